"""The search for a plan in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowprec_check.core.session import Session
from lowprec_check.engine.model.target_spec import OnProgress, TargetSpec
from lowprec_check.process import Isolation
from lowprec_check.schema.options import PlanOptions
from lowprec_check.schema.plan import Planning

if TYPE_CHECKING:
    from lowprec_check.engine.model.target_source import TargetSource


def plan_file(
    spec: TargetSpec, options: PlanOptions, isolation: Isolation | None = None, on_progress: OnProgress | None = None
) -> Iterator[Planning]:
    """Load ``spec`` and search for its plan; yield the result after each base."""
    yield from Session(spec, options, isolation, options.seconds, on_progress).grow(_growing_planning, Planning)


def _growing_planning(source: TargetSource, isolation: Isolation | None, options: PlanOptions) -> Iterator[Planning]:
    from lowprec_check.features.plan.planner import growing_planning

    yield from growing_planning(source, isolation, options)
