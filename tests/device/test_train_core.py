"""scripts/train_core.py, without a trainer: one page, only core and data, and the trainer's losses."""

import ast

import jax
import optax

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.data.catalog import load_dataset
from cyxjax.distributed import process_group
from cyxjax.train.trainer import DistributedTrainer
from tests.support.places import ROOT, module_of
from tests.support.trainers import use_devices

SCRIPT = ROOT / "scripts" / "train_core.py"


@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an integer power
def test_it_gives_the_trainer_s_losses(tmp_path):
    script = module_of(SCRIPT)
    use_devices(4)
    mesh = process_group.ensure().mesh
    digits = load_dataset("digits")
    config = DistributedTrainingConfig(
        epochs=2,
        global_batch_size=script.GLOBAL_BATCH_SIZE,
        seed=script.SEED,
        checkpoint_dir=str(tmp_path),
        checkpoint_every_n_epochs=0,
        verbose=False,
    )
    trainer = DistributedTrainer(script.Net(), CrossEntropyLoss(), optax.adam(script.LEARNING_RATE))
    history = trainer.fit(digits.train, digits.val, config)
    losses, test = script.train(mesh, epochs=2)
    assert losses == history.train_losses
    assert (test["loss"], test["accuracy"]) == trainer.evaluate(digits.test)


def test_it_is_one_page_of_core_and_data():
    assert len(SCRIPT.read_text().splitlines()) <= 120
    rooms = {
        node.module.split(".")[1]
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("cyxjax")
    }
    assert rooms == {"core", "data"}
