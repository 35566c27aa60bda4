"""The saved results, and the axes that identify a run."""
