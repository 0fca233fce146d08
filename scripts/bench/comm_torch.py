"""One process of comm.py under torch DDP: the same model, batch and optimizer, each hook in turn."""

import datetime
import json
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def samples_per_s(name: str, options: dict, batch_size: int, seconds: float) -> float:
    torch.manual_seed(dist.get_rank())
    layers = []
    for n, m in ((784, 2048), (2048, 2048)):
        layers += [torch.nn.Linear(n, m), torch.nn.ReLU()]
    # One bucket for PowerSGD: with two, ranks may start their all-reduces in different orders.
    bucket = {"bucket_cap_mb": 100} if name == "power_sgd" else {}
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(2048, 10)), **bucket)
    if name == "power_sgd":
        settings = {"matrix_approximation_rank": options["rank"], "start_powerSGD_iter": 2}
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **settings), powerSGD_hook.powerSGD_hook)
    elif name != "plain":
        compress = getattr(default_hooks, f"{name}_compress_hook")
        # In a lambda: without CUDA, torch rejects the bf16 hook by its name, although gloo supports it.
        model.register_comm_hook(None, lambda state, bucket: compress(state, bucket))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(batch_size, 784), torch.arange(batch_size) % 10

    def timed(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return time.perf_counter() - started

    timed(3)  # DDP rebuilds its buckets, and PowerSGD starts
    steps = torch.tensor(max(2, min(200, int(seconds / timed(1)))))
    dist.broadcast(steps, 0)
    return int(steps) * batch_size * dist.get_world_size() / timed(int(steps))


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for row, (name, options) in task["rows"].items():
        try:
            result = samples_per_s(name, options, task["batch"], task["seconds"])
        except RuntimeError as err:  # a dtype that this torch's gloo cannot send: fails on both ranks
            result = f"refused: {str(err).splitlines()[0][:60]}"
        if dist.get_rank() == 0:
            print(json.dumps([row, result]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
