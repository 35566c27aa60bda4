"""The precisions: each a named way to run a model.

To add one, add an entry to :data:`PRECISIONS`, or register it from another package
(CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from lowprec_check.errors import UsageError
from lowprec_check.schema.registry import Registry, words_in
from lowprec_check.schema.run_key import PLAN

Specials = Literal["ieee", "fn", "fnuz"]
"""Where Inf and NaN are: ``ieee``: they have an exponent of their own, above the largest; ``fn``:
no Inf, and NaN is what would be the largest number, as in E4M3; ``fnuz``: no Inf, and NaN is what
would be -0.
"""


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format with subnormals."""

    name: str
    """torch's name of the dtype, ``float16``."""
    short: str
    """``fp16``."""
    mark: str
    """The name in tables of op calls, ``f16``."""
    precision_bits: int
    """Bits of the significand, including the implicit one: 11 for fp16."""
    min_exponent: int
    """Exponent of the smallest normal number: -14 for fp16."""
    max_exponent: int
    """Exponent of the largest number: 15 for fp16."""
    tolerance: float
    """Default tolerance for the rel_l2 of a model's output."""
    aliases: tuple[str, ...] = ()
    cpp_name: str = ""
    """The dtype's name in error messages of torch's C++ code, ``Half``."""
    specials: Specials | None = None
    """By default as torch's names end: ``fn`` of ``float8_e4m3fn``, ``ieee`` of ``e5m2``."""

    def __post_init__(self) -> None:
        """Derive ``specials`` from the name if it is not given."""
        if self.specials is None:
            ends = (end for end in get_args(Specials) if self.name.endswith(end))
            object.__setattr__(self, "specials", next(ends, "ieee"))

    @property
    def spellings(self) -> tuple[str, ...]:
        """All names that users may write: ``float16``, ``fp16``, ``f16``, ``half``."""
        return tuple(dict.fromkeys((self.name, self.short, self.mark, *self.aliases)))

    def is_called(self, name: str) -> bool:
        """Whether ``name`` is one of its names, in any case."""
        return name.strip().lower().removeprefix("torch.") in self.spellings

    @property
    def roundoff(self) -> float:
        """Unit roundoff, half the distance from 1 to the next number: 2⁻¹¹ for fp16."""
        return 2.0**-self.precision_bits

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        return 2.0 ** (self.min_exponent - self.precision_bits + 1)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with full precision."""
        return 2.0**self.min_exponent

    @property
    def largest(self) -> float:
        """The largest finite number: 65504 for fp16, 448 for E4M3."""
        unused = 2 if self.specials == "fn" else 1
        return (2.0 - unused * 2.0 ** (1 - self.precision_bits)) * 2.0**self.max_exponent

    @property
    def dtype(self) -> str:
        """The dtype as code, ``torch.float16``."""
        return f"torch.{self.name}"

    @property
    def underflows(self) -> bool:
        """Whether values can become 0 that are not 0 in fp32, since the range ends above it."""
        return self.min_exponent > FP32.min_exponent


FP32 = FloatFormat("float32", "fp32", "f32", 24, -126, 127, tolerance=1e-3, aliases=("float",), cpp_name="Float")
FP64 = FloatFormat("float64", "fp64", "f64", 53, -1022, 1023, tolerance=1e-9, aliases=("double",), cpp_name="Double")
BF16 = FloatFormat("bfloat16", "bf16", "bf16", 8, -126, 127, tolerance=5e-2, cpp_name="BFloat16")
FP16 = FloatFormat("float16", "fp16", "f16", 11, -14, 15, tolerance=1e-2, aliases=("half",), cpp_name="Half")

LOW_FORMATS = (BF16, FP16)
"""The 16-bit formats that a device may accelerate."""

Kind = Literal["reference", "cast", "autocast", "custom"]
"""As it is; cast as ``model.half()`` does; in ``torch.autocast``; or by its ``application``."""


class SnippetWriter(Protocol):
    """Writes the code to paste for a ``custom`` precision."""

    def __call__(self, device: str, keep_fp32: Sequence[str]) -> str:
        """Code that prepares ``model`` and ``inputs``, without the call; ``device`` is a type."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A named way to run a model."""

    name: str
    """The name in options, saved results and reports: ``autocast-bf16``."""
    kind: Kind
    format: FloatFormat
    """The format of the narrowest values."""
    aliases: tuple[str, ...] = ()
    """Other names that users may write, in lower case."""
    method: str | None = None
    """The method of ``torch.nn.Module`` that casts to it, ``half``; only for ``cast``."""
    tolerance: float = -1.0
    """Default tolerance for the rel_l2 of the output; if not given, that of the format."""
    application: str | None = None
    """``package.module:attribute`` of an ``engine.model.prepared.Application`` (``custom``)."""
    snippet: SnippetWriter | None = None
    """Writes the code to paste; only for ``custom``."""
    keeps_modules: bool = True
    """Whether modules can stay in fp32 inside it, so that a plan can start from it."""

    def __post_init__(self) -> None:
        """Fill in the defaults; raise ``ValueError`` unless just ``custom`` has an application."""
        if self.tolerance < 0:
            object.__setattr__(self, "tolerance", self.format.tolerance)
        if (self.kind == "custom") != (self.application is not None and self.snippet is not None):
            raise ValueError(f"{self.name}: a custom precision, and no other, needs an application and a snippet")


def _of_dtype(format: FloatFormat) -> tuple[str, ...]:
    """Other names of the precision that casts to a format: ``fp16``, ``torch.half``."""
    return (*format.spellings, *(f"torch.{spelling}" for spelling in format.spellings))


def _of_autocast(format: FloatFormat) -> tuple[str, ...]:
    """Other names of autocast to a format: ``amp-fp16``, ``ac-fp16``, ``autocast-half``."""
    return tuple(f"{kind}-{spelling}" for kind in ("autocast", "amp", "ac") for spelling in format.spellings)


def _problem(precision: Precision) -> str | None:
    if precision.kind not in ("cast", "autocast", "custom"):
        return f"its kind {precision.kind!r} is not cast, autocast or custom"
    if precision.name.lower() == PLAN:
        return f"{PLAN!r} is the name of runs with modules in fp32"
    return None


PRECISIONS: Registry[Precision] = Registry(
    "precision",
    Precision,
    (
        Precision(name="fp32", kind="reference", format=FP32, aliases=_of_dtype(FP32)),
        Precision(name="bfloat16", kind="cast", format=BF16, aliases=_of_dtype(BF16), method="bfloat16"),
        Precision(name="autocast-bf16", kind="autocast", format=BF16, aliases=_of_autocast(BF16)),
        Precision(name="half", kind="cast", format=FP16, aliases=_of_dtype(FP16), method="half"),
        Precision(name="autocast-fp16", kind="autocast", format=FP16, aliases=_of_autocast(FP16)),
    ),
    _problem,
)
"""All precisions, in the order in which a scan shows them."""


def low_precisions() -> list[Precision]:
    """All precisions but the reference, in order."""
    return [precision for precision in PRECISIONS if precision.kind != "reference"]


def low_names() -> list[str]:
    """Their names: the choice where fp32 is not one."""
    return [precision.name for precision in low_precisions()]


def plan_bases() -> list[Precision]:
    """Bases of plans in the order of the search: widest range first, autocast before casts."""
    bases = [precision for precision in low_precisions() if precision.keeps_modules]
    return sorted(bases, key=lambda base: (-base.format.max_exponent, base.kind != "autocast"))


def bases_called(given: object) -> list[Precision]:
    """The bases of a format (``fp16``) or precision (``amp-fp16``), by any of their names, or of
    several; all for ``None``.

    Raises :class:`UsageError` with a suggestion for an unknown name.
    """
    words = []
    if given is not None:
        words = words_in(given)
    bases, asked = plan_bases(), list[Precision]()
    for word in words:
        of_format = [base for base in bases if base.format.is_called(word)]
        asked += of_format or [PRECISIONS.get(word)]
        if asked[-1] not in bases:
            choices = ", ".join(dict.fromkeys([*(base.format.short for base in bases), *(base.name for base in bases)]))
            raise UsageError(f"No plan can start from {asked[-1].name}.", f"Choose from {choices}.")
    return [base for base in bases if base in asked or not words]


def formats() -> list[FloatFormat]:
    """The formats of all precisions, each once."""
    return list(dict.fromkeys(precision.format for precision in PRECISIONS))
