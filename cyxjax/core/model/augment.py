"""Augmentation on the device: a function (key, x) -> x of one sample, only in the compiled training step.

The inputs of a training batch carry the words from which the keys of their samples are made (`Keyed`); those
of evaluation and prediction do not, and are not augmented.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cyxjax.core.draws import sample_key, sample_words
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.trees import PyTree, batch_shapes
from cyxjax.errors import ConfigError

Augment = Callable[[jax.Array, PyTree], PyTree]
"""(key, one sample's inputs, without a batch dimension) -> inputs of the same form, shapes and dtypes."""


class Keyed(NamedTuple):
    """Inputs of some samples, and the words that identify each sample's random draws."""

    inputs: PyTree  # leaves (B, ...)
    words: Any  # uint32 (B, 3), see `sample_words`


def keyed(inputs: PyTree, seed: int, epoch: int, places: np.ndarray) -> Keyed:
    """`inputs` of the samples at `places` of the order of `epoch`."""
    return Keyed(inputs, sample_words(seed, epoch, places))


def with_augment(fns: ModelFns, augment: Augment | None) -> ModelFns:
    """`fns` that also accepts `Keyed` inputs and augments each sample with its own key."""
    if augment is None:
        return fns

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        if isinstance(inputs, Keyed):
            inputs = jax.vmap(lambda words, x: augment(sample_key(words), x))(inputs.words, inputs.inputs)
        return fns.apply(params, model_state, inputs, key, train)

    return fns._replace(apply=apply)


def as_augment(given: Augment | Sequence[Augment] | None) -> Augment | None:
    """One function that applies the given ones in turn, each with its own key; None if there are none."""
    several = given if isinstance(given, Sequence) else () if given is None else (given,)
    if len(several) < 2:
        return several[0] if several else None

    def in_turn(key: jax.Array, x: PyTree) -> PyTree:
        for number, one in enumerate(several):
            x = one(jax.random.fold_in(key, number), x)
        return x

    return in_turn


def check_augment(augment: Augment, inputs: PyTree) -> str:
    """A text that identifies `augment`: equal for equal programs under one version of jax.

    inputs: of one sample, (1, ...). Nothing is computed.
    Raises: ConfigError for a function that differs each time it is traced: it draws with numpy, and its draws
        would be the same for all samples and epochs.
    """
    made, again = _digest(augment, inputs), _digest(augment, inputs)
    if made != again:
        raise ConfigError(
            "augment differs when it is traced twice: it draws with numpy or random, which would give the "
            "same draw for all samples and epochs. HINT: draw with its key, as in jax.random.uniform(key).",
            key="data.augment",
        )
    return f"a function {made} (jax {jax.__version__})"


def _digest(augment: Augment, inputs: PyTree) -> str:
    """A hash of the program for one sample and of the constants in it."""
    sample = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch_shapes(inputs, 1))
    key = jax.eval_shape(sample_key, jax.ShapeDtypeStruct((3,), np.uint32))
    made = jax.make_jaxpr(lambda key, x: augment(key, x))(key, sample)
    # The text of a program shows the functions that it calls with their addresses in memory.
    program = re.sub(r"0x[0-9a-f]+", "", str(made)).encode()
    consts = [np.ascontiguousarray(const).tobytes() for const in made.consts]
    return hashlib.sha256(b"".join([program, *consts])).hexdigest()[:12]
