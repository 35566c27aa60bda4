"""The backends: one module for each, with an instance ``BACKEND``. torch is imported only in ``prepare``."""
