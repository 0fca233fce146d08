"""MLIR contexts that programs share. jax makes one for each program it lowers: 3.5 ms, and much memory."""

from typing import Any

from jax._src.interpreters import mlir

# That share one: it holds the types and constants of all of them until the last is forgotten.
PROGRAMS = 64


def share() -> None:
    """From now on 64 programs, lowered one after another, share a context. What is lowered stays the same."""
    make, given = mlir.make_ir_context, list[Any]()
    if make.__module__ == __name__:
        return  # they do already

    def next_context() -> Any:
        if len(given) % PROGRAMS == 0:
            given[:] = [make()]
        else:
            given.append(given[0])
        return given[0]

    mlir.make_ir_context = next_context
