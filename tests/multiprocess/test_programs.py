"""Two ranks compile once: at the second start each finds all its programs, and trains to the same bits."""

import json
from pathlib import Path

import pytest

from tests.support.launching import start

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).with_name("programs_ranks.py")


def reports(folder: Path, mode: str, cache: object) -> list[dict]:
    """What each of two ranks printed at its end."""
    run = start(folder, 2, script=SCRIPT, fork=True, MODE=mode, CYXJAX_COMPILE_CACHE=cache).wait()
    assert run.code == 0, run.err
    assert run.no_survivors_within(30)
    return [json.loads(run.log(rank).partition("SAID ")[2]) for rank in range(2)]


@pytest.mark.parametrize("mode", ["none", pytest.param("exact", marks=pytest.mark.slow)])
def test_the_second_start_of_two_ranks_compiles_nothing_and_has_the_bits(tmp_path, mode):
    cache = tmp_path / "cache"
    first, second = (reports(tmp_path / name, mode, cache) for name in ("first", "second"))
    without = [] if mode == "none" else reports(tmp_path / "without", mode, "off")  # its bits: the slow row
    assert [rank["found"] for rank in without] == [0] * len(without)
    for rank in range(2):
        assert second[rank]["found"] == second[rank]["asked"] == first[rank]["asked"] > 5
        assert first[rank]["found"] < first[rank]["asked"] / 2  # programs that both ranks compile
    assert len({rank["bits"] for rank in [*without, *first, *second]}) == 1
