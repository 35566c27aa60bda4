"""The search for a mixed-precision plan, and applying one."""
