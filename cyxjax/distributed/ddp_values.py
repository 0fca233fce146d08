"""Values into and out of a wrapped model: first values, rows, losses with `backward()`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.objective.global_loss import part_of_batch
from cyxjax.core.scopes import holding
from cyxjax.core.trees import PyTree, times
from cyxjax.distributed.agreement import describe
from cyxjax.errors import ConfigError, DataError

_in_loss_of: ContextVar[Any] = ContextVar("the wrapped model whose loss is computed", default=None)


def first_values(fns: ModelFns, seed: int, inputs: PyTree) -> tuple[PyTree, PyTree]:
    """(params, model_state) drawn for inputs like these, as host arrays; only one sample is used."""
    sample = jax.tree.map(
        lambda a: np.asarray(a[:1]) if a.shape[0] else np.zeros((1, *a.shape[1:]), a.dtype), inputs
    )
    return jax.tree.map(np.asarray, fns.init(jax.random.key(seed), sample))


def whole_state(saved: dict[str, PyTree], now: Callable[[], dict[str, PyTree]]) -> list[PyTree]:
    """[step, params, model_state, optimizer] as `saved` has them; what it lacks is that of `now()`.

    Raises: DataError for another name, such as those of bare parameters.
    """
    names = "step", "params", "model_state", "optimizer"
    if others := [name for name in saved if name not in names]:
        raise DataError(
            f"load_state_dict got {others[0]!r}, expected some of {', '.join(names)}. HINT: "
            'ddp.load_state_dict({"params": params}).'
        )
    whole = saved if len(saved) == len(names) else now() | saved
    return [whole[name] for name in names]


def check_like(output_grad: PyTree, output: PyTree, at: PyTree = None) -> None:
    """Raises DataError unless the gradient has the form, shapes and dtypes of the `output` it belongs to.

    at: where the gradient was taken, which must be that output, number for number; None: not known.
    """
    pairs = zip(jax.tree.leaves(at), jax.tree.leaves(output), strict=False)
    others = any(a is not b and np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)
    if others or describe(output_grad) != describe(output):
        raise DataError(
            f"the loss, whose gradient is {describe(output_grad)}, was not computed from the values that the "
            f"last forward pass returned, {describe(output)}; changed copies have no gradient. HINT: "
            "ddp.loss(lambda out, y: criterion(f(out), y), outputs, targets), before the next forward pass."
        )


def of_whole(grad: PyTree, part: PyTree, output: PyTree) -> tuple[PyTree, PyTree]:
    """(gradient with respect to a model's `output`, `output`), from that with respect to a `part`, a tree of
    its arrays; (grad, part) for other arrays.
    """
    leaves, grads = jax.tree.leaves(output), jax.tree.leaves(grad)
    places = [[i for i, leaf in enumerate(leaves) if leaf is one][:1] for one in jax.tree.leaves(part)]
    if part is output or [] in places:
        return grad, part
    filled = [
        sum((grad for (at,), grad in zip(places, grads, strict=True) if at == i), jnp.zeros_like(leaf))
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(jax.tree.structure(output), filled), output


@contextmanager
def in_loss_of(ddp: Any) -> Iterator[None]:
    """A block in which a loss of `ddp` is computed, of a part of the batch if there are several processes."""
    with part_of_batch(ddp.get_world_size() > 1), holding(_in_loss_of, ddp):
        yield


def refuse_in_loss_of(ddp: Any) -> None:
    """Raises: ConfigError in the function of a loss of `ddp`, where a read value would have no gradient."""
    if _in_loss_of.get() is ddp:
        raise ConfigError(
            "the function of ddp.loss calls this model or reads its parameters. The gradient is with respect "
            "to the output that the function is given, and would lack this part. HINT: let the model return "
            "the penalty beside its output, one value per sample, and add it in the function; compute what "
            "needs no gradient before the forward pass."
        )


@dataclass(frozen=True)
class BoundLoss:
    """The mean loss of this process's batch with `.backward()`; made by `ddp.loss(...)`.

    It can be scaled (`loss / accumulation_steps`), read (`loss.item()`, `float(loss)`), combined with other
    losses of the same output (`loss - 0.1 * other`, `sum(losses)`), added to a total (`total += loss`), and
    its `backward()` called once.
    """

    value: jax.Array
    """float32 (), before scaling."""
    output_grad: Any
    """Gradient of `value` with respect to `output`."""
    output: Any
    """The model's output that `value` was computed from."""
    ddp: Any
    scale: float = 1.0

    __array_ufunc__ = None
    """NumPy leaves `np.float64(2) * loss` to `__rmul__`; else it would be a number without gradients."""

    def backward(self) -> None:
        """Adds the gradients of this loss to what `ddp` has gathered since its last update."""
        self.ddp.backward(self.output_grad, self.scale, self.output)

    def item(self) -> float:
        """The scaled loss as a Python float; waits until it is computed."""
        return float(self.value) * self.scale

    __float__ = item

    def __mul__(self, factor: float) -> "BoundLoss":
        return replace(self, scale=self.scale * _number(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "BoundLoss":
        return replace(self, scale=self.scale / _number(divisor))

    def __jax_array__(self) -> jax.Array:
        return self.value * self.scale

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.__jax_array__(), dtype)

    def __add__(self, other: Any) -> Any:
        """Of two losses of one output, or a loss and a number, a loss with `backward`; else an array."""
        total = self.__jax_array__() + other
        if type(other) in (int, float):  # a number of NumPy may have been computed from a loss
            output_grad = self._scaled_grad()
        elif isinstance(other, BoundLoss) and other.output is self.output:
            output_grad = jax.tree.map(jnp.add, self._scaled_grad(), other._scaled_grad())
        else:
            return total
        return replace(self, value=total, output_grad=output_grad, scale=1.0)

    __radd__ = __add__

    def __neg__(self) -> "BoundLoss":
        return self * -1.0

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def _scaled_grad(self) -> PyTree:
        """Gradient of the scaled loss with respect to the model's output."""
        return times(np.asarray(self.scale), self.output_grad)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __str__(self) -> str:
        return str(self.item())


def _number(factor: Any) -> float:
    """`factor` as a number. Raises: DataError for a loss, whose gradient would be left out."""
    if isinstance(factor, BoundLoss):
        raise DataError(
            "a loss was multiplied or divided by a loss, and backward() would take the second for a number. "
            "HINT: compute both in one function: ddp.loss(fn, output, target)."
        )
    return float(factor)
