"""Worker processes: start them, receive their messages, enforce limits, describe their ends."""

from typing import Literal

Isolation = Literal["fork", "spawn", "shared", "none"]
"""Where a model runs: ``fork``, each run in a copy of this process; ``spawn``, each in a fresh
interpreter; ``shared``, one run after another in one worker; ``none``, in this process.
"""
