"""From which op each Inf or NaN comes, and whether it reaches the output."""
