"""What a scan finds and recommends: gaps, diagnostics and the recommendation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.registry import choices
from lowprec_check.schema.run_key import EAGER, MemoryFormat, Phase, qualified
from lowprec_check.schema.statements import Figure, Sentence, plain
from lowprec_check.schema.verdict import ExceptionInfo, Status

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import Run


# -- What a scan finds: gaps in one run, and the diagnostics of the whole scan

Severity = Literal["error", "warning", "note"]
Layer = Literal["dispatch", "function", "backend"]
GapKind = Literal[
    "missing-kernel",
    "unsupported-dtype",
    "dtype-mismatch",
    "no-backend-kernel",
    "scalar-overflow",
    "numeric-failure",
    "crash",
]

RESCUES: dict[GapKind, str] = {
    "dtype-mismatch": "with inputs of one dtype",
    "no-backend-kernel": "on the CPU in fp32",
    "numeric-failure": "with the values that fp32 has there",
}
"""How a call that fails succeeds, by the kind of its gap, if not with inputs in fp32."""


class Gap(Struct, frozen=True, kw_only=True):
    """Calls of one op at one place that only fp32 can run; or that a backend lacks."""

    op: str
    """The op: an overload name, ``aten.dot.default``, or a function, ``torch.fft.rfft``."""
    layer: Layer
    """``dispatch``: the op fails; ``function``: what calls it; ``backend``: another library."""
    kind: GapKind
    """Why it fails."""
    phase: Phase = "forward"
    """The part of a training step."""
    module: str
    """Dotted path of the module that calls it, empty for the model itself."""
    source: str | None
    """``file.py:line`` of the innermost code that is not torch's."""
    caller: str | None = None
    """The user's innermost line, if ``source`` is in an installed package; empty if none."""
    dtypes: list[str]
    """The floating dtypes of its inputs."""
    message: str
    """The first line of the exception."""
    calls: int = 1
    """How many calls failed there."""
    rescued: bool = True
    """False for a ``backend``; else a gap that is not rescued is saved as ``stopped_by``."""
    gives_complex: bool = False
    """Whether a result is complex: there is no complex bf16, and few kernels of complex fp16."""
    predicted_by: str | None = None
    """Of a predicted run: the row of the catalog that says so, in words."""
    custom_function: str | None = None
    """The ``torch.autograd.Function`` whose ``backward`` calls it; ``None`` if none does."""
    constant: float | None = None
    """The number in the code that exceeds the range of the dtype, for a ``scalar-overflow``."""

    @property
    def is_between_casts(self) -> bool:
        """Whether a backend computed it in fp32, between its own casts: no run fails by it."""
        return self.layer == "backend" and self.kind == "missing-kernel"

    @property
    def place(self) -> tuple[str, str, str | None]:
        """Module, op and line."""
        return self.module, self.op, self.source


# -- Where dtypes come from that meet in an op which fails for them


WRITES_INTO = (
    *("index_put", "index_add", "index_copy", "index_reduce", "scatter", "scatter_add", "scatter_reduce"),
    *("masked_scatter", "slice_scatter", "select_scatter", "diagonal_scatter"),
)
"""Ops that write values into their first argument, or a copy of it, in its dtype."""


class DtypeOrigin(Struct, frozen=True, kw_only=True):
    """Where the dtype of a tensor comes from, as observed."""

    kind: Literal["autocast", "parameter", "buffer", "attribute", "input", "made", "cast", "op", "unknown"]
    """``autocast``: from an op that autocast ran in 16 bits; ``attribute``: a tensor of a module
    that is neither parameter nor buffer; ``made``: from an op that makes tensors, as ``zeros``.
    """
    name: str = ""
    """The op, ``linear``; else the path of the parameter, buffer, attribute or input."""
    source: str | None = None
    """``file.py:line`` of the op."""


class MixedInput(Struct, frozen=True, kw_only=True):
    """One floating input of an op that gets several dtypes."""

    argument: str
    """Its name, ``values``."""
    dtype: str
    """``bfloat16``."""
    origin: DtypeOrigin
    """Where this dtype comes from."""
    is_cast: bool
    """Whether the trial casts it."""


class DisabledAutocast(Struct, frozen=True, kw_only=True):
    """A region of ``torch.autocast`` that torch disabled with a warning."""

    device: str
    """Its device type, ``cuda``."""
    dtype: str
    """``torch.float32``."""
    source: str | None = None
    """``file.py:line`` of the code that makes it."""
    warning: str
    """The first line of the warning."""


class MixedCall(Struct, frozen=True, kw_only=True):
    """An op that fails for the dtypes of its inputs, and succeeds with a cast."""

    module: str
    """Dotted path, ``""`` for the model itself."""
    op: str
    """As in :class:`Gap`."""
    source: str | None = None
    """``file.py:line``."""
    inputs: list[MixedInput]
    """The floating inputs of the first such call."""
    disabled_autocast: DisabledAutocast | None = None
    """The region around it that torch disabled, if any."""

    @property
    def place(self) -> tuple[str, str, str | None]:
        """Module, op and line."""
        return self.module, self.op, self.source


class MixedDtypes(Struct, frozen=True, kw_only=True):
    """A run again, with casts where ops get several dtypes."""

    calls: list[MixedCall]
    """The ops, with what was cast."""
    status: Status | None = None
    """How it ended; ``None`` if it failed anyway, or other ops fail as well."""
    rel_l2: float | None = None
    """Error of its output; ``None`` if it is not finite."""


class ModelAsGiven(Struct, frozen=True, kw_only=True):
    """A model whose parameters and inputs have several floating dtypes, called as it is."""

    dtypes: dict[str, list[str]]
    """The modules with parameters of each dtype, ``*`` for numbers: ``{"float16": ["*.base"]}``."""
    exception: ExceptionInfo | None = None
    """What a call raised; ``None`` if it did not."""
    mixed: MixedCall | None = None
    """The op that raised it, if it fails for the dtypes of its inputs."""


# -- Findings


class ReportedCase(Struct, frozen=True, kw_only=True):
    """A fault like that of a finding, which users have reported: nothing of it was measured."""

    title: str
    """What was reported."""
    link: str
    """The public thread."""
    repair: str
    """How its maintainers repaired it."""
    evidence: Literal["reported"] = "reported"
    """What it rests on."""

    @property
    def text(self) -> str:
        """``similar report: title, link``: the repair is that of another model."""
        return f"similar report: {self.title}, {self.link}"


class Diagnostic(Struct, frozen=True, kw_only=True):
    """One finding, at one place."""

    # The rule.
    code: str
    """The rule, ``LP101``; ``lowprec-check explain`` prints its manual."""
    name: str
    """The name of the rule, ``missing-kernel``."""
    severity: Severity
    """How much it matters."""
    # The run.
    precision: str | None = None
    """The precision of its run; ``None`` if it concerns the whole scan."""
    backend: str = EAGER
    """The backend of its run: ``eager``, ``inductor``, …"""
    memory_format: MemoryFormat = "contiguous"
    """The memory format of its run."""
    # The place.
    module: str | None = None
    """Dotted path of the module, empty for the model itself; ``None`` if it is about none."""
    op: str | None = None
    """The op that it is about, if any."""
    source: str | None = None
    """``file.py:line`` of the code that it is about, not torch's."""
    caller: str | None = None
    """The line of the user's own code that leads there, if ``source`` is in an installed package:
    the call of the package, or the line that makes the model. Empty if there is none, as of a model
    that is scanned by its name.
    """
    # What is said: as text, and as a template with typed figures.
    message: str
    """What was found."""
    template: str = ""
    """The words of ``message``, with ``{name:type}`` for the figures; empty in older files."""
    figures: dict[str, Figure] = {}
    """The figures of ``template``."""
    help: str | None = None
    """What to do."""
    help_template: str = ""
    """The words of ``help``, if figures or names in it are those of the run."""
    help_figures: dict[str, Figure] = {}
    """The figures of ``help_template``."""
    url: str | None = None
    """The link of ``known``."""
    known: ReportedCase | None = None
    """A fault that users have reported and that it is like, if one is known."""
    rests_on: str | None = None
    """Of a predicted run: what this is known from, in words; a row of the catalog, for example."""
    # How much it matters.
    calls: int = 1
    """The op calls that show it."""
    accepted: bool = False
    """Whether the scan's baseline accepts it."""
    timed: bool = False
    """Whether it rests on measured times and so depends on the load: never in a baseline."""
    share: float | None = None
    """Share of the squared output error that its place causes, if an error budget says so."""
    matters: bool | None = None
    """Whether it affects the output; ``None`` if unknown, or if it is not about the error."""

    @property
    def sentence(self) -> Sentence:
        """``message`` with its figures."""
        if self.template:
            return Sentence(template=self.template, figures=self.figures)
        return plain(self.message)

    @property
    def advice(self) -> Sentence | None:
        """``help`` with its figures."""
        if self.help_template:
            return Sentence(template=self.help_template, figures=self.help_figures)
        if self.help:
            return plain(self.help)
        return None

    @property
    def run_label(self) -> str | None:
        """The label of its run, ``half · inductor``; ``None`` if it concerns the whole scan."""
        return self.precision and qualified(self.precision, self.backend, self.memory_format)

    def is_about(self, run: Run) -> bool:
        """Whether it belongs to ``run``."""
        return (self.precision, self.backend, self.memory_format) == (run.precision, run.backend, run.memory_format)


# -- What a scan recommends, and whether it is worth it

Prefer = Literal["speed", "memory", "accuracy"]
"""What the recommendation is to gain."""
Worth = Literal["faster", "smaller", "faster and smaller", "nothing", "unknown"]
"""``faster`` than fp32, beyond noise and by at least 5 %; ``smaller``: at most 0.9 of its peak
memory; ``nothing``: neither; ``unknown``: not smaller, and whether it is faster cannot be told.
"""


class Recommendation(Struct, frozen=True, kw_only=True):
    """The recommended run in low precision, which passed, and whether it is worth it."""

    precision: str
    """The precision to use; of a plan, its base."""
    backend: str = EAGER
    """The backend to use."""
    memory_format: MemoryFormat = "contiguous"
    """The memory format to use."""
    keep_fp32: list[str] = []
    """Paths of the modules to keep in fp32."""
    keep_fp32_inputs: list[str] = []
    """Names of the inputs that are not cast."""
    way: str | None = None
    """How to train, a name in :data:`~lowprec_check.schema.ways_to_train.WAYS`, if trained."""
    evidence: Literal["measured", "predicted"] = "measured"
    """Whether the run that it rests on was measured or predicted."""
    reason: str
    """Why, in words."""
    code: str
    """Code to paste."""
    speedup: float | None = None
    """How many times as fast as fp32; ``None`` if that cannot be told."""
    rel_l2: float | None = None
    """The error of its output against fp32; ``None`` if it is not known."""
    prefer: Prefer = "speed"
    """What it is to gain."""
    worth: Worth | None = None
    """What is gained; ``None`` in a file of a version that did not say so."""
    gain: str = ""
    """The same with its figures: ``1.4 times as fast as fp32, saves 50 % of the memory``."""
    stay_in_fp32: bool = False
    """Whether fp32 is better in what is preferred: the run is for those who need its gain."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a predicted one that promises a gain, which needs the device."""
        claims = self.speedup is not None or self.gain or self.stay_in_fp32 or self.worth not in (None, "unknown")
        if self.evidence == "predicted" and claims:
            raise ValueError("a predicted recommendation says nothing about times and memory")

    @property
    def label(self) -> str:
        """The label of its run, ``half · inductor``."""
        return qualified(self.precision, self.backend, self.memory_format)

    @property
    def elsewhere(self) -> str:
        """How a finding names it."""
        kept = ""
        if self.keep_fp32:
            kept = " with the modules in fp32 that the recommendation names"
        elif self.keep_fp32_inputs:
            kept = f" with {choices(self.keep_fp32_inputs, 'and')} in fp32"
        return f"{self.label}{kept}"

    @property
    def kept(self) -> list[str]:
        """The inputs and modules to keep in fp32."""
        return [*self.keep_fp32_inputs, *self.keep_fp32]
