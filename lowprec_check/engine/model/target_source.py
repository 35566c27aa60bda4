"""Loads the target; workers get it by a fork, or load or unpickle it in a fresh interpreter."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import nn

from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.memory import free_weights
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.target_spec import OnProgress, TargetSpec
from lowprec_check.engine.model.user_module import UserImports, separate_imports, use_sources
from lowprec_check.engine.model.user_script import parked_threads
from lowprec_check.engine.model.weights import scale_weights
from lowprec_check.errors import UsageError, WorkerError, encodable, one_line
from lowprec_check.process import Isolation, system
from lowprec_check.process.breadcrumb import read_shared, shared_file
from lowprec_check.process.function_worker import KeptWorker, Method
from lowprec_check.process.interpreter import change_folder, current_folder
from lowprec_check.schema.scan_result import Run
from lowprec_check.torchkit.devices import cuda_driver_is_initialized, in_bad_fork, resolve, seed_everything
from lowprec_check.torchkit.isolation import accelerator_in_use, best_isolation, isolated, threads_end
from lowprec_check.torchkit.source_location import is_own_file

# -- How workers get the target

Load = Callable[[], Target]
"""Returns the target inside a worker; picklable if the worker is a fresh interpreter."""


class FreshLoad(NamedTuple):
    """Loads the target in a fresh interpreter, which inherits ``descriptors``."""

    load: Load
    descriptors: tuple[int, ...] = ()


class TargetSource:
    """The source of ``target`` for workers."""

    # ``reload`` loads it from the user's file; without it, the target is pickled. ``imports`` is
    # what the file imported; ``best`` is the default isolation on a CPU; ``name`` is the user's.

    def __init__(
        self,
        target: Target,
        reload: Load | None = None,
        imports: UserImports | None = None,
        best: Isolation | None = None,
        kept: KeptWorker | None = None,
        name: str | None = None,
    ) -> None:
        self.target, self.reload, self.name = target, reload, encodable(name or target.name)
        self.on_progress: OnProgress = lambda _run, _doing: None
        """Told what its runs do."""
        self.on_judged: Callable[[Run], None] = lambda _run: None
        """Told of each run of a scan as soon as it is judged: its measurements follow."""
        self.search_step: tuple[str, str] | None = None
        """What is shown in place of the steps of a run that a search makes."""
        self.best: Isolation = best or best_isolation(can_spawn=reload is not None)
        self.kept = kept or KeptWorker()
        """The worker that all tasks share, with ``isolation="shared"``."""
        self._imports = imports
        self._fork_fails = False
        self._pickled: int | None = None

    @property
    def method(self) -> Method:
        """How a worker starts that is to be as it is with ``fork`` if possible."""
        if self.best == "fork" and not self._fork_fails and not accelerator_in_use():
            return "fork"
        return "spawn"

    def best_on(self, device: str) -> Isolation:
        """The default isolation on ``device``, sharing aside: no fork that could not use it."""
        if device.startswith("cpu") or self.best != "fork" or not self._forks_lose_accelerators:
            return self.best
        self.stop_forking()
        return "spawn" if self.reload is not None else "none"

    @functools.cached_property
    def _forks_lose_accelerators(self) -> bool:
        """Whether forks cannot use accelerators, as this process asked for them; a fork tells."""
        return cuda_driver_is_initialized() or isolated(in_bad_fork, "fork", bool)

    def isolation_of_functions(self, isolation: Isolation | None, device: str | None) -> Isolation:
        """How a function that may initialize ``device`` is called, for runs with ``isolation``."""
        wanted = isolation or self.best
        method = "fork" if wanted == "shared" and self.method == "fork" else wanted
        if method == "fork" and not (device or "").startswith("cpu") and self._forks_lose_accelerators:
            return "none"
        return method

    def stop_forking(self) -> None:
        """Make :attr:`method` a fresh interpreter: a fork has failed where that has not."""
        self._fork_fails = True

    def isolated_by(self, isolation: Isolation) -> None:
        """Free what this process holds on an accelerator, if workers load it again."""
        loads_again = isolation == "spawn" or (isolation == "shared" and self.method == "spawn")
        if self.reload is not None and loads_again:
            free_weights(self.target.model)

    def forked(self) -> Target:
        """The target in a fork of this process, or in this process."""
        if self._imports is not None:
            self._imports.install()
        return self.target

    def fresh(self) -> FreshLoad:
        """The target for a fresh interpreter; :class:`UsageError` if it cannot be pickled."""
        if self.reload is not None:
            return FreshLoad(self.reload)
        if self._pickled is None:
            descriptor = shared_file()
            try:
                # With what the main script defines, which need not run again.
                with os.fdopen(os.dup(descriptor), "wb") as file:
                    cloudpickle.dump(self.target, file)
            except Exception as error:
                os.close(descriptor)
                why = one_line(error)
                raise UsageError(
                    f"The model cannot be sent to a fresh interpreter: {why}",
                    "Scan its file with: lowprec-check scan FILE.",
                ) from None
            self._pickled = descriptor
        return FreshLoad(functools.partial(_unpickle, self._pickled), (self._pickled,))

    def batch(self, number: int, seed: int) -> TargetSource:
        """The source of the same target with the inputs of another batch."""
        reload = None
        if self.reload is not None:
            reload = functools.partial(_load_batch, self.reload, number, seed)
        seed_everything(seed + number)
        batch = TargetSource(self.target.batch(number), reload, self._imports, self.best, self.kept, self.name)
        batch.on_progress = self.on_progress
        return batch

    def scale_weights(self, seed: int, output_rms: float) -> bool:
        """Scale random weights of a model loaded by name, by its output's RMS; whether any was."""
        if self.target.weights != "random":
            return False
        self.target = scale_weights(self.target, seed, output_rms)
        if self.target.weights != "scaled":
            return False
        # Also in the workers that start from now on.
        if self.reload is not None:
            self.reload = functools.partial(_load_scaled, self.reload, seed, output_rms)
        self.kept.end()  # it has the weights as they were
        return True

    def own_files(self) -> list[Path]:
        """The user's own files that the target was loaded from, sorted."""
        imported = {**sys.modules, **(self._imports.modules if self._imports is not None else {})}
        imported.pop("__main__", None)  # the command
        files = [getattr(module, "__dict__", {}).get("__file__") for module in imported.values()]
        own = [file for file in files if isinstance(file, str) and is_own_file(file)]
        return sorted(path for path in {*map(Path, own), Path(self.name.partition(":")[0])} if path.is_file())

    def report(self, run: str, doing: str) -> None:
        """Show what ``run`` is ``doing`` as progress, or the step of the search that needs it."""
        self.on_progress(*(self.search_step or (run, doing)))

    def close(self) -> None:
        """End the worker that tasks share, and free the pickled target."""
        self.kept.end()
        if self._pickled is not None:
            os.close(self._pickled)
            self._pickled = None


def _load_batch(load: Load, number: int, seed: int) -> Target:
    target = load()
    seed_everything(seed + number)
    return target.batch(number)


def _load_scaled(load: Load, seed: int, output_rms: float) -> Target:
    return scale_weights(load(), seed, output_rms)


def _unpickle(descriptor: int) -> Target:
    target: Target = pickle.loads(read_shared(descriptor))
    return target


# -- Loads what the user names in this process, so that worker processes can share it

# Makes `torch.cuda.is_available()` in a user's file work without initializing CUDA, which does not
# survive a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

QUICK_SECONDS = 10.0
"""A file that takes longer to load is not loaded again for other initial weights."""


def load_spec(spec: TargetSpec, seed: int) -> Target:
    """Load the target after seeding: random weights are the same in every worker and scan."""
    started = system.monotonic()
    seed_everything(seed)
    use_sources(dict(spec.sources), spec.rewrites() if spec.rewrites is not None else None)
    weights = str(spec.weights) if spec.weights is not None else None
    target = load_target(spec.name, spec.inputs, weights, spec.arguments, spec.steps, stream=spec.stream)
    if system.monotonic() - started > QUICK_SECONDS:
        return target
    return target._replace(remake=functools.partial(_model, spec._replace(steps=min(1, spec.steps))))


def _model(spec: TargetSpec, seed: int) -> nn.Module:
    return load_spec(spec, seed).model


def load_here(spec: TargetSpec, seed: int) -> TargetSource:
    """Load ``spec`` in this process; the source knows how its runs are isolated best."""
    running, folder = threading.enumerate(), current_folder()
    with separate_imports() as imports, cuda_asked_in_a_fork(), one_thread() as asked:
        target = load_spec(spec, seed)
    # What a script has made is used by forks, so that it runs once, even if threads of Python are
    # left, as loggers have them: a fork that waits for one is noticed. A file is loaded again.
    forks_safely = target.of_script or (not asked and threads_end(known=[*running, *parked_threads()]))
    # A backward pass starts threads for accelerators.
    if target.observed is not None and resolve(None).type != "cpu":
        forks_safely = False
    best = best_isolation(can_spawn=True)
    if best == "fork" and not forks_safely:
        best = "spawn"
    return TargetSource(target, functools.partial(_load_in, folder, spec, seed), imports, best, name=spec.name)


@contextlib.contextmanager
def one_thread() -> Iterator[list[int]]:
    """Inside, torch computes in one thread: a pool of threads is not forked, and a fork that has
    the use of one waits forever. The numbers that the user's code sets are noted, and the last of
    them holds afterwards.
    """
    asked: list[int] = []
    set_threads, get_threads, is_over = torch.set_num_threads, torch.get_num_threads, False
    before = get_threads()

    def note(nthreads: int) -> None:
        if is_over or type(nthreads) is not int or nthreads < 1:  # torch says what is wrong
            set_threads(nthreads)
        else:
            asked.append(nthreads)

    def noted() -> int:
        return get_threads() if is_over or not asked else asked[-1]

    set_threads(1)
    torch.set_num_threads, torch.get_num_threads = note, noted
    try:
        yield asked
    finally:  # the user's code may keep these functions
        is_over, torch.set_num_threads, torch.get_num_threads = True, set_threads, get_threads
        set_threads(asked[-1] if asked else before)


def _renew_threads() -> None:
    """In a fork, make torch's pool of threads anew, in one thread.

    Once the number of threads was set, each thread of OpenMP sets it again when it first computes.
    In a fork they find no pool if they do so at the same time ("Invalid thread pool!"): with 16
    threads, a third of the forks fail, in torch 2.11 and in 2.13.
    """
    _set_threads(_get_threads())


_set_threads, _get_threads = torch.set_num_threads, torch.get_num_threads  # a file may replace them
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_threads)


@contextlib.contextmanager
def cuda_asked_in_a_fork() -> Iterator[None]:
    """Let a fork answer what imported files ask about a GPU, as ``torch.utils._triton`` does."""
    # Initializing CUDA here would keep forks from using it: they would have to load the model.
    cuda, asks = torch.cuda, torch.backends.cuda.is_built() and sys.platform.startswith("linux")
    current_device, get_device_properties = cuda.current_device, cuda.get_device_properties

    def current() -> int:
        if asks and not cuda.is_initialized() and cuda.device_count():
            return 0
        return current_device()

    def plain_properties(device: Any) -> dict[str, Any]:
        about = get_device_properties(device)
        values = {name: getattr(about, name) for name in dir(about) if not name.startswith("_")}
        return {
            name: value if isinstance(value, (int, float, str, tuple)) else str(value) for name, value in values.items()
        }

    def index_of(device: Any) -> int:
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        return current() if index is None else index

    @functools.cache
    def asked_in_a_fork(device: int) -> dict[str, Any]:
        return isolated(lambda: plain_properties(device), "fork", dict)

    def properties(device: Any = None) -> Any:
        if asks and not cuda.is_initialized():
            with contextlib.suppress(WorkerError):  # else the error is raised here
                return SimpleNamespace(**asked_in_a_fork(index_of(device)))
        return get_device_properties(device)

    cuda.current_device, cuda.get_device_properties = current, properties
    try:
        yield
    finally:  # classes may keep these functions
        asks, cuda.current_device, cuda.get_device_properties = False, current_device, get_device_properties


def _load_in(folder: str | None, spec: TargetSpec, seed: int) -> Target:
    """Load ``spec`` in the command's folder: its file may have changed the current one."""
    change_folder(folder)
    return load_spec(spec, seed)
