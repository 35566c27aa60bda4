"""Parts of the pytest plugin, each loaded when a test or an option asks for it."""
