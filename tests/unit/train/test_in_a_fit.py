"""What a callback may ask of its trainer in the middle of a fit, and what a failed fit leaves."""

import jax
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.errors import GroupError
from cyxjax.train import trainer as train
from tests.support.trainers import VAL, X, Y, config, mlp, trainer

pytestmark = pytest.mark.usefixtures("two_devices")


class Asks(cx.Callback):
    """Does something with its trainer at each step, or each epoch."""

    def __init__(self, *, step=None, epoch=None):
        self.trainer, self.seen, self._step, self._epoch = None, [], step, epoch

    def on_step(self, info):
        if self._step is not None:
            self.seen.append(self._step(self.trainer, info.position))

    def on_epoch(self, info):
        if self._epoch is not None:
            self.seen.append(self._epoch(self.trainer, info.position))


def asking(**what):
    callback = Asks(**what)
    callback.trainer = trainer(callbacks=[callback])
    return callback.trainer, callback


def test_a_callback_evaluates_predicts_and_reads_the_parameters_of_now():
    one, callback = asking(
        step=lambda t, at: t.params, epoch=lambda t, at: (t.evaluate(*VAL), t.predict(VAL[0]), at.epoch)
    )
    one.fit(X, Y, *VAL, config(epochs=2))
    epochs = [seen for seen in callback.seen if isinstance(seen, tuple)]
    assert [epoch for *_, epoch in epochs] == [1, 2]
    assert [loss for (loss, _), *_ in epochs] == one.history.val_losses  # of the epoch just over
    np.testing.assert_array_equal(epochs[-1][1], one.predict(VAL[0]))
    assert len(callback.seen) == 2 * 8 + 2


@pytest.mark.parametrize("when", ["step", "epoch"])
def test_what_a_callback_saves_goes_on_bit_for_bit(tmp_path, when):
    # At a step others are under way, whose numbers no hook has seen: they belong to what is saved.
    due = {"step": lambda at: at.step == 11, "epoch": lambda at: at.epoch == 1}[when]
    save = lambda t, at: due(at) and t.save_checkpoint(str(tmp_path / "now"))  # noqa: E731
    one, _ = asking(**{when: save})
    one.fit(X, Y, *VAL, config(epochs=3))
    other = trainer()
    other.load_checkpoint(str(tmp_path / "now"))
    assert 8 <= other.run_state.position.step < 24
    assert other.fit(X, Y, *VAL, config(epochs=3)).train_losses == one.history.train_losses
    assert jax.tree.all(jax.tree.map(np.array_equal, other.params, one.params))


@pytest.mark.parametrize("call", ["fit", "load_checkpoint"])
def test_a_call_that_a_running_fit_would_not_take_is_refused(tmp_path, call, monkeypatch):
    path = str(tmp_path / "before")
    calls = {
        "fit": lambda t, at: t.fit(X, Y, config()),
        "load_checkpoint": lambda t, at: t.load_checkpoint(path),
    }
    one, _ = asking(epoch=calls[call])
    other = trainer()
    other.fit(X, Y, config(epochs=1))
    other.save_checkpoint(path)
    monkeypatch.setattr(train, "on_any_rank", None)  # it does not wait for the other ranks first
    with pytest.raises(GroupError, match=rf"^{call}\(.* fit"):
        one.fit(X, Y, config())
    monkeypatch.undo()
    if call == "load_checkpoint":  # and it may be called afterwards
        one.load_checkpoint(path)
        assert one.evaluate(*VAL) == other.evaluate(*VAL)


def fails(at_step):
    def step(t, at):
        if at.step == at_step:
            raise ValueError("callback's")

    return step


def test_after_an_error_in_a_callback_the_trainer_goes_on_from_what_it_learned(tmp_path):
    one, callback = asking(step=fails(3))
    with pytest.raises(ValueError, match="callback's"):
        one.fit(X, Y, config(epochs=2, steps_in_flight=4))
    done = one.run_state.position.step
    assert done == 6  # three more were under way
    alike = trainer()
    alike.fit(X, Y, config(epochs=2, max_steps=done))
    assert one.evaluate(*VAL) == alike.evaluate(*VAL)
    one.save_checkpoint(str(tmp_path / "rescued"))  # whole: the numbers of the steps under way are in it
    other = trainer()
    other.load_checkpoint(str(tmp_path / "rescued"))
    np.testing.assert_allclose(other.run_state.sums, alike.run_state.sums, rtol=1e-12)
    callback._step = None
    assert one.fit(X, Y, config(epochs=2)).train_losses == alike.fit(X, Y, config(epochs=2)).train_losses


def test_a_model_that_holds_values_has_the_trained_ones_in_a_callback():
    model, seen = mlp(), []
    callback = Asks(epoch=lambda t, at: seen.append(model.parameters()))
    callback.trainer = trainer(model=model, callbacks=[callback])
    callback.trainer.fit(X, Y, config(epochs=2))
    for epochs, found in enumerate(seen, 1):
        alike = trainer(model=mlp())
        alike.fit(X, Y, config(epochs=epochs))
        assert jax.tree.all(jax.tree.map(np.array_equal, found, alike.params))
