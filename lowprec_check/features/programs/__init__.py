"""Every model that a program calls, scanned on the inputs that the program gives it."""
