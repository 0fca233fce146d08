"""The models of peers.py in Flax: ours and the hand-written loop train the same ones."""

from typing import Any

from peers_work import CONTEXT, DENSE, FEATURES, HEADS, HIDDEN, LAYERS, VOCABULARY, WIDTH

import cyxjax as cx


def model(work: str) -> Any:
    if work == "gpt":
        return cx.get_model("gpt")(
            vocab_size=VOCABULARY, context_length=CONTEXT, num_layers=LAYERS, num_heads=HEADS, width=WIDTH
        )
    if work == "cnn":
        return cx.get_model("cnn")(features=FEATURES, hidden=DENSE)
    return cx.get_model("mlp")(hidden=HIDDEN[work])
