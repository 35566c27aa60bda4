"""Executes the code that a scan recommends, in a process of its own, before it is printed."""
