"""What the entries of strategies say is what the documentation says, and enough for tests and `plan`."""

from pathlib import Path

import jax
import numpy as np
import optax

from cyxjax.sync.registry import STRATEGIES

DOCUMENTED = Path(__file__).parents[3] / ".github" / "docs" / "strategies.md"


def test_the_documented_table_has_the_rows_of_the_entries():
    rows = [f"| `{name}` | {' | '.join(one.row)} |" for name, one in STRATEGIES.items()]
    lines = DOCUMENTED.read_text().splitlines()
    first = lines.index(rows[0])
    assert lines[first : first + len(rows)] == rows


def test_options_suit_the_strategy_they_are_for():
    params = {"kernel": jax.ShapeDtypeStruct((64, 64), np.float32)}
    for one in STRATEGIES.values():
        for options in (one.lossless, one.usual or {}, one.learns or {}):
            more = {"params": params} if one.cuts_leaves else {}
            assert one.make(optax.sgd(0.1), **options, **more).update
