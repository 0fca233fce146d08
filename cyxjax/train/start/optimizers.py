"""Optimizers by the guides' names, each an optax transformation that remembers its learning rate."""

from collections.abc import Callable
from typing import Any

import optax

from cyxjax.errors import ConfigError
from cyxjax.train.settings import RatePlan


class Optimizer(optax.GradientTransformation):
    """An optax transformation with `lr`, its peak learning rate. Any optax transformation does as well."""

    lr: float


def _named(transformation: optax.GradientTransformation, lr: float) -> Optimizer:
    if not lr > 0:
        raise ConfigError(f"lr={lr!r}: a learning rate is a positive number. HINT: 0.001 suits Adam.")
    optimizer = Optimizer(transformation.init, transformation.update)
    optimizer.lr = lr
    return optimizer


def _with_l2(weight_decay: float, transformation: optax.GradientTransformation) -> Any:
    """torch's `weight_decay` outside AdamW: an L2 term of the gradient, before the rule sees it."""
    if not weight_decay:
        return transformation
    return optax.chain(optax.add_decayed_weights(weight_decay), transformation)


def SGDOptimizer(
    lr: float = 0.01, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
) -> Optimizer:
    """v = momentum * v + g; p -= lr * v. Source: torch.optim.SGD (dampening 0)."""
    return _named(_with_l2(weight_decay, optax.sgd(lr, momentum or None, nesterov)), lr)


def MomentumOptimizer(lr: float = 0.01, momentum: float = 0.9, nesterov: bool = False) -> Optimizer:
    """SGD with momentum."""
    return SGDOptimizer(lr, momentum, nesterov)


def AdamOptimizer(
    lr: float = 0.001,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Source: Kingma and Ba 2015, arXiv:1412.6980; defaults as torch.optim.Adam."""
    return _named(_with_l2(weight_decay, optax.adam(lr, *betas, eps=eps)), lr)


def AdamWOptimizer(
    lr: float = 0.001,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Adam with decoupled decay. Source: Loshchilov and Hutter 2019, arXiv:1711.05101."""
    return _named(optax.adamw(lr, *betas, eps=eps, weight_decay=weight_decay), lr)


def RMSPropOptimizer(
    lr: float = 0.01, decay: float = 0.99, eps: float = 1e-8, momentum: float = 0.0
) -> Optimizer:
    """Defaults as torch.optim.RMSprop; eps is added outside the root, as there."""
    return _named(optax.rmsprop(lr, decay, eps, momentum=momentum or None, eps_in_sqrt=False), lr)


def AdaGradOptimizer(lr: float = 0.01, eps: float = 1e-10) -> Optimizer:
    """Source: Duchi, Hazan and Singer 2011; accumulators start at 0, as in torch.optim.Adagrad."""
    return _named(optax.adagrad(lr, initial_accumulator_value=0.0, eps=eps), lr)


def build_optimizer(section: Any) -> Optimizer:
    """The optimizer an experiment's `optimizer` section describes."""
    lr, decay, (b1, b2) = section.lr, section.weight_decay, section.betas
    made: dict[str, Callable[[], optax.GradientTransformation]] = {
        "sgd": lambda: SGDOptimizer(lr, weight_decay=decay),
        "momentum": lambda: SGDOptimizer(lr, section.momentum, section.nesterov, decay),
        "adam": lambda: AdamOptimizer(lr, section.betas, section.eps, decay),
        "adamw": lambda: AdamWOptimizer(lr, section.betas, section.eps, decay),
        "lamb": lambda: optax.lamb(lr, b1, b2, eps=section.eps, weight_decay=decay),
        "lion": lambda: optax.lion(lr, b1, b2, weight_decay=decay),
        "adagrad": lambda: _with_l2(decay, optax.adagrad(lr, eps=section.eps)),
        "rmsprop": lambda: _with_l2(decay, RMSPropOptimizer(lr, eps=section.eps, momentum=section.momentum)),
    }
    return _named(made[section.name](), lr)


Schedule = Callable[[Any], Any]
"""optimizer steps done -> factor on the learning rate"""


def build_schedule(plan: RatePlan) -> Schedule:
    """Factor on the learning rate: linear warm-up to the peak, then constant, cosine or linear decay.

    Counted in optimizer steps only, so it does not change with the number of processes. The first step of
    a warm-up of n steps has peak / n, as in Goyal et al. 2017; step n has the peak.
    """
    peak, decay_steps = plan.peak, max(plan.decay_steps, 1)
    after: dict[str, Callable[[], Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, plan.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, peak * plan.final_fraction, decay_steps),
    }
    if not plan.warmup_steps:
        return after[plan.name]()
    warmup = optax.linear_schedule(peak / plan.warmup_steps, peak, max(plan.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after[plan.name]()], [plan.warmup_steps])


def with_schedule(optimizer: optax.GradientTransformation, factor: Schedule) -> optax.GradientTransformation:
    """`optimizer` with its updates times `factor(step)`.

    A rule's update is proportional to its learning rate, so one factor serves every optax transformation.
    """
    return optax.chain(optimizer, optax.scale_by_schedule(factor))
