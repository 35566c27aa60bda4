"""A twin of a device that is not here: its autocast policy and its kernels, emulated on the CPU."""
