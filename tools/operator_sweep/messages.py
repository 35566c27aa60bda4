"""What the workers of a full sweep add to the messages of :mod:`lowprec_check.engine.sweep.kept_sweep`."""

from __future__ import annotations

import msgspec

from lowprec_check.catalog.records import Header, OpTimes
from lowprec_check.engine.sweep.kept_sweep import Answer, CannotMeasure, Decode, Hello, OperatorFault


class FullHello(Hello, frozen=True, tag="hello"):
    """Also what is measured, on which machine."""

    header: Header


class FullAnswer(Answer, frozen=True, tag="answer"):
    """Also the times of the operator."""

    times: OpTimes


decode: Decode = msgspec.json.Decoder(FullHello | CannotMeasure | FullAnswer | OperatorFault).decode
