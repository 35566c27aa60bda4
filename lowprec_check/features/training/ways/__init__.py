"""The ways to train, a module each: a class that updates weights is run, and printed to paste."""
