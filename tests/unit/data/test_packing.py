"""Rows of packed texts hold every pair of a token and its next once, and a model sees no other text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyxjax.data.text import IGNORED, pack


def test_texts_share_rows():
    packed = pack([[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11, 12]], 4)
    assert packed.tokens.tolist() == [[1, 2, 5, 11], [7, 8, 9, 10]]
    assert packed.targets.tolist() == [[2, 3, 6, 12], [8, 9, 10, 11]]
    assert packed.segments.tolist() == [[1, 1, 2, 3], [1, 1, 1, 1]]
    assert packed.positions.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert packed.filled == 1.0


@given(st.lists(st.lists(st.integers(1, 9), max_size=12), min_size=1, max_size=90), st.integers(1, 7))
def test_every_pair_stands_once(texts, length):
    pairs = sorted((a, b) for text in texts for a, b in zip(text, text[1:], strict=False))
    if not pairs:
        assert pack(texts, length).tokens.shape == (0, length)
        return
    packed = pack(texts, length)
    real = packed.targets != IGNORED
    assert sorted(zip(packed.tokens[real].tolist(), packed.targets[real].tolist(), strict=True)) == pairs
    assert ((packed.segments > 0) == real).all()
    assert (packed.tokens[~real] == 0).all()
    starts = (packed.positions == 0) & real
    same = np.diff(packed.segments, axis=1, prepend=0) == 0
    assert (starts == (real & ~same)).all()  # places count on within a text, and begin anew with each


@pytest.mark.parametrize("text", [[1.5, 2.0], "ab"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(TypeError):
        pack([[1, 2], text], 4)
