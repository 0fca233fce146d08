"""What a hook's methods may return, and methods that are never called."""

import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.train.hooks.composite import checked
from cyxjax.train.hooks.hook import stops


def test_true_stops_and_nothing_else():
    for answer in (True, np.True_, jnp.array(True)):
        assert stops(answer)
    for answer in (None, False, np.False_, jnp.array(False), 0, 1, {"loss": 1.0}, "stop", np.ones(3)):
        assert not stops(answer)


@pytest.mark.parametrize("name", ["on_epoch_end", "on_train_begin", "on_save_checkpoint"])
def test_a_method_of_another_library_prints_a_line_that_names_it(name, capfd):
    own = type("Own", (cx.Callback,), {name: lambda self, *values: None})
    checked([own(), cx.EarlyStopping(3), cx.EMA(), cx.TerminateOnNaN()])
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert name in said
    assert "Own" in said
