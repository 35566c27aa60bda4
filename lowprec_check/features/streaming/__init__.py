"""Weights that stay in their files and are read when they are used."""
