"""What a search for fixes of the user's source found: the patch, its proof, what is left."""

from __future__ import annotations

from lowprec_check.schema.base import Struct
from lowprec_check.schema.verdict import Status


class SourceChange(Struct, frozen=True, kw_only=True):
    """One change of a file, and the finding that it removes."""

    kind: str
    """``fp32``, ``constant``, ``dtype``, ``cast``, ``scale``, ``autocast``, ``custom_fwd``,
    ``buffer``; of a training script ``grad_scaler``, ``unscale``, ``autocast_cache``,
    ``scaler_step``, ``unscale_once``, ``scaler_update``, ``scaled_loss``, ``autocast``,
    ``switch``.
    """
    file: str
    """Relative to the current folder."""
    line: int
    """The first line that it changes, in the file as it is, from 1."""
    end_line: int
    """The last one."""
    before: str
    """The lines as they are."""
    after: str
    """The lines with this change alone."""
    why: str
    """What it does, in words."""
    codes: tuple[str, ...] = ()
    """The findings that it is for."""
    op: str | None = None
    """The op that fails there."""
    precisions: tuple[str, ...] = ()
    """The precisions in which it fails."""


class Proven(Struct, frozen=True, kw_only=True):
    """A precision before and after the patch, as plain runs showed it."""

    precision: str
    """Its name."""
    before: Status
    """The status of its plain run."""
    after: Status
    """That with the patch."""
    error_before: float | None = None
    """rel_l2 of the output against fp32."""
    error_after: float | None = None
    """rel_l2; ``None`` if it is infinite, or there is no output."""
    tolerance: float | None = None
    """The largest error that passes."""
    further: int = 0
    """Further inputs that the source was tried on, with the patch if there is one."""
    further_failed: int = 0
    """Those on which it fails."""

    @property
    def passes(self) -> bool:
        """Whether it passes with the patch, on the further inputs too."""
        return self.after == "ok" and not self.further_failed


class InputInFp32(Struct, frozen=True, kw_only=True):
    """A precision that fails because inputs are cast, and passes with them in fp32."""

    precision: str
    """Its name."""
    inputs: list[str]
    """The inputs, ``timestep`` or ``inputs[1]``."""
    code: str = ""
    """Code that runs ``model`` so, on ``inputs``."""
    error_before: float | None = None
    """rel_l2 of the output against fp32, with all inputs cast; ``None`` if it is infinite."""
    error_after: float | None = None
    """rel_l2 with these inputs in fp32."""
    tolerance: float | None = None
    """The largest error that passes."""


class LeftAlone(Struct, frozen=True, kw_only=True):
    """A finding that no change is offered for."""

    source: str | None
    """``file.py:line``."""
    op: str | None
    """The op."""
    reason: str
    """Why, in words."""
    codes: tuple[str, ...] = ()
    """The findings."""


class ScriptProof(Struct, frozen=True, kw_only=True):
    """The steps of a training script, run with the patch and without."""

    steps: int
    """How many."""
    before: float | None = None
    """‖Δw − Δw₃₂‖ / ‖Δw₃₂‖ of the weights after the steps; ``None`` if not finite."""
    after: float | None = None
    """The same with the patch."""
    tolerance: float
    """The largest distance that passes."""
    precision: str = ""
    """The precision that the patch is for, if the script trains in fp32 without; else empty."""
    command: str = ""
    """The script's own switch for it on the command line; empty if its source is changed."""
    losses: float | None = None
    """With such a patch, ‖l − l₃₂‖ / ‖l₃₂‖ of the losses."""
    skipped: int = 0
    """Steps that a ``GradScaler`` skips with the patch."""
    failure: str = ""
    """What the script raises without the patch; empty if it makes its steps."""
    runs_again: bool = False
    """Whether the script was run again in fp32, as forks of its process could not be used."""


class Fixing(Struct, frozen=True, kw_only=True):
    """The smallest patch that was found to make a model pass, or to come nearest."""

    tool: str
    """What saved it."""
    target: str
    """The target, as its user wrote it."""
    device: str
    """Where the runs were."""
    due: bool
    """Whether there is a patch to apply."""
    passes: bool
    """Whether each precision passes, with it or without any; of a script, whether weights do."""
    changes: list[SourceChange] = []
    """The smallest set that was found."""
    diff: str = ""
    """All changes as a unified diff."""
    proven: list[Proven] = []
    """Each precision that fails without the patch, before and after."""
    by_input: list[InputInFp32] = []
    """The precisions that need no patch, but an input in fp32."""
    outputs_equal: bool | None = None
    """Whether fp32's output stays bit for bit; ``None`` if two calls without the patch differ."""
    gradients_equal: bool | None = None
    """The same of the gradients; ``None`` if there are none, or two calls differ."""
    left_alone: list[LeftAlone] = []
    """Findings without a change, if the patch does not pass."""
    trials: int = 0
    """How many sources were tried."""
    seconds: float = 0.0
    """What the search took."""
    scan_seconds: float = 0.0
    """What the scan took before."""
    stopped: str | None = None
    """Why the search ended early."""
    plan: str | None = None
    """How the patch compares with a plan, if the scan found one."""
    script: ScriptProof | None = None
    """How a training script does with the patch; ``outputs_equal`` is about its fp32 weights."""
