"""Worker processes: how they start, talk, overrun, end and are described. Never imports torch."""
