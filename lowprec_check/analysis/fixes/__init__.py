"""Fixes of the user's own source: where an op is called in it, what could be written instead, and
the text with it.
"""
