"""Options and ini keys: the option counts, else the ini key. Never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def value(config: pytest.Config, name: str) -> Any:
    """What ``--lowprec-NAME`` says, else the ini key ``lowprec_NAME``; ``None`` or empty where neither is given."""
    given = config.getoption(f"lowprec_{name}")
    return given if given else config.getini(f"lowprec_{name}")


def path(config: pytest.Config, name: str) -> Path | None:
    """A file: the option's is relative to where pytest was called, the ini key's to the ini file."""
    given = config.getoption(f"lowprec_{name}")
    if given:
        return config.invocation_params.dir / str(given)
    from_ini = config.getini(f"lowprec_{name}")
    return (config.inipath.parent if config.inipath else config.rootpath) / str(from_ini) if from_ini else None


def where(config: pytest.Config, name: str) -> str:
    """What a wrong value is blamed on: the option or the ini key."""
    option = f"--lowprec-{name.replace('_', '-')}"
    return option if config.getoption(f"lowprec_{name}") else f"lowprec_{name} in {config.inipath}"


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is one of pytest-xdist's workers, whose results another process sums up."""
    return hasattr(config, "workerinput")
