"""Reports in every format, rendered from a saved result."""
