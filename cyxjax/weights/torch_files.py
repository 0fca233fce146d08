"""torch's `state_dict` files (.pt, .pth, .bin since torch 1.6): a zip with a pickle, parsed, not executed.

The pickle's operations are interpreted one by one. Only operations that build dicts, lists, tuples, numbers
and strings are known, and only the few names with which torch writes a tensor; none of these is imported or
called. Any other operation or name is refused. (Python's own unpickler imports whatever a file names.)
"""

import pickletools
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cyxjax.checkpoint.arrays import Entry
from cyxjax.checkpoint.manifest import dtype_of
from cyxjax.errors import CheckpointError
from cyxjax.files import readable

_MOST_PICKLE = 64 << 20  # names and shapes; a model of a million tensors needs this much
_STORAGES = {
    "torch FloatStorage": "float32",
    "torch DoubleStorage": "float64",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
    "torch ComplexFloatStorage": "complex64",
}
_HINT = "save plain weights, torch.save(model.state_dict(), path), or safetensors"
_MARK = object()


class _Storage(NamedTuple):
    dtype: np.dtype
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements


def read_file(path: Path) -> dict[str, Entry]:
    """The tensors in the file, by their keys joined with dots.

    Raises: CheckpointError for an incomplete file, or one whose pickle holds anything but tensors, numbers,
        strings and containers of them.
    """
    with readable(path, CheckpointError, _HINT), zipfile.ZipFile(path) as archive:
        pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("this is a zip file, but not one that torch wrote")
        (pickled,) = pickles
        if pickled.file_size > _MOST_PICKLE:
            raise ValueError(f"its pickle is {pickled.file_size} bytes long")
        folder = pickled.filename.removesuffix("data.pkl")
        is_swapped = (
            f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") == b"big"
        )
        found: dict[str, Entry] = {}
        for name, one in _tensors(_walk(archive.read(pickled))):
            if name in found:
                raise ValueError(f"it holds {name!r} twice")
            found[name] = Entry(one.shape, one.storage.dtype, partial(_read, path, folder, is_swapped, one))
        return found


def _tensors(tree: Any, above: str = "") -> list[tuple[str, _Tensor]]:
    if isinstance(tree, _Tensor):
        return [(above or "tensor", tree)]
    if isinstance(tree, dict):
        parts = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple) and not isinstance(tree, _Storage):
        parts = [(str(i), value) for i, value in enumerate(tree)]
    else:
        return []
    return [found for key, value in parts for found in _tensors(value, f"{above}.{key}" if above else key)]


def _read(path: Path, folder: str, is_swapped: bool, one: _Tensor) -> np.ndarray:
    """The values of a tensor; numpy checks that they are within the storage. Raises: CheckpointError."""
    with readable(path, CheckpointError, _HINT), zipfile.ZipFile(path) as archive:
        flat = np.frombuffer(archive.read(f"{folder}data/{one.storage.key}"), one.storage.dtype)
        if is_swapped:
            flat = flat.byteswap()
        steps = [step * flat.itemsize for step in one.strides]
        start = one.offset * flat.itemsize
        return np.ndarray(one.shape, flat.dtype, flat.view(np.uint8), start, steps).copy()


def _walk(data: bytes) -> Any:
    """The object that the pickle builds, of plain containers and tensors.

    Raises: ValueError for any other operation or name; IndexError or similar for an incomplete pickle.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, arg, _ in pickletools.genops(data):  # ends with STOP, or raises
        name = opcode.name
        if name in _PLAIN:
            stack.append(_PLAIN[name](arg))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            memo[len(memo) if arg is None else int(arg)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(arg or 0)])
        elif name in _STEPS:
            _STEPS[name](stack, arg)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"its pickle uses {name}, which plain weights do not need")
    return stack.pop()


_PLAIN: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "INT", "LONG", "BINFLOAT"), lambda arg: arg),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "UNICODE", "BINUNICODE8"), lambda arg: arg),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "SHORT_BINSTRING", "BINSTRING"), lambda arg: arg),
    "NONE": lambda arg: None,
    "NEWTRUE": lambda arg: True,
    "NEWFALSE": lambda arg: False,
    "EMPTY_DICT": lambda arg: {},
    "EMPTY_LIST": lambda arg: [],
    "EMPTY_TUPLE": lambda arg: (),
    "EMPTY_SET": lambda arg: [],
    "MARK": lambda arg: _MARK,
}


def _to_mark(stack: list[Any]) -> list[Any]:
    at = max(i for i, value in enumerate(stack) if value is _MARK)
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _set_items(stack: list[Any], items: list[Any]) -> None:
    stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _append(stack: list[Any], items: list[Any]) -> None:
    stack[-1].extend(items)


def _popped(stack: list[Any], count: int) -> list[Any]:
    return [stack.pop() for _ in range(count)][::-1]


def _known(name: str) -> str:
    """`name`, a module and what it holds, if torch uses it to write a tensor; nothing is imported.

    Raises: ValueError otherwise.
    """
    if name not in _CALLS and name not in _STORAGES:
        raise ValueError(f"its pickle names {name.replace(' ', '.')}, which could execute any code")
    return name


def _reduce(stack: list[Any], arg: Any) -> None:
    called, args = _popped(stack, 2)
    stack.append(_CALLS[called](*args))


def _persistent(stack: list[Any], arg: Any) -> None:
    _, kind, key, *_ = stack.pop()
    stack.append(_Storage(dtype_of(_STORAGES[kind]), str(key)))


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any = None, hooks: Any = None, bits: Any = None
) -> _Tensor:
    if bits:  # that the stored numbers are to be conjugated or negated
        raise ValueError(f"a tensor is not resolved ({', '.join(map(str, bits))}): call resolve_conj() on it")
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


_CALLS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": dict,
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": lambda tensor, *_: tensor,
}
_STEPS: dict[str, Callable[[list[Any], Any], None]] = {
    "GLOBAL": lambda stack, arg: stack.append(_known(str(arg))),
    "STACK_GLOBAL": lambda stack, arg: stack.append(_known(" ".join(map(str, _popped(stack, 2))))),
    "REDUCE": _reduce,
    "BINPERSID": _persistent,
    "BUILD": lambda stack, arg: stack.pop(),  # torch sets `_metadata` on its OrderedDict; it is ignored
    "TUPLE": lambda stack, arg: stack.append(tuple(_to_mark(stack))),
    "TUPLE1": lambda stack, arg: stack.append(tuple(_popped(stack, 1))),
    "TUPLE2": lambda stack, arg: stack.append(tuple(_popped(stack, 2))),
    "TUPLE3": lambda stack, arg: stack.append(tuple(_popped(stack, 3))),
    "LIST": lambda stack, arg: stack.append(_to_mark(stack)),
    "SETITEM": lambda stack, arg: _set_items(stack, _popped(stack, 2)),
    "SETITEMS": lambda stack, arg: _set_items(stack, _to_mark(stack)),
    "APPEND": lambda stack, arg: _append(stack, _popped(stack, 1)),
    "APPENDS": lambda stack, arg: _append(stack, _to_mark(stack)),
}
