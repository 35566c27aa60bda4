"""Objects of the user's whose own methods raise exceptions do not end a scan, wherever a model has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Call
from torch import nn

from lowprec_check import scan
from lowprec_check.engine.model.snapshot import ObjectState
from lowprec_check.torchkit.pytree import leaves, map_tensors

Write = Callable[..., Path]

METHODS = (
    *("__len__", "__eq__", "__ne__", "__lt__", "__iter__", "__next__", "__getattr__", "__getattribute__", "__hash__"),
    *("__bool__", "__repr__", "__str__", "__format__", "__contains__", "__getitem__", "__length_hint__", "__index__"),
    *("__int__", "__float__", "__call__", "__copy__", "__deepcopy__", "__reduce_ex__", "__dir__", "__setattr__"),
    *("__sizeof__", "__array__", "__torch_function__", "__dlpack__", "items", "keys", "values"),
)
PROPERTIES = ("shape", "dtype", "device", "data_ptr", "__dict__", "__class__", "__array_interface__", "_fields")
KINDS: tuple[Any, ...] = (object, tuple, list, dict, set, frozenset, str, int)


def odd(kind: Any, name: str) -> Any:
    """An object of a subclass of ``kind``, whose method or property ``name`` raises."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ArithmeticError(name)

    own: dict[str, Any] = {name: property(fail) if name in PROPERTIES else fail}
    if name == "__eq__":
        own["__hash__"] = object.__hash__
    made: Any = type(f"Odd{kind.__name__}{name}", (kind,), own)
    content = {tuple: (1, 2), frozenset: (1, 2), str: "a", int: 3}
    value = kind.__new__(made, content[kind]) if kind in content else kind.__new__(made)
    if kind is list:
        list.append(value, 1)
    if kind is dict:
        dict.__setitem__(value, "k", [1])
    if kind is set:
        set.add(value, 1)
    return value


def all_odd() -> Iterator[Any]:
    for kind in KINDS:
        for name in (*METHODS, *PROPERTIES):
            yield odd(kind, name)


class Net(nn.Module):
    """Multiplies, and holds ``parts``, which it may give back."""

    def __init__(self, parts: Any = None, *, gives: bool = False) -> None:
        super().__init__()
        self.linear, self.gives = nn.Linear(8, 8), gives
        self.__dict__["parts"] = parts  # torch compares what it registers

    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        output = self.linear(x).relu()
        return {"output": output, "parts": self.parts} if self.gives else output


def in_attributes() -> tuple[nn.Module, Any]:
    net = Net()
    net.__dict__.update({f"part{number}": part for number, part in enumerate(all_odd())})
    return net, torch.ones(4, 8)


def in_containers() -> tuple[nn.Module, Any]:
    return Net({"list": list(all_odd()), "tuple": (1, (tuple(all_odd()),))}), torch.ones(4, 8)


def in_closures() -> tuple[nn.Module, Any]:
    net, parts = Net(), list(all_odd())
    for part in parts:
        net.linear.register_forward_hook(lambda *_, part=part: None)
    net.linear.register_forward_hook(lambda *_: parts and None)
    return net, torch.ones(4, 8)


def in_inputs() -> tuple[nn.Module, Any]:
    return Net(), {"x": torch.ones(4, 8), "other": list(all_odd())}


def in_outputs() -> tuple[nn.Module, Any]:
    return Net(list(all_odd()), gives=True), torch.ones(4, 8)


def in_classes() -> tuple[nn.Module, Any]:
    kind: Any = type("WithParts", (Net,), {f"part{number}": part for number, part in enumerate(all_odd())})
    return kind(), torch.ones(4, 8)


@pytest.mark.parametrize("make", [in_attributes, in_containers, in_closures, in_inputs, in_outputs, in_classes])
def test_a_scan_does_not_call_them(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, inputs = make()
    result = scan(model.eval(), inputs, precisions=["bfloat16", "autocast-fp16"], times="off", isolation="none")
    assert [run.status for run in result.runs] == ["ok"] * 3
    assert not any("could not be saved" in note for note in result.model.notes)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


@pytest.mark.parametrize("name", ["__len__", "__eq__", "__iter__", "__getattr__", "__bool__", "__repr__", "__dir__"])
def test_modules_whose_methods_fail(name: str) -> None:
    def fail(self: Any, *given: Any) -> Any:
        if name == "__getattr__" and given[0] in ("linear", *vars(nn.Module)):
            return nn.Module.__getattr__(self, *given)
        raise ArithmeticError(name)

    kind: Any = type("OddModule", (Odd,), {name: fail, "__hash__": object.__hash__})
    model = nn.Sequential(kind(), nn.Linear(8, 8)).eval()
    result = scan(model, torch.ones(4, 8), precisions=["bfloat16"], times="off", isolation="none")
    assert [run.status for run in result.runs] == ["ok"] * 2


@pytest.mark.parametrize("kind", [object, tuple, list, dict, set, frozenset])
def test_their_content_is_restored(kind: Any) -> None:
    for name in (*METHODS, *PROPERTIES):
        part = odd(kind, name)
        state: dict[str, Any] = {}
        object.__setattr__(part, "inside", state)
        saved = ObjectState([part], ())
        state["changed"] = True
        if kind is list:
            list.append(part, 2)
        if kind is dict:
            dict.__getitem__(part, "k").append(2)
        if kind is set:
            set.add(part, 2)
        saved.restore()
        assert not saved.unsaved
        assert not state
        held = {list: [1], dict: [[1]], set: [1]}
        if kind in held:
            assert list(dict.values(part) if kind is dict else kind.__iter__(part)) == held[kind]


def test_what_cannot_be_saved_is_a_note() -> None:
    class Unreadable(torch.Generator):
        def get_state(self) -> Any:
            raise ArithmeticError("no state")

    result = scan(Net([Unreadable()]), torch.ones(4, 8), precisions=["bfloat16"], times="off", isolation="none")
    assert result.runs[1].status == "ok"
    note = next(note for note in result.model.notes if "could not be saved" in note)
    assert "Unreadable could not be saved (ArithmeticError: no state)" in note


def test_their_tensors_are_found_and_replaced() -> None:
    class Pair(tuple):  # type: ignore[type-arg]
        __slots__ = ()

        def __len__(self) -> int:
            raise ArithmeticError

    class Held(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise ArithmeticError

    tensor = torch.ones(2)
    value = {"pair": Pair((tensor, 1)), "held": Held([tensor]), "odd": list(all_odd())}
    assert [path for path, _ in leaves(value)] == ["pair.0", "held.0"]
    doubled = map_tensors(value, lambda found: found * 2)
    assert [float(found.sum()) for _, found in leaves(doubled)] == [4.0, 4.0]
    assert type(doubled["pair"]) is Pair
    uncopied = odd(object, "__copy__")
    assert map_tensors([uncopied], lambda found: found)[0] is uncopied


def test_what_was_read_before_is_read_as_before() -> None:
    numpy = pytest.importorskip("numpy")
    assert [float(found) for _, found in leaves(numpy.float64(1e300), numbers=True)] == [1e300]
    cycle: list[Any] = []
    cycle += [cycle, cycle]
    mapped = map_tensors(cycle, lambda found: found)
    assert mapped is not cycle
    assert mapped[0] is mapped[1] is mapped
    nested: list[Any] = [torch.ones(2)]
    for _ in range(300):
        nested = [nested]
    assert float(next(found for _, found in leaves(map_tensors(nested, lambda found: found * 2))).sum()) == 4.0


class Lazy(Mapping):  # type: ignore[type-arg]
    """A mapping of which one value cannot be read."""

    def __getitem__(self, key: str) -> torch.Tensor:
        if key == "b":
            raise ArithmeticError(key)
        return torch.ones(1)

    def __iter__(self) -> Iterator[str]:
        return iter("abc")

    def __len__(self) -> int:
        return 3


@dataclasses.dataclass
class Output:
    x: torch.Tensor
    unset: Any = dataclasses.field(init=False)


def test_what_can_be_read_of_them_is_compared() -> None:
    assert [path for path, _ in leaves(Lazy())] == ["a", "c"]
    copied = map_tensors(Output(torch.ones(2)), lambda found: found * 2)
    assert float(copied.x.sum()) == 4.0
    assert not hasattr(copied, "unset")


class Proxy:
    """Stands for an object, as the proxies of wrapt do."""

    def __init__(self, wrapped: Any) -> None:
        object.__setattr__(self, "inner", wrapped)

    @property
    def __wrapped__(self) -> Any:
        return vars(self)["inner"]


class Plain:
    pass


def test_objects_without_content_and_behind_proxies_are_restored() -> None:
    plain, behind = Plain(), Plain()
    held = type("Held", (list,), {})()
    saved = ObjectState([plain, held, Proxy(behind)], ())
    plain.made = held.made = behind.made = 1  # type: ignore[attr-defined]
    saved.restore()
    assert vars(plain) == vars(held) == vars(behind) == {}
    assert [path for path, _ in leaves(Proxy([torch.ones(1)]))] == ["0"]


def test_a_copy_that_fails_with_a_tensor_inside_is_an_error() -> None:
    class Held:
        def __init__(self) -> None:
            self.tensor = torch.ones(2)

        def __copy__(self) -> Any:
            raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        map_tensors(Held(), lambda found: found)


IRREPS = """import torch
from torch import nn
class Irreps(tuple):
    def __len__(self):
        raise NotImplementedError
    def __eq__(self, other):
        raise TypeError
    __hash__ = tuple.__hash__
irreps = Irreps((1, 2))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.irreps, self.linear = irreps, nn.Linear(8, 8)
    def forward(self, x):
        return self.linear(x) * sum(tuple.__iter__(self.irreps))
net = Net().eval()
def inputs():
    return torch.ones(4, 8)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["scan", "plan", "fix"])
def test_a_file_with_an_attribute_as_that_of_e3nn(here: Path, write: Write, call: Call, command: str) -> None:
    options = ["--times", "off"] if command == "scan" else []
    done = call(command, str(write(IRREPS, "irreps.py")), "-p", "bf16", *options)
    assert done.returncode in (0, 1), done.stderr
    assert "internal" not in done.stderr
    assert "Traceback" not in done.stderr


class Layer:
    def __init__(self, size: int) -> None:
        self.keys = torch.ones(size)


class Cache:
    """An object of the user's that holds others, one of which refers back to it."""

    def __init__(self) -> None:
        self.layers = [Layer(2), Layer(3)]
        self.cross, self.name = Layer(4), "cache"
        self.cross.owner = self  # type: ignore[attr-defined]


def test_tensors_in_objects_inside_objects_are_replaced() -> None:
    cache = Cache()
    halved = map_tensors({"past": cache}, lambda tensor: tensor.half())["past"]
    assert [tensor.dtype for _, tensor in leaves(halved)] == [torch.float16] * 3
    assert [tensor.dtype for _, tensor in leaves(cache)] == [torch.float32] * 3
    assert halved.cross.owner is halved
    assert cache.cross.owner is cache  # type: ignore[attr-defined]
