"""Which software a process runs: versions by name, and digests of the code.

Different code under the same version would give different results without a warning.
"""

import hashlib
import os
import platform
import shlex
import socket
import subprocess
import sys
import sysconfig
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

from cyxjax import __version__
from cyxjax.files import is_installed
from cyxjax.redaction import redact

PACKAGE = Path(__file__).parents[1]
_MOST = 64  # modules: they are named in every manifest
_SHORT = 12  # hex digits shown and compared: no two are equal by chance


@cache
def code_facts() -> dict[str, str]:
    """A digest of the files of each package of cyxjax, and of the program that was started, by name.

    What is installed, as a command or a package, is not the user's program: its path and first line
    differ between hosts that hold the same code.
    """
    folders = {
        f"the code of {folder}": _digest(files, PACKAGE) for folder, files in _source_folders().items()
    }
    program = _program(sys.modules.get("__main__"))
    return (
        folders
        if program is None
        else folders | {"the program": f"{program.name} {_digest([program], program.parent)}"}
    )


def own_modules() -> dict[str, tuple[str, str]]:
    """(digest, path) of the user's own files that are loaded, by the name they are imported by.

    The program is among them, by the name under which another program would import it: a model is often
    imported from the program that trained it. Installed modules are not: their version identifies them.
    """
    own = [
        (name, path)
        for name, module in list(sys.modules.items())
        if (path := _source(module)) and (name != "__main__" or _program(module))
    ]
    found = {}
    for name, path in sorted(own)[:_MOST]:
        with suppress(OSError):  # deleted since, or in an archive
            digest = _digest_of_one(path, os.path.getmtime(path), os.path.getsize(path))
            found[Path(path).stem if name == "__main__" else name] = digest, path
    return found


@cache
def _digest_of_one(path: str, changed: float, size: int) -> str:
    """The digest of a file. Every fit asks for it: a file is read again if its time or size has changed."""
    return _digest([Path(path)], Path(path).parent)


def _source(module: object) -> str | None:
    """The file of a module of the user's own; a lazy module is not loaded to find out."""
    known = object.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else {}
    path = known.get("__file__")
    if not isinstance(path, str) or not path.endswith(".py") or path.startswith(_libraries()):
        return None
    return None if is_installed(path) else path


@cache
def _libraries() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    return (f"{PACKAGE}{os.sep}", *{sysconfig.get_paths()[kind] for kind in kinds})


def _source_folders() -> dict[str, list[Path]]:
    """The source files of cyxjax by the folder they are in, in order."""
    folders: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = path.relative_to(PACKAGE).parts[:-1]
        folders.setdefault("/".join(["cyxjax", *folder[:1]]), []).append(path)
    return folders


def _program(main: ModuleType | None) -> Path | None:
    """The file of `__main__`, where it is the user's own."""
    name = getattr(main, "__file__", None)
    path = Path(name) if isinstance(name, str) else None
    if path is None or not path.is_file() or is_installed(str(path)):
        return None
    installed = (Path(sys.executable).parent, Path(sys.prefix) / "bin", Path(sys.prefix) / "Scripts")
    return None if path.absolute().parent in installed or PACKAGE in path.absolute().parents else path


def _digest(files: list[Path], folder: Path) -> str:
    total = hashlib.sha256()
    for path in files:
        # Line ends are git's choice on each host and mean nothing to Python.
        content = path.read_bytes().replace(b"\r\n", b"\n")
        total.update(os.fsencode(f"{path.relative_to(folder).as_posix()} {len(content)}\n") + content)
    return total.hexdigest()[:_SHORT]


PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pydantic", "safetensors")


def software() -> dict[str, str]:
    """Python, system, and the packages training needs; a missing one is "not installed"."""
    return {
        "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        "cyxjax": __version__,
        **{name: version_of(name) or "not installed" for name in PACKAGES},
    }


def machine() -> dict[str, str]:
    """This host: its name, system and cores."""
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
    }


def command_line() -> str:
    """How this process was started, without secrets."""
    return redact(shlex.join(sys.orig_argv))


def provenance() -> dict[str, str]:
    """How this process was started, and the git commit of its working folder; without what is not known."""
    found = {"command": command_line()}
    with suppress(OSError, subprocess.SubprocessError):
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
        if commit:  # where SIGCHLD is ignored, a failure of git is not seen
            found["git commit"] = f"{commit}, {'with changes' if changed else 'clean'}"
    return found


def _git(*words: str) -> str:
    """The output of git. Raises: OSError without git; SubprocessError outside a repository, or after 2 s."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=2, check=True)
    return done.stdout.strip()


def version_of(package: str) -> str | None:
    """The installed version; None without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
