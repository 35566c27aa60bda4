"""LP510 to LP514: what a training script does wrong with autocast and ``GradScaler``."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, rule
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import plain
from lowprec_check.schema.training import AmpFault


def _findings(result: ScanResult, *faults: AmpFault) -> Iterator[Finding]:
    uses = result.training.amp if result.training is not None else []
    for use in [use for use in uses if use.fault in faults]:
        yield Finding(plain(use.told), op=use.op, source=use.line, help=use.repair)


@rule("LP510", "scaler-order", "error")
def scaler_order(result: ScanResult) -> Iterator[Finding]:
    """The script calls its `GradScaler` in an order that torch rejects.

    Observed: the calls of the script's scaler, while its steps were made without autocast and
    scaling. Torch raises an exception where `unscale_()` is called twice for an update, where
    `step()` or `unscale_()` follows a step without `update()`, where `update()` follows no step,
    and where no loss was scaled.

    Usual cause: gradients are accumulated over several batches, and only some of the calls are in
    the branch that makes the step.

    What to do: scale each loss; when the gradients are complete, call the rest in this order.

        # before
        for number, (x, y) in enumerate(loader):
            with torch.autocast("cuda", torch.float16):
                loss = criterion(model(x), y) / 4
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            if number % 4 == 3:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        # after
        for number, (x, y) in enumerate(loader):
            with torch.autocast("cuda", torch.float16):
                loss = criterion(model(x), y) / 4
            scaler.scale(loss).backward()
            if number % 4 == 3:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    """
    yield from _findings(result, "unscaled-twice", "no-update", "no-inf-checks", "never-scaled")


@rule("LP511", "scaled-gradients", "error")
def scaled_gradients(result: ScanResult) -> Iterator[Finding]:
    """The script uses gradients of a scaled loss as if it were not scaled.

    Observed: a backward pass of `scaler.scale(loss)`, and then, without `scaler.unscale_()`, the
    step of an optimizer or a call that clips gradients. They are as many times too large as the
    loss was scaled, 65536 times at first: SGD makes steps that are too large by this factor, and
    clipping reduces nearly every gradient to the limit divided by it.

    What to do: let the scaler make the step, and unscale gradients before anything reads them.

        # before
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # after
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    """
    yield from _findings(result, "scaled-step", "scaled-clip")


@rule("LP512", "fp16-parameters", "error")
def fp16_parameters(result: ScanResult) -> Iterator[Finding]:
    """The script's `GradScaler` gets gradients in fp16, since parameters are in fp16.

    Observed: when the scaler unscales gradients, those of the named parameters are in fp16. Torch
    raises "Attempting to unscale FP16 gradients.": what the scale saved from zero would become zero
    again.

    What to do: keep the parameters in fp32. Autocast casts what an op needs.

        # before
        activation = nn.PReLU(64, dtype=torch.float16)
        # after
        activation = nn.PReLU(64)
    """
    yield from _findings(result, "unscaled-fp16")


@rule("LP513", "loss-in-fp16", "error")
def loss_in_fp16(result: ScanResult) -> Iterator[Finding]:
    """The script gives a function 16-bit values that torch has no kernel for, or refuses.

    Observed: outside of models, a function such as `ctc_loss` raised an exception for the values
    that the script gives it; the scan went on with its result in fp32. Or `binary_cross_entropy`
    was called under autocast of a device on which torch refuses that, since its gradient would
    overflow in fp16.

    What to do: compute the loss in fp32.

        # before
        loss = F.ctc_loss(log_probs.half(), targets, input_lengths, target_lengths)
        # after
        loss = F.ctc_loss(log_probs.float(), targets, input_lengths, target_lengths)
    """
    yield from _findings(result, "no-kernel", "refused-loss")


@rule("LP514", "needless-amp", "note")
def needless_amp(result: ScanResult) -> Iterator[Finding]:
    """The script scales losses of bf16, or calls `backward()` inside autocast.

    Observed: a `GradScaler` scales the loss where autocast is to bf16 alone, whose range is that of
    fp32, so that no gradient needs a scale: each step costs a pass over all gradients. Or
    `backward()` was called inside autocast: each op of the backward pass runs in the dtype of its
    forward op anyway, and torch advises against it.

    What to do: leave the scaler out for bf16; end the block of autocast after the loss.

        # before
        with torch.autocast("cuda", torch.bfloat16):
            loss = criterion(model(x), y)
            loss.backward()
        # after
        with torch.autocast("cuda", torch.bfloat16):
            loss = criterion(model(x), y)
        loss.backward()
    """
    yield from _findings(result, "scaler-for-bf16", "backward-in-autocast")
