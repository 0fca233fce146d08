"""Values that version 0.2.0 drew, trained and saved, and files that still load.

Random draws have the same bits. A different compiler or CPU type adds in a different order: values then agree
up to the rounding of a few float32 additions (seen with jax 0.12, and on a CPU with AMX: 5e-7).
"""

import json

import numpy as np
import pytest

import cyxjax as cx
from tests.data import make_sequential as made
from tests.support.models import first_values_as_for_users as first_values_as_for_users
from tests.support.trainers import one_device as one_device

STORED = json.loads((made.FOLDER / "numbers.json").read_text())
ROOM = 2e-6

pytestmark = pytest.mark.usefixtures("one_device", "first_values_as_for_users")

QUICK = {"mlp", "cnn", "vae", "gpt"}
RESNETS = {"resnet18", "resnet50"}


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(RESNETS, marks=pytest.mark.slow)], ids=["quick", "resnets"]
)
def test_first_values_of_every_model_are_those_of_before(names):
    stored = STORED["first_values"]
    wanted = {name: value for name, value in stored.items() if name in names or name not in made.INPUTS}
    assert made.first_values(sorted(names)) == wanted
    assert set(made.INPUTS) == QUICK | RESNETS


def test_trainer_and_loop_reach_the_numbers_of_before():
    numbers, stored = made.trained_numbers(), STORED["trained"]
    np.testing.assert_allclose(numbers["losses"], stored["losses"], ROOM, 0)
    np.testing.assert_allclose(numbers["loop"], stored["loop"], ROOM, 1e-7)  # some are nearly 0


def test_a_model_file_of_before_loads():
    model = cx.SequentialModel.load(made.FOLDER / "model.cyxmodel").eval()
    assert model.layers == made.every_layer().layers
    np.testing.assert_allclose(np.asarray(model(made.X[:2])), np.float32(STORED["outputs"]), ROOM, 0)


def test_a_checkpoint_of_before_goes_on_to_the_same_losses():
    model = made.every_layer()
    trainer = made.trainer(model)
    trainer.load_checkpoint(str(made.FOLDER / "checkpoint"))
    np.testing.assert_allclose(np.asarray(model.eval()(made.X[:2])), np.float32(STORED["outputs"]), ROOM, 0)
    losses = trainer.fit(made.X, made.Y, made.config(2)).train_losses
    np.testing.assert_allclose(losses, STORED["trained"]["losses"], ROOM, 0)
