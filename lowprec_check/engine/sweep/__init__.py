"""Runs every operator that torch describes in fp32, half and bf16, and writes the results into the
catalog.

`kept_sweep` (no torch) gives operators to processes of `operator_worker`. These modules, and what
they import from this package, must work with torch 2.1.
"""
