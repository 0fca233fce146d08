"""Runs the model eagerly and finds the first layer, and its line, whose output is not finite."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import jax
from flax import linen, nnx

_HERE = Path(__file__).parent
# Whose lines are never to blame; models of our own count as the user's.
_NOT_THEIRS = (
    *(str(Path(str(m.__file__)).parent) for m in (jax, flax)),
    str(_HERE),
    str(_HERE.parents[1] / "core"),
)


@dataclass
class Found:
    """The first operation whose result was not finite: where in the model, what, and where in the code."""

    layer: str
    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.what}{f', at {self.line}' if self.line else ''}"


def first_nonfinite(model: Any, run: Callable[[], Any]) -> list[Found]:
    """The first operations of `run` (eager) that give a NaN and that give an infinity; [] if all is finite.

    Both: an infinity is often what the NaN was made of, but masks of attention are infinite on purpose.
    """
    found = (_first(model, run, checked) for checked in (jax.debug_nans, jax.debug_infs))
    return [one for one in found if one is not None]


def _first(model: Any, run: Callable[[], Any], checked: Callable[[bool], Any]) -> Found | None:
    layers: list[str] = []
    try:
        with checked(True), _naming(model, layers):
            jax.block_until_ready(run())
    except FloatingPointError as error:
        return Found(layers[0] if layers else _whole(model), _first_line(error), _line_of(error))
    return None


@contextmanager
def _naming(model: Any, layers: list[str]) -> Iterator[None]:
    """While open, an error in a layer appends the layer's name: innermost first."""
    if isinstance(model, nnx.Module):
        with _naming_nnx(model, layers):
            yield
        return

    def intercept(call: Callable, args: Any, kwargs: Any, context: linen.module.InterceptorContext) -> Any:
        try:
            return call(*args, **kwargs)
        except FloatingPointError:
            layers.append(_named(context.module.path, context.module))
            raise

    with linen.intercept_methods(intercept):
        yield


@contextmanager
def _naming_nnx(model: nnx.Module, layers: list[str]) -> Iterator[None]:
    """nnx has no interceptors: the classes' calls are exchanged while this is open."""
    names: dict[int, str] = {}
    own = {cls: vars(cls)["__call__"] for cls in _classes(model)}
    for cls, call in own.items():
        cls.__call__ = _reporting(call, names, layers)
    try:
        yield
    finally:
        for cls, call in own.items():
            cls.__call__ = call


def _classes(model: nnx.Module) -> set[Any]:
    kinds = {cls for _, part in nnx.iter_modules(model) for cls in type(part).__mro__}
    return {cls for cls in kinds if "__call__" in vars(cls) and issubclass(cls, nnx.Module)}


def _reporting(call: Callable, names: dict[int, str], layers: list[str]) -> Callable:
    def reporting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in names:  # what is run is a copy of the model: its root is called first
            names.update({id(part): _named(path, part) for path, part in nnx.iter_modules(self)})
        try:
            return call(self, *args, **kwargs)
        except FloatingPointError:
            layers.append(names[id(self)])
            raise

    return reporting


def _named(path: Any, module: Any) -> str:
    name = "/".join(map(str, path))
    return f"layer {name} ({type(module).__name__})" if name else f"{type(module).__name__} itself"


def _whole(model: Any) -> str:
    return "the model" if isinstance(model, tuple) else type(model).__name__


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def _line_of(error: BaseException) -> str:
    """The innermost line of model code."""
    frames = traceback.extract_tb(error.__traceback__)
    user = [f for f in frames if not f.filename.startswith(_NOT_THEIRS)]
    return f"{user[-1].filename}:{user[-1].lineno} ({user[-1].name})" if user else ""
