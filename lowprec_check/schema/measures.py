"""What is measured of a run, and how: times, errors, ranges, magnitudes, ablations."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.verdict import Status

# -- Times, and what some scans measure besides: times in a scenario, errors of quantized layers

Errors = Literal["both", "accumulated", "none"]
"""The errors that are computed for each op: local and accumulated ones, these, or none."""

Explain = Literal["failing", "recommended", "all"]
"""The runs that are explained with errors: those that fail or are near the tolerance, also the
recommended one, or all.
"""

Reference = Literal["fp32", "fp64"]
"""The precision of the reference that each op is compared with."""

Scenario = Literal["offline", "realtime"]
"""``offline``: the inputs on all cores; ``realtime``: batches of 1, several 4-core instances."""


class Speedup(Struct, frozen=True, kw_only=True):
    """How many times as fast as fp32 a run is; both are called in turns, a ratio per round."""

    median: float
    """The median of the ratios."""
    low: float
    """The lower end of the interval."""
    high: float
    """``low`` to ``high`` contains the median of all possible rounds with a probability of at least
    95 %: order statistics from 6 rounds on, else Student's interval of the ratios' logarithms; of
    one ratio, a factor of 3 to each side.
    """
    rounds: int
    """Number of rounds; 0 if calls of plain parts are compared, of runs too slow for rounds."""
    one_core: bool = False
    """Whether other programs used the cores: it rests on one-core calls, less their waiting."""


class Latency(Struct, frozen=True, kw_only=True):
    """How long calls took, in rounds over all runs: a change of the speed meets each of them."""

    median_ms: float
    """The median of the calls, in milliseconds."""
    quartiles_ms: tuple[float, float]
    """The first and the third."""
    samples: int
    """Calls timed."""
    noisy: bool = False
    """Whether the quartiles are more than a quarter of the median apart, twice."""
    speedup: Speedup | None = None
    """``None`` for fp32 itself, and for a run that was not timed in rounds with it."""
    slower_than: list[str] = []
    """The labels of runs in the same rounds that this one is slower than."""
    host_ms: float | None = None
    """Milliseconds to launch a call on an idle accelerator; ``None`` on a CPU, or not measured."""
    device_ms: float | None = None
    """Milliseconds the accelerator takes at most for a call; ``None`` as :attr:`host_ms`."""
    device_speedup: Speedup | None = None
    """How many times as fast as fp32 the accelerator is, if it need not wait for the host."""


class TimingConditions(Struct, frozen=True, kw_only=True):
    """What may have disturbed the times of a scan."""

    waited: float | None = None
    """Share of the time that the model's threads waited for a core; ``None`` if unknown."""
    speed_change: float | None = None
    """Ratio (above 1) of the processor's speed in two turns, a quarter of all from either end, by
    a piece of work; ``None`` if these are too few.
    """
    reason: str | None = None
    """Why times were not taken, or not compared in rounds; ``None`` if they were."""


class Timing(Struct, frozen=True, kw_only=True):
    """How long calls took in a scenario: in several instances at a time, or one on all cores."""

    scenario: Scenario
    """How the model is served."""
    batch: int | None
    """Size of the first dimension of the inputs; ``None`` if they do not agree on one."""
    instances: int
    """Processes that ran the model at the same time."""
    cores: int
    """Processor cores of each instance."""
    calls: int
    """Calls timed, of all instances."""
    median_ms: float
    """The median of the calls, in milliseconds."""
    p99_ms: float
    """Their 99th percentile, in milliseconds."""
    throughput: float | None
    """Items per second of all instances; ``None`` if the batch is unknown."""


class Outliers(Struct, frozen=True, kw_only=True):
    """How far the largest values of weights, or of the inputs of a layer, are from the others."""

    share: float
    """The share of values that are more than 6 standard deviations from the mean."""
    channel: int
    """The channel, an input of the layer, with the largest magnitude."""
    times: float
    """How many times as large it is as the largest value of the median channel."""


class LayerError(Struct, frozen=True, kw_only=True):
    """Distance of a quantized layer's output from the unquantized one's, on calibration inputs."""

    module: str
    """The path of the module, ``layer1.0.conv1``; empty for the model itself."""
    op: str
    """``conv2d``."""
    local: float | None = None
    """rel_l2 of the layer alone, on unquantized inputs; ``None`` if not measured or not finite."""
    accumulated: float | None = None
    """The rel_l2 in the quantized model, with the errors of the layers before it."""
    alone: float | None = None
    """The rel_l2 of the model's output if this layer alone is quantized; of a few layers only."""
    weights: Outliers | None = None
    """Those of its weights."""
    activations: Outliers | None = None
    """Those of its inputs."""
    left: str | None = None
    """Why it is not quantized, a clause; ``None`` if it is."""


# -- The error budget of a run: which ops, modules and lines its output error comes from

MATTERS = 0.03
"""An op matters to the error of an output if it causes at least this share of it."""


class Share(Struct, frozen=True, kw_only=True):
    """The share of the output error that one op causes at one place, over all its calls."""

    module: str
    """The path of the module, ``layer1.0.conv1``; empty for the model itself."""
    op: str
    """``aten.addmm.default``; ``cast input`` for the rounding of the inputs."""
    source: str | None = None
    """``model.py:41``."""
    share: float
    """Of the squared error; negative if this op's error cancels that of others."""
    calls: int = 1
    """Number of op calls."""
    rounding: bool = False
    """Whether it is the rounding of the op's result that stays if only a module inside ``module``
    is in fp32: of a cast model where the result leaves that, under autocast where an op reads it in
    16 bits. ``module`` is the innermost with which it goes; empty: it stays with any.
    """


class ModuleShare(Struct, frozen=True, kw_only=True):
    """What goes with one module in fp32: 1 - (error with it in fp32 / error)², to first order."""

    module: str
    """The path of the module, ``layer1.0``."""
    share: float
    """Of the squared error; negative if that grows. Modules share parts: the sum may not be 1."""
    measured: float | None = None
    """The same of a plain run with the module in fp32; ``None`` if there was none."""

    @property
    def told(self) -> float:
        """What a plain run has shown, else what is derived."""
        return self.share if self.measured is None else self.measured


class ErrorBudget(Struct, frozen=True, kw_only=True):
    """Where the error of an output comes from, to first order: shares and ``unexplained`` add up to
    1.

    The error that an op adds reaches the output through the derivatives of all later ops. A share
    is the part of the squared error of the output that is explained so. It is about the floating
    tensor of the output with the largest error.
    """

    # How much of the error the shares explain.
    predicted: float | None = None
    """rel_l2 of the output to first order; ``None`` if there is no budget."""
    measured: float | None = None
    """rel_l2 that the shares are about: of the first call, with missing kernels replaced."""
    unexplained: float | None = None
    """1 less the sum of all shares: beyond the first order; negative if that predicts too much."""
    decisions: float = 0.0
    """The part of ``unexplained`` by indices and comparisons other than fp32's; 0 if none."""
    # The shares.
    shares: list[Share] = []
    """The largest shares, largest first."""
    others: float = 0.0
    """The sum of the shares that are not listed."""
    modules: list[ModuleShare] = []
    """What goes with each module in fp32, largest first; empty in older files."""
    # What limits them.
    blocked: list[str] = []
    """Ops that no derivative passes, so that errors before them are not seen."""
    output_rms: float | None = None
    """Root mean square of the fp32 output."""
    spread: float = 0.0
    """Standard deviation of a share from a plain run, in which later results round otherwise."""
    next_error: float | None = 0.0
    """rel_l2 of the output's tensor with the next largest error, maybe of other ops; or 0."""
    reason: str | None = None
    """Why there is no budget, in words."""

    @property
    def known(self) -> bool:
        """Whether shares were computed."""
        return self.predicted is not None


# -- What further batches show of a run: whether it passes on them, and the range of each op


class PlaceRange(Struct, frozen=True, kw_only=True):
    """The range of one op at one place, over its calls there; each list has an item per batch."""

    module: str
    """The path of the module, ``layer1.0.conv1``; empty for the model itself."""
    op: str
    """``aten.addmm.default``."""
    source: str | None = None
    """``model.py:41``."""
    dtypes: str
    """Floating dtypes in, an arrow, floating dtypes out: ``bf16+f32→bf16``."""
    largest: list[float | None]
    """The largest finite magnitude; ``None`` if the op was not called."""
    overflows: list[int]
    """Number of values that are Inf where fp32 is finite."""
    flushed: list[float | None]
    """The largest share of fp32's non-zeros that are zero; ``None`` if it was not measured."""
    subnormal: list[float | None]
    """The largest share of them below the dtype's smallest normal number, or flushed."""


class BatchRanges(Struct, frozen=True, kw_only=True):
    """A run on several batches; each list but ``places`` has an item per batch."""

    statuses: list[str]
    """The status on each batch, ``ok``; the batches after one that fails are not run."""
    output_errors: list[float | None]
    """The error of the output that the status rests on; ``None`` if there is none, or infinite."""
    places: list[PlaceRange] = []
    """In the order in which they were called first; empty if the run was not analyzed op by op."""


# -- Further inputs that a run was tried on: how many fail, how near the others are to failing

InputKind = Literal["drawn", "batches", "resampled"]
"""``drawn``: made anew; ``batches``: the loader's next; ``resampled``: from the inputs' values."""


class InputsTried(Struct, frozen=True, kw_only=True):
    """A run that passes, on further inputs: each is compared with fp32 on the same input."""

    kind: InputKind
    """Where they are from."""
    tried: int = 0
    """Number of further inputs."""
    failed: int = 0
    """Those on which the run does not pass."""
    statuses: dict[str, int] = {}
    """How often it ended in each status: ``{"ok": 15, "inaccurate": 1}``."""
    # How near the others are to failing, and how sure that is.
    worst: float | None = None
    """The largest rel_l2, or share of integers that differ; ``None`` if not finite or untried."""
    worst_shown: str = ""
    """The figure of the measure that decides there: ``tokens 99.2 %``."""
    low: float = 0.0
    """The lower end of the interval."""
    high: float = 1.0
    """95 % interval (Clopper-Pearson) of the share of such inputs that fail."""
    # For trying them again.
    first_failed: int | None = None
    """The first batch that fails, ``inputs(17)``; of resampled values, the seed's increment."""
    left_out: int = 0
    """Inputs left out: fp32 fails or is not finite, shapes differ, or nothing can be compared."""
    seed: int = 0
    """The seed that they were drawn with."""
    reason: str | None = None
    """Why none was tried."""


# -- The magnitudes of the values that the ops of a module give, as counts by power of two

SAMPLE = 1024
"""At most this number of values of each op output is counted, evenly spread over the tensor."""


class ModuleMagnitudes(Struct, frozen=True, kw_only=True):
    """A histogram of the fp32 reference's values in one module, its submodules not included.

    Of each op output at most :data:`SAMPLE` values; casts and copies, which give no new values, and
    op calls after the forward pass are left out. An op that no low-precision value reaches is its
    own reference.
    """

    module: str
    """The path of the module; empty for the model itself."""
    lowest: int = 0
    """``counts[i]``: how many values have 2**(lowest + i) <= magnitude < 2**(lowest + i + 1)."""
    counts: list[int] = []
    """Number of values per bucket."""
    zeros: int = 0
    """Number of values that are exactly 0."""
    nonfinite: int = 0
    """Number of values that are Inf or NaN in the reference too."""
    ops: int = 0
    """Number of op calls whose outputs were sampled."""

    @property
    def values(self) -> int:
        """The size of the sample."""
        return sum(self.counts) + self.zeros + self.nonfinite


# -- What became of a failing run when the modules blamed for its error were kept in fp32

BlamedFor = Literal["share", "nonfinite", "range", "tolerance"]
"""``share``: the largest shares of the error; ``nonfinite``: their ops turn finite values into Inf
or NaN, which reach the output; ``range``: values that became Inf or zero there spoil the output of
fp32 alone; ``tolerance``: the output of one is the first to be over the tolerance, which need not
be the cause.
"""


class Ablation(Struct, frozen=True, kw_only=True):
    """A plain run like the failed one, with the modules in fp32 that the analysis blames."""

    keep_fp32: list[str]
    """The modules blamed, none inside another, in the order of the analysis."""
    blamed_for: BlamedFor
    """Why they are blamed."""
    status: Status
    """How the run with them in fp32 ended."""
    rel_l2: float | None = None
    """Error of the output; ``None`` if it is not finite, or the run gave no output."""
    predicted: float | None = None
    """``rel_l2`` that the shares predict to first order; ``None`` if these are not the reason."""


class ClampTrial(Struct, frozen=True, kw_only=True):
    """A failing run again, with the inputs of logarithms and ``rsqrt`` kept away from zero.

    They are at least the smallest normal number of their dtype, where these functions gave Inf.
    """

    places: int
    """At how many places."""
    status: Status
    """How that run ended, with the tolerance of the run."""
    rel_l2: float | None = None
    """Error of its output; ``None`` if it is not finite."""


class UncoveredFault(Struct, frozen=True, kw_only=True):
    """An op that gives Inf or NaN, or an error, once what hides that is in fp32."""

    kept: list[str]
    """The modules in fp32 in the run that shows it."""
    module: str
    """Dotted path of the module of the op."""
    op: str
    """The op, as op calls name it."""
    source: str | None = None
    """``file.py:line``."""
    becomes: Literal["Inf", "NaN", "error", "magnified error"]
    """What finite values became; an error: finite values that are too far from those of fp32."""
    values: int = 0
    """How many became Inf or NaN."""
    of: int = 0
    """The values compared."""
    error: float | None = None
    """The largest relative error that the op adds, or to which it magnifies that of its inputs."""
    share: float | None = None
    """Its share of the squared error of the output, if that is known."""


class InputTrial(Struct, frozen=True, kw_only=True):
    """A plain run like the failed one, in which some of the inputs are not cast."""

    inputs: list[str]
    """Their names: ``timestep`` for a keyword argument, else ``inputs[1]``."""
    status: Status
    """How the run with them in fp32 ended."""
    rel_l2: float | None = None
    """Error of the output; ``None`` if it is not finite, or the run gave no output."""


class RangeTrial(Struct, frozen=True, kw_only=True):
    """The fp32 model in which only what a format cannot hold at one place is Inf or zero."""

    module: str
    """Dotted path, ``""`` for the model itself."""
    op: str
    """As op calls name it; ``cast input`` and ``cast weight`` for the casts before the run."""
    source: str | None = None
    """``file.py:line``."""
    nth: int = 0
    """Which op of this name on its line it is, from 0."""
    becomes: Literal["Inf", "zero"]
    """What the values became."""
    values: int
    """How many."""
    status: Status
    """``ok``, ``inaccurate`` or ``nonfinite``, with the tolerance of the run."""
    rel_l2: float | None = None
    """Error of the output; ``None`` if it is not finite."""

    @property
    def place(self) -> tuple[str, str, str | None, int]:
        """Module, op, line, and which op of this name on the line."""
        return self.module, self.op, self.source, self.nth


class VanishedConstant(Struct, frozen=True, kw_only=True):
    """A number in the code that is zero in the dtype of the op that takes it."""

    module: str
    """Dotted path, ``""`` for the model itself."""
    source: str | None = None
    """``file.py:line``."""
    constant: float | None
    """The number as the code has it; ``None`` for a :attr:`weight`."""
    weight: str | None = None
    """A parameter or buffer with one value everywhere, ``eps``, which the cast of the model makes
    zero.
    """

    @property
    def place(self) -> tuple[str, str | None, float | None]:
        """Module, line and number."""
        return self.module, self.source, self.constant


class ConstantTrial(Struct, frozen=True, kw_only=True):
    """A failing run again, with other numbers for constants that are zero in its dtype."""

    constants: list[VanishedConstant]
    """Those that matter: without another number for one of them, the run fails as before. If it
    fails as before with other numbers for all, all that were replaced.
    """
    number: float
    """The number in their place, with their signs; the dtype holds it."""
    status: Status
    """How that run ended, with the tolerance of the run."""
    rel_l2: float | None = None
    """Error of its output; ``None`` if it is not finite."""
    in_fp32: bool = False
    """Whether it is the fp32 model, which fails if one of the constants is zero, since the run
    itself fails as before.
    """


# -- A device that is not here, for which a scan predicts


class PredictedDevice(Struct, frozen=True, kw_only=True):
    """What is predicted, and what the prediction rests on."""

    name: str
    """Its type: ``cuda``, ``xpu``."""
    torch: str
    """The release of torch that runs there, ``2.13``."""
    kernels: str
    """Where the support of kernels is from, in words: ``measured on cuda, torch 2.11``."""
    autocast: str
    """The release of torch whose policy of autocast is used, ``2.13``."""


# -- Where the tensors are in the inputs of a model


class InputLayout(Struct, frozen=True, kw_only=True):
    """Where the tensors are in the inputs, so that code can cast and move them."""

    kind: Literal["tensor", "sequence", "mapping", "nested"]
    """``inputs`` is a tensor; a sequence or mapping with tensors; or has tensors deeper inside."""
    tensors: list[str] = []
    """Positions or keys of the tensors."""
    floating: list[str] = []
    """Positions or keys of those with floating-point values; for one tensor, one empty key."""
    images: list[str] = []
    """Positions or keys of those with 4 dimensions; for one tensor, one empty key."""


class CodeTrial(Struct, frozen=True, kw_only=True):
    """An execution of the recommended code, in a process of its own."""

    code: str
    """The code."""
    status: Literal["ran", "differs", "failed", "not run"]
    """``differs``: its output is not that of the run that it is for."""
    reason: str = ""
    """Why it is not ``ran``: the error, or what kept it from being executed."""
    rel_l2: float | None = None
    """The error of its output against the same code in fp32."""
    seconds: float | None = None
    """What it added to the scan."""
