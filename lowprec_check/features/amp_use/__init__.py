"""A failing run again, with the modules in fp32 that its analysis blames."""
