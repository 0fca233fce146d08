"""The norm of the mean gradients, whose squares are added up in branches of so many leaves."""

import jax
import numpy as np
import optax

from cyxjax.core.strategy import Stepped, norm_row


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
