"""What one trainer does in turn: evaluate, load, fit and fit again, each as if it were the first."""

import os
import shutil
from unittest import mock

import jax
import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.checkpoint.folders import list_steps
from cyxjax.cli.checkpoint import main as export
from cyxjax.errors import CheckpointError, ConfigError, DataError, OtherStateError
from cyxjax.run_folder import RunFolder
from cyxjax.train.reporting import audit_of
from tests.support.refusals import refused
from tests.support.trainers import X, Y, after_fit, config, loaded, same_bits, trainer

pytestmark = pytest.mark.usefixtures("two_devices")
DATA = (X[:24], Y[:24])  # 3 steps of 8 samples


def one_layer(**options):
    return trainer(linen.Dense(3), **options)


def test_data_that_were_refused_may_come_again_in_another_shape():
    one, values = one_layer(), config(comm="fsdp")
    with pytest.raises(DataError, match="class"):
        one.fit(X[:24, :5], Y[:24] + 3, values)
    one.fit(*DATA, values)
    assert same_bits(one.params, after_fit(*DATA, values, model=linen.Dense(3)).params)


def fitted(options=None, **values):
    """A layer after a fit, with these values of its configuration and these options of its trainer."""
    return after_fit(*DATA, config(**values), model=linen.Dense(3), **options or {})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoint of two epochs, six steps."""
    folder = str(tmp_path_factory.mktemp("saved"))
    with mock.patch.dict(os.environ), cx.testing.devices(2):
        fitted(checkpoint_dir=folder, checkpoint_every_n_epochs=1)
    return folder


def refused_fit(one, saved):
    with pytest.raises(CheckpointError, match="must"):
        one.fit(*DATA, config(resume="must", checkpoint_dir=saved + "/none"))


def refused_resume(one, saved):
    with pytest.raises(CheckpointError):
        one.fit(*DATA, config(checkpoint_dir=saved, resume="auto", precision="params=bfloat16"))


def evaluated(one, saved):
    one.evaluate(*DATA)


def predicted(one, saved):
    one.predict(DATA[0])


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"seed": 7}, (evaluated, predicted, refused_fit, refused_resume)),
        ({"lora": {"rank": 2}}, (evaluated,)),
        ({"init_from": "saved"}, (predicted, refused_resume)),
    ],
)
def test_what_comes_before_the_first_fit_does_not_choose_its_parameters(settings, calls, saved):
    values = settings | ({"init_from": saved} if "init_from" in settings else {})
    plain = fitted(**values)
    for before in calls:
        other = one_layer()
        before(other, saved)
        other.fit(*DATA, config(**values))
        assert same_bits(plain.params, other.params), before


def test_a_checkpoint_of_other_settings_is_loaded_after_an_evaluation(tmp_path):
    folder = str(tmp_path / "a")
    made = fitted(on_nonfinite="skip", checkpoint_dir=folder, checkpoint_every_n_epochs=1)
    other = one_layer()
    other.evaluate(*DATA)
    other.load_checkpoint(folder)
    assert same_bits(made.params, other.params)


def test_a_fit_that_has_nothing_to_do_or_is_refused_keeps_what_was_loaded(saved):
    one = loaded(saved, model=linen.Dense(3))
    one.fit(*DATA, config(epochs=2))  # all epochs are done
    with pytest.raises(ConfigError, match="steps_per_epoch"):
        one.fit(cx.DataLoader(DATA, batch_size=8), config(steps_per_epoch=2, batch_size=None))
    history = one.fit(*DATA, config(epochs=3))
    assert (history.steps, history.epochs) == ([3, 6, 9], [0, 1, 2])


MOMENTS = {"optimizer": cx.SGDOptimizer(0.1, momentum=0.9)}


@pytest.fixture(scope="module")
def with_moments(tmp_path_factory):
    """A folder with the checkpoint of an epoch with momentum."""
    folder = tmp_path_factory.mktemp("moments")
    with mock.patch.dict(os.environ), cx.testing.devices(2):
        fitted(options=MOMENTS, epochs=1).save_checkpoint(str(folder))
    return folder


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"precision": "float16"}, "precision .*'float32', .*'float16' .*sync/"),
        ({"precision": "params=bfloat16"}, "params=bfloat16.*params/bias .*float32.*bfloat16"),
        ({"trainable": ["bias"]}, "trainable .*'bias'.*sync/"),
        ({"comm": "local_sgd"}, "comm .*'mean', .*'local_sgd' .*params/"),
    ],
)
def test_a_loaded_state_of_other_arrays_is_refused_by_what_was_set_otherwise(settings, named, with_moments):
    other = loaded(with_moments, model=linen.Dense(3), **MOMENTS)
    with pytest.raises(OtherStateError, match=f"{named}.*init_from: {with_moments}"):
        other.fit(*DATA, config(**settings))
    assert other.fit(*DATA, config()).num_steps == 6  # what was loaded is kept


@pytest.mark.parametrize("comm", ["bucketed", "zero1", "fsdp"])
def test_a_loaded_state_goes_on_under_another_strategy_and_back(comm, with_moments, tmp_path):
    def ended(folder, **values):
        one = loaded(shutil.copytree(folder, tmp_path / "gone"), model=linen.Dense(3), **MOMENTS)
        shutil.rmtree(tmp_path / "gone")  # what was loaded is in memory
        one.fit(*DATA, config(**values))
        return one

    ended(with_moments, epochs=2, comm=comm).save_checkpoint(str(tmp_path / "kept"))
    back, expected = ended(tmp_path / "kept", epochs=3), ended(with_moments, epochs=3)
    assert back.history.epochs == [0, 1, 2]
    for value, one in zip(*map(jax.tree.leaves, (back.params, expected.params)), strict=True):
        np.testing.assert_allclose(value, one, rtol=1e-5)


class Scaled(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x) * self.param("scale", lambda key: np.float32(1))


def test_a_scalar_is_not_taken_for_a_row_of_each_replica(tmp_path):
    saving = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1, "resume": "auto"}
    after_fit(*DATA, config(**saving), model=Scaled())
    with pytest.raises(OtherStateError, match="params/scale"):
        trainer(Scaled()).fit(*DATA, config(comm="local_sgd", **saving))


def test_a_fit_after_another_refuses_to_begin_with_parameters_of_its_own(saved):
    one = fitted(init_from=saved)
    one.fit(*DATA, config(init_from=saved))  # continues
    with refused("init_from", f"{saved}/other"):
        one.fit(*DATA, config(init_from=saved + "/other"))
    assert one.fit(*DATA, config()).num_steps == 18


@pytest.mark.parametrize("comm", ["local_sgd", "diloco"])
def test_what_continues_from_replicas_with_parameters_of_their_own_takes_their_mean(comm, tmp_path):
    folder, file = str(tmp_path / "c"), tmp_path / "m.safetensors"
    one = fitted(epochs=1, comm=comm, checkpoint_dir=folder, checkpoint_every_n_epochs=1)
    assert export(["export", folder, str(file)]) == 0
    for source in (folder, str(file)):
        other = one_layer()
        other.prepare(*DATA, config=config(init_from=source))
        assert same_bits(other.params, one.params)


def test_a_second_fit_has_its_own_max_steps_and_precision(as_users_promote):
    one = fitted(epochs=2)
    history = one.fit(*DATA, config(epochs=9, max_steps=4, precision="params=bfloat16"))
    assert (history.num_steps, history.stopped_by) == (10, "max_steps")
    assert one.params["kernel"].dtype == "bfloat16"


def test_a_run_s_own_checkpoint_comes_before_ckpt_path(saved, tmp_path):
    own = config(epochs=3, checkpoint_dir=str(tmp_path / "own"), checkpoint_every_n_epochs=1, resume="auto")
    for epochs in (3, 4):
        history = one_layer().fit(*DATA, own.model_copy(update={"epochs": epochs}), ckpt_path=saved)
    assert history.epochs == [0, 1, 2, 3]
    assert list_steps(tmp_path / "own") == [9, 12]


@pytest.mark.parametrize("validation", [{"x": X[:8], "y": Y[:8]}, (X[:8], Y[:8])])
@pytest.mark.parametrize("data", [{"x": X, "y": Y}, [[x, y] for x, y in zip(X, Y, strict=True)]])
def test_validation_data_are_no_targets(data, validation):
    assert len(one_layer().fit(data, validation_data=validation, config=config(epochs=1)).val_losses) == 1


def test_an_autoencoder_is_validated_on_its_validation_data():
    one = trainer(linen.Dense(X.shape[1]), cx.MSELoss(), lr=0.0)
    history = one.fit(X, validation_data=X + 9, config=config(epochs=1))
    assert history.val_losses[0] == pytest.approx(one.evaluate(X + 9)[0], rel=1e-5)
    assert history.train_losses[0] == pytest.approx(one.evaluate(X)[0], rel=1e-5)


def test_the_end_of_a_run_is_saved_also_after_a_rollback_at_its_last_step(tmp_path):
    x = DATA[0].copy()
    x[-1] = np.nan
    saving = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_steps": 1, "resume": "auto"}
    rolls_back = config(epochs=1, shuffle=False, on_nonfinite="rollback", **saving)
    assert one_layer().fit(x, DATA[1], rolls_back).rollback_steps == [1]
    assert one_layer().fit(x, DATA[1], rolls_back).rollback_steps == [1]  # nothing is trained again


def test_what_was_trained_elsewhere_is_not_replaced_and_a_finished_run_says_so(tmp_path, capsys):
    one, settings = one_layer(), {"run_dir": str(tmp_path / "run"), "checkpoint_every_n_epochs": 1}
    first = one.fit(*DATA, config(), **settings)
    capsys.readouterr()
    assert one.fit(*DATA, config(), **settings).train_losses == first.train_losses  # nothing is left to train
    assert "All 2 epochs are done" in capsys.readouterr().err
    one.fit(*DATA, config())
    trained = one.params
    with pytest.raises(ConfigError, match="12 steps"):
        one.fit(*DATA, config(), **settings)
    assert same_bits(one.params, trained)
    one.fit(*DATA, config(), resume="never", **settings)


def test_a_program_of_two_stages_goes_on_in_the_second(tmp_path):
    def stages(epochs):
        one, settings = one_layer(), {"checkpoint_every_n_epochs": 1}
        one.fit(*DATA, config(), run_dir=str(tmp_path / "first"), **settings)
        one.fit(*DATA, config(epochs=epochs, seed=3), run_dir=str(tmp_path / f"then {epochs}"), **settings)
        return one.params

    whole = stages(3)
    stages(1)
    (tmp_path / "then 1").rename(tmp_path / "then 3 cut")
    (tmp_path / "then 3").rename(tmp_path / "then 3 whole")
    (tmp_path / "then 3 cut").rename(tmp_path / "then 3")
    assert same_bits(stages(3), whole)


def test_a_callback_that_changes_the_state_needs_whole_parameters():
    class Halves(cx.Callback):
        def next_state(self, info, state):
            return state._replace(params=jax.tree.map(lambda a: a / 2, state.params))

    one_layer(callbacks=[Halves()]).fit(*DATA, config(epochs=1, comm="zero1"))
    with pytest.raises(ConfigError, match="Halves"):
        one_layer(callbacks=[Halves()]).fit(*DATA, config(epochs=1, comm="fsdp"))
    one_layer(callbacks=[cx.EMA(0.9)]).fit(*DATA, config(epochs=1, comm="fsdp"))


def test_a_run_after_a_refused_resume_records_itself_alone(tmp_path):
    def stream(steps, **values):
        given = {"steps_per_epoch": steps, "batch_size": None, "checkpoint_dir": str(tmp_path / "stream")}
        return cx.DataLoader(DATA, batch_size=8), config(**given, checkpoint_every_n_epochs=1, **values)

    first, one = fitted(), one_layer()
    first.fit(*stream(3))
    with pytest.raises(ConfigError, match="steps_per_epoch was 3"):
        one.fit(*stream(2, resume="auto"))
    one.fit(*DATA, config(max_steps=4), run_dir=str(tmp_path / "run"), checkpoint_every_n_steps=1)
    assert list_steps(tmp_path / "run" / "checkpoints")[-1] == 4
    audit = audit_of(RunFolder(tmp_path / "run"))
    assert (audit.good, "4 steps" in str(audit.lines)) == (True, True)


def test_a_fit_from_a_loaded_checkpoint_records_its_own_batch_size(tmp_path):
    fitted(epochs=1, checkpoint_every_n_epochs=1, checkpoint_dir=str(tmp_path))
    history = one_layer().fit(*DATA, config(batch_size=2), ckpt_path=str(tmp_path))
    assert history.effective_batch_size == 4
