"""The loop written by hand of starts.py: data, network and optimizer of configs/digits.yaml, one step."""

from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import optax
from flax import linen as nn
from starts import BUILT, LOADED, STEPPED, mark


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for channels in (32, 64):
            x = nn.max_pool(nn.relu(nn.Conv(channels, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def main() -> None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    table = np.loadtxt(
        Path(find_spec("sklearn").submodule_search_locations[0], "datasets/data/digits.csv.gz"), delimiter=","
    )
    x, y = (table[:, :-1] / 16).astype(np.float32).reshape(-1, 8, 8, 1), table[:, -1].astype(np.int32)
    mark(LOADED)
    model = CNN()
    params = jax.jit(model.init)(jax.random.key(42), x[:1])
    steps = optax.warmup_cosine_decay_schedule(1e-4, 2e-3, 20, 1000)
    optimizer = optax.adam(steps)
    opt_state = jax.jit(optimizer.init)(params)
    mark(BUILT)

    @jax.jit
    def step(params, opt_state, x, y):
        def loss_of(params):
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    _, _, loss = step(params, opt_state, x[:32], y[:32])
    float(loss)
    mark(STEPPED)


if __name__ == "__main__":
    main()
