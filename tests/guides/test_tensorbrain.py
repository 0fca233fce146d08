"""The TensorBrain guide: its program under the launcher, and one process over all devices."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import jax
import pytest

import cyxjax as cx
from cyxjax.distributed import process_group
from cyxjax.errors import ConfigError
from tests.guides import program_tensorbrain as program
from tests.guides.program_cyxwiz import data, model
from tests.support.programs import launch

pytestmark = pytest.mark.multiprocess
dist = cx.distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    flags = ("--gpus", "2", "--script")  # the Genesis guide's; torchrun's: test_cricket.py
    return launch(Path(program.__file__), tmp_path_factory.mktemp("tensorbrain"), *flags)


def test_the_loop_learns_and_ranks_stay_alike(ranks):
    assert [r["place"] for r in ranks.reports] == [[0, 2, 0], [1, 2, 1]]
    losses = ranks.every("losses")
    assert losses[-1] < losses[0]
    ranks.every("bias")
    first, second, third = ranks.reports[0]["first_batches"]
    assert first != second != third  # set_epoch gives each epoch a different order
    assert ranks.reports[1]["first_batches"][0] != first  # the ranks read different samples


def test_collectives_fill_arrays_as_in_torch(ranks):
    assert ranks.every("summed") == ranks.every("told") == [1.0, 2.0, 3.0]
    assert ranks.every("gathered") == [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]
    assert [r["scattered"] for r in ranks.reports] == [[1.0], [2.0]]


def test_data_parallel_is_the_wrapper_on_all_devices_of_one_process(capsys):
    net = dist.DataParallel(model())
    assert capsys.readouterr().out == f"Using {jax.local_device_count()} CPU devices\n"
    assert isinstance(net, dist.DistributedDataParallel)
    assert net(data()[0]).devices() == {*jax.local_devices()}


def test_the_timeout_of_init_process_group():
    dist.init_process_group("gloo", "env://", 0, 1, timedelta(seconds=90))
    assert process_group.current().topology.timeout_ms == 90_000


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"init_method": "file:///x"}, "expected 'env://' or 'tcp://HOST:PORT'"),
        ({"init_method": "tcp://localhost"}, "init_method='localhost'"),
        ({"rank": 0}, "WORLD_SIZE"),
    ],
)
def test_arguments_of_init_process_group_that_name_no_place(given, named):
    with pytest.raises(ConfigError, match=named):
        dist.init_process_group(**given)


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, {}),
        ({"rank": 1, "world_size": 2}, {}),
        ({"rank": 1}, {}),
        ({"timeout": 60, "backend": "nccl"}, {"timeout_ms": 60_000, "backend": "nccl"}),
        ({"init_method": "tcp://[::1]:29511"}, {"master_addr": "::1", "master_port": 29_512}),
    ],
)
def test_arguments_of_init_process_group_change_only_their_own_fields(monkeypatch, given, changes):
    # torchrun's variables: its agent holds MASTER_PORT, so the ranks meet one above
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1234"}
    env |= {"MASTER_ADDR": "10.0.0.1", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env |= {"DISTRIBUTED_TIMEOUT_MS": "5000", "DISTRIBUTED_BACKEND": "cpu"}
    made = []
    monkeypatch.setattr(process_group, "here", lambda: env)
    monkeypatch.setattr(process_group, "_join", made.append)
    dist.init_process_group(**given)
    assert made == [replace(process_group.discover(env), **changes)]
