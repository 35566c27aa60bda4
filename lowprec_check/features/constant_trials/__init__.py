"""What a failing run gives with other numbers for the constants that are zero in its dtype."""
