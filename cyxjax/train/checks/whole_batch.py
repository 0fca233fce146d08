"""Checks for losses over the global batch (`core/objective/global_loss.py`), and for batch norms that cannot
exclude padding."""

from typing import Any

import jax

from cyxjax.core.mesh import REPLICATED
from cyxjax.core.model.batch_stats import needs_full_batches
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.objective.global_loss import sees_whole_batch
from cyxjax.core.strategy import Sync
from cyxjax.errors import ConfigError
from cyxjax.train.feeding.fit_data import FitData, is_loader
from cyxjax.train.settings import BatchShape, Settings

_WAY = "HINT: put the batch first in what it takes, or drop_last=True."


def check_whole_batch(loss: Any, settings: Settings, data: FitData) -> None:
    """Returns where a step has the whole batch at once, which a loss over the global batch needs.

    Raises: ConfigError saying what cuts the batch, or which data end in a short one.
    """
    plan = settings.step
    if plan.is_exact:
        raise ConfigError(
            "reproducibility='exact' computes each part of a batch alone, and the loss compares samples of "
            "all of them. HINT: leave reproducibility at 'none'."
        )
    if plan.batch.accumulation > 1:
        raise ConfigError(
            f"gradient_accumulation_steps={plan.batch.accumulation} cuts the global batch, and the loss "
            "compares samples of all of it. HINT: gradient_accumulation_steps=1; remat='full' saves memory."
        )
    epoch = settings.reading.epoch
    if not (epoch and epoch.drop_last):
        check_full_batches(loss, data.train, plan.batch, "training data")
    if data.val is not None:
        check_full_batches(loss, data.val, plan.batch, "validation data")


def check_full_batches(loss: Any, data: Any, batch: BatchShape, what: str) -> None:
    """Raises: ConfigError where `data` end in a short batch and the loss has no argument for its padding."""
    if not sees_whole_batch(loss) or loss.takes_padding:
        return
    size = batch.batch_size * batch.num_shares
    if is_loader(data):
        short = "come from a loader, whose last batch may be short"
    elif len(data) % size:
        short = f"end in a short batch: {len(data)} samples in batches of {size}"
    else:
        return
    raise ConfigError(
        f"the {what} {short}, and the loss takes no weight that separates padding from samples. "
        "HINT: take it as third argument, fn(output, target, weight): 1 for a sample, 0 for padding."
    )


def check_same_params(sync: Sync, comm: str) -> None:
    """Raises: ConfigError where replicas hold other parameters: a loss over the global batch compares outputs
    of all of them.
    """
    if sync.params_spec != REPLICATED and not sync.keeps_parts:
        raise ConfigError(
            f"comm={comm!r} keeps different parameters on each replica, and the loss compares their outputs. "
            "HINT: comm='mean', or another that keeps them equal."
        )


def check_norms(fns: ModelFns, settings: Settings, inputs: Any) -> list[str]:
    """Warnings for batch norms that cannot exclude padding, where batches may be padded.

    inputs: one sample's, (1, ...).
    Raises: ConfigError with the shape of what a norm takes.
    """
    epoch, rows = settings.reading.epoch, settings.step.batch.batch_size
    if epoch is not None and (epoch.drop_last or epoch.num_samples % epoch.global_batch_size == 0):
        return []
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), inputs)
    key = jax.random.key(0)
    params, model_state = jax.eval_shape(fns.init, key, inputs)
    what = needs_full_batches(fns, params, model_state, batch, key)
    if not what:
        return []
    if epoch is None:
        return [f"{what[0].upper()}{what[1:]}: a short batch of the loader would give NaN. {_WAY}"]
    short = f"{epoch.num_samples} samples in batches of {epoch.global_batch_size} end in a short one"
    raise ConfigError(f"{what}: {short}, whose padding would count in its statistics. {_WAY}")
