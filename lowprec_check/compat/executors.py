"""Runs the scans of many models: in threads, on ray, or on dask."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import joblib

from lowprec_check.errors import UsageError

# -- Runs calls on dask: a call that kills its worker is an error of that call alone

Item = TypeVar("Item")
Result = TypeVar("Result")

_RESUME = "Start the cluster again and run the same command to resume."

_POLL_SECONDS = 10
_WORKER_SECONDS = 60
"""How long to wait for a first worker, or for a new one after the last has died."""

_RESULT_SECONDS = 30
"""How long the transfer of a result may take; it never ends if the result was lost with its worker."""


def map_on_dask(
    call: Callable[[Item], Result],
    items: list[Item],
    jobs: int,
    address: str,
    *,
    on_error: Callable[[Item, Exception], Result],
    stop: Callable[[], None],
) -> Iterator[Result]:
    """Yield ``call(item)`` for all ``items`` in order of completion, or ``on_error(item, error)``.

    dask blames the death of a worker on every call that the worker had accepted, and an accepted call fails after a few
    deaths; a result that was not transferred yet is lost as well. So calls without a result run again, one at a time: then
    the blame is certain.
    """
    with _client(address, jobs, stop) as client:
        suspects: list[Item] = []
        for alone in (False, True):
            chosen, suspects = (suspects if alone else items), []
            for item, future in _run(client, call, chosen, alone):
                try:
                    result = future.result(timeout=_RESULT_SECONDS)
                except Exception as error:
                    future.cancel()
                    if alone:
                        yield on_error(item, error)
                    else:
                        suspects.append(item)
                else:
                    yield result


def _run(client: Any, call: Callable[[Item], Result], items: list[Item], alone: bool) -> Iterator[tuple[Item, Any]]:
    """Yield each item with its future, in order of completion; two calls per thread are submitted, or one at a time."""
    waiting, running = collections.deque(items), dict[Any, Item]()
    try:
        while waiting or running:
            most = 1 if alone else 2 * max(1, sum(client.ncores().values()))
            while waiting and len(running) < most:
                item = waiting.popleft()
                running[client.submit(call, item, pure=False, retries=0)] = item
            for future in _next_done(client, [*running]):
                yield running.pop(future), future
    finally:
        client.cancel([*running])


def _next_done(client: Any, futures: list[Any]) -> list[Any]:
    """Wait until at least one future is done; returns those that are."""
    from distributed import CancelledError, wait
    from distributed import TimeoutError as DaskTimeoutError

    while True:
        try:
            return list(wait(futures, timeout=_POLL_SECONDS, return_when="FIRST_COMPLETED").done)
        except CancelledError:
            raise UsageError("Lost the connection to the dask scheduler.", _RESUME) from None
        except DaskTimeoutError:
            _wait_for_worker(client)


def _wait_for_worker(client: Any) -> None:
    from distributed import TimeoutError as DaskTimeoutError

    try:
        client.wait_for_workers(1, timeout=_WORKER_SECONDS)
    except DaskTimeoutError:
        raise UsageError(f"The dask cluster has had no worker for {_WORKER_SECONDS} s.", _RESUME) from None


@contextlib.contextmanager
def _client(address: str, jobs: int, stop: Callable[[], None]) -> Iterator[Any]:
    """Connect to the scheduler at ``address``, or start workers here, which call ``stop`` when they are closed."""
    try:
        import dask
        from distributed import Client, LocalCluster
        from distributed import TimeoutError as DaskTimeoutError
    except ModuleNotFoundError:
        raise UsageError(
            "--engine dask needs dask.distributed, which is not installed.", "pip install 'dask[distributed]'"
        ) from None
    with contextlib.ExitStack() as stack:
        try:
            if address:
                scheduler: Any = f"tcp://{address}"
            else:
                stack.enter_context(dask.config.set({"distributed.scheduler.allowed-failures": 0}))
                scheduler = stack.enter_context(LocalCluster(n_workers=jobs, threads_per_worker=1))
            client = stack.enter_context(Client(scheduler, timeout="20s"))
        except (OSError, ValueError, DaskTimeoutError) as error:
            raise UsageError(
                f"Cannot connect to a dask scheduler{f' at {address}' if address else ''}: {error}.",
                "Start one: dask scheduler; dask worker HOST:PORT",
            ) from None
        if not address:  # the workers of a cluster may run the calls of other clients too
            client.register_plugin(_at_close(stop))
        yield client


def _at_close(stop: Callable[[], None]) -> Any:
    from distributed import WorkerPlugin

    class AtClose(WorkerPlugin):  # type: ignore[misc]
        def teardown(self, worker: Any) -> None:
            stop()

    return AtClose()


# -- Runs calls in parallel, in local threads, on ray or on dask; a call that fails costs only its own result


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
