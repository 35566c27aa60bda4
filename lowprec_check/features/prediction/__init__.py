"""A process that stands in for a device that is not here."""
