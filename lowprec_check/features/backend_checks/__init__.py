"""What a compiler or another backend does otherwise than eager mode, and to the error."""
