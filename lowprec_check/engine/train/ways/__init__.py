"""The ways to train, one module each. A class that updates weights is run by scans and printed as
code to paste, so that the user runs what was tried.
"""
