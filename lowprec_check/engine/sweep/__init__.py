"""Runs single operators that torch describes in fp32, half and bf16, on the device that is here.

`kept_sweep` (no torch) gives operators to processes of `operator_worker`. `tools/operator_sweep`
measures more of them, and all operators, for the catalog: these modules, and what they import from
this package, must work with torch 2.1.
"""
