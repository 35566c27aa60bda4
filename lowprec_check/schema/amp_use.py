"""What a training script does wrong with autocast and ``GradScaler``, as its calls showed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from lowprec_check.schema.base import Struct

AmpFault = Literal[
    "unscaled-twice",
    "unscaled-fp16",
    "no-update",
    "no-inf-checks",
    "never-scaled",
    "scaled-step",
    "scaled-clip",
    "no-kernel",
    "refused-loss",
    "scaler-for-bf16",
    "backward-in-autocast",
]
"""What is wrong. The last two cost something, and break nothing."""


class AmpUse(Struct, frozen=True, kw_only=True):
    """One fault, at one line."""

    fault: AmpFault
    """What is wrong."""
    source: str | None
    """The line, ``train.py:12``."""
    caller: str | None = None
    """The innermost line of the user's own, if ``source`` is in a package."""
    span: str | None = None
    """Where the expression starts and ends."""
    op: str = ""
    """The function that is called there: ``unscale_``."""
    earlier: str | None = None
    """The line of the earlier call that it does not go with."""
    names: tuple[str, ...] = ()
    """Parameters, or devices, that it is about."""
    scale: float | None = None
    """The scale that the ``GradScaler`` starts with."""
    elsewhere: str = ""
    """The device of the ``GradScaler``, if torch disables it on the machine of the scan."""
    raises: str = ""
    """What torch raises there, ``RuntimeError: …``; empty if the script goes on."""

    @property
    def line(self) -> str:
        """The user's line."""
        return self.caller or self.source or ""

    @property
    def is_harmless(self) -> bool:
        """Whether the script trains all the same."""
        return self.fault in ("scaler-for-bf16", "backward-in-autocast")

    @property
    def words(self) -> str:
        """What is wrong, in words."""
        names = ", ".join(self.names)
        scaled = f"are still scaled, {self.scale or 0:g} times as large as the true ones"
        words = {
            "unscaled-twice": "scaler.unscale_() is called twice for one update of the scaler",
            "unscaled-fp16": f"gradients of {names or 'some parameters'} are in fp16, as these parameters are",
            "no-update": f"scaler.{self.op}() is called again without scaler.update() since the step",
            "no-inf-checks": "scaler.update() is called without scaler.step() since the last update",
            "never-scaled": f"scaler.{self.op}() is called, and no loss was scaled",
            "scaled-step": f"the optimizer makes its step with gradients that {scaled}",
            "scaled-clip": f"gradients are clipped that {scaled}",
            "no-kernel": f"{self.op} has no kernel for what it gets in 16 bits",
            "refused-loss": f"autocast refuses {self.op} on {names}",
            "scaler-for-bf16": "a GradScaler scales the loss of bf16, which has the range of fp32",
            "backward-in-autocast": "backward() is called inside autocast, which is for the forward pass and the loss",
        }[self.fault]
        if self.earlier is not None and self.earlier != self.line:
            words = f"{words} at {self.earlier}" if self.fault == "no-update" else f"{words}, first at {self.earlier}"
        return words

    @property
    def told(self) -> str:
        """The same, and what torch raises."""
        where = f" (on {self.elsewhere})" if self.elsewhere else ""
        return f"{self.words}: {self.raises.rstrip('.')}{where}" if self.raises else self.words

    @property
    def repair(self) -> str:
        """What to do about it."""
        return {
            "unscaled-twice": "call scaler.unscale_(optimizer) once per update, when its gradients are complete: "
            "right before they are clipped and scaler.step(optimizer) is called",
            "unscaled-fp16": "keep these parameters in fp32: autocast casts what ops need",
            "no-update": "call scaler.update() once after the steps of all optimizers",
            "no-inf-checks": "call scaler.update() only after scaler.step(optimizer)",
            "never-scaled": "call scaler.scale(loss).backward()",
            "scaled-step": "call scaler.step(optimizer) in place of optimizer.step(), then scaler.update()",
            "scaled-clip": "call scaler.unscale_(optimizer) before",
            "no-kernel": f"give {self.op} fp32 values: x.float()",
            "refused-loss": "use binary_cross_entropy_with_logits on the logits",
            "scaler-for-bf16": "leave the GradScaler out",
            "backward-in-autocast": "end the block of autocast before it",
        }[self.fault]


def all_told(uses: Iterable[AmpUse]) -> str:
    """All that is not harmless, with repairs, or empty."""
    return " ".join(f"At {use.line}, {use.told}; {use.repair}." for use in uses if not use.is_harmless)
