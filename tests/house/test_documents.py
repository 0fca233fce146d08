"""Files, links and commands in the documents exist."""

import importlib.util
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cyxjax import errors
from cyxjax.cli import checkpoint, main, plan
from cyxjax.config.load import load_config
from cyxjax.launch import job_files, options
from tests.support.places import ROOT
from tests.support.programs import printed_by

LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
DOCUMENTS = [ROOT / name for name in LISTED.stdout.split()]
PATH = re.compile(r"(?<![\w/.<-])(?:cyxjax|tests|scripts|configs|notebooks|\.github)/[\w./-]*\w")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def printed_commands(text: str) -> Iterator[list[str]]:
    """The words of each command in the ```bash blocks, without comments, continuation lines joined."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


COMMANDS = [
    pytest.param(words, id=f"{name_of(path)}: {shlex.join(words)}")
    for path in DOCUMENTS
    for words in printed_commands(path.read_text())
]


def check_command(words: list[str]) -> None:
    """Fails unless the program that the command starts accepts it."""
    while re.match(r"[A-Z_]+=", words[0]) or words[0] == "sudo":
        words = words[1:]
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest[0] in targets
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = re.fullmatch(r"\.\[(.*)\]", rest[-1])[1].split(",")
        assert set(extras) <= set(project["optional-dependencies"])
    elif program == "cyxjax":
        check_ours(rest[0], rest[1:])
    elif program == "python" and rest[0] == "-m" and rest[1] in ("cyxjax.train", "cyxjax.launch"):
        check_ours(rest[1].removeprefix("cyxjax."), rest[2:])
    elif program == "python" and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1])
    else:  # other programs get one of our files
        assert program in ("python", "sbatch", "mpirun"), program
        assert [word for word in rest if (ROOT / word).is_file()]


def check_ours(command: str, words: list[str]) -> None:
    assert command in main.ROWS
    if command == "plan":
        words = plan.own_options(words)[1]
    if command in ("train", "config", "plan"):
        load_config([word for word in words if word != "--help"])
    elif command == "launch" and words[0] != "--slurm":
        assert options.parse(words, {}).command
    elif command == "launch":
        job_files._build_parser().parse_args(["slurm", *words[1 : words.index("--")]])
    elif command == "checkpoint":
        checkpoint._parser().parse_args([word.replace("runs/digits/checkpoints", ".") for word in words])


def test_there_are_documents_and_commands():
    assert {"README.md", ".github/CONTRIBUTING.md", ".github/docs/index.md"} <= set(map(name_of, DOCUMENTS))
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("words", COMMANDS)
def test_each_printed_command_is_one_that_works(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_command(words)


@pytest.mark.parametrize(
    "words", ["make trian", "pip install '.[gpus]'", "cyxjax polish", "python scripts/no.py"]
)
def test_a_command_that_does_not_work_is_found(words):
    with pytest.raises(AssertionError):
        check_command(shlex.split(words))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_each_file_and_link_exists(path):
    text = path.read_text()
    missing = [name for name in PATH.findall(text) if not (ROOT / name).exists()]
    links = [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not (path.parent / link).exists()]
    assert (missing, links) == ([], [])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_commands_for_a_file_and_its_checkpoints_run_in_a_clone(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    pages = [ROOT / ".github" / "docs" / name for name in ("checkpoints.md", "trained-models.md")]
    chosen = [
        words
        for page in pages
        for words in printed_commands(page.read_text())
        if words[0] == "cyxjax" or words[:3] == ["python", "-m", "cyxjax.train"]
    ]
    assert len(chosen) >= 8
    for words in chosen:
        program = ["-m", "cyxjax.cli", *words[1:]] if words[0] == "cyxjax" else words[1:]
        # A run waits half a minute at its end for a store that it cannot reach.
        printed_by(*(word.replace("s3://my-bucket", f"file://{tmp_path}") for word in program), cwd=clone)
    assert (clone / "digits.safetensors").is_file()
    assert list(tmp_path.glob("runs/digits/checkpoints/step_*/MANIFEST.json"))


def test_the_exit_codes_that_are_documented_are_those_of_the_program():
    rows = (ROOT / ".github" / "docs" / "errors.md").read_text().split("| exit code | meaning |")[1]
    table = re.findall(r"^\| (\d+) \| (\S.*) \|$", rows.split("\n\n")[0], re.MULTILINE)
    codes = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert [int(code) for code, _ in table] == sorted(codes.values())
    meanings = dict(zip(sorted(codes, key=codes.get), (meaning for _, meaning in table), strict=True))
    for name, word in {
        "EXIT_USER_ERROR": "error in the program",
        "EXIT_CONFIG": "nothing was written",
        "EXIT_INFRASTRUCTURE": "restart budget",
        "EXIT_SECONDARY": "a peer did",
        "EXIT_HANG": "no progress",
        "EXIT_INTERRUPT": "Ctrl-C",
        "EXIT_PREEMPTED": "after saving",
    }.items():
        assert word in meanings[name]
