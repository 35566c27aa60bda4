"""The backends: a module for each compiler, with an instance for each backend. torch is imported
only in ``prepare``.
"""
