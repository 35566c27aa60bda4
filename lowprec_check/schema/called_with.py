"""Functions of the Python API whose keyword arguments are declared options."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, get_type_hints

from lowprec_check.schema.options import DeclaredOptions, declared_in

P = ParamSpec("P")
Given = TypeVar("Given", bound=DeclaredOptions)
Found = TypeVar("Found")
Found_co = TypeVar("Found_co", covariant=True)
Model = TypeVar("Model")
Model_contra = TypeVar("Model_contra", contravariant=True)


class OfModel(Protocol[Model_contra, P, Found_co]):
    """A function of a model and its inputs with the options ``P``."""

    def __call__(self, model: Model_contra, inputs: Any, *args: P.args, **given: P.kwargs) -> Found_co:
        """Call it; ``inputs`` as for :func:`lowprec_check.scan`."""


def called_with(
    arguments: Callable[P, Given],
) -> Callable[[Callable[[Model, Any, Given], Found]], OfModel[Model, P, Found]]:
    """Makes ``f(model, inputs, given)`` a function with options as keyword arguments."""

    def decorated(function: Callable[[Model, Any, Given], Found]) -> OfModel[Model, P, Found]:
        @functools.wraps(function)
        def called(model: Model, inputs: Any, *args: P.args, **given: P.kwargs) -> Found:
            try:
                signature.bind(model, inputs, *args, **given)
            except TypeError as error:
                raise TypeError(f"{function.__name__}(): {error}") from None
            return function(model, inputs, arguments(*args, **given))

        # The signature and the documentation say what the function takes, not ``arguments``.
        positional = list(inspect.signature(function).parameters.values())[:2]
        options = inspect.signature(arguments).parameters.values()
        types = get_type_hints(function) | get_type_hints(arguments)
        parameters = [option.replace(annotation=types[option.name]) for option in (*positional, *options)]
        signature = inspect.Signature(parameters, return_annotation=types["return"])
        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__annotations__ = {name: types[name] for name in (*signature.parameters, "return")}
        more = ("", "; one, several, or several in a string with commas")
        texts = [
            textwrap.fill(
                f"{name}: {declared.sentences(more[declared.takes_several])}",
                120,
                initial_indent=" " * 8,
                subsequent_indent=" " * 12,
            )
            for name, _, _, declared in declared_in(arguments)  # type: ignore[arg-type]
        ]
        head, returns, tail = (function.__doc__ or "").partition("\n\n    Returns:")
        called.__doc__ = "\n".join([head, *texts]) + returns + tail
        return called

    return decorated
