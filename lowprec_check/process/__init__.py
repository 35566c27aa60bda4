"""Worker processes: starting them, receiving their messages, enforcing limits, describing how they ended. Never imports torch."""
