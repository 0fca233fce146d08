"""The guides' loops in their own order and spelling, with one rank; unsupported forms name our form."""

import jax
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.distributed import process_group
from cyxjax.distributed.spawning import _taken
from cyxjax.errors import ConfigError

dist = cx.distributed
RNG = np.random.default_rng(0)
BATCHES = [(RNG.normal(size=(8, 6)).astype(np.float32), RNG.integers(0, 3, 8)) for _ in range(3)]


def stacked():
    return cx.SequentialModel([cx.LinearModule(6, 3)])


@pytest.fixture(autouse=True)
def world_of_one(own_group):
    dist.init_process_group(backend="gloo", world_size=1, rank=0)
    process_group.narrow(2)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax's Adam needs them
        yield


def by_ours():
    """The same steps in our own API."""
    ddp, optimizer = dist.DistributedDataParallel(stacked()), cx.AdamOptimizer(0.01)
    for data, targets in BATCHES:
        ddp.loss(cx.CrossEntropyLoss(), ddp(data), targets).backward()
        ddp.update_parameters(optimizer)
    return ddp.parameters()


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_criterion_zero_grad_backward_step(accumulation):
    model = stacked().to("cpu")
    ddp_model = dist.DistributedDataParallel(model, device_ids=[0])
    optimizer = cx.AdamOptimizer(ddp_model.parameters(), lr="1e-2")
    criterion = cx.CrossEntropyLoss()
    lines = []
    for i, (data, targets) in enumerate(BATCHES):
        outputs = ddp_model(data)
        loss = criterion(outputs, targets) / accumulation
        if accumulation == 1:
            optimizer.zero_grad()
        loss.backward()
        if (i + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        lines.append(f"Loss: {loss.item():.4f}")
        # After `backward` a loss is a plain number, as in evaluation.
        assert isinstance(criterion(outputs, targets), jax.Array)
    assert len(set(lines)) == 3
    if accumulation == 1:
        same(ddp_model.parameters(), by_ours())
    else:  # one update with the mean gradient: Adam's first step is about lr, whatever the gradient
        first = dist.DistributedDataParallel(stacked()).parameters()
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), ddp_model.parameters(), first)
        assert max(jax.tree.leaves(moved)) == pytest.approx(0.01, rel=1e-3)
    ddp_model.eval()
    assert isinstance(criterion(ddp_model(BATCHES[0][0]), BATCHES[0][1]), jax.Array)


def test_a_network_by_name_is_moved_as_torch_moves_one():
    for name in cx.models.model_names():
        made = cx.get_model(name)()
        assert made.to(0) is made


def test_two_models_do_not_mix_up_their_outputs():
    one, two = (dist.DistributedDataParallel(stacked(), seed=seed) for seed in (0, 1))
    outputs = [ddp(BATCHES[0][0]) for ddp in (one, two)]
    losses = [cx.CrossEntropyLoss()(output, BATCHES[0][1]) for output in outputs]
    assert [loss.ddp for loss in losses] == [one, two]


def test_what_is_bound_to_nothing_says_our_form():
    ddp_model = dist.DistributedDataParallel(stacked())
    for call, form in (
        ("step", r"ddp\.update_parameters\(optimizer\)"),
        ("zero_grad", r"ddp\.zero_grad\(\)"),
    ):
        with pytest.raises(ConfigError, match=f"HINT: call {form}"):
            getattr(cx.AdamOptimizer(0.1), call)()
    part = {"head": dict(ddp_model.parameters())["0_linear"]["kernel"] * 1}
    for parameters in ({"w": np.ones(3)}, part, iter([np.ones(3)])):
        with pytest.raises(ConfigError, match=r"AdamOptimizer .*AdamOptimizer\(0\.001\)"):
            cx.AdamOptimizer(parameters, lr=0.1)


def as_torch(rank, world_size, config):
    return rank, world_size, config


def as_ours(rank, world_size, settings, folder):
    return rank, world_size, settings, folder


def test_spawn_takes_torch_s_arguments_and_ours():
    # mp.spawn(train, args=(world_size, config), nprocs=world_size)
    assert _taken(as_torch, 1, 2, (2, "config")) == (1, 2, "config")
    assert _taken(as_ours, 1, 2, ("settings", "folder")) == (1, 2, "settings", "folder")


def test_a_file_s_model_type_and_rate_are_taken_as_they_stand(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {type: vae, latent_size: 3, hidden: [8]}\ntraining: {lr: 1e-3}\n")
    config = cx.Config.from_file(str(path))
    assert cx.get_model(config.model.type)(config).latent_size == 3
    assert config.training.lr * 2 == 0.002
    assert cx.AdamOptimizer(lr=config.training.lr).lr == 0.001
    with pytest.raises(ConfigError, match="'vae'.* 'mlp'"):
        cx.get_model("mlp")(config)
