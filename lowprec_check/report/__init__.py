"""Reports in every format, rendered from a saved result. Never imports torch."""
