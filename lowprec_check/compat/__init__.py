"""Scans many models, each in its own process, and collects the results in a matrix."""
