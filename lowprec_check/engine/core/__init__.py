"""Basics of the engine: comparing tensors, nested containers, dispatch modes, source lines."""
