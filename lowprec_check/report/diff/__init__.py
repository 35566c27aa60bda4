"""The difference of two scans, as documents and on the terminal."""
