"""Worker processes: starting them, receiving their messages, enforcing limits, describing how they ended. Never imports torch."""

from typing import Literal

Isolation = Literal["fork", "spawn", "none"]
"""Where a model runs: ``fork``, in a copy of this process; ``spawn``, in a fresh interpreter; ``none``, in this process."""
