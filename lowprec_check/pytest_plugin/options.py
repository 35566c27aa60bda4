"""Values of options; if an option is not given, its ini key is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def value(config: pytest.Config, name: str) -> Any:
    """The value of ``--lowprec-NAME``, else of the ini key ``lowprec_NAME``; ``None`` or empty if neither is given."""
    given = config.getoption(f"lowprec_{name}")
    return given if given else config.getini(f"lowprec_{name}")


def path(config: pytest.Config, name: str) -> Path | None:
    """A path: in an option relative to the directory pytest was started in, in an ini key to the ini file."""
    given = config.getoption(f"lowprec_{name}")
    if given:
        return config.invocation_params.dir / str(given)
    from_ini = config.getini(f"lowprec_{name}")
    return (config.inipath.parent if config.inipath else config.rootpath) / str(from_ini) if from_ini else None


def where(config: pytest.Config, name: str) -> str:
    """The option or ini key that a value comes from, for error messages."""
    option = f"--lowprec-{name.replace('_', '-')}"
    return option if config.getoption(f"lowprec_{name}") else f"lowprec_{name} in {config.inipath}"


def shown(config: pytest.Config, path: Path) -> str:
    """A path as messages show it: relative to the directory pytest was started in, if it is below."""
    folder = config.invocation_params.dir
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist; another process reports its results."""
    return hasattr(config, "workerinput")


def worker_of(config: pytest.Config) -> str:
    """``gw0:`` in a worker of pytest-xdist; empty without workers."""
    return f"{config.workerinput['workerid']}:" if is_worker(config) else ""  # type: ignore[attr-defined]
