"""Classes that update 16-bit weights. Each file is run by scans and printed as code to paste, so that the user runs what was tried."""
