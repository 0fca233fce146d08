"""What hooks answer and are called: what would end a run unsaid, or never run, is refused."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.errors import ConfigError
from cyxjax.train.hooks.brought.answers import stops
from cyxjax.train.hooks.callbacks import check


def test_true_stops_and_anything_else_but_nothing_is_refused():
    told = (True, np.True_, jnp.array(True), None, False, np.False_, jnp.array(False), 0)
    assert [stops("", "on_step", answer) for answer in told] == [True] * 3 + [False] * 5

    async def late():
        return True

    for answer in ({"loss": 1.0}, "stop", 1, np.ones(3), late(), (one for one in ())):
        with pytest.raises(
            ConfigError, match=rf"on_step of the callback str gave {type(answer).__name__} .*HINT"
        ):
            stops("", "on_step", answer)


def test_a_hook_that_only_makes_a_coroutine_or_a_generator_is_refused_where_callbacks_are_taken():
    class Late(cx.Callback):
        async def on_epoch(self, info):
            return True

    class Parts(cx.Callback):
        def on_end(self, moment, finished):
            yield

        def parts(self):  # one of its own, which nobody else calls
            yield

    with pytest.raises(ConfigError, match="on_epoch of the callback Late is a coroutine"):
        check([Late()])
    with pytest.raises(ConfigError, match="on_end of the callback Parts is a generator"):
        check([Parts()])


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("on_epoch_end", "on_epoch"),
        ("on_train_begin", "on_start"),
        ("on_train_end", "on_end"),
        ("on_train_batch_end", "on_step"),
        ("on_validation_epoch_end", "on_evaluation"),
        ("on_save_checkpoint", "on_state"),
    ],
)
def test_a_hook_by_another_librarys_name_is_refused(name, nearest):
    own = type("Own", (cx.Callback,), {name: lambda self, *values: None})
    with pytest.raises(
        ConfigError, match=f"Own has {name}, which is never called. HINT: the nearest is {nearest};"
    ):
        check([own()])


def test_a_method_that_somebody_calls_is_no_lost_hook():
    class Adapter(cx.Callback):
        def on_epoch(self, info):
            return [self.on_epoch_end(one) for one in (info,)] and None

        def on_epoch_end(self, info): ...

        def on_signal(self, number): ...

    class Elsewhere:
        def on_epoch_end(self, epoch, logs=None): ...

    class Both(cx.Callback, Elsewhere):  # serves two libraries
        def on_epoch_end(self, epoch, logs=None): ...

    class Wrapped(cx.Callback):
        @functools.wraps(Adapter.on_epoch)  # a decorator's
        def on_epoch(self, info): ...

        @classmethod
        def told(cls):
            return [lambda one: one.on_batch_end()]

        def on_batch_end(self): ...

        def on_epoch_end(self, info): ...

    class Named(cx.Callback):  # calls by a name that is made
        def on_step(self, info):
            getattr(self, f"on_{info.place}_end")()

        def on_fit_end(self): ...

    given = [Adapter(), Both(), Wrapped(), Named(), cx.EarlyStopping(3), cx.EMA(), cx.TerminateOnNaN()]
    assert check(given) == given
