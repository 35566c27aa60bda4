"""Training in low precision: steps, ways to update 16-bit weights, and what is measured of them."""
