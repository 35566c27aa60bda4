"""Scans many models in threads or on dask; resumes after an interruption."""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from lowprec_check.catalog.versions import installed_version
from lowprec_check.compat.report_folder import is_done, scan_path
from lowprec_check.compat.scan_process import (
    Request,
    ScanLimits,
    ScanOutcome,
    end_running_scans,
    failed_row,
    request_of,
    row_of,
    scan_one,
    temporary_file,
)
from lowprec_check.errors import UsageError, message_of, type_name
from lowprec_check.process.process_group import GUARDIAN
from lowprec_check.schema.base import make_folder
from lowprec_check.schema.matrix import Matrix, MatrixRow, load, save
from lowprec_check.schema.scan_result import ResultError, ScanResult

# -- Calls in parallel: in local threads or on dask; a call that fails costs only its own result

Item = TypeVar("Item")
Result = TypeVar("Result")

_RESUME = "Start the cluster again and run the same command to resume."
_POLL_SECONDS = 10
# How long to wait for the scheduler to answer.
_CONNECT_SECONDS = 20.0
# How long to wait for a first worker, or for a new one after the last has died.
_WORKER_SECONDS = 60
# How long to wait for calls to end before they are ended again.
_STOP_SECONDS = 0.1
# How long the transfer of a result may take; it never ends if the worker died with the result.
_RESULT_SECONDS = 30


def map_unordered(
    call: Callable[[Item], Result],
    items: list[Item],
    jobs: int,
    engine: str | None,
    *,
    on_error: Callable[[Item, Exception], Result],
    stop: Callable[[], None],
) -> Generator[Result, None, None]:
    """Yield ``call(item)`` for all ``items``, in order of completion; ``jobs`` run at once, or one
    per thread of ``engine``.

    A call that raises, or kills its worker, yields ``on_error(item, error)``. ``stop`` ends the
    calls that still run after an interruption, in each process of this machine that makes some. A
    wrong ``engine`` is a :class:`UsageError`.
    """
    if not items:
        return
    kind, _, address = (engine or "").partition("://")
    if kind not in ("", "dask"):
        hint = "Choose dask://HOST:PORT or dask; omit --engine to run on this machine."
        raise UsageError(f"Unknown engine {engine!r}.", hint)
    guarded = functools.partial(_guarded, call, on_error)
    try:
        if kind == "dask":
            yield from _map_on_dask(guarded, items, jobs, address, on_error, stop)
        elif jobs == 1:  # in the main thread, where an interruption ends the scan at once
            yield from map(guarded, items)
        else:
            yield from _map_in_threads(guarded, items, jobs, stop)
    finally:
        stop()


def _guarded(call: Callable[[Item], Result], on_error: Callable[[Item, Exception], Result], item: Item) -> Result:
    try:
        return call(item)
    except Exception as error:
        return on_error(item, error)


def _map_in_threads(
    call: Callable[[Item], Result], items: list[Item], jobs: int, stop: Callable[[], None]
) -> Iterator[Result]:
    """Yield the results of ``call``, which does not raise; each scan is a process of its own."""
    waiting, running = iter(items), set[Future[Result]]()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while True:
                # As many again as run at once: a thread has work while the caller handles a result.
                for item in itertools.islice(waiting, 2 * jobs - len(running)):
                    running.add(pool.submit(call, item))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                while done:  # a result is not held longer than its caller needs it
                    yield done.pop().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in running):
                stop()  # more than once: a thread may have started a scan since
                wait(running, timeout=_STOP_SECONDS)


def _map_on_dask(
    call: Callable[[Item], Result],
    items: list[Item],
    jobs: int,
    address: str,
    on_error: Callable[[Item, Exception], Result],
    stop: Callable[[], None],
) -> Iterator[Result]:
    """Yield the results. dask blames the death of a worker on every call that it had accepted, so
    that calls without a result run again, one at a time: then the blame is certain.
    """
    with _dask_client(address, jobs, stop) as client:
        # Those without a result are tried again alone: these are to blame.
        suspects: list[Item] = []
        for alone in (False, True):
            chosen, suspects = (suspects if alone else items), []
            for item, future in _completed(client, call, chosen, alone):
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


def _completed(
    client: Any, call: Callable[[Item], Result], items: list[Item], alone: bool
) -> Iterator[tuple[Item, Any]]:
    """Yield each item with its future as it completes; two per thread are submitted, or one."""
    from distributed import CancelledError
    from distributed import TimeoutError as DaskTimeoutError
    from distributed import wait as wait_on_dask

    waiting, running = collections.deque(items), dict[Any, Item]()
    try:
        while waiting or running:
            # A thread has its next call when one ends; workers come and go.
            most = 1 if alone else 2 * max(1, sum(client.ncores().values()))
            while waiting and len(running) < most:
                item = waiting.popleft()
                running[client.submit(call, item, pure=False, retries=0)] = item
            try:
                done = wait_on_dask([*running], timeout=_POLL_SECONDS, return_when="FIRST_COMPLETED").done
            except CancelledError:
                raise UsageError("Lost the connection to the dask scheduler.", _RESUME) from None
            except DaskTimeoutError:
                try:
                    client.wait_for_workers(1, timeout=_WORKER_SECONDS)
                except DaskTimeoutError:
                    raise UsageError(f"The dask cluster has had no worker for {_WORKER_SECONDS} s.", _RESUME) from None
                continue
            for future in done:
                yield running.pop(future), future
    finally:
        client.cancel([*running])


@contextlib.contextmanager
def _dask_client(address: str, jobs: int, stop: Callable[[], None]) -> Iterator[Any]:
    """Connect to the scheduler at ``address``, or start one with a worker of ``jobs`` threads,
    which waits for its calls: ``stop`` ends them first.
    """
    try:
        import dask
        from distributed import Client, LocalCluster
        from distributed import TimeoutError as DaskTimeoutError
    except ModuleNotFoundError:
        hint = "pip install 'dask[distributed]'"
        raise UsageError("--engine dask needs dask.distributed, which is not installed.", hint) from None
    with contextlib.ExitStack() as stack:
        try:
            if address:
                scheduler: Any = f"tcp://{address}"
            else:  # one worker with threads, since each scan is a process
                stack.enter_context(dask.config.set(temporary_directory=GUARDIAN.temporary_folder()))
                local = {"n_workers": 1, "threads_per_worker": jobs, "processes": False, "dashboard_address": None}
                scheduler = stack.enter_context(LocalCluster(**local))
            client = stack.enter_context(Client(scheduler, timeout=_CONNECT_SECONDS))
        except (OSError, ValueError, DaskTimeoutError) as error:
            scheduler = f"a dask scheduler at {address}" if address else "a dask scheduler"
            hint = "Start one: dask scheduler; dask worker HOST:PORT"
            raise UsageError(f"Cannot connect to {scheduler}: {error}.", hint) from None
        stack.callback(stop)
        yield client


# -- Scans many models, each in its own process; resumes after an interruption

OnRow = Callable[[int, int, MatrixRow, "ScanResult | None"], None]


def scan_all(
    requests: list[Request],
    folder: Path,
    *,
    jobs: int = 1,
    engine: str | None = None,
    timeout: float = 1800.0,
    on_row: OnRow | None = None,
) -> Matrix:
    """Scan the models that ``folder`` does not contain yet, and save each row when its scan has
    ended.

    ``folder`` gets ``matrix.json`` and ``scans/<slug>.json``, and is made again if it is removed. A
    model without a scan is done if it has all its pages. ``on_row`` gets the numbers of
    finished and all rows, the row, and its result, ``None`` if the scan failed. Raises
    :class:`UsageError`.
    """
    make_folder(folder)
    # A row is kept if it was made with the same versions, options and files.
    installed = {"tool": installed_version("lowprec-check"), "torch": installed_version("torch")}
    versions = {name: version for name, version in installed.items() if version is not None}
    made_with = {request: versions | _digest_of_files(request) for request in requests}
    rows: dict[Request, MatrixRow] = {}
    for row in load(folder / "matrix.json").rows:
        request = request_of(row)
        # A row that is not asked for stays, also a failed one.
        is_current = row.made_with == made_with.get(request, row.made_with | versions)
        is_repeated = row.state == "failed" and request in made_with
        if is_current and not is_repeated and is_done(folder, row):
            rows[request] = row
    # Scans beside each other share the cores.
    missing = [request for request in requests if request not in rows]
    threads = None
    if jobs > 1 and engine is None:
        threads = max(1, (os.cpu_count() or 1) // jobs)
    if missing and engine is None:
        temporary_file().close()  # without one, no scan can run
    scan = functools.partial(scan_one, limits=ScanLimits(timeout, threads))
    scans = map_unordered(scan, missing, jobs, engine, on_error=_failed, stop=end_running_scans)
    with contextlib.closing(scans) as outcomes:  # if iteration stops early, running scans are killed
        for outcome in outcomes:
            row, result = _row(outcome, made_with[outcome.request])
            make_folder(folder / "scans")
            if result is not None:
                result.save(scan_path(folder, row))
            rows[outcome.request] = row
            save(_ordered(rows, requests), folder / "matrix.json")
            if on_row is not None:
                on_row(sum(request in rows for request in requests), len(requests), row, result)
    matrix = _ordered(rows, requests)
    save(matrix, folder / "matrix.json")
    return matrix


SMALL_FILE = 1 << 20
"""Bytes of a file that is read to see whether it changed; of a larger one, size and time tell."""


def _digest_of_files(request: Request) -> dict[str, str]:
    """A digest of the files that a scan reads: the target, its imports, files in options."""
    # Any word of the options may be a file, also behind an equals sign.
    target = re.sub(r"(\.py):[^:]*$", r"\1", request.target)
    words = [Path(part) for word in request.options for part in (word, word.partition("=")[2])]
    files = [*_with_imports(Path(target)), *filter(_is_file, words)]
    if target.startswith("hf:"):
        with contextlib.suppress(OSError):
            files += sorted(filter(_is_file, Path(target[3:]).iterdir()))
    digest = hashlib.sha256()
    for path in files:
        with contextlib.suppress(OSError):
            state = path.stat()
            if state.st_size <= SMALL_FILE:
                digest.update(path.read_bytes())
            else:
                digest.update(repr((state.st_size, state.st_mtime_ns)).encode())
    return {"file": digest.hexdigest()[:12]} if files else {}


def _with_imports(path: Path) -> list[Path]:
    """A file of Python, and what it imports from its folder or its package; none if missing."""
    # The package that it lies in, outwards, starts at `root`.
    root, sources, waiting = path.parent, set[Path](), [path] if _is_file(path) else []
    while waiting and _is_file(root / "__init__.py"):
        waiting.append(root / "__init__.py")
        root = root.parent
    while waiting:
        source = waiting.pop()
        if source in sources:
            continue
        sources.add(source)
        try:
            nodes = list(ast.walk(ast.parse(source.read_bytes())))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # its scan says why
            continue
        # Each part of a name may be a module or a package: beside the source, the file, in `root`.
        for node in nodes:
            places, names = {source.parent, path.parent, root}, list[str]()
            if isinstance(node, ast.ImportFrom):
                if 0 < node.level <= len(source.parents):
                    places = {source.parents[node.level - 1]}
                names = [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for parts in (name.split(".") for name in names):
                bases = [place.joinpath(*parts[: end + 1]) for place in places for end in range(len(parts))]
                waiting += filter(
                    _is_file, [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py")]
                )
    return sorted(sources)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # its name is too long, or has a null byte
        return False


def _ordered(rows: dict[Request, MatrixRow], requests: list[Request]) -> Matrix:
    """The requested rows in their order, then the rows of earlier calls."""
    first = [rows[request] for request in requests if request in rows]
    slugs, asked = {request.slug for request in requests}, {request._replace(slug="") for request in requests}
    others = [row for key, row in rows.items() if row.slug not in slugs and key._replace(slug="") not in asked]
    return Matrix(rows=[*first, *others])


def _row(outcome: ScanOutcome, made_with: dict[str, str]) -> tuple[MatrixRow, ScanResult | None]:
    if outcome.reason is None:
        try:
            result = ScanResult.from_json(outcome.json)
        except ResultError as error:
            outcome = outcome._replace(reason=message_of(error))
        else:
            return row_of(result, outcome.request, outcome.seconds, made_with), result
    return failed_row(outcome.request, outcome.reason or "no reason given", outcome.seconds, made_with), None


def _failed(request: Request, error: Exception) -> ScanOutcome:
    """The outcome of a scan that could not be started, or that killed its worker in the cluster."""
    reason = f"{type_name(error)}: {message_of(error)}"
    if isinstance(error, UsageError):
        reason = error.message
    return ScanOutcome(request, b"", reason[:500], 0.0)
