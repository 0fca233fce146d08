"""The norm of the mean gradients: its squares, added up in branches of leaves, and what waits for it."""

import jax
import numpy as np
import optax

from cyxjax.core.strategy import Stepped, norm_row, written_after


def test_no_branch_adds_up_many_leaves_and_the_norm_keeps_its_bits():
    # 1 + 2**-24 is 1 in float32: small leaves count only where they are added up first.
    sizes = [1.0, *[2.0**-12] * 199]
    leaves = [np.full(1, size, np.float32) for size in sizes]
    row = lambda step, grads: norm_row(Stepped(None, None, grads), step)  # noqa: E731
    traced = jax.make_jaxpr(row)(np.int32(8), leaves)
    given = [len(eqn.invars) for eqn in traced.jaxpr.eqns if eqn.primitive.name == "cond"]
    assert len(given) == 4
    assert max(given) <= 66  # the condition, the sum so far, 64 leaves
    one_by_one = np.float32(optax.tree.norm(leaves))
    assert one_by_one == 1.0 != np.float32(np.sqrt(np.sum(np.square(sizes))))
    np.testing.assert_array_equal(jax.jit(row)(np.int32(8), leaves), [one_by_one, 1.0])
    np.testing.assert_array_equal(jax.jit(row)(np.int32(9), leaves), [0.0, 0.0])


def test_parameters_that_wait_for_the_norm_keep_their_bits():
    params = {
        "a": np.float32([-0.0, np.nan, np.inf, 1e-30]),
        "b": np.int32([-7]),
        "c": np.complex64([-0.0 - 2j]),
    }
    for norm in (0.0, -0.0, 3.0, np.inf, np.nan):
        wait = lambda row, new: written_after(row, Stepped(new, None, [np.ones(1)]))  # noqa: E731
        written = jax.jit(wait)(np.float32([norm, 1.0]), params)
        assert jax.tree.map(lambda a: (a.dtype, np.asarray(a).tobytes()), written) == jax.tree.map(
            lambda a: (a.dtype, a.tobytes()), params
        )


def test_parameters_wait_for_no_norm_that_nobody_takes_or_that_is_of_parts():
    params, row = {"a": np.ones(2)}, np.zeros(2, np.float32)
    assert written_after(row, Stepped(params, None)) is params
    assert written_after(row, Stepped(params, None, {"a": np.ones(1)}, in_parts=True)) is params


def test_a_gpu_is_given_no_branch_which_its_host_would_wait_for(monkeypatch):
    leaves = [np.full(3, 2.0, np.float32)] * 3
    row = lambda step, grads: norm_row(Stepped(None, None, grads), step)  # noqa: E731
    with monkeypatch.context() as there:
        there.setattr(jax, "default_backend", lambda: "gpu")
        traced = jax.make_jaxpr(row)(np.int32(8), leaves)
        found = [jax.jit(lambda n, leaves: row(n, leaves))(np.int32(n), leaves) for n in (8, 9)]
    assert "cond" not in str(traced)
    np.testing.assert_array_equal(found, [[6.0, 1.0], [0.0, 0.0]])
