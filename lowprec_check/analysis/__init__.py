"""What a result means: diagnostics, the recommendation, differences."""
