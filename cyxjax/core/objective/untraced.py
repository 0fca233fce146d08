"""A function of the user's that cannot be compiled, because it asks for numbers: said in a line."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from cyxjax.errors import ConfigError

_ASKS = (
    jax.errors.ConcretizationTypeError,  # float(), .item(), and `if` of it
    jax.errors.TracerArrayConversionError,  # numpy, scikit-learn
    jax.errors.TracerIntegerConversionError,
)
_PACKAGE = str(Path(__file__).parents[2])


@contextmanager
def compiled(what: str) -> Iterator[None]:
    """Raises: ConfigError where `what` asks for a number while it is traced."""
    try:
        yield
    except _ASKS as err:
        raise ConfigError(
            f"{what} asks for numbers{_place(err)}, by numpy, float() or `if`; it is compiled, where "
            "there are none yet. HINT: jnp for numpy, jnp.where for `if`; what has no such form "
            "(scikit-learn) is computed from trainer.predict(X)."
        ) from err


def _place(err: Exception) -> str:
    """ " in file.py:12", of the user's own line nearest to the error."""
    own = [
        frame
        for frame in traceback.extract_tb(err.__traceback__)
        if "site-packages" not in frame.filename and not frame.filename.startswith(_PACKAGE)
    ]
    own = [frame for frame in own if Path(frame.filename).exists()]
    return f" in {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
