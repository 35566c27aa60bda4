"""Training in low precision: steps, the ways to update 16-bit weights, and what is measured of
them. Independent of tasks and workers.
"""
