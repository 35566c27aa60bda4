"""Which modules to keep in fp32, for a scan whose runs fail."""
