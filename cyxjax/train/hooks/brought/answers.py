"""What a hook may answer, True, False or nothing, and what it may be called.

A hook by another library's name would never be called, a coroutine never run, and a dict be read as "stop".
"""

import inspect
import re
from collections.abc import Iterable
from types import CodeType
from typing import Any

from cyxjax.errors import ConfigError

_NEAREST = (
    (re.compile(r"val|test|predict|sanity|evaluat"), "on_evaluation"),
    (re.compile(r"epoch"), "on_epoch"),
    (re.compile(r"save|load|checkpoint"), "on_state"),
    (re.compile(r"batch|step|iter|backward|optimizer"), "on_step"),
    (re.compile(r"begin|start|before|init|setup"), "on_start"),
    (re.compile(r"end|finish|complete|teardown|after"), "on_end"),
)
_WORD = (
    r"train(ing)?|fit|run|epochs?|batch(es)?|(sub)?steps?|iteration|val|valid(ation)?|test|eval|evaluat(e|ion)"
    r"|predict(ion)?|sanity|check|begin|start(ed)?|end(ed)?|finish(ed)?|completed?|init|setup|teardown|before"
    r"|after|backward|optimizer|zero|grad|save|load|checkpoint|log|loss"
)
_ELSEWHERE = re.compile(rf"on(_({_WORD}))+")
"""Words that the hooks of other libraries (Keras, Lightning, transformers) are made of."""


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
    """Raises: ConfigError for a hook of `one` that is never called, or that would only make a coroutine.

    known: the class whose public methods are those that are called.
    """
    for name in dir(known):
        if not name.startswith("_") and callable(method := getattr(type(one), name, None)):
            _check_runs(one, name, method)
    for name in _on(set(dir(type(one))) - set(dir(known))):
        if _ELSEWHERE.fullmatch(name) and _nobody_else_calls(type(one), name, known):
            raise ConfigError(
                f"the callback {type(one).__name__} has {name}, which is never called. HINT: the nearest is "
                f"{_nearest(name)}; there are {', '.join(_on(dir(known)))}."
            )


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


def _nobody_else_calls(kind: type, name: str, known: type) -> bool:
    """Whether neither the class itself calls it, nor a library that one of its bases is of."""
    ours = [base for base in kind.__mro__ if issubclass(base, known)]
    if any(hasattr(base, name) for base in kind.__mro__ if base not in ours):
        return False
    codes = [getattr(inspect.unwrap(one), "__code__", None) for base in ours for one in vars(base).values()]
    used = set().union(*(_names(code) for code in codes if code is not None))
    return not used & {name, "getattr"}


def _names(code: CodeType) -> set[str]:
    """Names that a function, and those within it, look up; a method that is called is one of them."""
    return set(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))


def _nearest(name: str) -> str:
    return next((ours for pattern, ours in _NEAREST if pattern.search(name)), "on_step")


def _on(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith("on_"))
