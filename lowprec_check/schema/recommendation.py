"""What a scan recommends, and whether it is worth it. Never imports torch."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.run_key import EAGER, MemoryFormat, qualified

Prefer = Literal["speed", "memory", "accuracy"]
"""What the recommendation is to gain."""
Worth = Literal["faster", "smaller", "faster and smaller", "nothing", "unknown"]
"""``faster`` than fp32, beyond noise and by at least 5 %; ``smaller``: at most 0.9 of its peak memory; ``nothing``: neither;
``unknown``: not smaller, and whether it is faster cannot be told.
"""


class Recommendation(Struct, frozen=True, kw_only=True):
    """The recommended way to run the model in low precision, which was run and passed, and whether it is worth it."""

    precision: str
    """The precision to use; of a plan, its base."""
    backend: str = EAGER
    """The backend to use."""
    memory_format: MemoryFormat = "contiguous"
    """The memory format to use."""
    keep_fp32: list[str] = []
    """Paths of the modules to keep in fp32."""
    way: str | None = None
    """How to train, a key of :data:`~lowprec_check.schema.training.WAYS`; ``None`` if only the forward pass was run."""
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
    """Whether fp32 is better in what is preferred; this is then the best way for those who need what it gains."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a predicted one that promises a gain, which only a run on the device itself can show."""
        claims = self.speedup is not None or self.gain or self.stay_in_fp32 or self.worth not in (None, "unknown")
        if self.evidence == "predicted" and claims:
            raise ValueError("a predicted recommendation says nothing about times and memory")

    @property
    def label(self) -> str:
        """The label of its run, ``half · inductor``."""
        return qualified(self.precision, self.backend, self.memory_format)
