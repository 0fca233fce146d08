"""What a model's inputs were when it first ran, for one that its library would speak of in its own words."""

from collections.abc import Callable
from typing import Any

from cyxjax.core.trees import named_leaves
from cyxjax.errors import CyxjaxError, DataError

PyTree = Any


def described(tree: PyTree) -> str:
    """Names, dtypes and shapes of samples: "float32[N, 6]"."""
    each = [
        f"{name + ' ' if name else ''}{leaf.dtype}[{', '.join(['N', *map(str, leaf.shape[1:])])}]"
        for name, leaf in named_leaves(tree)
    ]
    return ", ".join(each) or "None"


def other_inputs(err: Exception, given: str, known: str, whose: str, way: str) -> DataError:
    """What to raise where a model does not take samples described so. whose: parameters."""
    text = " ".join(str(err).split())[:160]
    return DataError(
        f"the samples are {given}, and {whose} parameters were made for {known}: the model does not take "
        f"them ({type(err).__name__}: {text}). HINT: prepare them as before, or {way}."
    )


class KnownInputs:
    """Runs a model, and remembers the form of what it took first."""

    def __init__(self) -> None:
        self._known = ""

    def took(self, inputs: PyTree) -> None:
        """The parameters were made for inputs like these."""
        if inputs is not None:
            self._known = self._known or described(inputs)

    def run(self, run: Callable, inputs: PyTree, *given: Any) -> Any:
        """`run(*given)`. Raises: DataError with both forms, where the model does not take others."""
        try:
            result = run(*given)
        except CyxjaxError:
            raise
        except Exception as err:  # whatever a model raises
            now = described(inputs)
            if not self._known or now == self._known:
                raise
            raise other_inputs(err, now, self._known, "this ddp's", "wrap a new model") from err
        if not self._known:
            self.took(inputs)
        return result
