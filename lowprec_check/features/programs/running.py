"""Runs a script to its end, as ``python script.py`` does, with the user's files as they are."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.engine.model.user_module import run_script
from lowprec_check.engine.model.user_script import Ran
from lowprec_check.engine.model.user_surroundings import KeptFiles, OutsideEffects, exit_handlers_of_the_user, replaced
from lowprec_check.errors import UsageError
from lowprec_check.torchkit.devices import default_generator, seed_everything
from lowprec_check.torchkit.dispatch_mode import is_without_values
from lowprec_check.torchkit.floating_dtypes import NARROW
from lowprec_check.torchkit.source_location import PACKAGE, is_installed, is_user_code, own_line

Watching = Callable[[Callable[[], Mapping[str, Any]]], contextlib.AbstractContextManager[None]]
"""Entered around the script, with what returns its variables."""


def run_to_end(
    spec: TargetSpec, seed: int, watching: Watching, *, seconds: float, threads: int | None = None
) -> tuple[str, ...]:
    """Run the script of ``spec``, for so many ``seconds`` at most; returns notes.

    With ``threads``, torch computes with so many: one leaves no pool, which a fork would lack.
    Raises :class:`UsageError` if it is no script, or fails.
    """
    path = Path(spec.name)
    if path.suffix != ".py" or not path.is_file():
        raise UsageError(f"{spec.name} is not a script.", "Pass the path of a Python file that calls its models.")
    argv, folders, before = sys.argv, list(sys.path), torch.get_num_threads()
    sys.argv = [spec.name, *spec.arguments]
    sys.path.insert(0, str(path.resolve().parent))
    seed_everything(seed)
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        with contextlib.redirect_stdout(sys.stderr), torchvision_works():
            return run_script(path, run=lambda work: _run(work, watching, seconds)).ran.notes
    finally:
        torch.set_num_threads(before)
        sys.argv, sys.path[:] = argv, folders


STOPPED = "the program was stopped after"
"""How the note of a program starts that did not end."""
_AGAIN, _ANYWHERE = 0.01, 1.0
"""Seconds until the end of a program is tried again; until it is tried wherever the program is."""


class _OverdueError(BaseException):
    """Ends a program that runs too long."""


class _Overdue:
    """The end of a program whose time is over, as the handler of a timer."""

    def __init__(self) -> None:
        self._since: float | None = None

    def __call__(self, _number: int, frame: FrameType | None) -> None:
        """Raise :class:`_OverdueError` where the program can be ended, or be called again soon."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        is_patient = now - self._since < _ANYWHERE
        # What is raised in a hook of a package, as of the garbage collector, nobody may see
        is_hook = frame is not None and is_installed(frame.f_code.co_filename)
        if _is_ours(frame) or (is_patient and is_hook):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
            return
        signal.setitimer(signal.ITIMER_REAL, _ANYWHERE)  # again, if nobody sees this one
        raise _OverdueError


def _is_ours(frame: FrameType | None) -> bool:
    """Whether this package copies or compares, on behalf of the program: it is soon over."""
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def _run(work: Callable[[], object], watching: Watching, seconds: float) -> Ran:
    """Run ``work`` to its end: ``exit()`` is one, and so are so many ``seconds``."""
    variables, effects = vars(sys.modules["__main__"]), OutsideEffects()
    over: tuple[str, ...] = ()
    handler = signal.signal(signal.SIGALRM, _Overdue())
    with exit_handlers_of_the_user(), KeptFiles() as files, effects.watched(), watching(lambda: variables):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            work()
        except UsageError as error:
            ended = error.__context__
            if isinstance(ended, _OverdueError):
                over = (f"{STOPPED} {seconds:g} s (--budget), with the calls up to there",)
            elif not (isinstance(ended, SystemExit) and ended.code in (None, 0)):
                raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
    return Ran(None, (*over, *files.notes, *effects.notes))


# -- Random numbers that a program draws in 16 bits: those that it draws in fp32, rounded


_NEW = ("rand", "randn", "rand_like", "randn_like")
_IN_PLACE = ("normal_", "uniform_", "exponential_")
_ROUNDING = 2**-5
"""Relative difference of two draws that is no rounding, of any dtype with 16 bits."""


class Draws:
    """Where a program draws numbers in 16 bits that are not those of fp32, rounded."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        """``infer.py:21``, each once."""

    @contextlib.contextmanager
    def as_in_fp32(self) -> Iterator[None]:
        """Inside, what is drawn in 16 bits are the numbers of fp32, rounded."""
        with contextlib.ExitStack() as stack:
            for name in _NEW:
                stack.enter_context(replaced(torch, name, self._new(getattr(torch, name))))
            for name in _IN_PLACE:
                stack.enter_context(replaced(Tensor, name, self._in_place(getattr(Tensor, name))))
            yield

    def _new(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def draw(*args: Any, **options: Any) -> Tensor:
            if is_compiling() or is_without_values():
                return function(*args, **options)
            like = args[0] if args and isinstance(args[0], Tensor) else None
            dtype, device = options.get("dtype"), options.get("device")
            if dtype is None:
                dtype = like.dtype if like is not None else torch.get_default_dtype()
            if device is None:
                device = like.device if like is not None else torch.get_default_device()
            is_meta = torch.device(device).type == "meta"  # it has no numbers
            if dtype not in NARROW or is_meta or options.get("out") is not None:
                return function(*args, **options)
            requires_grad = options.pop("requires_grad", False)
            with _same_state(options.get("generator") or default_generator(device)):
                by_itself = function(*args, **{**options, "dtype": dtype})
            numbers = function(*args, **{**options, "dtype": torch.float32})
            self._note(by_itself, numbers)
            return numbers.to(dtype).requires_grad_(requires_grad)

        return draw

    def _in_place(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def draw(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            if is_compiling() or is_without_values() or tensor.dtype not in NARROW or tensor.is_meta:
                return function(tensor, *args, **options)
            with _same_state(options.get("generator") or default_generator(tensor.device)):
                by_itself = function(tensor.detach().clone(), *args, **options)
            numbers = function(torch.empty_like(tensor, dtype=torch.float32), *args, **options)
            self._note(by_itself, numbers)
            return tensor.copy_(numbers)

        return draw

    def _note(self, by_itself: Tensor, numbers: Tensor) -> None:
        """Keep where numbers were drawn that are not those of fp32."""
        difference = (by_itself.float() - numbers).abs() > _ROUNDING * numbers.abs().clamp(min=_ROUNDING)
        line = own_line(sys._getframe(2))
        if line is not None and line not in self.lines and bool(difference.any()):
            self.lines.append(line)


@contextlib.contextmanager
def _same_state(generator: torch.Generator) -> Iterator[None]:
    """Inside, numbers may be drawn that do not count."""
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
