"""What a fit pays before its first step: nothing that an earlier fit has paid."""

import jax
import numpy as np

import cyxjax as cx
from cyxjax.distributed import DistributedTrainer
from cyxjax.train import run_state
from tests.support.trainers import VAL, X, Y, config, mlp, two_devices  # noqa: F401


def test_a_second_fit_compiles_nothing(two_devices, tmp_path):  # noqa: F811
    trainer, compiled = DistributedTrainer(mlp(), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1)), []
    quiet = config(checkpoint_dir=str(tmp_path), resume="never")
    trainer.fit(X, Y, *VAL, quiet)
    jax.monitoring.register_event_duration_secs_listener(lambda *told, **more: compiled.append((*told, more)))
    try:
        first = trainer.params
        trainer.fit(X, Y, *VAL, quiet)
    finally:
        jax.monitoring.clear_event_listeners()
    # Shapes are traced again, for the checks of the data; no program is made.
    assert [more["fun_name"] for name, _, more in compiled if "backend_compile" in name] == []
    # it did train: the parameters went on from those of the first fit
    pairs = zip(*map(jax.tree.leaves, (first, trainer.params)), strict=True)
    assert any((np.asarray(a) != b).any() for a, b in pairs)


def test_a_second_fit_begins_with_the_parameters_where_they_lie(two_devices, monkeypatch):  # noqa: F811
    trainer = DistributedTrainer(mlp(), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1))
    quiet = config(checkpoint_every_n_epochs=0, resume="never")
    trainer.fit(X, Y, *VAL, quiet)
    fetched = []
    take = run_state.local_value
    monkeypatch.setattr(run_state, "local_value", lambda leaf: fetched.append(leaf.shape) or take(leaf))
    trainer.fit(X, Y, *VAL, quiet)
    assert fetched == [()]  # the step's number; 0.4 s of a GPU's time where a GPT-2 went to the host and back
