"""The options of a scan and of a search for a plan, each declared once: the Python API, the command
line, settings, the saved JSON and the documentation all derive from :class:`ScanOptions` and
:class:`PlanOptions`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, get_args, get_type_hints

from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.axes import BACKENDS, DEVICES, MEMORY_FORMATS, catalogued, device_of, replaced
from lowprec_check.schema.findings import Prefer
from lowprec_check.schema.measures import Errors, Explain, Reference, Scenario
from lowprec_check.schema.precisions import PRECISIONS, bases_called, formats, low_names, plan_bases
from lowprec_check.schema.registry import Registry, choices, words_in
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, REFERENCE, RunKey

FORMS = (
    "mymodel.py, mymodel.py:make_model, package.module:attr, torchvision:NAME, timm:NAME, "
    "transformers:NAME or hf:FOLDER"
)
"""The ways to name a target, for help and messages."""

Names = str | Sequence[str] | None
"""One name, several, or ``None`` for the default."""
Words = str | Sequence[str]
"""One text, several, or several in one, separated by commas."""
if TYPE_CHECKING:
    import torch

    DeviceName = str | torch.device | None
    Dtypes = str | torch.dtype | Sequence[str | torch.dtype] | None
else:  # the command line does not import torch
    DeviceName, Dtypes = str | None, Names


FailOn = Literal["no-pass", "error", "warning", "note", "never"]
"""What the exit code of a scan is about: no precision passes, or also findings so severe."""
FAIL_BY_DEFAULT: FailOn = "no-pass"

RUN, WHERE, THOROUGH, OUTPUT = "What to run", "Where", "How thorough", "Output"
"""The groups of options in the help."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What is known of an option besides its name, type and default value."""

    text: str
    """A sentence for ``--help``, the Python documentation and that of the saved JSON."""
    details: str = ""
    """More sentences, which ``--help-all`` and the Python documentation have."""
    unset: str = ""
    """What is done without it, if its default value does not say so."""
    group: str = RUN
    """Under which heading the help lists it."""
    listed: bool = True
    """Whether ``--help`` lists it; ``--help-all`` lists all options."""
    flags: tuple[str, ...] = ()
    """On the command line; by default ``--name-of-the-field``."""
    metavar: str | None = None
    """What the help shows in place of its value; by default ``NAME`` or the type."""
    kind: Any = None
    """The type on the command line, if the Python API takes more."""
    names: Callable[[], list[str]] | None = None
    """The names to choose from, which a shell completes."""
    registry: Registry[Any] | None = None
    """The registry of the names or aliases that are given; options keep the registered names."""
    repeatable: bool = False
    """Whether it takes several words that are in no registry."""
    least: float | None = None
    above: float | None = None
    saved: bool = True
    """Whether the options of a saved result have it."""

    def head(self, more: str = "") -> str:
        """The text, with ``more`` before its full stop, and what the default is."""
        text = self.text
        if more:
            text = f"{text.removesuffix('.')}{more}."
        if self.unset:
            text += f" Default: {self.unset}."
        return text

    def sentences(self, more: str = "") -> str:
        """All that is said of the option."""
        return " ".join(filter(None, (self.head(more), self.details)))

    @property
    def takes_several(self) -> bool:
        """Whether several words may be given."""
        return self.repeatable or self.registry is not None


def option(default: Any, text: str, **more: Any) -> Any:
    """A field of :class:`DeclaredOptions`; ``more`` as in :class:`Declared`."""
    return field(default=default, metadata={"declared": Declared(text=text, **more)})


def declared_in(options: type[DeclaredOptions]) -> Iterator[tuple[str, Any, Any, Declared]]:
    """The name, type, default value and declaration of each option, without other fields."""
    types = get_type_hints(options)
    for field_ in dataclasses.fields(options):  # type: ignore[arg-type]
        declared = field_.metadata.get("declared")
        if declared is not None:
            yield field_.name, declared.kind or types[field_.name], field_.default, declared


class DeclaredOptions:
    """Options whose values are checked when they are given; raises :class:`UsageError`."""

    device: DeviceName

    def __post_init__(self) -> None:
        """Replace names by those registered, and texts that hold several words by these."""
        for name, kind, default, declared in declared_in(type(self)):
            value = getattr(self, name)
            if declared.takes_several:
                words = words_in if declared.registry is None else declared.registry.names_in
                value = default if value is None else tuple(words(value))
            elif name != "device":
                _check_value(name, kind, value, declared)
            elif value is not None:
                device_of(str(value))  # whether it is here is for torch to know
            object.__setattr__(self, name, value)

    @property
    def device_name(self) -> str | None:
        """The name of the device, if one is given."""
        if self.device is None:
            return None
        return str(self.device)


def _check_value(name: str, kind: Any, value: Any, declared: Declared) -> None:
    """Raise :class:`UsageError` for a value of another type, or beyond the limits."""
    kinds = (kind, *get_args(kind))
    if value is None and type(None) in kinds:
        return
    allowed = [text for part in kinds for text in get_args(part) if isinstance(text, str)]
    if allowed and value not in allowed:
        raise UsageError(f"Unknown {name} {value!r}.", f"Choose from {', '.join(allowed)}.")
    least, above, is_whole = declared.least, declared.above, float not in kinds
    if least is not None or above is not None:
        fits = isinstance(value, int if is_whole else (int, float))
        if not fits or (above is not None and not value > above) or (least is not None and not value >= least):
            limit = f"of at least {least:g}" if above is None else f"above {above:g}"
            raise UsageError(f"{name} is {value!r}.", f"Give {'an integer' if is_whole else 'a number'} {limit}.")
    elif kind is int and (not isinstance(value, int) or abs(value) >= 2**63):
        raise UsageError(f"{name} is {value!r}.", "Give an integer of 64 bits.")
    elif str in kinds and not isinstance(value, str):
        raise UsageError(f"{name} is {value!r}.", "Give a string.")


# -- Options that a scan and a search have in common

_DEVICES = choices(DEVICES.names())
_TOLERANCES = ", ".join(f"{f.tolerance:g} for {f.short}" for f in formats() if f.name != "float32")
_BASES = list(dict.fromkeys(base.kind for base in plan_bases()))
_BACKENDS = ", ".join(f"{backend.name} ({backend.summary})" for backend in BACKENDS)
_HOW = f"How to execute the model: {', '.join(BACKENDS.names())}."
PREDICTED = f"{choices([name for name in catalogued() if name != 'cpu'])} that is not here is predicted"


def _device(text: str = "") -> Any:
    return option(
        None,
        f"Device: {_DEVICES}{text}.",
        unset="an accelerator if there is one, else cpu",
        group=WHERE,
        metavar="NAME",
        names=DEVICES.names,
        saved=False,
    )


def _tolerance() -> Any:
    return option(
        None,
        "Largest relative L2 error of the output that passes.",
        unset=_TOLERANCES,
        group=THOROUGH,
        metavar="ERROR",
        least=0.0,
    )


def _judge() -> Any:
    return option(
        None,
        "What to judge the output by: tokens, classes, pixels, masks, boxes, picture, audio, embeddings, integers, or "
        "rel_l2 for none of them.",
        unset="by what the output is",
        group=THOROUGH,
        metavar="MEASURE",
    )


def _limit() -> Any:
    return option(
        (),
        "Limit of a figure of a measure, e.g. boxes.found=0.98.",
        group=THOROUGH,
        listed=False,
        metavar="MEASURE.FIGURE=VALUE",
        repeatable=True,
    )


def _seed() -> Any:
    return option(0, "Random seed of every run.", listed=False, metavar="N")


def _without_kernel() -> Any:
    return option(
        (), "Simulate a missing kernel, e.g. aten.dot:half.", listed=False, metavar="OP:DTYPE", repeatable=True
    )


@dataclass(frozen=True, kw_only=True)
class ScanOptions(DeclaredOptions):
    """What to run and how: arguments of :func:`lowprec_check.scan`, options of ``scan``."""

    precisions: Names = option(
        None,
        f"Precisions: {', '.join(low_names())}, or an alias such as fp16 (half).",
        unset="all",
        flags=("--precision", "-p"),
        names=low_names,
        registry=PRECISIONS,
    )
    backends: Names = option(
        None, _HOW, details=f"These are {_BACKENDS}.", unset=EAGER, flags=("--backend",), registry=BACKENDS
    )
    memory_formats: Names = option(
        None,
        f"Memory formats: {choices(MEMORY_FORMATS.names())}.",
        unset=CONTIGUOUS,
        listed=False,
        flags=("--memory-format",),
        registry=MEMORY_FORMATS,
    )
    device: DeviceName = _device(f"; {PREDICTED}")
    torch_version: str | None = option(
        None,
        "Release of torch to predict for; needs a device.",
        unset="the installed one",
        group=WHERE,
        listed=False,
        flags=("--torch",),
        metavar="X.Y",
    )
    predict: bool = option(
        False, "Predict, although the device is here and could be measured.", group=WHERE, listed=False
    )
    budget: float | None = option(
        None,
        "Seconds for each part of a run.",
        unset="20, or ten fp32 forward passes if they take longer",
        group=THOROUGH,
        metavar="SECONDS",
        above=0.0,
    )
    errors: Errors = option(
        "both", "Errors to compute for each op; accumulated and none are faster.", group=THOROUGH, listed=False
    )
    budget_error: Literal["auto", "on", "off"] = option(
        "auto",
        "Find out which ops the error of the output comes from.",
        details="Takes time, and memory for all activations. Needs both errors. "
        "auto: within 2.2 times the memory of fp32, or 4 GiB; on: half of the memory that is free.",
        group=THOROUGH,
        listed=False,
    )
    explain: Explain | None = option(
        None,
        "Runs to explain op by op with errors; others only by dtypes and largest values.",
        details="failing: those that fail, or whose error is at least half of the tolerance; recommended: also the "
        "recommended one; all: every run, also with --thorough, --batches, or another option about these errors.",
        unset="failing; recommended in Python and with --json or --report; all with a baseline or --fail-on SEVERITY",
        group=THOROUGH,
        listed=False,
    )
    reference: Reference = option(
        "fp32", "Precision of the reference for the errors of each op.", group=THOROUGH, listed=False
    )
    tolerance: float | None = _tolerance()
    judge: str | None = _judge()
    limit: Words = _limit()
    seed: int = _seed()
    without_kernel: Words = _without_kernel()
    batches: int = option(
        1,
        "Batches to run: inputs(0), inputs(1), …, or items of a loader.",
        details="Runs that pass on the first are run on the others; LP205 reports values that grow.",
        group=THOROUGH,
        metavar="N",
        least=1,
    )
    further_inputs: int | None = option(
        None,
        "Try what passes on so many further inputs; 0: on none.",
        details="They are drawn anew or resampled. Without the option, they take a small part of the time at most.",
        unset="16, or 64 near the tolerance",
        group=THOROUGH,
        metavar="N",
        least=0,
    )
    plan: bool | None = option(
        None,
        "Search for modules to keep in fp32, for each precision that fails.",
        unset="only if none passes",
        group=THOROUGH,
        flags=("--plan/--no-plan",),
    )
    times: Literal["on", "off"] = option(
        "on",
        "Compare times with fp32; off saves some seconds.",
        details="All runs are called in turns for that. Leave it off in a CI, for example.",
        group=THOROUGH,
    )
    thorough: bool = option(
        False,
        "Run every precision as often as those that the device accelerates.",
        details="Otherwise one whose first call takes twice as long as fp32's, and that is not "
        "accelerated, is judged by this call.",
        group=THOROUGH,
        listed=False,
    )
    scenario: Scenario | None = option(
        None,
        "Also time every run as it is served.",
        details="offline: the inputs on all cores; realtime: batches of 1, in several instances of at most "
        "4 cores at a time.",
        group=THOROUGH,
        listed=False,
    )
    prefer: Prefer = option(
        "speed", "What the recommendation is to gain, among the precisions that pass.", group=OUTPUT, listed=False
    )
    train: bool = option(
        False,
        "Scan training: forward, loss, backward, optimizer.",
        details="Uses loss(output) and optimizer(parameters) of the file if it defines them.",
        saved=False,
    )
    steps: int | None = option(
        None,
        "Training steps of each run.",
        details="They are compared with fp32 and with the spread of fp32 runs from other seeds.",
        unset="1",
        metavar="N",
        least=1,
    )
    select: Words = option(
        (),
        "Only findings whose code starts with this prefix, e.g. LP1.",
        group=OUTPUT,
        listed=False,
        metavar="CODE",
        repeatable=True,
    )
    ignore: Words = option(
        (),
        "No findings whose code starts with this prefix.",
        group=OUTPUT,
        listed=False,
        metavar="CODE",
        repeatable=True,
    )

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for options that do not go together, too."""
        super().__post_init__()
        # An option that would be ignored is refused: its user expects something of it.
        if self.steps is not None and not self.train:
            raise UsageError("steps is the number of training steps of a scan of training.", "Add --train.")
        if self.device is None and (self.predict or self.torch_version is not None):
            raise UsageError("No device is named to predict.", "Add --device xpu, cuda or cpu.")
        if not self.train:
            return
        for name in ("scenario", "predict"):
            if getattr(self, name):
                raise UsageError(
                    f"{name} is about the forward pass, not about training.", f"Leave out --{name.replace('_', '-')}."
                )
        if self.batches > 1:
            raise UsageError("Training takes a new batch for each step by itself.", "Leave out --batches.")

    @property
    def explains_all(self) -> bool:
        """Whether runs that pass clearly are explained with errors: an option asks for these."""
        about_errors = self.errors == "accumulated" or self.reference != "fp32" or self.budget_error == "on"
        return self.explain == "all" or self.thorough or self.batches > 1 or about_errors

    def names_of(self, axis: Literal["precisions", "backends", "memory_formats"]) -> list[str]:
        """The names that are run; by default all precisions, in eager mode and contiguous."""
        names: Sequence[str] | None = getattr(self, axis)
        if names:
            return list(names)
        defaults: dict[str, list[str]] = {
            "precisions": PRECISIONS.names(),
            "backends": [EAGER],
            "memory_formats": [CONTIGUOUS],
        }
        return defaults[axis]

    @property
    def training_steps(self) -> int:
        """Steps of training; 0 if only the forward pass is run."""
        if self.train:
            return self.steps or 1
        return 0

    def keys(self, device: str) -> list[RunKey]:
        """Every run that a scan makes on ``device``, the reference first; a plan is not counted."""
        # Eager mode first, as it explains the others.
        backends = sorted(replaced(self.names_of("backends"))[0], key=lambda name: name != EAGER)
        asked = [
            RunKey(precision, backend, device, MEMORY_FORMATS.get(memory_format).name)
            for backend in backends
            for memory_format in self.names_of("memory_formats")
            for precision in self.names_of("precisions")
        ]
        return list(dict.fromkeys([RunKey(REFERENCE, device=device), *asked]))

    def saved(self, isolation: Isolation) -> dict[str, Any]:
        """The options as they are saved with the result."""
        chosen = {
            "precisions": self.names_of("precisions"),
            "backends": replaced(self.names_of("backends"))[0],
            "memory_formats": self.names_of("memory_formats"),
            "steps": self.training_steps,
        }
        names = [name for name, _, _, declared in declared_in(ScanOptions) if declared.saved]
        values = {name: getattr(self, name) for name in names} | chosen
        for name, value in values.items():
            if isinstance(value, tuple):  # as JSON has it
                values[name] = list(value)
        return {"isolation": isolation} | values


@dataclass(frozen=True, kw_only=True)
class FixOptions(DeclaredOptions):
    """What a patch must make pass, and how long it is searched; the options of ``fix``."""

    precisions: Names = option(
        None,
        "Precisions that must pass with the patch.",
        unset="all that fail",
        flags=("--precision", "-p"),
        names=low_names,
        registry=PRECISIONS,
    )
    device: DeviceName = _device()
    tolerance: float | None = _tolerance()
    judge: str | None = _judge()
    limit: Words = _limit()
    further_inputs: int | None = option(
        None,
        "Try the patch on so many further inputs; 0: on none.",
        unset="as many as a scan",
        group=THOROUGH,
        metavar="N",
        least=0,
    )
    seconds: float | None = option(
        None,
        "Seconds for the search after the scan.",
        unset="as many as the scan took, but at least 60",
        group=THOROUGH,
        flags=("--search-seconds",),
        metavar="SECONDS",
        above=0.0,
    )
    plan: bool = option(False, "Also search for modules to keep in fp32, and compare.", group=THOROUGH)
    train: bool = option(False, "Fix a training script: autocast in its loop, GradScaler, clipping of gradients.")
    steps: int | None = option(None, "With --train, the steps of the script.", unset="8", metavar="N", least=1)
    seed: int = _seed()
    without_kernel: Words = _without_kernel()


@dataclass(frozen=True, kw_only=True)
class PlanOptions(DeclaredOptions):
    """What to search for: arguments of :func:`lowprec_check.find_plan`, options of ``plan``."""

    dtype: Dtypes = option(
        None,
        f"{choices(list(dict.fromkeys(base.format.short for base in plan_bases())))}, "
        "or a precision such as autocast-fp16.",
        unset="try all, keep the best",
        flags=("--dtype", "--precision", "-p"),
        metavar="NAME",
        repeatable=True,
    )
    base: str | None = option(
        None, f"How the other modules run: {choices(_BASES)}.", unset="try all, keep the best", metavar="NAME"
    )
    backend: str = option(EAGER, _HOW, details=f"These are {_BACKENDS}.", metavar="NAME", names=BACKENDS.names)
    device: DeviceName = _device()
    tolerance: float | None = _tolerance()
    judge: str | None = _judge()
    limit: Words = _limit()
    use_metric: bool = option(
        False,
        "Judge by metric(model) from the file (higher is better) instead of the tolerance.",
        group=THOROUGH,
        flags=("--metric",),
    )
    max_drop: float | None = option(
        None,
        "Largest drop of the metric that passes.",
        unset="1% of the metric in fp32",
        group=THOROUGH,
        metavar="DROP",
        least=0.0,
    )
    batches: int = option(
        1,
        "Batches that must pass: inputs(0), inputs(1), …",
        group=THOROUGH,
        metavar="N",
        least=1,
    )
    seconds: float = option(
        600.0,
        "Seconds for the whole search.",
        group=THOROUGH,
        flags=("--search-seconds",),
        metavar="SECONDS",
        above=0.0,
    )
    seed: int = _seed()
    without_kernel: Words = _without_kernel()
    predict: bool = True
    """Whether the error budget proposes sets; trials alone find them too, in more trials."""

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for options that do not go together, too."""
        super().__post_init__()
        BACKENDS.get(self.backend)
        if self.base not in (None, *_BASES):
            raise UsageError(f"Unknown base {self.base!r}.", f"Choose from {', '.join(_BASES)}.")
        if not self.bases():
            asked = " or ".join(words_in(self.dtype))
            raise UsageError(
                f"No precision is both {asked} and {self.base}.", "Leave out --base, or give another --dtype."
            )
        if self.use_metric and self.tolerance is not None:
            raise UsageError(
                "Both a metric and a tolerance are given.", "Give one; --max-drop is the metric's tolerance."
            )
        if self.max_drop is not None and not self.use_metric:
            raise UsageError("--max-drop needs a metric.", "Add --metric.")

    def bases(self) -> list[str]:
        """The precisions to start from, in the order of the search."""
        asked = bases_called(self.dtype)
        return [base.name for base in plan_bases() if base in asked and self.base in (None, base.kind)]


# -- Functions of Python with these options

P = ParamSpec("P")
Given = TypeVar("Given", bound=DeclaredOptions)
Found = TypeVar("Found")
Found_co = TypeVar("Found_co", covariant=True)
Model = TypeVar("Model")
Model_contra = TypeVar("Model_contra", contravariant=True)


class OfModel(Protocol[Model_contra, P, Found_co]):
    """A function of a model and its inputs with the options ``P``."""

    def __call__(self, model: Model_contra, inputs: Any, *args: P.args, **given: P.kwargs) -> Found_co:
        """Call it; ``inputs`` as for :func:`lowprec_check.scan`."""


def called_with(
    arguments: Callable[P, Given],
) -> Callable[[Callable[[Model, Any, Given], Found]], OfModel[Model, P, Found]]:
    """Makes ``f(model, inputs, given)`` a function with options as keyword arguments."""

    def decorated(function: Callable[[Model, Any, Given], Found]) -> OfModel[Model, P, Found]:
        @functools.wraps(function)
        def called(model: Model, inputs: Any, *args: P.args, **given: P.kwargs) -> Found:
            try:
                signature.bind(model, inputs, *args, **given)
            except TypeError as error:
                raise TypeError(f"{function.__name__}(): {error}") from None
            return function(model, inputs, arguments(*args, **given))

        # The signature and the documentation say what the function takes, not ``arguments``.
        positional = list(inspect.signature(function).parameters.values())[:2]
        options = inspect.signature(arguments).parameters.values()
        types = get_type_hints(function) | get_type_hints(arguments)
        parameters = [option.replace(annotation=types[option.name]) for option in (*positional, *options)]
        signature = inspect.Signature(parameters, return_annotation=types["return"])
        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__annotations__ = {name: types[name] for name in (*signature.parameters, "return")}
        more = ("", "; one, several, or several in a string with commas")
        texts = [
            textwrap.fill(
                f"{name}: {declared.sentences(more[declared.takes_several])}",
                120,
                initial_indent=" " * 8,
                subsequent_indent=" " * 12,
            )
            for name, _, _, declared in declared_in(arguments)  # type: ignore[arg-type]
        ]
        head, returns, tail = (function.__doc__ or "").partition("\n\n    Returns:")
        called.__doc__ = "\n".join([head, *texts]) + returns + tail
        return called

    return decorated
