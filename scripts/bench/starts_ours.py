"""A callback for starts.py that marks the phases of a start and ends the process after the first step."""

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
