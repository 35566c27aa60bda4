"""Times that can be compared: in rounds over all runs, or in a scenario."""
