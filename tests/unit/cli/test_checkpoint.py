"""`cyxjax checkpoint`: its output, and that reading changes nothing."""

import contextlib
import json
import os
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import list_steps
from cyxjax.cli.checkpoint import main
from cyxjax.errors import CheckpointError, ConfigError

PARAMS = {"Dense_0": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3, jnp.bfloat16)}}


@pytest.fixture
def run(tmp_path):
    """A run folder with steps 1, 2 and 3; step 2 is the best."""
    state = {"params": PARAMS, "model_state": {"mean": jnp.zeros(3)}, "sync": {"mu": jnp.ones(3)}}
    with Checkpointer(tmp_path / "checkpoints", keep_last=5) as checkpointer:
        for step, loss in ((1, 3.0), (2, 0.5), (3, 1.25)):
            checkpointer.save(step, state, metric=loss)
    return tmp_path


def damage(run, step):
    path = run / "checkpoints" / f"step_{step:08d}" / "arrays" / "process_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize("below", [".", "checkpoints"])
def test_ls_shows_every_step_once_one_that_is_none_and_what_was_set_aside(run, printed, below):
    folder = run / "checkpoints"
    (folder / "step_00000004").mkdir()
    (folder / "step_00000005.corrupt-20260101-000000").mkdir()
    *rows, none, aside = printed(main, "ls", run / below).splitlines()
    found = [(line.split()[0], line.split()[-1]) for line in rows]
    assert found == [("step", "metric"), ("1", "3"), ("2", "0.5"), ("3", "1.25")]
    assert "4  MANIFEST.json: No such file" in none
    assert aside == "step_00000005.corrupt-20260101-000000: set aside because it did not verify"
    *steps, last = json.loads(printed(main, "ls", run, "--json"))
    assert [step["metric"] for step in steps] == [3, 0.5, 1.25]
    assert last.keys() == {"step", "error"}


def test_verify_says_which_file_is_damaged_and_ends_with_1(run, printed):
    (run / "config.yaml").write_text("of: another program\n")
    assert main(["verify", str(run)]) == 0
    damage(run, 2)
    before = sorted(os.listdir(run / "checkpoints"))
    shown = printed(main, "verify", run, code=1)
    assert "step 2: damaged: arrays/process_00000.safetensors has another sha256" in shown
    assert main(["verify", str(run), "--step", "3"]) == 0
    with pytest.raises(CheckpointError, match="checkpoints: .* 9"):
        main(["verify", str(run), "--step", "9"])
    found = json.loads(printed(main, "verify", run, "--json", code=1))
    assert [step["good"] for step in found] == [True, False, True]
    assert sorted(os.listdir(run / "checkpoints")) == before


@pytest.mark.parametrize("given", ["", "checkpoints", "a"])
def test_verify_reads_the_digests_of_the_run_wherever_its_checkpoints_are(run, printed, given):
    root = run / "a" if given == "a" else run  # the configuration of `a` names the checkpoints beside it
    root.mkdir(exist_ok=True)
    (root / "config.yaml").write_text(f"checkpoint_dir: {run / 'checkpoints'}\n")
    (root / "bits.jsonl").write_text('{"step": 2, "digests": {"params/Dense_0/bias": "0-0"}}\n')
    shown = printed(main, "verify", run / given, code=1)
    assert "step 2: damaged: the digest of params/Dense_0/bias" in shown


def test_export_writes_the_parameters_of_the_newest_good_step(run, printed):
    damage(run, 3)
    assert printed(main, "export", run, run / "m.safetensors").startswith("step 2: 3 arrays")
    tensors = dict(safetensors.deserialize((run / "m.safetensors").read_bytes()))
    assert sorted(tensors) == ["model_state/mean", "params/Dense_0/bias", "params/Dense_0/kernel"]
    assert tensors["params/Dense_0/bias"]["dtype"] == "BF16"
    kernel = np.frombuffer(tensors["params/Dense_0/kernel"]["data"], np.float32)
    assert kernel.tolist() == [0, 1, 2, 3, 4, 5]


def test_export_holds_one_leaf_at_a_time(tmp_path, capsys):
    kernels = {name: np.full((1000, 2000), number, np.float32) for number, name in enumerate("abc")}
    Checkpointer(tmp_path / "checkpoints", async_save=False).save(1, {"params": kernels})
    main(["export", str(tmp_path), str(tmp_path / "warm")])  # warm-up
    tracemalloc.start()
    try:
        assert main(["export", str(tmp_path), str(tmp_path / "m")]) == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20  # three of 8 MB each; measured 10.1
    assert safetensors.numpy.load_file(tmp_path / "m")["params/b"][-1, -1] == 1


def test_export_of_chosen_parts(run):
    assert main(["export", str(run), str(run / "m"), "--step", "1", "--part", "sync"]) == 0
    assert safetensors.numpy.load_file(run / "m").keys() == {"sync/mu"}
    with pytest.raises(CheckpointError, match=r"Step 3 .*weights.* model_state\W+params\W+sync"):
        main(["export", str(run), str(run / "m"), "--part", "weights"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from orbax, while its v1 is experimental
def test_plain_orbax_opens_what_is_exported_and_the_arrays_of_a_step_as_they_lie(run):
    assert main(["export", str(run), str(run / "tree"), "--to", "orbax"]) == 0
    import orbax.checkpoint as ocp  # slow: each worker imports every test file
    import orbax.checkpoint.experimental.v1 as v1

    tree = ocp.PyTreeCheckpointer().restore((run / "tree").absolute())
    assert sorted(tree) == ["model_state", "params"]
    assert np.asarray(tree["params"]["Dense_0"]["kernel"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(CheckpointError, match="/tree "):
        main(["export", str(run), str(run / "tree"), "--to", "orbax"])
    with v1.Context(checkpoint_layout=v1.options.CheckpointLayout.SAFETENSORS):
        arrays = v1.load(run / "checkpoints" / "step_00000002" / "arrays")
    assert arrays.keys() == {"model_state/mean", "params/Dense_0/bias", "params/Dense_0/kernel", "sync/mu"}
    assert np.asarray(arrays["params/Dense_0/kernel"]).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_export_reports_and_refuses_damaged_steps_and_a_bad_place(run, caplog):
    with pytest.raises(FileNotFoundError, match="none"):
        main(["export", str(run), str(run / "none" / "m")])
    damage(run, 3)
    assert main(["export", str(run), str(run / "m")]) == 0  # of step 2
    assert [record.args[0] for record in caplog.records] == [3]
    (run / "m").unlink()
    for step in (1, 2):
        damage(run, step)
    for source, words, message in (
        (run, ["--step", "2"], "step 2: .*process_00000"),
        (run, ["--step", "9"], r"step 9: .*MANIFEST\.json: [^.]*\. HINT:"),
        (run, [], "checkpoints: step 3: arrays"),
        (run / "checkpoints" / "step_00000001", [], r"step_00000001 .*step_"),
    ):
        with pytest.raises(CheckpointError, match=message):
            main(["export", str(source), str(run / "m"), *words])
    assert os.listdir(run) == ["checkpoints"]


def test_prune_keeps_the_newest_the_best_and_the_last_damaged_step(run, printed):
    folder = run / "checkpoints"
    # Step 9 was found damaged first, step 8 last.
    aside = ["step_00000009.corrupt-20260101-000000", "step_00000008.corrupt-20260102-000000-1"]
    aside += ["step_00000007.abandoned-20260103-000000"]
    for name in (*aside, "step_00000006.corrupt-mine"):
        (folder / name / "arrays").mkdir(parents=True)
    shown = printed(main, "ls", run)
    assert f"{aside[2]}: set aside because the run continued from an earlier step" in shown
    deleted = f"deleted step 1, {aside[0]}, {aside[2]}"
    for words, line in (
        ((), deleted),
        ((), "nothing to delete"),
        (("--keep-corrupt", 0), f"deleted {aside[1]}"),
    ):
        assert printed(main, "prune", run, "--keep-last", 1, *words) == f"{line}\n"
    kept = ["step_00000002", "step_00000003", "step_00000006.corrupt-mine"]  # the last one is not our naming
    assert sorted(os.listdir(folder)) == ["run.lock", *kept]
    assert os.listdir(run) == ["checkpoints"]
    with pytest.raises(ConfigError, match="--keep-corrupt.*-1"):
        main(["prune", str(run), "--keep-last", "3", "--keep-corrupt", "-1"])


ASKS = pytest.raises(ConfigError, match="--best")  # for the direction of a metric of one's own


@pytest.mark.parametrize(
    ("config", "kept", "outcome"),
    [
        ({"monitor": "val_loss"}, [2, 3], contextlib.nullcontext()),
        ({"monitor": "val_accuracy"}, [1, 3], contextlib.nullcontext()),
        ({"monitor": "val_bleu"}, [1, 2, 3], ASKS),
        (None, [2, 3], contextlib.nullcontext()),  # of another program
    ],
)
def test_prune_keeps_the_step_that_the_run_s_monitor_calls_best(config, kept, outcome, tmp_path):
    with Checkpointer(tmp_path, keep_last=5) as checkpointer:
        for step, value in ((1, 3.0), (2, 0.5), (3, 1.25)):
            checkpointer.save(step, {"params": PARAMS}, {"config": config}, metric=value)
    with outcome:
        main(["prune", str(tmp_path), "--keep-last", "1"])
    assert list_steps(tmp_path) == kept
