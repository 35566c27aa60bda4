"""Scans and plans in a process of its own: whatever the user's file does, results are kept.

The process loads the target and starts the workers. Its messages are encoded by msgspec: nothing
that it sends is unpickled. This process does not import torch: both would wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import msgspec

from lowprec_check.analysis.conclusion import as_wanted
from lowprec_check.engine.model.target_spec import LOAD_SECONDS, NOTICE, OnProgress, TargetSpec
from lowprec_check.errors import ProcessLostError, UsageError
from lowprec_check.process import Isolation
from lowprec_check.process.breadcrumb import read_shared, shared_file
from lowprec_check.process.function_worker import Ended, FunctionWorker, Loaded, SendBytes
from lowprec_check.process.process_group import GUARDIAN
from lowprec_check.process.supervisor import StateEvent, Supervisor, describe_exit
from lowprec_check.process.system import address_space_limit
from lowprec_check.schema.base import Struct, encoded
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.options import DeclaredOptions, ScanOptions
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import bytes_figure
from lowprec_check.torchkit.isolation import best_isolation, check_isolation


class _Progressed(Struct, frozen=True, tag="progress"):
    run: str
    doing: str


class _Judged(Struct, frozen=True, tag="judged"):
    run: Run
    """With its verdict, before it is measured and explained."""


class _Grown(Struct, frozen=True, tag="grown"):
    item: msgspec.Raw
    """What was found so far; of a scan, ``runs`` has only those that are new or have changed."""


_Message = Loaded | _Progressed | _Judged | _Grown | Ended
_DECODER: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)

EXIT_SECONDS = 5.0
"""Time for the exit handlers that the user's file registers."""
_UNSENT = 74
"""Exit code of a process that could not send its messages: ``EX_IOERR`` of ``sysexits.h``."""

_IMPORTING, _LOADING, _LOADED = "importing torch", "loading the target", "loaded"
"""How far the process is."""

if TYPE_CHECKING:
    from lowprec_check.engine.model.target_source import TargetSource

Item = TypeVar("Item", bound=Struct)
AnyOptions = TypeVar("AnyOptions", bound=DeclaredOptions)
Grow = Callable[..., Iterator[Item]]
"""Yields what was found so far, like :func:`growing_scan`; picklable for a fresh interpreter."""


def scan_file(
    spec: TargetSpec,
    options: ScanOptions,
    isolation: Isolation | None = None,
    on_progress: OnProgress | None = None,
    earlier: ScanResult | None = None,
    show: Callable[[ScanResult], None] | None = None,
) -> Iterator[ScanResult]:
    """Load and scan ``spec``; yield the result after each run, without its conclusion. ``show``
    gets it also when a run is judged, before that is measured and explained.

    Runs of ``earlier``, a scan that ended early, are not repeated if weights are streamed. Raises
    :class:`UsageError` for what the user can fix, and :class:`ProcessLostError` if the process ends
    after it has loaded the target.
    """
    runs: dict[RunKey, Run] = {}
    so_far: ScanResult | None = None

    def judged(run: Run) -> None:
        if show is not None and so_far is not None:
            others = [other for other in so_far.runs if other.key != run.key]
            whole = as_wanted([*others, run], options.keys(so_far.runs[0].device))
            show(msgspec.structs.replace(so_far, runs=whole))

    session = Session(spec, options, isolation, options.budget or LOAD_SECONDS, on_progress, on_judged=judged)
    for result in session.grow(functools.partial(_growing_changes, earlier=earlier), ScanResult):
        # Op calls are sent when they are new.
        for run in result.runs:
            sent = runs.get(run.key)
            op_calls = run.op_calls if sent is None or run.op_calls else sent.op_calls
            runs[run.key] = msgspec.structs.replace(run, op_calls=op_calls)
        # The first run is known from the first result on; a result may have no run that changed.
        whole = list(runs.values())
        whole = as_wanted(whole, options.keys(whole[0].device))
        so_far = msgspec.structs.replace(result, runs=whole, target_options=spec.options)
        yield so_far


def _growing_changes(
    source: TargetSource, isolation: Isolation | None, options: ScanOptions, earlier: ScanResult | None = None
) -> Iterator[ScanResult]:
    """The result after each run; ``runs`` has new and changed ones, with op calls that are new."""
    from lowprec_check.core.scan import growing_scan

    sent: dict[RunKey, Run] = {}
    for result in growing_scan(source, isolation, options, earlier):
        changed = [run for run in result.runs if sent.get(run.key) is not run]
        news = [
            msgspec.structs.replace(run, op_calls=OpCalls())
            if run.key in sent and sent[run.key].op_calls is run.op_calls
            else run
            for run in changed
        ]
        yield msgspec.structs.replace(result, runs=news)
        sent = {run.key: run for run in result.runs}


def _ignored(run: Run) -> None:
    """Nobody is told."""


@dataclass
class Session(Generic[AnyOptions]):
    """A target to load, with limits; :meth:`grow` starts the process."""

    spec: TargetSpec
    options: AnyOptions
    isolation: Isolation | None
    load_seconds: float
    on_progress: OnProgress | None
    grow_seconds: float = math.inf
    """Limit of what follows, if its runs have no limits of their own."""
    load: Callable[[TargetSpec, Any], Any] | None = None
    """Loads what is given to ``grow``; by default the source of the target."""
    on_judged: Callable[[Run], None] = _ignored
    """Told of each run of a scan as soon as it is judged."""

    def grow(self, grow: Grow[Item], kind: type[Item]) -> Iterator[Item]:
        """Load the target and yield what ``grow`` finds, in another process if there are any."""
        self.spec.check()
        check_isolation(self.isolation)
        best = best_isolation(can_spawn=True)
        if (self.isolation or best) == "none":
            source = self.loaded()
            source.on_progress = self.on_progress or source.on_progress
            yield from grow(source, self.isolation, self.options)
            return
        log = shared_file()
        try:
            without_callback = replace(self, on_progress=None, on_judged=_ignored)
            worker = FunctionWorker(
                functools.partial(_work, without_callback, log, grow),
                _DECODER.decode,
                method="fork" if best == "fork" else "spawn",
                log=log,
            )
            worker.set_timeout(LOAD_SECONDS)
            for item in self._watch(worker, log):
                yield msgspec.msgpack.decode(item, type=kind)
        finally:
            os.close(log)

    def loaded(self) -> Any:
        """What is given to ``grow``; raises :class:`UsageError` for what the user can fix."""
        return (self.load or _load)(self.spec, self.options)

    def _watch(self, worker: FunctionWorker[_Message], log: int) -> Iterator[msgspec.Raw]:
        step, stage = (self.spec.name, _IMPORTING), _IMPORTING
        ended: Ended | None = None
        with Supervisor[FunctionWorker[_Message], _Message]([worker]) as supervisor:
            for event in supervisor.events():
                if isinstance(event, StateEvent):
                    if event.state != "running" and ended is None:
                        self._raise_loss(event, stage, log)
                    self._tell(*step)
                    continue
                message = event.message
                if isinstance(message, Loaded):
                    stage = _LOADED
                    worker.set_timeout(self.grow_seconds)
                elif isinstance(message, _Judged):
                    self.on_judged(message.run)
                elif isinstance(message, _Grown):
                    yield message.item
                elif isinstance(message, Ended):
                    ended = message
                    worker.set_timeout(EXIT_SECONDS)
                elif message.run == NOTICE:
                    self._tell(message.run, message.doing)
                else:
                    step = (message.run, message.doing)
                    # What this program imports does not count.
                    if stage != _LOADED:
                        stage = _LOADING
                        worker.set_timeout(self.load_seconds)
        if ended is not None:
            _check(ended, stage)

    def _tell(self, run: str, doing: str) -> None:
        if self.on_progress is not None:
            self.on_progress(run, doing)

    def _raise_loss(self, event: StateEvent[Any], stage: str, log: int) -> NoReturn:
        how = describe_exit(event.exit_code or 0)
        if stage == _IMPORTING:
            _raise_if_limited(how)
        from lowprec_check.torchkit.place_log import model_line

        line = model_line(read_shared(log))
        at = f" at {line}" if line else ""
        if event.state == "timeout" and stage != _LOADED:
            raise UsageError(
                f"{self.spec.name} was not loaded within {self.load_seconds:g} s{at and f'; it was{at}'}.",
                "Increase --budget, or shorten what the file does when it is imported.",
            )
        if event.exit_code == _UNSENT and not at:
            how = "it closes file descriptors that it did not open, or changes modules that lowprec-check needs"
        if stage == _LOADED:
            raise ProcessLostError(f"The scan ended early: {how}{at}.")
        raise UsageError(
            f"{self.spec.name} cannot be loaded: {how}{at}.", "Import it with python alone, and fix it there."
        )


def _check(ended: Ended, stage: str) -> None:
    """Raise what ended the process, if it did not do its work."""
    if stage == _IMPORTING and ended.traceback is not None:
        _raise_if_limited(ended.traceback.rstrip().splitlines()[-1])
    ended.check()


def _raise_if_limited(how: str) -> None:
    """Blame a limit of address space, if there is one, for an import of torch that failed."""
    limit = address_space_limit()
    if limit is not None:
        problem = f"torch cannot be imported with a limit of {bytes_figure(limit)} of address space: {how}."
        raise UsageError(problem, "Raise the limit: ulimit -v unlimited.")


# -- inside the process


def _work(session: Session[Any], log: int, grow: Grow[Any], send_bytes: SendBytes) -> None:
    def send(message: _Message) -> None:
        send_bytes(encoded(message, msgspec.msgpack.encode))

    def load_and_grow() -> None:
        with _rare_collections():
            from lowprec_check.torchkit.place_log import note_model  # and torch

            scans = importlib.import_module("lowprec_check.core.scan")  # and all that it imports
            if isinstance(session.options, ScanOptions):
                for feature in scans.features():
                    feature.before_loading()
            note_model(log, _packages_named_by(session.spec.name))
            with _logged_ends(log):
                send(_Progressed(session.spec.name, "loading"))
                source = session.loaded()
        send(Loaded())
        source.on_progress = lambda run, doing: send(_Progressed(run, doing))
        source.on_judged = lambda run: send(_Judged(run))
        for item in grow(source, session.isolation, session.options):
            send(_Grown(msgspec.Raw(encoded(item, msgspec.msgpack.encode))))

    atexit._clear()  # those of the command
    atexit.register(GUARDIAN.close)
    ended = Ended.after(load_and_grow)
    try:
        send(ended)
    except Exception:
        os._exit(_UNSENT)
    atexit._run_exitfuncs()


def _load(spec: TargetSpec, options: Any) -> TargetSource:
    """The source of the target; raises :class:`UsageError` for what the user can fix."""
    from lowprec_check.core.scan import check_options
    from lowprec_check.core.trace.plain_modes import parse_withheld
    from lowprec_check.engine.model.target_source import load_here

    if isinstance(options, ScanOptions):
        check_options(options)
    else:
        parse_withheld(options.without_kernel)
    return load_here(spec, options.seed)


def _packages_named_by(name: str) -> list[str]:
    """The top-level package of a target: ``timm`` of ``timm:resnet18``, ``a`` of ``a.b:attr``."""
    root = name.partition(":")[0].partition(".")[0]
    if root.isidentifier():
        return [{"hf": "transformers"}.get(root, root)]
    return []


_RARE = (50, 100)
"""Collections of younger objects, after which older ones are looked through for garbage."""


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Inside, garbage is looked for rarely among older objects: imports make many that stay. With
    the usual numbers, a sixth of the time in which transformers is imported goes there. Young
    garbage is found as usual: a script that trains while it is loaded may make much of it.
    """
    usual = gc.get_threshold()
    rare = (usual[0], *_RARE)
    gc.set_threshold(*rare)
    try:
        yield
    finally:
        if gc.get_threshold() == rare:  # else the user's file has set others
            gc.set_threshold(*usual)


@contextlib.contextmanager
def _logged_ends(log: int) -> Iterator[None]:
    """Log the line that calls ``os._exit``, which ends a process without a trace."""
    ends, process = os._exit, os.getpid()

    def logged_exit(status: int) -> NoReturn:
        if os.getpid() == process:
            faulthandler.dump_traceback(log, all_threads=False)
        ends(status)

    os._exit = logged_exit
    try:
        yield
    finally:
        os._exit = ends
