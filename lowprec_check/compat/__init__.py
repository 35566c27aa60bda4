"""Many models scanned, each in a process of its own, into one matrix. Never imports torch."""
