"""Histograms of the magnitudes of values, by module."""
