"""The base of our dispatch modes."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that is called as it stands.

    torch wraps a mode's handler to keep Dynamo out, which imports ``torch._dynamo`` (a second) at the first op and
    costs microseconds at every other. Nothing is compiled under our modes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
