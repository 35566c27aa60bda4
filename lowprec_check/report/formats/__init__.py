"""The report formats: one module each, with a ``FORMAT``, which imports its renderer on use."""
