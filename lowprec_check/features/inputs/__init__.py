"""Further inputs, on which a run that passes is tried."""
