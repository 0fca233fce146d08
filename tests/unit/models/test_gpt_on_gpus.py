"""The attention that a GPT uses on a GPU, simulated on a CPU; `tests/gpu` runs on a real GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cyxjax.core.exact.calls import must_repeat, read_xla_flags, repeatable
from cyxjax.models import gpt
from cyxjax.models.registry import get_model

TINY = {"context_length": 16, "num_layers": 1, "num_heads": 2, "width": 16}


def test_a_gpu_multiplies_whole_tiles_of_tokens(monkeypatch):
    model = get_model("gpt")(TINY | {"vocab_size": 17})
    tokens = jnp.arange(20, dtype=jnp.int32).reshape(2, 10) % 17
    variables = jax.jit(model.init)(jax.random.key(0), tokens)

    def outputs_and_gradients():
        square = lambda out: ((out**2).sum(), out)  # noqa: E731
        run = jax.grad(lambda v: square(model.apply(v, tokens)), has_aux=True)
        return jax.jit(lambda v: run(v))(variables)  # traced again: the result depends on the backend

    here = outputs_and_gradients()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    on_gpu = outputs_and_gradients()
    assert " = pad[" in str(jax.make_jaxpr(model.apply)(variables, tokens))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), here, on_gpu)


@pytest.mark.parametrize(
    ("dtype", "places", "width", "repeats", "by"),
    [
        (jnp.bfloat16, 256, 64, False, "cudnn"),
        (jnp.float16, 1024, 128, False, "cudnn"),
        (jnp.float32, 1024, 64, False, "xla"),  # cuDNN only has half precision
        (jnp.bfloat16, 128, 64, False, "xla"),  # short: XLA is faster
        (jnp.bfloat16, 256, 20, False, "xla"),  # no multiple of 8
        (jnp.bfloat16, 256, 64, True, "xla"),  # its backward pass does not repeat its bits
    ],
)
def test_long_texts_in_half_precision_take_cudnns_attention_on_a_gpu(
    monkeypatch, dtype, places, width, repeats, by
):
    options = []
    monkeypatch.setattr(gpt, "_has_cudnns_attention", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **how: options.append(how) or q)
    with repeatable() if repeats else nullcontext():
        gpt._attend_here(*[jnp.zeros((1, places, 2, width), dtype)] * 3)
    assert options == [{"is_causal": True, "implementation": by}]


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("", False),
        ("--xla_gpu_deterministic_ops=true --xla_dump_to=x", True),
        ("--xla_gpu_exclude_nondeterministic_ops", True),
        ("--xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=0", False),
    ],
)
def test_flags_that_ask_for_repeatable_programs_are_heeded(flags, options):
    try:
        read_xla_flags(flags)
        assert must_repeat() == options
    finally:
        read_xla_flags("")


@pytest.mark.parametrize(
    ("capability", "has"), [("7.5", False), ("8.0", True), ("9.0", True), ("12.0", True)]
)
def test_a_gpu_older_than_ampere_is_not_asked_for_cudnns_attention(monkeypatch, capability, has):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])
    assert gpt._has_cudnns_attention() == has
