"""Runs of a model in worker processes: tasks, messages, what happens to a worker, and the saved
run.
"""
