"""Data sets by name: `load_dataset("digits")`, `load_dataset("csv", "prices.csv", target="price")`."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyxjax.data import bundled, files, images, text
from cyxjax.data.splits import Splits, split_rows
from cyxjax.errors import ConfigError, nearest

Loader = Callable[..., Splits]

_LOADERS: dict[str, Loader] = {
    "digits": bundled.load_digits,
    "wine": bundled.load_wine,
    "breast_cancer": bundled.load_breast_cancer,
    "diabetes": bundled.load_diabetes,
    "text": text.load_text,
    "mnist": files.load_mnist,
    "fashion_mnist": files.load_fashion_mnist,
    "cifar10": files.load_cifar10,
    "npz": files.load_npz,
    "npy": files.load_npy,
    "csv": files.load_csv,
    "image_folder": images.load_image_folder,
}


def names() -> list[str]:
    """Names that `load_dataset` knows."""
    return sorted(_LOADERS)


def load_dataset(name: str, root: str | Path | None = None, **options: Any) -> Splits:
    """Train, validation and test splits of the data set `name`, the same in every run.

    `root` is the file or folder of the sets that are read from files. Options are the loader's own, such as
    `sequence_length` of "text", `target` of "csv", `val_fraction`, `test_fraction` and `split_seed`.

    Raises: ConfigError for an unknown name or option, naming the nearest; DataError for an unreadable file.
    """
    if name not in _LOADERS:
        raise ConfigError(f"unknown data set {name!r}. HINT: {nearest(name, _LOADERS)}", key="name")
    loader = _LOADERS[name]
    _check_options(name, loader, options)
    return loader(*_root(name, loader, root), **options)


def _root(name: str, loader: Loader, root: str | Path | None) -> tuple[Path, ...]:
    """What to pass as `root`: nothing where it is not given and not needed."""
    wanted = inspect.signature(loader).parameters.get("root")
    if wanted is None and root is not None:
        raise ConfigError(
            f"data set {name!r} is not read from files, but root={root}. HINT: leave root out.", key="root"
        )
    if wanted is not None and wanted.default is wanted.empty and root is None:
        raise ConfigError(
            f"data set {name!r} is read from files. HINT: set root to its file or folder.", key="root"
        )
    if root is not None and not Path(root).exists():
        raise ConfigError(
            f"root={root} of data set {name!r} does not exist. HINT: check the path.", key="root"
        )
    return () if root is None else (Path(root),)


def _check_options(name: str, loader: Loader, options: dict[str, Any]) -> None:
    known = _options(loader)
    for option in options:
        if option not in known:
            raise ConfigError(
                f"data set {name!r} has no option {option!r}. HINT: {nearest(option, known)}",
                key=f"options.{option}",
            )


def _options(loader: Loader) -> set[str]:
    """The loader's keywords; those that it hands on as **split are `split_rows`'s."""
    parameters = inspect.signature(loader).parameters.values()
    known = {item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD} - {"root"}
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        handed_on = inspect.signature(split_rows).parameters.values()
        known |= {item.name for item in handed_on if item.kind is item.KEYWORD_ONLY}
    return known
