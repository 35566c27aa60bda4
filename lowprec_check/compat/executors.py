"""Runs calls in parallel, in local threads or on a cluster, through joblib's backends. Never imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import joblib

from lowprec_check.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_unordered(call: Callable[[Item], Result], items: list[Item], jobs: int, engine: str | None) -> Iterator[Result]:
    """Yield ``call(item)`` for all ``items``, in order of completion; ``jobs`` run at once, or one per worker of ``engine``.

    Raises:
        UsageError: the engine is unknown, not installed or not reachable.
    """
    if not items:
        return
    with _joblib_backend(engine, jobs) as n_jobs:
        backend, _ = joblib.parallel.get_active_backend()
        if getattr(backend, "supports_return_generator", False):
            size, how = len(items), {"return_as": "generator_unordered", "pre_dispatch": "2*n_jobs"}
        else:  # ray returns results only at the end, so it gets a few items at a time
            size, how = backend.effective_n_jobs(n_jobs), {}
        work = joblib.Parallel(n_jobs=n_jobs, batch_size=1, **how)
        for start in range(0, len(items), size):
            yield from work(joblib.delayed(call)(item) for item in items[start : start + size])


@contextlib.contextmanager
def _joblib_backend(engine: str | None, jobs: int) -> Iterator[int]:
    """Select joblib's backend, and yield the number of jobs to request from it."""
    if engine is None:  # each scan is a process, so threads suffice
        with joblib.parallel_config(backend="threading"):
            yield jobs
        return
    kind, _, address = engine.partition("://")
    opened = {"dask": _dask, "ray": _ray}.get(kind)
    if opened is None:
        raise UsageError(
            f"Unknown engine {engine!r}.",
            "Choose dask://HOST:PORT, dask, ray://HOST:PORT or ray; omit --engine to run on this machine.",
        )
    with opened(address, jobs), joblib.parallel_config(backend=kind):
        yield -1


@contextlib.contextmanager
def _dask(address: str, jobs: int) -> Iterator[Any]:
    try:
        from distributed import Client, LocalCluster
    except ModuleNotFoundError:
        raise UsageError(
            "--engine dask needs dask.distributed, which is not installed.", "pip install 'lowprec-check[cluster]'"
        ) from None
    with contextlib.ExitStack() as stack:
        try:
            scheduler = (
                f"tcp://{address}"
                if address
                else stack.enter_context(LocalCluster(n_workers=jobs, threads_per_worker=1))
            )
            yield stack.enter_context(Client(scheduler, timeout="20s"))
        except (OSError, TimeoutError, ValueError) as error:
            raise UsageError(
                f"Cannot connect to a dask scheduler{f' at {address}' if address else ''}: {error}.",
                "Start one: dask scheduler; dask worker HOST:PORT",
            ) from None


@contextlib.contextmanager
def _ray(address: str, jobs: int) -> Iterator[Any]:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ModuleNotFoundError:
        raise UsageError("--engine ray needs ray, which is not installed.", "pip install ray") from None
    try:
        ray.init(
            address=f"ray://{address}" if address else None, num_cpus=None if address else jobs, log_to_driver=False
        )
    except ConnectionError as error:
        raise UsageError(
            f"Cannot connect to a ray cluster at {address}: {error}.", "Start one: ray start --head"
        ) from None
    register_ray()
    try:
        yield None
    finally:
        ray.shutdown()
