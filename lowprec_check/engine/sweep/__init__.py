"""Runs every operator that torch describes in fp32, half and bf16 and writes what it found into the catalog.

`build` (no torch) hands operators to `worker` processes; `measure` runs one of them. The rooms here hold to what
torch 2.1 has, and to what of this package does.
"""
