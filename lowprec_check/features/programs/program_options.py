"""The options of ``lowprec-check program``: those of a scan, with other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowprec_check.errors import UsageError
from lowprec_check.schema.options import THOROUGH, ScanOptions, option


@dataclass(frozen=True, kw_only=True)
class ProgramOptions(ScanOptions):
    """How the models of a program are scanned."""

    further_inputs: int | None = option(
        0, "Try what passes on so many further inputs; 0: on none.", group=THOROUGH, metavar="N", least=0
    )
    times: Literal["on", "off"] = option("off", "Compare times of each model with fp32.", group=THOROUGH)


def check_fits(options: ScanOptions) -> None:
    """Raise :class:`UsageError` for options of a scan that a program has no use for."""
    if options.train:
        raise UsageError(
            "A program is run as it is, not trained.", "Scan its training: lowprec-check scan --train FILE."
        )
    if options.batches != 1:
        raise UsageError("The calls of a program are its batches.", "Leave out --batches.")
