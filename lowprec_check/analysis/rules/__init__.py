"""The diagnostics: one function per code, registered by decorator."""
