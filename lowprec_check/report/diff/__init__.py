"""The differences between two scans, as text and Markdown."""
