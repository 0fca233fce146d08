"""What a fit pays before its first step: nothing that an earlier fit has paid."""

import jax
import numpy as np

import cyxjax as cx
from cyxjax.distributed import DistributedTrainer
from tests.support.trainers import VAL, X, Y, config, mlp, two_devices  # noqa: F401


def test_a_second_fit_compiles_nothing(two_devices, tmp_path):  # noqa: F811
    trainer, compiled = DistributedTrainer(mlp(), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1)), []
    quiet = config(checkpoint_dir=str(tmp_path), resume="never")
    trainer.fit(X, Y, *VAL, quiet)
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        first = trainer.params
        trainer.fit(X, Y, *VAL, quiet)
    finally:
        jax.monitoring.clear_event_listeners()
    # Shapes are traced again, for the checks of the data; no program is made.
    assert [name for name in compiled if "backend_compile" in name] == []
    # it did train: the parameters went on from those of the first fit
    pairs = zip(*map(jax.tree.leaves, (first, trainer.params)), strict=True)
    assert any((np.asarray(a) != b).any() for a, b in pairs)
