"""What torch lacks, for any program: devices, comparing tensors, dispatch modes, source lines."""
