"""The examples as users run them: on two devices of one process and in two processes, with equal losses."""

import jax
import pytest

import cyxjax as cx
from tests.multiprocess.conftest import forked_spawn as forked_spawn
from tests.support.places import ROOT, module_of
from tests.support.trainers import two_devices as two_devices

EXAMPLES = ROOT / "scripts" / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def losses(name, **options):
    """The loss of each epoch, from the example's own `main`."""
    example = module_of(EXAMPLES / f"{name}.py")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return example.main(**options)


def all_losses(names):
    return {name: losses(name, epochs=1) for name in names}


# Each model of the grid compiles its own programs: two points are a grid too.
OPTIONS = {"sweep": {"grid": {"lr": (0.003, 0.01), "hidden": (32,)}}, "packed_text": {"texts": 60}}

# The wide test with two processes also runs all of them on two devices.
SLOW = ("own_model", "worker_stream")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in NAMES])
def test_an_example_learns_on_two_devices(name, group, cwd, two_devices):
    found = losses(name, **OPTIONS.get(name, {}))
    assert found[-1] < 0.95 * found[0]
    assert {path.name for path in cwd.iterdir()} <= {"runs"}


def test_a_loop_that_resumes_from_its_file_has_the_losses_of_one_that_was_not_interrupted(group, tmp_path):
    path = tmp_path / "new" / "loop.pkl"
    losses("ddp_loop", epochs=1, path=path)
    assert losses("ddp_loop", epochs=3, path=path) == losses("ddp_loop", epochs=3)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)  # one after another, on a busy machine
@pytest.mark.parametrize(
    "names",
    [
        # optimizers in turns with noise per replica, masked tokens of packed rows, a stream split by rank
        ("gan", "packed_text", "worker_stream"),
        pytest.param(NAMES, marks=pytest.mark.wide),
    ],
    ids=["three", "all"],
)
def test_two_processes_have_the_losses_of_two_devices(names, group, forked_spawn, cwd, two_devices):
    alone = all_losses(names)
    one, two = cx.testing.run_ranks(2, all_losses, names)
    for name in names:
        assert one[name] == two[name]
        assert one[name] == pytest.approx(alone[name], rel=1e-5), name  # a different order of sums


def test_an_example_is_short():
    lengths = {name: len((EXAMPLES / f"{name}.py").read_text().splitlines()) for name in NAMES}
    assert len(NAMES) >= 7
    assert {name: count for name, count in lengths.items() if count > 80} == {}
