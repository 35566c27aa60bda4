"""The user's model: loading it, casting it, running it plain, putting it back."""
