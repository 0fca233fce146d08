"""Callbacks: what they do to the step, to evaluation and to the history, on two replicas."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.errors import EXIT_PREEMPTED, ConfigError
from cyxjax.train.hooks.composite import checked
from cyxjax.train.hooks.hook import stops
from tests.support.trainers import VAL, X, Y, config, trainer

pytestmark = pytest.mark.usefixtures("two_devices")


def test_the_learning_rate_falls_on_a_plateau_and_nothing_is_compiled_again():
    # No epoch improves by 10, so after each patience of 1 epoch the factor halves, down to a quarter.
    falls = cx.ReduceLROnPlateau(0.5, patience=1, monitor="train_loss", min_delta=10, min_factor=0.25)
    one = trainer(callbacks=[falls])
    history = one.fit(X, Y, config(epochs=5))
    # The first epoch is the best seen so far; its successors each use up the patience.
    assert history.learning_rates == pytest.approx([0.1, 0.1, 0.05, 0.025, 0.025])
    assert one.program.train_step._cache_size() == 1
    # Half the rate from epoch 2 on: the same as training on with half of it (SGD has no memory).
    plain = trainer()
    first = plain.fit(X, Y, config(epochs=2)).train_losses
    assert history.train_losses[:2] == first
    assert history.train_losses[2] != trainer().fit(X, Y, config(epochs=3)).train_losses[2]


def test_a_plateau_goes_on_where_a_checkpoint_was_made(tmp_path):
    def run(**values):
        falls = cx.ReduceLROnPlateau(0.5, patience=2, min_delta=10)
        return trainer(callbacks=[falls, cx.EMA(0.9)]), config(
            checkpoint_dir=str(tmp_path / values.pop("to")), checkpoint_every_n_epochs=1, **values
        )

    whole, wanted = run(to="whole", epochs=5)
    unbroken = whole.fit(X, Y, *VAL, wanted)
    first, wanted = run(to="cut", epochs=2)  # one epoch of waiting done, one to go
    first.fit(X, Y, *VAL, wanted)
    second, wanted = run(to="cut", epochs=5, resume="must")
    history = second.fit(X, Y, *VAL, wanted)
    assert history.learning_rates == unbroken.learning_rates == [0.1, 0.1, 0.1, 0.05, 0.05]
    assert history.train_losses == unbroken.train_losses
    for a, b in zip(jax.tree.leaves(second.state.params), jax.tree.leaves(whole.state.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_evaluation_sees_the_average_and_training_the_parameters():
    # One sample, one step an epoch: the average can be followed by hand from the parameters.
    class Follow(cx.Callback):
        def on_start(self, moment):
            self.seen = [np.array(moment.state.params["0_linear"]["kernel"])]

        def wants_state(self, position, asked_to_save):
            return True

        def on_state(self, moment):
            self.seen.append(np.array(moment.state.params["0_linear"]["kernel"]))

    follow = Follow()
    one = trainer(callbacks=[cx.EMA(0.2), follow])
    history = one.fit(X[:1], Y[:1], X[:1], Y[:1], config(epochs=4))
    average = follow.seen[0]
    for t, params in enumerate(follow.seen[1:]):
        d = min(0.2, (1 + t) / (10 + t))
        average = d * average + (1 - d) * params
    kernel = one.params["0_linear"]["kernel"]
    np.testing.assert_allclose(kernel, average, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(one.get_model().parameters()["0_linear"]["kernel"], kernel)
    np.testing.assert_array_equal(one.state.params["0_linear"]["kernel"], follow.seen[-1])
    assert one.evaluate(X[:1], Y[:1])[0] == history.val_losses[-1]
    # The parameters train as without an average, also into a second fit.
    plain = trainer()
    for epochs in (4, 2):
        again = one.fit(X[:1], Y[:1], config(epochs=epochs)) if epochs == 2 else history
        assert plain.fit(X[:1], Y[:1], config(epochs=epochs)).train_losses == again.train_losses


@pytest.mark.parametrize("comm", ["zero1", "local_sgd"])
def test_an_average_in_parts_is_refused(comm):
    with pytest.raises(ConfigError, match="EMA .*comm="):
        trainer(callbacks=[cx.EMA()]).fit(X, Y, config(comm=comm))


@pytest.mark.parametrize("comm", ["zero1", "local_sgd"])
def test_the_learning_rate_falls_with_any_strategy(comm):
    one = trainer(callbacks=[cx.ReduceLROnPlateau(0.5, patience=1, monitor="train_loss", min_delta=10)])
    history = one.fit(X, Y, config(epochs=3, comm=comm))
    assert history.learning_rates == pytest.approx([0.1, 0.1, 0.05])
    assert one.program.train_step._cache_size() == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_fit_that_a_signal_stopped_says_so_and_keeps_the_history(capfd, number):
    class Stopped(cx.Callback):
        def on_epoch(self, info):  # once: a second signal ends the process
            if info.position.epoch == 1:
                os.kill(os.getpid(), number)

    one = trainer(callbacks=[Stopped()])
    if number == signal.SIGTERM:
        with pytest.raises(SystemExit) as ended:
            one.fit(X, Y, config(epochs=3))
        assert ended.value.code == EXIT_PREEMPTED
    else:
        assert one.fit(X, Y, config(epochs=3)).stopped_by == "interrupt"
    assert one.stopped_by_signal
    assert 0 < len(one.history.train_losses) < 3
    assert f"step {one.history.num_steps}" in capfd.readouterr().err


def test_training_stops_early_and_a_resumed_run_has_waited_already(tmp_path):
    def stopping(epochs, **more):
        folder = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1}
        one = trainer(callbacks=[cx.EarlyStopping(3, min_delta=10)])
        return one.fit(X, Y, *VAL, config(epochs=epochs, **folder, **more))

    assert len(stopping(3).train_losses) == 3  # the first is the best, two were waited for
    history = stopping(9, resume="must")
    assert (len(history.train_losses), history.stopped_by) == (4, "early_stopping")
    again = stopping(9, resume="must")  # the same command: what it waited for has not come since
    assert (again.train_losses, again.stopped_by) == (history.train_losses, "early_stopping")
    wrong = (VAL[0], (VAL[1] + 1) % 3)  # gets worse from the second epoch on
    by_config = trainer().fit(X, Y, *wrong, config(epochs=9, early_stopping_patience=2))
    assert (len(by_config.train_losses), by_config.stopped_by) == (3, "early_stopping")


def test_the_best_epoch_is_kept(tmp_path):
    # Validation labels that contradict the training's: the more is learned the worse, so epoch 0 is best.
    path, wrong = str(tmp_path / "best_model.pt"), (VAL[0], (VAL[1] + 1) % 3)
    history = trainer(callbacks=[cx.BestCheckpoint(path)]).fit(X, Y, *wrong, config(epochs=4))
    assert history.val_losses == sorted(history.val_losses)
    other = trainer()
    other.load_checkpoint(path)
    assert other.evaluate(*wrong)[0] == pytest.approx(history.val_losses[0], rel=1e-6)
    assert other.history.val_losses == history.val_losses[:1]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: trainer(callbacks=[cx.EarlyStopping]), "callbacks .*EarlyStopping"),
    ],
)
def test_bad_options_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


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
