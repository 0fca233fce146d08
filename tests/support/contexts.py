"""MLIR contexts that programs share. jax creates one per program that it lowers: 3.5 ms and much memory."""

from typing import Any

from jax._src.interpreters import mlir

# Programs per context, which holds the types and constants of all of them until the last one is freed.
PROGRAMS = 64


def share() -> None:
    """From now on 64 programs, lowered one after another, share a context; the lowered code is the same."""
    make, contexts = mlir.make_ir_context, list[Any]()
    if make.__module__ == __name__:
        return  # already shared

    def next_context() -> Any:
        if len(contexts) % PROGRAMS == 0:
            contexts[:] = [make()]
        else:
            contexts.append(contexts[0])
        return contexts[0]

    mlir.make_ir_context = next_context
