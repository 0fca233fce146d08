"""Torch's habits on jax's arrays and Flax's modules: an AttributeError of theirs is told our way as well."""

import sys
from types import TracebackType

_OF_ARRAYS = {
    "backward": "jax's arrays carry no graph: all that makes a loss goes into one function of one pass in "
    "train() mode, ddp.loss(lambda out, y: ..., output, targets).backward()",
    **dict.fromkeys(("cuda", "cpu", "to"), "leave it out: arrays are placed where the step runs"),
    "detach": "leave it out, or jax.lax.stop_gradient(x) within a loss",
    "numpy": "numpy.asarray(x)",
    **dict.fromkeys(
        ("requires_grad", "requires_grad_", "grad"), "ddp.sync_gradients() gives the mean gradients"
    ),
}
_OF_MODULES = {
    **dict.fromkeys(("to", "cuda", "cpu"), "leave it out: devices are chosen when the group is formed"),
    **dict.fromkeys(
        ("train", "eval"), "leave it out: a trainer tells the model, and ddp.train(), ddp.eval()"
    ),
    **dict.fromkeys(
        ("parameters", "named_parameters"),
        "cx.AdamOptimizer(ddp, lr=...) or the trainer knows whose they are",
    ),
    **dict.fromkeys(("state_dict", "load_state_dict"), "ddp.state_dict(), or trainer.save_checkpoint(path)"),
    "zero_grad": "ddp.zero_grad(), or leave it out: an update ends with zero gradients",
    "forward": "call the wrapped model, ddp(x), or module.apply({'params': params}, x)",
}
_ROOTS = {"jaxlib": _OF_ARRAYS, "jax": _OF_ARRAYS, "flax": _OF_MODULES}


def note(error: BaseException) -> None:
    """Adds our way to an AttributeError of a name that torch has there; leaves all others alone."""
    if not isinstance(error, AttributeError) or error.obj is None:
        return
    for kind in type(error.obj).__mro__:
        way = _ROOTS.get(kind.__module__.partition(".")[0], {}).get(error.name or "")
        if way and not getattr(error, "__notes__", None):
            error.add_note(f"HINT: {way}.")
            return


def install() -> None:
    """From now on an uncaught error is shown with its note. Twice is harmless."""
    usual = sys.excepthook
    if getattr(usual, "notes_habits", False):
        return

    def shown(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        note(error)
        usual(kind, error, tb)

    shown.notes_habits = True  # type: ignore[attr-defined]
    sys.excepthook = shown
