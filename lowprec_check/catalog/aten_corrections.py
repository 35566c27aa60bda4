"""Corrections of the support of aten ops that a sweep cannot show, from bare calls of the ops."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from lowprec_check.catalog.data_files import data_folder
from lowprec_check.catalog.records import State
from lowprec_check.catalog.toml_tables import read_tables
from lowprec_check.schema.base import StrictStruct

FILE = "aten-corrections.toml"


class AtenCorrection(StrictStruct, frozen=True, kw_only=True):
    """The support of ops that the samples of operators suggest to run in part."""

    device: str
    ops: list[str]
    """Overload names, ``_cdist_forward``."""
    state: State
    why: str


def corrected_state(device: str, op: str, state: State) -> State:
    """The state of an op, ``_cdist_forward``, for one that runs in part (``some``) by the samples of operators."""
    return _corrections().get((device, op), state) if state == "some" else state


@cache
def _corrections() -> Mapping[tuple[str, str], State]:
    entries = read_tables(data_folder() / FILE, "correction", AtenCorrection)
    return {(entry.device, op): entry.state for entry in entries for op in entry.ops}
