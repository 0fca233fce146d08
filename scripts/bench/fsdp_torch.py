"""One process of fsdp.py with torch: DDP or FSDP2 (`fully_shard`) over gloo, with a GPT of the same size."""

import datetime
import json
import resource
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class GPT(torch.nn.Module):
    def __init__(self, task: dict) -> None:
        super().__init__()
        width = task["width"]
        self.tokens = torch.nn.Embedding(task["vocab"], width)
        self.places = torch.nn.Parameter(torch.randn(task["length"], width) * 0.02)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                width, task["heads"], 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(task["layers"])
        )
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, task["vocab"], bias=False)
        self.head.weight = self.tokens.weight  # tied, as in fsdp_ours.py
        self.register_buffer(
            "mask", torch.nn.Transformer.generate_square_subsequent_mask(task["length"]), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.places
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    torch.manual_seed(0)
    model = GPT(task)
    num_params = sum(p.numel() for p in model.parameters())
    if task["comm"] == "fsdp":
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x = torch.randint(0, task["vocab"], (task["batch"], task["length"]))
    y = x.roll(-1, 1)

    def timed(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
        return time.perf_counter() - started

    timed(2)
    steps = torch.tensor(max(2, min(200, int(task["seconds"] / timed(1)))))
    dist.broadcast(steps, 0)
    cpu_s, wall_s = time.process_time(), timed(int(steps))
    tokens = int(steps) * x.numel() * dist.get_world_size()
    found = {
        "tokens_per_s": tokens / wall_s,
        "cpu_s": (time.process_time() - cpu_s) / int(steps),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "params": num_params,
    }
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
