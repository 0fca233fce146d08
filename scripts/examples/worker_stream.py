"""A stream from worker processes: each decodes its share of the samples; a loader combines them to batches.

python scripts/examples/worker_stream.py    (also under the launcher, with the same losses)
"""

import subprocess
import sys
from contextlib import ExitStack

import numpy as np
from flax import linen

import cyxjax as cx

SAMPLES, BATCH, WORKERS, CLASSES = 192, 24, 2, 4  # BATCH: samples per step of all ranks

# The program of a worker, which does not import jax. Sample `index` is the same in every worker.
WORK = """
import sys
import numpy as np

first, stop, step, classes = map(int, sys.argv[1:])
for index in range(first, stop, step):
    rng = np.random.default_rng(index)
    label = rng.integers(0, classes)
    features = np.eye(classes, 8)[label] + rng.normal(0, 0.4, 8)  # in place of decoded pictures
    sys.stdout.buffer.write(np.float32([*features, label]).tobytes())
"""


class Stream:
    """Batches of this rank's share of the samples. Each iterator starts its own workers and ends them."""

    def __init__(self, rank, ranks):
        self._rank, self._ranks = rank, ranks
        self.batch_size = BATCH // ranks

    def __len__(self):
        return SAMPLES // BATCH

    def __iter__(self):
        with ExitStack() as running:
            workers = [running.enter_context(self._worker(number)) for number in range(WORKERS)]
            for worker in workers:
                running.callback(worker.kill)  # if the iteration ends early
            for _ in range(len(self)):
                rows = np.stack([_read(workers[i % WORKERS]) for i in range(self.batch_size)])
                yield rows[:, :-1], rows[:, -1].astype(np.int32)

    def _worker(self, number):
        # This rank has every `ranks`-th sample; each worker decodes every `WORKERS`-th of these.
        share = (self._rank + self._ranks * number, SAMPLES, self._ranks * WORKERS, CLASSES)
        return subprocess.Popen([sys.executable, "-c", WORK, *map(str, share)], stdout=subprocess.PIPE)


def _read(worker):
    data = worker.stdout.read(9 * 4)
    if len(data) < 9 * 4:
        raise RuntimeError(f"a worker process ended with exit code {worker.wait()}")
    return np.frombuffer(data, np.float32)


def main(epochs=3):
    model, optimizer = linen.Dense(CLASSES), cx.SGDOptimizer(0.3)
    trainer = cx.distributed.DistributedTrainer(model, cx.CrossEntropyLoss(), optimizer)
    stream = Stream(cx.distributed.get_rank(), cx.distributed.get_world_size())
    config = cx.distributed.DistributedTrainingConfig(epochs=epochs, checkpoint_every_n_epochs=0)
    return trainer.fit(stream, config=config).train_losses


if __name__ == "__main__":
    print("losses:", [round(loss, 4) for loss in main()])
