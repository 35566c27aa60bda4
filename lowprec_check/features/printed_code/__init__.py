"""Executes the code that a scan recommends, in a fresh interpreter, before it is printed."""
