"""Writes torch_trajectory.json: torch DDP's losses (gloo, 2 processes) on the task of problem.py.

python tests/parity/make_torch_trajectory.py [file]     needs torch; takes about 20 s on 2 cores
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
import problem

OPTIMIZERS = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam}


def build(model: str) -> nn.Module:
    if model == "mlp":
        net = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, problem.CLASSES))
    else:
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, problem.CLASSES))
    values = {name: torch.from_numpy(value) for name, value in problem.first_weights(model).items()}
    net.load_state_dict(values)
    return net


def losses(model: str, optimizer: str, rank: int) -> list[float]:
    """The mean over ranks of the loss before each step."""
    ddp = DistributedDataParallel(build(model))
    rule = OPTIMIZERS[optimizer](ddp.parameters(), **problem.OPTIMIZERS[optimizer])
    criterion, found = nn.CrossEntropyLoss(), []
    for step in range(problem.STEPS):
        images, labels = map(torch.from_numpy, problem.batch(step, rank))
        rule.zero_grad()
        loss = criterion(ddp(images.flatten(1) if model == "mlp" else images), labels)
        loss.backward()
        rule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(mean.item() / problem.RANKS)
    return found


def run(rank: int, folder: str, target: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=problem.RANKS)
    table = {f"{m}-{o}": losses(m, o, rank) for m in problem.MODELS for o in problem.OPTIMIZERS}
    if rank == 0:
        Path(target).write_text(json.dumps({"torch": torch.__version__, "losses": table}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    stored = str(Path(__file__).with_name("torch_trajectory.json"))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder, *(sys.argv[1:] or [stored])), nprocs=problem.RANKS)
