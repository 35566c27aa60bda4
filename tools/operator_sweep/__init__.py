"""Measures every operator for the catalog. See docs/catalog.md."""
