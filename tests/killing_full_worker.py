"""The worker of a full sweep, with the operators of ``killing_worker``."""

from __future__ import annotations

import killing_worker  # noqa: F401 - replaces the operators

from tools.operator_sweep.worker import main

if __name__ == "__main__":
    main()
