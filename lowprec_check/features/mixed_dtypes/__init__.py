"""Where the dtypes come from that meet in one op, and which cast there makes the run pass."""
