"""A process that stands in for a missing device: its autocast policies and kernels, on the CPU."""
