"""How many files one has to open to follow a thing through the package."""

import sys
from pathlib import Path

import pytest

import cyxjax
from cyxjax.checkpoint.manifest import Leaf
from cyxjax.train import resume
from tests.support.trainers import X, Y, config, trainer

PACKAGE = Path(cyxjax.__file__).parent


def asks_a_value(frame):
    """Whether `frame` reads a number off a frozen value (a shape, a size): nobody opens its file for that."""
    first = frame.f_code.co_varnames[:1]
    return first == ("self",) and isinstance(frame.f_locals.get("self"), tuple | Leaf)


def chain(frame):
    """The files of the package on the stack at `frame`, outermost first, each once."""
    files = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if (
            path.is_relative_to(PACKAGE)
            and not asks_a_value(frame)
            and (name := path.relative_to(PACKAGE).as_posix()) not in files
        ):
            files.append(name)
        frame = frame.f_back
    return files[::-1]


@pytest.fixture
def restores(monkeypatch):
    """Chains of files, from `restore` down, of all calls made by restores."""
    found, real = [], resume.restore

    def watched(*args, **options):
        above = len(chain(sys._getframe().f_back)) - 1
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, arg: event == "call" and found.append(chain(frame)[above:]))
        try:
            return real(*args, **options)
        finally:
            sys.setprofile(before)

    monkeypatch.setattr(resume, "restore", watched)
    return found


def test_a_restore_is_six_files_from_resume_down_to_the_disk(restores, tmp_path):
    kept = {"checkpoint_every_n_epochs": 1, "checkpoint_dir": str(tmp_path)}
    trainer().fit(X, Y, config(epochs=1, **kept))
    trainer().fit(X, Y, config(epochs=2, **kept, resume="auto"))
    deepest = max(restores, key=len)
    assert len(deepest) <= 6, " > ".join(deepest)
    said = (PACKAGE / "train" / "resume.py").read_text().split('"""')[1]
    listed = [line.split()[0] for line in said.splitlines() if ".py  " in line]
    assert listed in restores, "the chain that resume.py tells of is not gone through"
