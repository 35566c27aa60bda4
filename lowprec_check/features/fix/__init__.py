"""Searches for a patch of the user's source that makes failing precisions pass."""
