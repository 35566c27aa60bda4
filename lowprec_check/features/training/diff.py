"""What is compared of a training in two scans."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.diff import ERROR_FLOOR, Comparison, error_changes
from lowprec_check.analysis.run_summary import label
from lowprec_check.analysis.training_status import LOST, first_way
from lowprec_check.schema.scan_diff import Direction, ScanChange
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import percent


def training_changes(before: Run, after: Run) -> Iterator[ScanChange]:
    """Changes of the weights' distance from fp32, of lost updates, and of ways that pass."""
    if before.training is None or after.training is None:
        return
    was, is_now = first_way(before), first_way(after)
    if was is not None and is_now is not None and was.distances and is_now.distances:
        last = min(len(was.distances), len(is_now.distances)) - 1  # one may have ended early
        far, is_at = (max(way.distances[last], ERROR_FLOOR) for way in (was, is_now))
        grown, shrunk = "as far from those of fp32 as before", "nearer to those of fp32 than before"
        words = "the weights end {times:times}", grown, shrunk
        yield from error_changes(after, (far, is_at), words, (f"{far:.1e}", f"{is_at:.1e}"))
    lost, loses = (None if way is None else way.lost_updates for way in (was, is_now))
    direction: Direction
    if lost is not None and loses is not None and abs(loses - lost) >= LOST:
        direction, how = ("worse", "more") if loses > lost else ("better", "fewer")
        what, shares = f"rounding loses {how} updates of weights", (percent(lost), percent(loses))
        yield ScanChange(kind="error", direction=direction, run=label(after), what=what, old=shares[0], new=shares[1])
    # the first way is what the status of the run says; a trap is never advised
    for way in after.training.ways:
        earlier, is_other = before.training.way(way.name), way is not is_now and not way.declared.is_trap
        if earlier is not None and is_other and (earlier.status == "ok") != (way.status == "ok"):
            direction, how = ("better", "passes now") if way.status == "ok" else ("worse", "passes no longer")
            what, ended = f"{way.declared.words}: {how}", earlier.status
            yield ScanChange(kind="status", direction=direction, run=label(after), what=what, old=ended, new=way.status)


def setup_of(result: ScanResult) -> dict[str, object]:
    """What the model was trained with."""
    setup = result.training
    if setup is None:
        return {}
    return {
        "training optimizer": setup.optimizer,
        "training loss": setup.loss,
        "training new batches": setup.new_batches,
    }


COMPARISON = Comparison(training_changes, setup_of)
