"""Runs of a model in worker processes: tasks, messages, how a worker ended, and the saved run."""
