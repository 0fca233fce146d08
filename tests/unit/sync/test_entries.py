"""The entries of strategies say enough for tests, `plan` and the documentation."""

import jax
import numpy as np
import optax

from cyxjax.sync.registry import STRATEGIES


def test_each_entry_fills_a_row_of_the_documented_table():
    for name, one in STRATEGIES.items():
        assert len(one.row) == 3, name
        assert all(text and "|" not in text for text in one.row), name


def test_options_suit_the_strategy_they_are_for():
    params = {"kernel": jax.ShapeDtypeStruct((64, 64), np.float32)}
    for one in STRATEGIES.values():
        for options in (one.lossless or {}, one.usual or {}, one.learns or {}):
            more = {"params": params} if one.cuts_leaves else {}
            assert one.make(optax.sgd(0.1), **options, **more).update
