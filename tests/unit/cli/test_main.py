"""The `cyxjax` command: the right subcommand, exit codes, and one line per error."""

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from unittest.mock import Mock

import pytest

import cyxjax
from cyxjax.cli import machine_checks, main
from cyxjax.cli.env import describe_place
from cyxjax.launch.program import provenance


@pytest.mark.parametrize("module", ["cyxjax", "cyxjax.cli"])
def test_python_m_is_the_command(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"cyxjax {cyxjax.__version__}\n")


def test_ctrl_c_is_one_line_also_while_modules_load(monkeypatch, capsys):
    pressed = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(main, "dispatch", pressed)
    assert main.main(["plan"]) == 130
    assert capsys.readouterr().err == "cyxjax: interrupted. HINT: run the same command again.\n"
    monkeypatch.setattr("cyxjax.config.load.load_config", pressed)
    assert importlib.import_module("cyxjax.train.__main__").main([]) == 130
    assert "to continue" in capsys.readouterr().err
    monkeypatch.setattr("cyxjax.launch.options.parse", pressed)
    assert importlib.import_module("cyxjax.launch.__main__").main(["x.py"]) == 130


def test_signals_are_heard_before_what_takes_long_to_load():
    late = ("pydantic", "yaml", "jax", "numpy", "cyxjax.launch.supervise.supervisor", "cyxjax.config.load")
    load = "import sys, cyxjax.train.__main__, cyxjax.launch.__main__"
    code = f"{load}; sys.exit(any(m in sys.modules for m in {late}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("command", sorted(main.ROWS))
def test_each_command_has_a_page_of_its_own_with_an_example(command, capsys):
    with contextlib.suppress(SystemExit):
        assert main.main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    own = f"python -m cyxjax.{command}" if command in ("train", "launch") else f"cyxjax {command}"
    assert shown.startswith(f"usage: {own}")
    examples = re.findall(
        rf"(?:^  |example: .*?)(?:cyxjax {command}|{re.escape(own)})\b", shown, re.MULTILINE
    )
    assert examples, shown
    assert not re.search(r" --\s+\S+\.py", shown)  # a job runs its words as they are: a script needs python
    assert "--json" in shown or command not in ("audit", "hash", "top", "env", "doctor")
    assert "cyxjax.train" not in shown or command not in ("config", "plan")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["docter"], "no command 'docter'. Did you mean 'doctor'?"),
        (["config", "--epocs", "7"], "Did you mean 'epochs'"),
        (["hash", ".", "--jsn"], "--jsn (from the command line). Did you mean '--json'?"),
        (["checkpoint", "ls", ".", "--json", "b"], "unrecognized arguments: b"),
        (["checkpoint", "lss", "x"], "invalid choice: 'lss'"),
        (["doctor", "here"], "unrecognized arguments: here"),
        (["report"], "required: RUN"),
        *(([name, "nosuch"], "nosuch: no such folder") for name in ("report", "audit", "hash", "replay")),
        (["checkpoint", "ls", "nosuch"], "nosuch: no such folder"),
        (["audit", ".", "--max-findings", "0"], "--max-findings: '0'"),
        (["manifest", "pbs", "--", "x"], "'pbs'"),
        (["launch", "--grace", "x", "y.py"], "--grace"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(words, named, capfd):
    assert main.main(words) == 2
    shown = capfd.readouterr()  # the launcher writes to the file descriptors
    output = shown.out + shown.err
    assert (named in output, output.count("\n")) == (True, 1), output
    assert "HINT: " in output


def test_env_as_json_is_what_a_bug_report_needs(printed, monkeypatch):
    monkeypatch.setenv("CYXJAX_TOKEN", "open-sesame")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x")
    text = printed(main.main, "env", "--json")
    report = json.loads(text)
    assert report["software"]["jax"][0].isdigit()
    assert " x cpu" in report["devices"]
    assert report["variables"]["XLA_FLAGS"] == "--xla_dump_to=/x"
    assert report["code"]
    assert "open-sesame" not in text


BASH = """
eval "$1"
COMP_WORDS=("${@:2}"); COMP_CWORD=$(($# - 2)); COMPREPLY=()
_cyxjax
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts():
    """The completion scripts for our commands, by shell."""
    found = {}
    for shell in ("bash", "zsh", "fish"):
        page = io.StringIO()
        with contextlib.redirect_stdout(page):
            assert main.main(["completion", shell]) == 0
        found[shell] = page.getvalue()
    return found


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("aud", "audit"),
        ("audit --m", "--max-findings"),
        ("audit runs-", "runs-of-mine"),
        ("train --optimizer.l", "--optimizer.lr"),
        ("checkpoint ", "ls verify export prune"),
        ("checkpoint ls --j", "--json"),
        ("checkpoint ls runs-", "runs-of-mine"),
    ],
)
def test_bash_completes_commands_options_and_files(scripts, tmp_path, words, found):
    (tmp_path / "runs-of-mine").mkdir()
    command = ["bash", "-c", BASH, "bash", scripts["bash"], "cyxjax", *words.split(" ")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == found.split()
    assert "audit" in scripts["fish"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here: apt-get install zsh")
def test_zsh_takes_its_script(scripts, tmp_path):
    (tmp_path / "script").write_text(scripts["zsh"])
    words = f"autoload -U compinit; compinit -u -d {tmp_path}/dump; source {tmp_path}/script"
    done = subprocess.run(
        ["zsh", "-f", "-c", words + "; print $_comps[cyxjax]"], capture_output=True, text=True, check=True
    )
    assert (done.stdout.split(), done.stderr) == (["_cyxjax"], "")


@pytest.mark.parametrize("words", [["--help"], ["config"], ["launch", "--help"]], ids=" ".join)
def test_a_reader_that_leaves_early_sees_no_traceback(words):
    # the pipe is closed before the first write: the worst case of `| head -0`
    child = subprocess.Popen(
        [sys.executable, "-m", "cyxjax.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child.stdout.close()
    output = child.stderr.read()
    child.stderr.close()
    assert (child.wait(), output) == (0, "")


def test_a_list_that_nobody_reads_ends_without_a_traceback(monkeypatch):
    dropped = []
    monkeypatch.setattr(main, "dispatch", Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr(main, "drop_output", lambda: dropped.append(True))
    assert (main.main(["checkpoint"]), dropped) == (1, [True])
    with pytest.raises(BrokenPipeError):
        main.main(["train"])  # a run must not end silently


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux's device that is always full")
@pytest.mark.parametrize("words", [["config"], []])
def test_output_onto_a_full_disk_is_one_line(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "cyxjax.cli", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("cyxjax: No space left on device. HINT: ")
    assert done.stderr.count("\n") == 1


def test_env_says_where_the_place_is_from():
    env = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"}
    shown = "\n".join(describe_place(env | {"CUDA_VISIBLE_DEVICES": ""}))
    for text in ("(RANK=1, WORLD_SIZE=4)", "rank        1 of 4", "10.0.0.1:29511", "backend     gloo"):
        assert text in shown


@pytest.mark.parametrize(
    ("program", "level", "found"),
    [
        ("print('noise'); print('[\"cpu\", 2, \"cpu\", 8.0]')", "ok", "2 x cpu"),
        ('print(\'["cpu", 2, "cpu", 7.0]\')', "FAIL", "8 ones add up to 7.0"),
        ("import time; time.sleep(60)", "FAIL", "did not start in 0.5 s"),
        ("raise ImportError('no libcuda')", "FAIL", "no libcuda"),
        ("pass", "FAIL", "HINT"),
    ],
)
def test_doctor_s_devices_check_is_honest(program, level, found):
    check = machine_checks.devices(program, 0.5 if "sleep" in program else 60)
    assert (check.level, found in check.found) == (level, True), check


def test_doctor_sees_what_this_machine_does_not_offer(tmp_path, monkeypatch):
    with socket.create_server(("", 0)) as listener:
        number = listener.getsockname()[1]
        found = [machine_checks.port(number), machine_checks.disk(tmp_path, low_bytes=1 << 60)]
        with socket.create_connection(("127.0.0.1", number)):
            listener.accept()[0].close()  # first, so that the port is in TIME_WAIT
    found += [machine_checks.port(number), machine_checks.disk(tmp_path)]
    monkeypatch.setattr("os.access", lambda folder, how: False)
    found += [machine_checks.disk(tmp_path)]
    assert [check.level for check in found] == ["warn", "warn", "ok", "ok", "FAIL"]


def test_doctor_ends_with_1_when_something_is_in_the_way(monkeypatch, printed):
    broken = machine_checks.Check("FAIL", "devices", "none. HINT: plug one in.")
    monkeypatch.setattr(machine_checks, "devices", lambda: broken)
    assert "FAIL  devices   none. HINT: plug one in.\n" in printed(main.main, "doctor", code=1)


DOCTOR = """
import os, sys
from cyxjax.cli import machine_checks, main
def talkative():
    os.write(1, b"[Gloo] Rank 0 is connected\\n")
    print("a library")
    return machine_checks.Check("ok", "devices", "1 x cpu")
machine_checks.devices = talkative
sys.exit(main.main(["doctor", "--json"]))
"""


def test_a_script_reads_one_document_whatever_libraries_say():
    done = subprocess.run([sys.executable, "-c", DOCTOR], capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["good"]) == (0, True)
    assert "[Gloo] Rank 0 is connected" in done.stderr
    assert "a library" in done.stderr


def test_a_run_tells_the_commit_and_whether_it_was_changed(cwd, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    assert "git commit" not in provenance()
    with monkeypatch.context() as unseen:  # as where SIGCHLD is ignored: nobody learns how git ended
        unseen.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, "", ""))
        assert "git commit" not in provenance()
    git("init", "--quiet")
    (cwd / "model.py").touch()
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    assert re.fullmatch(r"[0-9a-f]{12}, clean", provenance()["git commit"])
    (cwd / "model.py").write_text("x = 1")
    assert provenance()["git commit"].endswith(", with changes")
