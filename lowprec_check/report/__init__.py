"""Reports: every format made from a saved result. Never imports torch."""
