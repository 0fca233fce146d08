"""The CyxWiz guide's program, for two terminals: `RANK=r WORLD_SIZE=2 python program_cyxwiz.py FOLDER`."""

import sys

import numpy as np

import cyxjax as cx
from tests.support.programs import report
from tests.support.trainers import CLASSES, FEATURES, classes


def data():
    return classes(50)


def model():
    built = cx.SequentialModel()
    built.add(cx.LinearModule(FEATURES, 16))
    built.add(cx.ReLUModule())
    built.add(cx.LinearModule(16, CLASSES))
    return built


def train(folder):
    """The quick start, with every field of the configuration set."""
    net, (X, y) = model(), data()
    trainer = cx.distributed.DistributedTrainer(net, cx.CrossEntropyLoss(), cx.AdamOptimizer(0.01))
    config = cx.distributed.DistributedTrainingConfig()
    config.epochs, config.batch_size, config.shuffle, config.seed = 3, 4, True, 42
    config.verbose, config.log_every_n_batches = True, 2
    config.checkpoint_every_n_epochs, config.checkpoint_dir = 2, f"{folder}/checkpoints"
    config.save_on_master_only, config.validation_split = True, 0.1
    history = trainer.fit(X, y, config)
    trainer.save_checkpoint(f"{folder}/model.ckpt")
    again = cx.distributed.DistributedTrainer(model(), cx.CrossEntropyLoss(), cx.AdamOptimizer(0.01))
    again.load_checkpoint(f"{folder}/model.ckpt")
    if trainer.is_master():
        net.save(f"{folder}/model.cyxmodel")
    return {
        "history": {k: v for k, v in history.to_dict().items() if "_second" not in k},
        "clock": [history.total_time_seconds, history.samples_per_second],
        "evaluated": trainer.evaluate(X, y),
        "loaded": again.evaluate(X, y),
        "with_validation": trainer.fit(X, y, X[:9], y[:9], config).to_dict()["val_losses"],
        "who": [trainer.is_master(), trainer.get_rank(), trainer.get_world_size()],
    }


def step_by_hand():
    """DDP's methods, and accumulation over two backwards."""
    config = cx.distributed.DDPConfig()
    config.broadcast_parameters, config.bucket_size_mb, config.find_unused_parameters = True, 25, False
    net, loss_fn, optimizer = model(), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1)
    ddp = cx.distributed.DistributedDataParallel(net, config)
    X, y = data()
    mine = slice(ddp.get_rank(), None, ddp.get_world_size())
    x_mine, y_mine, accumulation_steps = X[mine], y[mine], 2
    for half in (slice(0, 12), slice(12, 24)):
        output = ddp.forward(x_mine[half])
        ddp.backward(loss_fn.backward(output, y_mine[half]) / accumulation_steps)
    grads = ddp.sync_gradients()
    ddp.update_parameters(optimizer)
    return {
        "gradient": float(np.abs(grads["0_linear"]["kernel"]).sum()),
        "bias": ddp.parameters()["2_linear"]["bias"].tolist(),
        "same_model": ddp.get_model() is net,
        "ddp_who": [ddp.is_master(), ddp.get_rank(), ddp.get_world_size()],
    }


def main(folder):
    cx.distributed.init()
    queries = {
        "initialized": cx.distributed.is_initialized(),
        "place": [
            cx.distributed.get_rank(),
            cx.distributed.get_world_size(),
            cx.distributed.get_local_rank(),
        ],
        "master": cx.distributed.is_master(),
    }
    values = queries | train(folder) | step_by_hand()
    rank = cx.distributed.get_rank()
    cx.distributed.finalize()
    report(folder, rank, values | {"left": not cx.distributed.is_initialized()})


if __name__ == "__main__":
    main(sys.argv[1])
