"""What a result means, in sentences: one function writes each, and nothing else does."""
