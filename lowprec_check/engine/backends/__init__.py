"""The backends, a module for each compiler; torch is imported only in ``prepare``."""
