"""Runs of a model in worker processes: jobs, messages, supervision."""
