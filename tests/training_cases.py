"""Results of training scans, made by hand: one precision each, of which a test changes what it is about."""

from __future__ import annotations

from typing import Any

from lowprec_check.schema.measures import InputLayout
from lowprec_check.schema.op_calls import OpCall, to_columns
from lowprec_check.schema.scan_result import ModelInfo, Run, ScanResult
from lowprec_check.schema.training import TrainingRun, TrainingSetup, TrainingWay
from lowprec_check.schema.verdict import ExceptionInfo

STEPS = 10
LOSSES: list[float | None] = [2.0 - 0.1 * step for step in range(STEPS + 1)]
UNSCALE = ExceptionInfo(type="ValueError", message="Attempting to unscale FP16 gradients.", phase="optimizer")
MODEL = ModelInfo(
    name="Net",
    parameters=100,
    inputs=["(8, 16)"],
    modules=4,
    training=True,
    call="model(inputs)",
    setup=["model = make_model()"],
    layout=InputLayout(kind="tensor", tensors=[""], floating=[""]),
)
SETUP = TrainingSetup(
    steps=STEPS,
    loss="loss of the file",
    loss_code="loss(output)",
    optimizer="SGD(lr=0.1)",
    optimizer_code="optimizer(parameters)",
    seeds=3,
    varied=["initial weights", "batches"],
    losses=[loss for loss in LOSSES if loss is not None],
    distances=[0.1] * STEPS,
)


def a_way(name: str = "plain", status: str = "ok", **more: Any) -> TrainingWay:
    """A way to train that stays near fp32, unless ``more`` says otherwise."""
    fields: dict[str, Any] = {"losses": LOSSES, "distances": [0.01] * STEPS, "state_bytes": 3 << 20} | more
    return TrainingWay(name=name, status=status, **fields)  # type: ignore[arg-type]


def a_trained(precision: str, *ways: TrainingWay, calls: list[OpCall] | None = None, **more: Any) -> Run:
    """A run with these ways, its status the first one's; ``more`` are fields of :class:`TrainingRun` or `Run`."""
    ways = ways or (a_way(),)
    of_run = {name: value for name, value in more.items() if name in Run.__struct_fields__}
    of_training = {name: value for name, value in more.items() if name not in of_run}
    first = ways[0]
    fields: dict[str, Any] = {"device": "cpu", "status": first.status, "exception": first.exception} | of_run
    training = TrainingRun(ways=list(ways), **of_training)
    return Run(precision=precision, training=training, op_calls=to_columns(calls or []), **fields)


def a_result(*runs: Run, setup: TrainingSetup = SETUP, model: ModelInfo = MODEL, **environment: Any) -> ScanResult:
    """A scan of these runs, fp32 first."""
    fp32 = Run(
        precision="fp32",
        device="cpu",
        status="ok",
        training=TrainingRun(ways=[a_way(state_bytes=6 << 20)]),
        latency_ms=10.0,
    )
    about = {"torch": "2.13.0", "device": "cpu"} | environment
    return ScanResult(tool="t", target="t", model=model, environment=about, runs=[fp32, *runs], training=setup)
