"""What a hook may answer: True, False or nothing.

A coroutine would never run, and a dict be read as "stop".
"""

import inspect
from typing import Any

from cyxjax.errors import ConfigError


def stops(hook: object, name: str, answer: Any) -> bool:
    """Whether `answer`, what `name` of `hook` gave, asks to stop: True does, None and what is empty do not.

    Raises: ConfigError for anything else, such as a dict or a coroutine.
    """
    if answer is None or isinstance(answer, bool):
        return bool(answer)
    try:
        truth = bool(answer)
    except (TypeError, ValueError, RuntimeError):  # an array of several
        truth = True
    else:
        if not truth or "bool" in str(getattr(answer, "dtype", "")):
            return truth
    if inspect.iscoroutine(answer):
        answer.close()  # or Python warns that nobody awaited it
    told = " ".join(repr(answer).split())[:60]
    raise ConfigError(
        f"{name} of the callback {type(hook).__name__} gave {type(answer).__name__} {told}, expected "
        "True to stop the run, or None. HINT: return nothing, or bool(...) of what says to stop."
    )


def check_hooks(one: object, known: type) -> None:
    """Raises: ConfigError for a hook of `one` that would only make a coroutine.

    known: the class whose public methods are those that are called.
    """
    for name in dir(known):
        if not name.startswith("_") and callable(method := getattr(type(one), name, None)):
            _check_runs(one, name, method)


def _check_runs(one: object, name: str, method: Any) -> None:
    kinds = {
        "a coroutine (async def)": inspect.iscoroutinefunction,
        "a generator (yield)": inspect.isgeneratorfunction,
        "an async generator": inspect.isasyncgenfunction,
    }
    kind = next((kind for kind, is_one in kinds.items() if is_one(method)), None)
    if kind is not None:
        raise ConfigError(
            f"{name} of the callback {type(one).__name__} is {kind}, of which nothing would run. "
            "HINT: make it a plain function; asyncio.run(...) in it runs what is async."
        )
