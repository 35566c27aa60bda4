"""A block that is watched as ``--lowprec-coverage`` watches a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lowprec_check.pytest_plugin.fixture.watch import Watch


@contextmanager
def watching() -> Iterator[Watch]:
    watch = Watch()
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
        watch.close()
