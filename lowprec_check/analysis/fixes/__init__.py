"""Fixes of the user's source: where an op is called, what to write instead, the new text."""
