"""The backends, one module each with a ``BACKEND``; torch is imported only when one prepares a model."""
