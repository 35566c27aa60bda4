"""What a result means: diagnostics, the recommendation, differences, the search for a plan."""
