"""What is saved, and the axes that identify a run. Never imports torch."""
