"""What a scan is, in the order in which it happens: from `scan` to the worker of each run."""
