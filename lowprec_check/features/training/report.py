"""What a training scan found: columns of runs, loss by step, ways to train, gradients, updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowprec_check.analysis.recommend import action, recommended_run
from lowprec_check.analysis.run_summary import candidates, label, reference_of
from lowprec_check.analysis.training_status import distance_limit, first_way, ways_tried
from lowprec_check.features.training.outcomes import common_steps, remarks, steps_of
from lowprec_check.features.training.statements import MATTERS, lost_kinds, tensor_name
from lowprec_check.report import charts
from lowprec_check.report.blocks import Block, Chart, Column, ErrorOf, Fold, Heading, Row, Say, Table
from lowprec_check.report.feature_parts import RunColumn, Section
from lowprec_check.report.foreign_text import visible
from lowprec_check.schema.registry import choices
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Statement, agree, counted, percent, shown
from lowprec_check.schema.training import BEYOND, ParameterGradient, TrainingSetup, TrainingWay
from lowprec_check.schema.ways_to_train import WAYS, way_named

_GRADIENTS = (
    Column("parameter"),
    Column("elements", "number"),
    Column("error", "error", "Relative L2 error against fp32."),
    Column("share", "percent", "Of the squared error of all gradients."),
    Column("largest", "figure", "The largest magnitude in fp32."),
    Column("underflow", "percent", "Share of the elements that are zero here and not in fp32."),
    Column("overflow", "percent", "Share that is Inf or NaN here and finite in fp32."),
)
_LOST = (
    Column("precision", "run"),
    Column("values"),
    Column("tensors", "number"),
    Column("elements", "number"),
    Column(
        "lost",
        "percent",
        "Share of the updates after which the value is the same, although the same update changes an fp32 copy.",
    ),
    Column("weight decay", "percent", "The same of weight decay alone."),
    Column("most in", "sentence"),
)
_PARAMETERS = 20
"""Rows of a table of gradients."""


# -- columns of the table of runs


def _loss(run: Run, result: ScanResult) -> str | None:
    setup, way = result.training, first_way(run)
    if setup is None:
        return None
    if run.is_reference:
        losses: Sequence[float | None] = setup.losses
    elif way is None or way.status not in ("ok", "inaccurate", "nonfinite") or len(way.losses) < 2:
        return None
    elif way.status == "nonfinite":
        return "Inf/NaN"
    else:
        losses = way.losses
    if not losses:
        return None
    # a slow run may have made fewer steps
    firsts = [first_way(other) for other in candidates(result.runs)]
    loss = losses[common_steps([first for first in firsts if first is not None], setup)]
    if loss is None:
        return "Inf/NaN"
    return f"{loss:.4g}"


def _gradient_error(run: Run, result: ScanResult) -> str | None:
    training = run.training
    if result.training is None or run.is_reference or training is None or not training.gradients:
        return None
    if training.gradient_error is None:
        return "Inf/NaN"
    return f"{training.gradient_error:.1e}"


def _lost_updates(run: Run, result: ScanResult) -> float | None:
    way = first_way(run)
    if result.training is None or way is None:
        return None
    return way.lost_updates


LOSS = RunColumn("output error", Column("loss", "text", "The loss after the last step that all rows made."), _loss)
GRADIENT_ERROR = RunColumn(
    "output error",
    Column("gradient error", "text", "Relative L2 error of all gradients of the first step against fp32."),
    _gradient_error,
    detail="more",
)
LOST_UPDATES = RunColumn(
    "output error",
    Column("lost updates", "percent", "Share of the updates of weights that rounding loses."),
    _lost_updates,
)


# -- a chart of pages


def loss_by_step(result: ScanResult, said: Sequence[Statement]) -> Iterator[Chart]:
    """Loss by step, a line per precision, with the range of fp32 runs from other seeds; nothing
    for fewer than three steps.

    Changes of the loss are judged, so each line starts at the first loss of fp32, as the range
    does.
    """
    setup = result.training
    if setup is None or setup.steps < 2 or len(setup.losses) < 2:
        return
    first = setup.losses[0]
    losses = [charts.StepLine("fp32", "ink", setup.losses)]
    distances = []
    ways = [(run, way) for run in candidates(result.runs) if (way := first_way(run)) is not None]
    for number, (run, way) in enumerate(ways[:12]):
        name, color = visible(label(run)), f"s{1 + number % 6}"
        shift = first - next((loss for loss in way.losses[:1] if loss is not None), first)
        moved = [None if loss is None else loss + shift for loss in way.losses]
        losses.append(charts.StepLine(name, color, moved))
        distances.append(charts.StepLine(name, color, [None, *way.distances]))
    distances.append(charts.StepLine("other seeds", "dim", [None, *setup.distances]))
    band = [[first + bound for bound in bounds] for bounds in (setup.loss_low, setup.loss_high)]
    title = (
        "Loss, each line from the first loss of fp32, and distance of the weights from those of fp32, by step; "
        "grey: fp32 runs from other seeds"
    )

    def draw() -> str:
        drawn = charts.by_step(title, losses, setup.steps, "loss", band)
        if any(value for line in distances for value in line.values):
            of_weights = "Distance of the weights from those of fp32 by step, a line per precision"
            drawn += charts.by_step(of_weights, distances, setup.steps, "distance")
        return drawn

    yield Chart(title, draw, detail="all")


# -- sections


def training_blocks(result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    """The sections of a training scan; ``said`` are the statements of the result."""
    setup = result.training
    if setup is None:
        return
    yield from _ways(result, setup)
    # the ways that were not tried, by reason
    untried: dict[str, dict[str, None]] = {}
    for training in (run.training for run in result.runs if run.training is not None):
        for name, why in training.untried.items():
            untried.setdefault(why, {})[way_named(name).words] = None
    for why, words in untried.items():
        yield Say(f"not tried: {', '.join(words)} ({why})", role="hint", detail="more")
    band = _band(setup)
    if band:
        yield Say(band, role="hint", detail="more")
    yield from _items(said, "zero-gradients")  # LP506 says it too
    yield Heading("Gradients of the first step, without loss scaling", anchor="gradients", detail="more")
    yield from _items(said, "gradients")
    yield from _items(said, "loss-scale")
    yield from _items(said, "scale-growth")
    for run in result.runs:
        if not run.is_reference and run.training is not None and run.training.gradients:
            yield _gradients(label(run), run.training.gradients)
    yield Heading("Lost updates", anchor="lost", detail="more")
    yield from _items(said, "lost-updates")
    rows = []
    for run in result.runs:
        for kind in lost_kinds(run):
            elements = sum(tensor.elements for tensor in kind.tensors)
            most = None
            if kind.share:
                most = f"{tensor_name(kind.worst)}, {percent(kind.worst.lost)}"
            rows.append(Row([label(run), kind.name, len(kind.tensors), elements, kind.share, kind.decay, most]))
    if rows:
        yield Fold("Lost updates by kind of value", [Table(_LOST, rows, "lost updates", headings=2)], detail="all")


def _items(said: Sequence[Statement], kind: str) -> Iterator[Say]:
    """The sentences of one kind."""
    for each in said:
        if each.kind == kind:
            yield Say(each.text, each.tone, "item", ", ".join(each.runs), detail="more")


# -- ways


def _ways(result: ScanResult, setup: TrainingSetup) -> Iterator[Block]:
    random = choices([way.words for way in WAYS if way.is_random])
    judged = (
        "A way fails if, up to its last step, the change of its loss is outside the 99.5 % prediction interval of "
        f"fp32 runs from other seeds, or its weights are more than {BEYOND:g} times as far from those of fp32 as in "
        f"any such run (not judged with {random}, which is right on average), or move less or further."
    )
    columns = (
        Column("precision", "run"),
        Column("way"),
        Column("status", "status", judged),
        Column("loss", "figure", "After the last step that all rows made."),
        Column("distance", "error", "Of the weights from those of fp32, relative to how far these moved."),
        Column("moved", "share", "How far the weights moved, relative to fp32; or one of them, if it hardly moved."),
        Column("lost", "percent", "Share of the updates of weights that rounding loses."),
        Column("state", "bytes", "Weights, their copies and the state of the optimizer."),
        Column("why", "sentence"),
    )
    best, advice = recommended_run(result), result.recommendation
    recommended = None
    if advice is not None and action(result) == "use":
        recommended = advice.way
    # ways that say more than the table of runs are shown first, the others with more detail
    news, others, passing = list[Row](), list[Row](), 0
    steps = common_steps([way for run in result.runs for way, _ in _told(run)], setup)
    for run in result.runs:
        for way, is_news in _told(run):
            row = _way(run, way, setup, recommended if run is best else None, steps)
            (news if is_news else others).append(row)
            passing += not is_news and way.status == "ok"
    # the row of fp32, which the others are judged by
    fp32, reference = reference_of(result.runs), list[Row]()
    first = first_way(fp32) if fp32 is not None else None
    if first is not None:
        loss = setup.losses[steps] if setup.losses else None
        cells = ["fp32", first.declared.words, "reference", loss, None, None, None, first.state_bytes, None]
        reference = [Row(cells)]
    yield Heading("Ways to train", anchor="ways", detail="more")
    if news:
        table = Table(columns, [*reference, *news], "ways to train", headings=2, detail="more")
        yield table.with_content()
    if others:
        failing, more, parts = len(others) - passing, "more " if news else "", []
        if passing:
            parts.append(f"{counted(passing, f'{more}way')} to train {agree(passing, 'passes', 'pass')}")
        if failing:
            what = str(failing) if passing else f"{counted(failing, f'{more}way')} to train"
            parts.append(f"{what} {agree(failing, 'fails as its', 'fail as their')} precision does")
        if not news:
            others = [*reference, *others]
        folded = Table(columns, others, "ways to train", headings=2).with_content()
        yield Fold(", ".join(parts), [folded], detail="more")


def _told(run: Run) -> Iterator[tuple[TrainingWay, bool]]:
    """Each way, and whether it says more than the table of runs, which has the first way."""
    if run.is_reference:
        return
    ways = ways_tried(run)
    # of a precision that passes, the ways that fail are news
    if ways and ways[0].status == "ok":
        yield from ((way, way.status != "ok") for way in ways)
    # of one that fails, those that end otherwise than the first, and the first with them
    elif ways:
        ends = [(way.status, way.exception, way.divergence) for way in ways]
        news = [end != ends[0] for end in ends]
        yield from zip(ways, [any(news), *news[1:]], strict=True)


def _way(run: Run, way: TrainingWay, setup: TrainingSetup, recommended: str | None, steps: int) -> Row:
    loss, distance, moved, tag = None, None, None, ""
    # a way that a failure ended has no figures of its last step
    if steps_of(way):
        loss = way.losses[steps]
        moved = way.progress if way.moved is None else way.moved
        if way.distances:
            distance = ErrorOf(way.distances[-1], distance_limit(run, way, setup))
    if way.status == "ok" and way.name == recommended:
        tag = "recommended"
    why = remarks(way, setup)
    figures = (loss, distance, moved, way.lost_updates, way.state_bytes)
    return Row([label(run), way.declared.words, way.status, *figures, why and why.text], tag)


def _band(setup: TrainingSetup) -> str:
    """What fp32 runs from other seeds reach."""
    parts = []
    if setup.losses and setup.loss_low and setup.loss_high:
        low, high = (shown(setup.losses[0] + bounds[-1], "loss") for bounds in (setup.loss_low, setup.loss_high))
        parts.append(f"a loss of {low} – {high}")
    if setup.distances:
        parts.append(f"weights up to {shown(setup.distances[-1], 'error')} from those of fp32")
    seeds = f"fp32 with {counted(setup.seeds, 'other seed')}, counted from the first loss of fp32"
    if setup.seeds and parts:
        return f"{seeds}: {', '.join(parts)}"
    return ""


def _gradients(name: str, gradients: Sequence[ParameterGradient]) -> Fold:
    """A table of one run: the largest overflow, underflow and error come first."""

    def rank(gradient: ParameterGradient) -> tuple[float, ...]:
        # a few elements that underflow do not put a parameter before one with a large error
        underflow = gradient.underflow if gradient.underflow >= MATTERS else 0.0
        return gradient.overflow, underflow, gradient.error_share or 0.0

    rows = []
    for gradient in sorted(gradients, key=rank, reverse=True)[:_PARAMETERS]:
        error: ErrorOf | float | None = gradient.error
        if error is None and gradient.overflow:
            error = ErrorOf(None, text="Inf/NaN")
        figures = (error, gradient.error_share, gradient.absmax, gradient.underflow, gradient.overflow)
        rows.append(Row([gradient.parameter, gradient.elements, *figures]))
    left_out = max(0, len(gradients) - _PARAMETERS)
    table = Table(_GRADIENTS, rows, f"gradients, {name}", searchable=True, left_out=left_out)
    return Fold(f"Gradients by parameter: {name}", [table], detail="all")


CHART, SECTION = Section("runs", loss_by_step), Section("times", training_blocks)
