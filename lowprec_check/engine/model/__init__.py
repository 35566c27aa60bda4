"""The user's model: loading it, casting it, running it without instruments, restoring it."""
