"""Hands calls out to threads here, or to a cluster through joblib's backends. Never imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import joblib

from lowprec_check.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")


def spread(call: Callable[[Item], Result], items: list[Item], jobs: int, engine: str | None) -> Iterator[Result]:
    """What ``call`` makes of each of ``items``, as it comes; ``jobs`` at once, or as many as ``engine`` has workers.

    Raises:
        UsageError: the engine is unknown, not installed or not reached.
    """
    if not items:
        return
    with _chosen(engine, jobs) as n_jobs:
        backend, _ = joblib.parallel.get_active_backend()
        if getattr(backend, "supports_return_generator", False):
            size, how = len(items), {"return_as": "generator_unordered", "pre_dispatch": "2*n_jobs"}
        else:  # ray hands out results at the end: a few at a time
            size, how = backend.effective_n_jobs(n_jobs), {}
        work = joblib.Parallel(n_jobs=n_jobs, batch_size=1, **how)
        for start in range(0, len(items), size):
            yield from work(joblib.delayed(call)(item) for item in items[start : start + size])


@contextlib.contextmanager
def _chosen(engine: str | None, jobs: int) -> Iterator[int]:
    """Choose joblib's backend; the number of jobs to ask it for."""
    if engine is None:  # a scan is a process already: threads are enough to wait for it
        with joblib.parallel_config(backend="threading"):
            yield jobs
        return
    kind, _, address = engine.partition("://")
    opened = {"dask": _dask, "ray": _ray}.get(kind)
    if opened is None:
        raise UsageError(
            f"Unknown engine {engine!r}.", "Give dask://HOST:PORT, dask, ray://HOST:PORT or ray; none for this machine."
        )
    with opened(address, jobs), joblib.parallel_config(backend=kind):
        yield -1


@contextlib.contextmanager
def _dask(address: str, jobs: int) -> Iterator[Any]:
    try:
        from distributed import Client, LocalCluster
    except ModuleNotFoundError:
        raise UsageError("The dask engine needs dask.distributed.", "pip install 'lowprec-check[cluster]'") from None
    with contextlib.ExitStack() as stack:
        try:
            where = (
                f"tcp://{address}"
                if address
                else stack.enter_context(LocalCluster(n_workers=jobs, threads_per_worker=1))
            )
            yield stack.enter_context(Client(where, timeout="20s"))
        except (OSError, TimeoutError, ValueError) as error:
            raise UsageError(
                f"No dask scheduler answers at {address}: {error}.", "Start one: dask scheduler; dask worker HOST:PORT"
            ) from None


@contextlib.contextmanager
def _ray(address: str, jobs: int) -> Iterator[Any]:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ModuleNotFoundError:
        raise UsageError("The ray engine needs ray.", "pip install ray") from None
    try:
        ray.init(
            address=f"ray://{address}" if address else None, num_cpus=None if address else jobs, log_to_driver=False
        )
    except ConnectionError as error:
        raise UsageError(f"No ray cluster answers at {address}: {error}.", "Start one: ray start --head") from None
    register_ray()
    try:
        yield None
    finally:
        ray.shutdown()
