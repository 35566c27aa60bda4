"""Runs calls in parallel, in local threads, on ray or on dask; a call that fails costs only its own result."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import joblib

from lowprec_check.compat.dask_engine import map_on_dask
from lowprec_check.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_unordered(
    call: Callable[[Item], Result],
    items: list[Item],
    jobs: int,
    engine: str | None,
    *,
    on_error: Callable[[Item, Exception], Result],
    stop: Callable[[], None],
) -> Iterator[Result]:
    """Yield ``call(item)`` for all ``items``, in order of completion; ``jobs`` run at once, or one per thread of ``engine``.

    The result of a call that raises, or that kills its worker, is ``on_error(item, error)``. At the end, ``stop`` is called
    in the processes of this machine that make calls: it ends those still running after an interruption.

    Raises:
        UsageError: the engine is unknown, not installed or not reachable.
    """
    if not items:
        return
    kind, _, address = (engine or "").partition("://")
    if kind not in ("", "dask", "ray"):
        raise UsageError(
            f"Unknown engine {engine!r}.",
            "Choose dask://HOST:PORT, dask, ray://HOST:PORT or ray; omit --engine to run on this machine.",
        )
    guarded = functools.partial(_guarded, call, on_error)
    try:
        if kind == "dask":
            yield from map_on_dask(guarded, items, jobs, address, on_error=on_error, stop=stop)
        elif kind == "ray":
            yield from _map_on_ray(guarded, items, jobs, address, on_error)
        else:
            with joblib.parallel_config(backend="threading"):  # each scan is a process, so threads suffice
                work = joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")
                yield from work(joblib.delayed(guarded)(item) for item in items)
    finally:
        stop()


def _guarded(call: Callable[[Item], Result], on_error: Callable[[Item, Exception], Result], item: Item) -> Result:
    try:
        return call(item)
    except Exception as error:
        return on_error(item, error)


def _map_on_ray(
    call: Callable[[Item], Result],
    items: list[Item],
    jobs: int,
    address: str,
    on_error: Callable[[Item, Exception], Result],
) -> Iterator[Result]:
    """Yield the results of a few items at a time, since ray returns them only together."""
    with _ray(address, jobs), joblib.parallel_config(backend="ray"):
        backend, _ = joblib.parallel.get_active_backend()
        size = backend.effective_n_jobs(-1)
        work = joblib.Parallel(n_jobs=-1, batch_size=1)
        for start in range(0, len(items), size):
            batch = items[start : start + size]
            try:
                yield from work(joblib.delayed(call)(item) for item in batch)
            except Exception as error:  # a worker died: which item killed it is unknown
                yield from (on_error(item, error) for item in batch)


@contextlib.contextmanager
def _ray(address: str, jobs: int) -> Iterator[None]:
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
