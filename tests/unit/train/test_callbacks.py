"""Callbacks on two replicas: their effects, and the calls that they may make on the trainer during a fit."""

import os
import signal

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.core.optimizer import averaged_params, with_parameter_average
from cyxjax.core.step import TrainState
from cyxjax.errors import EXIT_PREEMPTED, ConfigError, GroupError
from cyxjax.launch import heartbeat
from cyxjax.train import trainer as train
from cyxjax.train.hooks.all_callbacks import checked
from cyxjax.train.hooks.hook import stops
from tests.support.trainers import (
    VAL,
    X,
    Y,
    after_fit,
    config,
    does,
    fitted,
    loaded,
    mlp,
    same_bits,
    trainer,
    use_devices,
)

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.mark.parametrize("comm", ["mean", "zero1", "local_sgd"])
def test_the_learning_rate_falls_on_a_plateau_and_nothing_is_compiled_again(comm):
    # No epoch improves by 10, so after each patience of 1 epoch the factor halves, down to a quarter.
    falls = cx.ReduceLROnPlateau(0.5, patience=1, monitor="train_loss", min_delta=10, min_factor=0.25)
    one = trainer(linen.Dense(3), callbacks=[falls])
    one.prepare(X[:24], Y[:24], config=config(epochs=5, comm=comm))
    compiled = one.program.train_steps._cache_size()  # by other trainers with this program
    history = fitted(one=one, epochs=5, comm=comm).history
    # The first epoch is the best; each later epoch uses up the patience.
    assert history.learning_rates == pytest.approx([0.1, 0.1, 0.05, 0.025, 0.025])
    assert one.program.train_steps._cache_size() <= compiled + 1
    plain = fitted(epochs=3, comm=comm).history.train_losses
    assert history.train_losses[:2] == plain[:2]
    assert history.train_losses[2] != plain[2]


def test_plateaus_lower_one_learning_rate_and_go_on_where_a_checkpoint_was_made(tmp_path):
    """Each multiplies the rate by its own factor, once, also after a resume."""

    def run(to, **values):
        by_loss = cx.ReduceLROnPlateau(0.5, patience=2, monitor="train_loss", min_delta=10)
        by_val = cx.ReduceLROnPlateau(0.1, patience=3, min_delta=10)
        high = cx.ReduceLROnPlateau(0.1, patience=4, monitor="train_loss", min_delta=10, min_factor=0.1)
        values |= {"checkpoint_dir": str(tmp_path / to), "checkpoint_every_n_epochs": 1}
        return fitted(by_loss, by_val, high, cx.EMA(0.9), data=(X[:24], Y[:24], *VAL), **values)

    # The first lowers after epochs 3 and 5, the second after epoch 4; the third keeps it at least at 0.01
    # unless another has gone below.
    expected = [0.1, 0.1, 0.1, 0.05, 0.005, 0.0025]
    whole = run("whole", epochs=6)
    run("cut", epochs=4)  # lowered twice; one of two epochs of waiting of the first is over
    second = run("cut", epochs=6, resume="must")
    history = second.history
    assert history.learning_rates == whole.history.learning_rates == pytest.approx(expected)
    assert history.train_losses == whole.history.train_losses
    assert same_bits(second.state.params, whole.state.params)
    by_hand = after_fit(
        *(X[:24], Y[:24], config(epochs=6)),
        model=linen.Dense(3),
        lr=lambda step: jnp.asarray(expected)[step // 3],
    )
    assert history.train_losses == pytest.approx(by_hand.history.train_losses, rel=1e-6)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_plateau_goes_on_where_replicas_keep_their_own_rate(tmp_path, devices):
    use_devices(devices)

    def run(**values):
        falls = cx.ReduceLROnPlateau(0.5, patience=1, monitor="train_loss", min_delta=10)
        return fitted(falls, comm="local_sgd", checkpoint_every_n_epochs=1, **values).history

    saving = {"checkpoint_dir": str(tmp_path / "cut"), "resume": "auto"}
    rates = run(epochs=4, checkpoint_dir=str(tmp_path / "whole")).learning_rates
    run(epochs=3, **saving)
    assert run(epochs=4, **saving).learning_rates == rates == pytest.approx([0.1, 0.1, 0.05, 0.025])


def test_a_callback_has_the_time_of_an_evaluation_also_where_there_is_none():
    """The launcher ends a rank whose step takes two minutes."""
    one, seen = asking(epoch=lambda t, at: heartbeat.progress().phase)
    one.fit(X, Y, config(epochs=1))
    assert seen == ["eval"]


def test_evaluation_sees_the_average_and_training_the_parameters():
    # One sample, one step per epoch: the test can compute the average from the parameters.
    seen = []

    def see(self, moment):
        seen.append(np.array(moment.state.params["0_linear"]["kernel"]))

    follow = does(on_start=see, wants_state=lambda self, position, saving: True, on_state=see)
    one = trainer(callbacks=[cx.EMA(0.2), follow])
    history = one.fit(X[:1], Y[:1], X[:1], Y[:1], config(epochs=4))
    average = seen[0]
    for t, params in enumerate(seen[1:]):
        d = min(0.2, (1 + t) / (10 + t))
        average = d * average + (1 - d) * params
    kernel = one.params["0_linear"]["kernel"]
    np.testing.assert_allclose(kernel, average, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(one.get_model().parameters()["0_linear"]["kernel"], kernel)
    np.testing.assert_array_equal(one.state.params["0_linear"]["kernel"], seen[-1])
    assert one.evaluate(X[:1], Y[:1])[0] == history.val_losses[-1]
    # The parameters train as without an average, also into a second fit.
    plain = trainer()
    for epochs in (4, 2):
        again = one.fit(X[:1], Y[:1], config(epochs=epochs)) if epochs == 2 else history
        assert plain.fit(X[:1], Y[:1], config(epochs=epochs)).train_losses == again.train_losses


def test_an_average_of_bfloat16_moves_by_less_than_bfloat16_resolves():
    # From 1 towards 2 by a thousandth a step: 2 - 0.999 ** 100 = 1.0952. In bfloat16 1.001 is 1.
    rule, one = with_parameter_average(optax.set_to_zero(), 0.999), jnp.ones((), jnp.bfloat16)
    kept = rule.init(one)._replace(count=jnp.int32(10_000))
    for _ in range(100):
        _, kept = rule.update(one, kept, 2 * one)
    assert float(kept.average) == pytest.approx(2 - 0.999**100, rel=1e-5)
    assert averaged_params(TrainState(None, one, None, kept, None)) == kept.average.astype(jnp.bfloat16)


@pytest.mark.parametrize("comm", ["zero1", "local_sgd"])
def test_an_average_in_parts_is_refused(comm):
    with pytest.raises(ConfigError, match="EMA .*comm="):
        trainer(callbacks=[cx.EMA()]).fit(X, Y, config(comm=comm))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_fit_that_a_signal_stopped_says_so_and_keeps_the_history(capfd, number):
    def kill(t, at):
        if at.epoch == 1:  # once: a second signal ends the process
            os.kill(os.getpid(), number)

    one, _ = asking(epoch=kill)
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
        one = trainer(callbacks=[cx.EarlyStopping("val_loss", 10, 3)])  # the order of Keras
        return one.fit(X, Y, *VAL, config(epochs=epochs, **folder, **more))

    assert len(stopping(3).train_losses) == 3  # the first is the best, then two of patience
    history = stopping(9, resume="must")
    assert (len(history.train_losses), history.stopped_by) == (4, "early_stopping")
    again = stopping(9, resume="must")  # the same command: still no improvement
    assert (again.train_losses, again.stopped_by) == (history.train_losses, "early_stopping")


def test_positional_arguments_that_have_no_name_are_refused():
    with pytest.raises(TypeError):
        cx.ReduceLROnPlateau("val_loss", 0.5, 3, 1)


class Patient(cx.Callback):
    """Counts epochs and stops after four; has seen their losses."""

    def __init__(self, unlike=None):
        self.losses, self.unlike = np.zeros(0), unlike

    def on_epoch(self, info):
        self.losses = np.append(self.losses, info.train["loss"])
        return len(self.losses) == 4

    def state_dict(self):
        return {"losses": self.losses, "unlike": self.unlike}

    def load_state_dict(self, state):
        self.losses = state["losses"]


def test_a_callback_s_state_goes_on_in_a_resumed_run(tmp_path):
    def losses(folder, *epochs):
        kept = {"checkpoint_dir": str(tmp_path / folder), "checkpoint_every_n_epochs": 1, "resume": "auto"}
        for count in epochs:
            both = [Patient(), Patient()]  # of one class, and yet with a state each
            trainer(linen.Dense(3), callbacks=both).fit(X[:24], Y[:24], config(epochs=count, **kept))
        return [one.losses.tolist() for one in both]

    whole = losses("whole", 9)
    assert len(whole[0]) == 4
    assert losses("cut", 1, 2, 9) == whole
    unlike = Patient(unlike={1})
    one, saved = trainer(linen.Dense(3), callbacks=[unlike]), config(checkpoint_every_n_epochs=1)
    with pytest.raises(ConfigError, match="Patient"):
        one.fit(X[:24], Y[:24], saved, checkpoint_dir=str(tmp_path / "unlike"))
    assert not unlike.losses.size  # nothing was trained


class Counting(cx.Callback):
    steps = 0

    def on_step(self, info):
        self.steps += 1

    def state_dict(self):
        return self.steps

    def load_state_dict(self, state):
        self.steps = state


def test_after_a_rollback_a_callback_has_the_state_of_that_checkpoint(tmp_path):
    bad = np.where(np.arange(48)[:, None] == 34, np.nan, X[:48])  # in the fifth step of 8 samples
    rolls = {"shuffle": False, "on_nonfinite": "rollback", "checkpoint_every_n_steps": 1, "resume": "auto"}

    def counted(folder, *steps):
        for most in steps:
            counting, settings = (
                Counting(),
                config(max_steps=most, checkpoint_dir=str(tmp_path / folder), **rolls),
            )
            history = trainer(linen.Dense(3), callbacks=[counting]).fit(bad, Y[:48], settings)
        assert len(history.rollback_steps) == 1
        return counting.steps

    assert counted("cut", 2, 5) == counted("whole", 5) == 5


@pytest.mark.parametrize("saved_by", ["save_checkpoint", "BestCheckpoint", "load and save_checkpoint"])
def test_every_checkpoint_holds_the_state_of_callbacks(saved_by, tmp_path):
    path = str(tmp_path / "saved")
    best = [cx.BestCheckpoint(path, monitor="train_loss")] if saved_by == "BestCheckpoint" else []
    layer, counting = linen.Dense(3), Counting()
    settings = config(epochs=1, batch_size=8)
    one = after_fit(X[:24], Y[:24], settings, model=layer, callbacks=[*best, Counting()])
    if not best:
        one.save_checkpoint(path)
    if saved_by.startswith("load"):
        loaded(path, model=layer).save_checkpoint(path)
    again = loaded(path, model=layer, callbacks=[counting])
    again.fit(X[:24], Y[:24], config(epochs=2, batch_size=8))
    assert counting.steps == again.history.num_steps == 4


@pytest.mark.parametrize(
    ("answer", "stop"),
    [
        *((answer, True) for answer in (True, np.True_, jnp.array(True))),
        *((answer, False) for answer in (None, False, np.False_, jnp.array(False))),
        *((answer, False) for answer in (0, 1, {"loss": 1.0}, "stop", np.ones(3))),
    ],
)
def test_true_stops_and_nothing_else(answer, stop):
    assert stops(answer) == stop


def test_a_method_of_another_library_prints_a_line_and_a_class_is_refused(capfd):
    for name in ("on_epoch_end", "on_save_checkpoint"):
        own = type("Own", (cx.Callback,), {name: lambda self, *values: None})
        checked([own(), cx.EarlyStopping(3), cx.EMA(), cx.TerminateOnNaN()])
        (line,) = capfd.readouterr().err.splitlines()
        assert "Own" in line
        assert name in line
    with pytest.raises(ConfigError, match="callbacks .*EarlyStopping"):
        trainer(callbacks=[cx.EarlyStopping])


# ---- in the middle of a fit --------------------------------------------------------------------------------


def asking(model=None, others=(), **what):
    """(trainer, answers): a callback calls `what` with the trainer at each step, evaluation or epoch."""
    seen = []

    def asks(ask):
        return lambda self, info: seen.append(ask(one, info.position))

    callback = does(**{f"on_{moment}": asks(ask) for moment, ask in what.items()})
    one = trainer(model, callbacks=[callback, *others])
    return one, seen


def test_a_callback_evaluates_predicts_and_reads_the_parameters_of_now():
    one, seen = asking(
        step=lambda t, at: t.params, epoch=lambda t, at: (t.evaluate(*VAL), t.predict(VAL[0]), at.epoch)
    )
    one.fit(X, Y, *VAL, config(epochs=2))
    epochs = [answer for answer in seen if isinstance(answer, tuple)]
    assert [epoch for *_, epoch in epochs] == [1, 2]
    assert [loss for (loss, _), *_ in epochs] == one.history.val_losses  # of the epoch that just ended
    np.testing.assert_array_equal(epochs[-1][1], one.predict(VAL[0]))
    assert len(seen) == 2 * 8 + 2


def test_what_a_callback_saves_goes_on_bit_for_bit(tmp_path):
    # 8 steps an epoch, evaluations at 4, 8, ... At step 9 the next is dispatched, whose results no hook
    # has seen: it is saved too. At 11 and 16, the evaluation after the saved step is still to be made.
    places = {  # to the step that is saved
        "step-9": 10,
        "step-11": 12,
        "step-16": 16,
        "evaluation-4": 4,
        "evaluation-12": 12,
        "epoch-8": 8,
    }
    falls = lambda: cx.ReduceLROnPlateau(0.5, patience=1, min_delta=10)  # noqa: E731  # at each but the first
    settings = config(epochs=3, evaluate_every_n_steps=4, steps_in_flight=2, steps_per_dispatch=1)
    save = lambda when: (  # noqa: E731
        lambda t, at: f"{when}-{at.step}" in places and t.save_checkpoint(f"{tmp_path}/{when}-{at.step}")
    )
    one, _ = asking(others=[falls()], **{when: save(when) for when in ("step", "evaluation", "epoch")})
    history = one.fit(X, Y, *VAL, settings)
    for name, step in places.items():
        other = loaded(tmp_path / name, callbacks=[falls()])
        assert other.run_state.position.step == step
        again = other.fit(X, Y, *VAL, settings)
        assert (again.train_losses, again.val_steps) == (history.train_losses, history.val_steps), name
        assert again.learning_rates == history.learning_rates == pytest.approx([0.1, 0.025, 0.00625])
        assert same_bits(other.params, one.params), name


@pytest.mark.parametrize("call", ["fit", "load_checkpoint"])
def test_a_call_that_a_running_fit_would_not_take_is_refused(tmp_path, call, monkeypatch):
    path = str(tmp_path / "before")
    calls = {
        "fit": lambda t, at: t.fit(X, Y, config()),
        "load_checkpoint": lambda t, at: t.load_checkpoint(path),
    }
    one, _ = asking(epoch=calls[call])
    other = after_fit(X, Y, config(epochs=1))
    other.save_checkpoint(path)
    monkeypatch.setattr(train, "on_any_rank", None)  # it must not wait for the other ranks first
    with pytest.raises(GroupError, match=rf"^{call}\(.* fit"):
        one.fit(X, Y, config())
    monkeypatch.undo()
    one.load_checkpoint(path)  # and it may be called afterwards
    assert one.evaluate(*VAL) == other.evaluate(*VAL)


def test_after_an_error_in_a_callback_the_trainer_goes_on_from_what_it_learned(tmp_path):
    def fail(t, at):
        if at.step == 3:
            raise ValueError("callback's")

    one, _ = asking(step=fail)
    with pytest.raises(ValueError, match="callback's"):
        one.fit(X, Y, config(epochs=2, steps_in_flight=4, steps_per_dispatch=1))
    done = one.run_state.position.step
    assert done == 6  # three more were dispatched
    alike = after_fit(X, Y, config(epochs=2, max_steps=done))
    assert one.evaluate(*VAL) == alike.evaluate(*VAL)
    one.save_checkpoint(str(tmp_path / "rescued"))  # complete: includes the steps that were dispatched
    other = loaded(tmp_path / "rescued")
    np.testing.assert_allclose(other.run_state.sums, alike.run_state.sums, rtol=1e-12)
    assert one.fit(X, Y, config(epochs=2)).train_losses == alike.fit(X, Y, config(epochs=2)).train_losses


def test_a_model_that_holds_values_has_the_trained_ones_in_a_callback():
    model = mlp()
    one, seen = asking(model, epoch=lambda t, at: model.parameters())
    one.fit(X, Y, config(epochs=2))
    for epochs, found in enumerate(seen, 1):
        assert same_bits(found, after_fit(X, Y, config(epochs=epochs)).params)


def test_an_epoch_that_max_steps_cut_short_is_not_one_more_for_a_callback_after_a_load(tmp_path):
    def one():
        falls = cx.ReduceLROnPlateau(0.5, patience=1, monitor="train_loss", min_delta=10)
        return trainer(linen.Dense(3), callbacks=[falls])

    def rates(made, **values):
        return made.fit(X[:24], Y[:24], config(epochs=4, **values)).learning_rates

    whole, cut, loaded_ = one(), one(), one()
    rates(cut, max_steps=2)
    cut.save_checkpoint(str(tmp_path))
    loaded_.load_checkpoint(str(tmp_path))
    assert rates(loaded_) == rates(whole)
    assert same_bits(loaded_.params, whole.params)
