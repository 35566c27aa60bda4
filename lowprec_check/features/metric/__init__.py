"""The user's metric of each run."""
