"""A process that stands in for a device that is not here: the device's autocast policies and
kernels, on CPU tensors.
"""
