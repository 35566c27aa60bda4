"""The models that a program was seen to call, and a scan of each on the calls that were kept."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec
from torch import nn

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.catalog.versions import own_version
from lowprec_check.core.scan import ScanArguments, growing_scan
from lowprec_check.engine.model.inputs import as_inputs, bind
from lowprec_check.engine.model.target import Target, check, forward_of, unchecked_target
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.engine.model.target_spec import NOTICE, OnProgress
from lowprec_check.errors import UsageError, message_of
from lowprec_check.features.programs.calls_of_model import CallCopy, CallsOfModel, State, restore_state
from lowprec_check.features.programs.program_options import check_fits
from lowprec_check.features.programs.program_scan import FirstCall, ProgramScan, ScannedModel
from lowprec_check.features.programs.watching import PlacingWatcher, is_model, names_of_modules
from lowprec_check.process import Isolation
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.statements import agree, some
from lowprec_check.torchkit.source_location import is_own_file

_STATE = "state_of_call"


@dataclasses.dataclass(frozen=True)
class ProgramModel:
    """A model that the program calls, or a method of one."""

    name: str
    """As the program reaches it from one of its variables, ``pipe.vae.decode``, else its class."""
    module: nn.Module
    method: str
    """Empty if the module itself is called."""
    calls: int
    kept: tuple[CallCopy, ...]
    """Those that a scan makes again."""
    key: str
    """Its class, and which of this class it is."""
    place: FirstCall
    """Where it is called first."""
    writes: bool
    """Whether it writes to what it is called with."""

    def target(self) -> Target:
        """What is scanned: the module on the kept calls, each a batch and from its own state."""
        model, forward = self.module, forward_of(self.module)
        if self.method:
            model = _with_forward(model, getattr(type(model), self.method))
            forward = forward_of(model)
        inputs = [as_inputs(forward, call.args, call.kwargs) for call in self.kept]
        if any(call.state for call in self.kept):
            with contextlib.suppress(UsageError):  # arguments without names
                named = [bind(forward, call.args, call.kwargs) for call in self.kept]
                model = _with_states(model, [call.state for call in self.kept])
                inputs = [{**by_name, _STATE: number} for number, by_name in enumerate(named)]
        line = self.kept[0].line
        target = unchecked_target(
            model,
            inputs[0],
            name=self.name,
            source=line,
            taken=f"called at {line}" if line else "",
            setup=(f"# `model` is {self.name}, `inputs` what it is called with at {line}",),
            make_batch=inputs.__getitem__,
        )
        return check(target)


class WatchedProgram:
    """What was seen of a program: :func:`watch` gives it."""

    def __init__(self, name: str = "program", wanted: Mapping[tuple[str, str], Collection[int]] | None = None) -> None:
        """``wanted`` calls are kept, by the key of a model and its method."""
        self.name = name
        self.was_stopped = False
        self.notes: tuple[str, ...] = ()
        """What its reader needs to know, such as why it did not run to its end."""
        self.on_progress: OnProgress | None = None
        self._watcher = PlacingWatcher(wanted)
        self._names: dict[int, str] = {}
        self._unseen: list[str] = []
        """Variables with models whose calls cannot be seen."""

    @contextlib.contextmanager
    def watching(self, variables: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Inside, calls are seen; ``variables`` are those of the program, read at the end."""
        with self._watcher.watching():
            yield
        self._names = names_of_modules(variables())
        self._unseen = [
            name
            for name, value in variables().items()
            if is_model(value) and type(value).__call__ is not nn.Module.__call__
        ]

    @property
    def models(self) -> tuple[ProgramModel, ...]:
        """The models, in the order of their first calls."""
        called = [(key, calls) for (key, _), calls in self._watcher.models.items() if calls.count]
        models = [self._model(key, calls) for key, calls in called]
        names = Counter(model.name for model in models)
        models = [
            dataclasses.replace(model, name=f"{model.name} at {model.place.line}") if names[model.name] > 1 else model
            for model in models
        ]
        names, numbers = Counter(model.name for model in models), Counter[str]()
        for at, model in enumerate(models):
            if names[model.name] > 1:  # made one after another, as in a loop
                numbers[model.name] += 1
                models[at] = dataclasses.replace(model, name=f"{model.name}, {numbers[model.name]}")
        return tuple(models)

    def _model(self, key: str, calls: CallsOfModel) -> ProgramModel:
        module, method = calls.module, calls.method
        place = self._watcher.places[key, method]
        name = place.path or self._names.get(id(module), type(module).__name__)
        if method:
            name = f"{name}.{method}"
        return ProgramModel(name, module, method, calls.count, tuple(calls.kept()), key, place, calls.writes)

    def scan(self, **options: Any) -> ProgramScan:
        """Scan each model on its kept calls, with the options of :func:`lowprec_check.scan`.

        Times and further inputs are off by default.

        Raises:
            UsageError: no model was called, or an option is not valid.
        """
        given = ScanArguments(**{"times": "off", "further_inputs": 0, **options})
        check_fits(given)
        self.on_progress = given.on_progress
        *_, result = self.growing_scan(given, given.isolation)
        return result

    def seen(self) -> ProgramScan:
        """The models before they are scanned."""
        return ProgramScan(
            tool=f"lowprec-check {own_version()}",
            target=self.name,
            models=[
                ScannedModel(
                    name=model.name,
                    kind=type(model.module).__name__,
                    calls=model.calls,
                    kept=[call.number for call in model.kept],
                    key=model.key,
                    method=model.method,
                    place=model.place,
                    writes=model.writes,
                )
                for model in self.models
            ],
            notes=[*self.notes, *self._watcher.notes],
            complete=False,
            was_stopped=self.was_stopped,
        )

    def growing_scan(
        self, options: ScanOptions, isolation: Isolation | None = None, earlier: ProgramScan | None = None
    ) -> Iterator[ProgramScan]:
        """Yield the result after each model; of those with the same calls, that of ``earlier``."""
        models, result = self.models, self.seen()
        if not models:
            if self._unseen:
                have = agree(len(self._unseen), "has a `__call__` of its", "have a `__call__` of their")
                problem = f"No call of a model was seen: {some(self._unseen)} {have} own."
                raise UsageError(
                    problem, "Let the class inherit `__call__` from torch.nn.Module, and define `forward`."
                )
            problem = "No model was called: no torch.nn.Module with parameters."
            raise UsageError(problem, "Call the models of the program while it is watched.")
        yield result
        scans = {}
        if earlier is not None:
            result = msgspec.structs.replace(result, runs=earlier.runs)
            scans = {(scanned.key, scanned.method, tuple(scanned.kept)): scanned for scanned in earlier.models}
        for index, model in enumerate(models):
            listed = list(result.models)
            scanned = listed[index]
            same = scans.get((scanned.key, scanned.method, tuple(scanned.kept)))
            listed[index] = same or self._scanned(model, scanned, options, isolation)
            result = msgspec.structs.replace(result, models=listed, complete=index == len(models) - 1)
            yield result

    def _scanned(
        self, model: ProgramModel, scanned: ScannedModel, options: ScanOptions, isolation: Isolation | None
    ) -> ScannedModel:
        """A model with its scan, or the problem that it has."""
        try:
            source = TargetSource(model.target(), name=model.name)
            if self.on_progress is not None:
                source.on_progress = functools.partial(_progress_of, self.on_progress, model)
            of_model = dataclasses.replace(options, batches=len(model.kept))
            *_, scan = growing_scan(source, isolation, of_model)
            return msgspec.structs.replace(scanned, scan=conclude(scan))
        except UsageError as error:
            return msgspec.structs.replace(scanned, problem=message_of(error))


@contextlib.contextmanager
def watch() -> Iterator[WatchedProgram]:
    """Inside, every model that the program calls is seen, and a few of its calls are kept.

    >>> with lowprec_check.watch() as program:  # doctest: +SKIP
    ...     image = pipe("a cat")
    >>> program.scan()  # doctest: +SKIP
    """
    program, frame = WatchedProgram(), sys._getframe(2)
    # In a function, its variables and those of its module; contextlib's frame lies between
    while frame.f_back is not None and not is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    with program.watching(lambda: {**frame.f_globals, **frame.f_locals}):
        yield program


def _with_forward(module: nn.Module, function: Callable[..., Any]) -> nn.Module:
    """A module with the parts of ``module``, which is called by ``function``."""
    kind = type(module)
    other = copy.copy(module)
    other.__class__ = type(kind.__name__, (kind,), {"forward": function, "__module__": kind.__module__})
    return other


def _with_states(module: nn.Module, states: list[State]) -> nn.Module:
    """A module that is in one of ``states`` before each call: its number is one more argument."""
    inner = type(module).forward

    def forward(self: nn.Module, **arguments: Any) -> Any:
        restore_state(self, states[arguments.pop(_STATE)])
        return inner(self, **arguments)

    return _with_forward(module, forward)


def _progress_of(on_progress: OnProgress, model: ProgramModel, run: str, doing: str) -> None:
    """Progress of a scan with the name of its model, and the call that is a batch of it."""
    numbers = [call.number for call in model.kept]
    in_calls = re.sub(r"\bbatch (\d+)", lambda batch: f"call {numbers[int(batch[1])]}", doing)
    on_progress(run if run == NOTICE else f"{model.name} · {run}", in_calls)
