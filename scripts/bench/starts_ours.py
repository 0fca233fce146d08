"""A callback for starts.py: notes the start of training, and ends the process at the first step."""

import os

from starts import BUILT, LOADED, STEPPED, mark

from cyxjax.train.hooks.hook import Hook


class Mark(Hook):
    def __init__(self) -> None:
        mark(LOADED)

    def on_start(self, moment) -> None:
        mark(BUILT)

    def on_step(self, info) -> None:
        mark(STEPPED)
        os._exit(0)
