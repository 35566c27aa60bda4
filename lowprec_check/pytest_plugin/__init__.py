"""The pytest plugin. Each part is imported when a test or an option needs it."""
