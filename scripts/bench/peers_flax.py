"""The Flax models of peers.py, for cyxjax and for the loop written by hand."""

from typing import Any

import peers_work as sizes

import cyxjax as cx


def model(work: str) -> Any:
    if work in sizes.TEXTS:
        size = sizes.TEXTS[work]
        return cx.get_model("gpt")(
            vocab_size=size.vocabulary,
            context_length=size.context,
            num_layers=size.layers,
            num_heads=size.heads,
            width=size.width,
        )
    if work == "resnet50":
        return cx.get_model("resnet50")(num_classes=sizes.CLASSES)
    if work == "resnet18":
        return cx.get_model("resnet18")(num_classes=sizes.CLASSES, width=sizes.STAGES[0], small_images=True)
    if work in sizes.DENSE:
        return cx.get_model("cnn")(features=sizes.FEATURES, hidden=sizes.DENSE[work])
    return cx.get_model("mlp")(hidden=sizes.HIDDEN[work])
