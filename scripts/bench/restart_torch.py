"""One rank of restart.py under torchrun: the same model, batch and optimizer with torch DDP."""

import os
import signal
import sys
import time

began = time.time()

import torch  # noqa: E402  # loading these libraries is part of the measurement
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def note(what: str, rank: int, at_s: float) -> None:
    with open(sys.argv[1], "a") as file:
        file.write(f"{what} {rank} {at_s}\n")


def main() -> None:
    loaded = time.time()
    dist.init_process_group("gloo")
    formed = time.time()
    rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model = torch.nn.Sequential(torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.ones(32, 784), torch.arange(32) % 10
    for number in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if number == 0 and not first:
            for what, at_s in (("began", began), ("loaded", loaded), ("formed", formed)):
                note(what, rank, at_s)
            note("stepped", rank, time.time())
        if first and rank == 1 and number == 10:
            note("killed", rank, time.time())
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
