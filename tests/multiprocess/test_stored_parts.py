"""A run of two processes that store parts, with moments on the host, is resumed and read by one and two."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.multiprocess.test_train import command
from tests.support import trainers
from tests.support.programs import printed_by

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
TWO = ["-m", "cyxjax.launch", "--nproc-per-node", "2"]


def here(*words):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as for users
        assert trainers.command(*words) == 0


def evaluated(text):
    line = next(line for line in text.splitlines() if '"part"' in line)
    return json.loads(line[line.index("{") :])


def test_it_goes_on_and_one_process_and_two_read_the_same(tmp_path, capsys, group):
    folder, more = tmp_path / "run", ["--model.name", "mlp", "--comm", "fsdp", "--offload", "optimizer"]
    printed_by(*TWO, *command(folder, 1), *more)
    assert "Resuming from step 20" in printed_by(*TWO, *command(folder, 2), *more)
    assert len(list((folder / "checkpoints" / "step_00000040" / "arrays").iterdir())) == 2
    two = evaluated(printed_by(*TWO, "-m", "cyxjax.cli", "evaluate", str(folder), "--json"))
    printed_by(*TWO, "-m", "cyxjax.cli", "export", str(folder), str(tmp_path / "two"))
    here("export", folder, tmp_path / "one")
    here("checkpoint", "export", folder, tmp_path / "joined")
    capsys.readouterr()
    here("evaluate", folder, "--json")
    one = evaluated(capsys.readouterr().out)
    assert one["samples"] == two["samples"]
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    arrays, *others = (load_file(tmp_path / name) for name in ("one", "two", "joined"))
    for same in others:
        assert sorted(arrays) == sorted(same)
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, same[name])
