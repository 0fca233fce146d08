"""Models as their libraries' examples write them, with all that a run puts around them: as by `mean`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

import cyxjax as cx
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.trees import named_leaves
from cyxjax.train.start.optimizers import with_groups
from cyxjax.train.trainer import DistributedTrainer
from tests.support.trainers import own_group as own_group
from tests.support.trainers import use_devices

pytestmark = pytest.mark.usefixtures("as_users_promote")

RNG = np.random.default_rng(1)
TOKENS = RNG.integers(0, 13, (36, 7)).astype(np.int32)
NEXT = np.roll(TOKENS, -1, 1)
SLOW, WIDE = pytest.mark.slow, pytest.mark.wide


class Block(nn.Module):
    """As in flax's lm1b: norm, attention, norm, two layers; dropout after each."""

    @nn.compact
    def __call__(self, x, train):
        drop = nn.Dropout(0.1, deterministic=not train)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + drop(nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask))
        return x + drop(nn.Dense(6)(nn.gelu(nn.Dense(10)(nn.LayerNorm()(x))))), None


class Transformer(nn.Module):
    """Layers scanned and computed again in backward, the embedding tied to the output."""

    @nn.compact
    def __call__(self, tokens, train=False):
        embed = nn.Embed(13, 6, name="embed")
        places = self.param("places", nn.initializers.normal(0.02), (1, 7, 6))
        layers = nn.scan(
            nn.remat(Block, static_argnums=(2,), prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=3,
        )(name="layers")
        x, _ = layers(embed(tokens) + places, train)
        return embed.attend(nn.LayerNorm(name="norm")(x))


class Experts(nnx.Module):
    """A router sends each token to two of four experts, made by vmap and summed by an einsum."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(13, 6, rngs=rngs)
        self.router = nnx.Linear(6, 4, use_bias=False, rngs=rngs)
        made = nnx.vmap(lambda key: nnx.Linear(6, 6, rngs=key), in_axes=0, out_axes=0)
        self.experts = nnx.split_rngs(splits=4)(made)(rngs)
        self.norm, self.last = nnx.LayerNorm(6, rngs=rngs), nnx.Linear(6, 13, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        best, which = jax.lax.top_k(jax.nn.softmax(self.router(x)), 2)
        share = (jax.nn.one_hot(which, 4) * best[..., None]).sum(-2)
        each = nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None), out_axes=0)(self.experts, x)
        return self.last(self.norm(x + jnp.einsum("ebtd,bte->btd", nnx.tanh(each), share)))


MODELS = {"transformer": Transformer, "experts": lambda: Experts(nnx.Rngs(0))}


def trained(comm, model, replicas, folder=None, optimizer=None, callbacks=(), val=False, **settings):
    use_devices(replicas)
    rule = optimizer or optax.chain(optax.scale_by_rms(), optax.trace(0.9), optax.scale(-0.003))
    trainer = DistributedTrainer(MODELS[model](), cx.CrossEntropyLoss(), rule, callbacks=callbacks)
    saving = {"checkpoint_dir": str(folder), "resume": "auto", "checkpoint_every_n_epochs": 1}
    saving = saving if folder else {"checkpoint_every_n_epochs": 0}
    given = {"epochs": 2, "global_batch_size": 12, "comm": comm, "verbose": False} | saving | settings
    data = (TOKENS, NEXT, TOKENS[:8], NEXT[:8]) if val else (TOKENS, NEXT)
    trainer.fit(*data, DistributedTrainingConfig(**given))
    return trainer


def assert_alike(one, other):
    # Steps of 0.003 on numbers up to 2: last bits differ, a replica or a group left out shows in the third.
    for (name, a), (_, b) in zip(*(named_leaves(run.params) for run in (one, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(one.history.train_losses, other.history.train_losses, rtol=1e-4)
    # A norm divides by what may be small: measured 3e-4 of outputs up to 2.
    np.testing.assert_allclose(one.predict(TOKENS), other.predict(TOKENS), rtol=1e-3, atol=2e-3)


@SLOW
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("transformer", {"max_grad_norm": 0.1, "on_nonfinite": "skip"}),
        pytest.param("experts", {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}, marks=WIDE),
        pytest.param("transformer", {"comm_options": {"regather": False}}, marks=WIDE),
    ],
)
def test_a_stranger_s_model_trains_as_by_mean(model, options):
    plain = {key: value for key, value in options.items() if key != "comm_options"}
    assert_alike(trained("fsdp", model, 3, **options), trained("mean", model, 3, **plain))


GROUPS = [
    {"match": "embed/*", "frozen": True},
    {"match": "*/bias", "lr": 0.01},
    {"match": "experts/*", "lr": 0.02},
]


def around(folder, comm):
    """Groups of parameters, an average, a stop, first values of a file: for each fit anew."""
    file = folder / "first.safetensors"
    save_file({"router.kernel": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)}, file)
    average = [cx.EMA(0.9)] if comm != "zero1" else []  # which refuses it: nobody has the whole
    return {
        "optimizer": with_groups(cx.MomentumOptimizer(0.05), GROUPS),
        "callbacks": [*average, cx.EarlyStopping(3)],
        "init_from": {"path": str(file), "strict": False},
        "val": True,
    }


@SLOW
@pytest.mark.parametrize("comm", ["fsdp", pytest.param("zero1", marks=WIDE)])
def test_groups_an_average_a_stop_and_first_values_go_through_resumes_of_4_2_and_3(comm, tmp_path):
    for epochs, replicas in enumerate((4, 2, 3), 1):
        one = trained(comm, "experts", replicas, tmp_path / "a", epochs=epochs, **around(tmp_path, comm))
    other = trained("mean", "experts", 1, epochs=3, **around(tmp_path, comm))
    assert_alike(one, other)
    np.testing.assert_allclose(one.history.val_losses, other.history.val_losses, rtol=1e-4)
    assert len(one.history.val_losses) == 3
