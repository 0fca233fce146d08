# %% [markdown]
# # A torch DDP script, ported step by step
#
# The script below trains a small network on handwritten digits with `DistributedDataParallel`. Each step
# ports a part of it; at the end the losses of both agree to within 5e-5.
#
# ```python
# import torch
# import torch.distributed as dist
# from sklearn.datasets import load_digits
# from torch import nn
# from torch.nn.parallel import DistributedDataParallel as DDP
# from torch.utils.data import DataLoader, TensorDataset
# from torch.utils.data.distributed import DistributedSampler
#
# dist.init_process_group("gloo")
#
# digits = load_digits()
# images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
# train = TensorDataset(images[:1500], labels[:1500])
# sampler = DistributedSampler(train, shuffle=False)
# loader = DataLoader(train, batch_size=32, sampler=sampler)
#
# model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
# ddp = DDP(model)
# criterion = nn.CrossEntropyLoss()
# optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
#
# for epoch in range(5):
#     sampler.set_epoch(epoch)
#     for x, y in loader:
#         optimizer.zero_grad()
#         loss = criterion(ddp(x), y)
#         loss.backward()
#         optimizer.step()
#     mean = loss.detach().clone()
#     dist.all_reduce(mean)
#     if dist.get_rank() == 0:
#         print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.5f}")
#
# if dist.get_rank() == 0:
#     with torch.no_grad():
#         hits = (model(images[1500:]).argmax(1) == labels[1500:]).float()
#     print(f"accuracy {hits.mean():.4f}")
#     torch.save(model.state_dict(), "model.pt")
# dist.destroy_process_group()
# ```

# %% [markdown]
# ## 1. The group
#
# `dist.init_process_group("gloo")` stays as it is; rank and world size come from the same environment
# variables, also under `torchrun`. A notebook is a single process, so two virtual devices replace
# the two ranks.

# %%
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import cyxjax as cx
import cyxjax.distributed as dist
from cyxjax.distributed import DistributedDataParallel as DDP
from cyxjax.distributed import DistributedSampler

group = dist.init(cpu_devices=2)
print(f"{dist.get_num_replicas()} replicas in {dist.get_world_size()} process, {group.backend}")

# %% [markdown]
# ## 2. Data
#
# Use NumPy arrays instead of tensors, and a tuple of arrays instead of a `TensorDataset`. Sampler and loader
# keep their names. With `shuffle=False` the order of samples is the same as in torch; with shuffling it
# differs, because the random generator differs.
#
# `batch_size` is per process: this process has two devices, so 64 gives 32 samples per device.

# %%
digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
train = (images[:1500], labels[:1500])
sampler = DistributedSampler(1500, shuffle=False)
loader = cx.DataLoader(train, batch_size=64, sampler=sampler)
print(len(loader), "batches")


# %% [markdown]
# ## 3. Model, loss, optimizer
#
# `nn.Sequential` is `cx.SequentialModel` (any Flax module does as well). Its kernels are (in, out), torch's
# weights (out, in). For the comparison, both scripts start from the same weights, drawn with NumPy; without
# `set_values`, weights are initialized from a seed, as in torch.


# %%
def first_values():
    rng = np.random.default_rng(0)
    shapes = {"0_linear": (64, 128), "2_linear": (128, 10)}
    return {
        name: {
            "kernel": rng.uniform(-1, 1, (rows, columns)).astype(np.float32) / np.float32(rows**0.5),
            "bias": np.zeros(columns, np.float32),
        }
        for name, (rows, columns) in shapes.items()
    }


model = cx.SequentialModel([cx.LinearModule(64, 128), cx.ReLUModule(), cx.LinearModule(128, 10)])
model.set_values(first_values(), {})
ddp = DDP(model)
criterion = cx.CrossEntropyLoss()
optimizer = cx.SGDOptimizer(ddp, lr=0.05, momentum=0.9)

# %% [markdown]
# ## 4. The loop
#
# The loop is the same, line by line. `loss` is the mean over this process's samples; `all_reduce` returns its
# result, because arrays are immutable.

# %%
losses = []
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(ddp(x), y)
        loss.backward()
        optimizer.step()
    losses.append(loss.item())
    print(f"epoch {epoch}: loss {losses[-1]:.5f}")

# %% [markdown]
# From the same weights, torch 2.13 with `torchrun --nproc-per-node 2` prints these losses:

# %%
TORCH = [1.41379, 0.45249, 0.30198, 0.15162, 0.11400]
for epoch, (ours, theirs) in enumerate(zip(losses, TORCH, strict=True)):
    print(f"epoch {epoch}: here {ours:.5f}, torch {theirs:.5f}, difference {abs(ours - theirs):.1e}")
assert np.abs(np.subtract(losses, TORCH)).max() < 5e-5

# %% [markdown]
# ## 5. Testing and saving
#
# Use `eval()` instead of `no_grad`: in evaluation mode the forward pass stores no activations. The saved
# model is one file without pickle.

# %%
ddp.eval()
hits = np.argmax(ddp(images[1500:]), axis=1) == labels[1500:]
print(f"accuracy {hits.mean():.4f}")
ddp.module.save("model.cyxmodel")
again = cx.SequentialModel.load("model.cyxmodel").eval()
assert (np.argmax(again(images[1500:]), axis=1) == np.argmax(ddp(images[1500:]), axis=1)).all()
dist.destroy_process_group()

# %% [markdown]
# ## 6. As a script, in two processes
#
# The complete script, run by the launcher in two processes: 32 samples per process, and rank 0 prints.

# %%
PORTED = """
import numpy as np
from sklearn.datasets import load_digits

import cyxjax as cx
import cyxjax.distributed as dist
from cyxjax.distributed import DistributedDataParallel as DDP
from cyxjax.distributed import DistributedSampler

dist.init_process_group("gloo")

digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
sampler = DistributedSampler(1500, shuffle=False)
loader = cx.DataLoader((images[:1500], labels[:1500]), batch_size=32, sampler=sampler)

model = cx.SequentialModel.load("first.cyxmodel")
ddp = DDP(model)
criterion = cx.CrossEntropyLoss()
optimizer = cx.SGDOptimizer(ddp, lr=0.05, momentum=0.9)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(ddp(x), y)
        loss.backward()
        optimizer.step()
    mean = dist.reduce_tensor(loss.item())
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {mean:.5f}")

ddp.eval()
hits = np.argmax(ddp(images[1500:]), axis=1) == labels[1500:]
if dist.get_rank() == 0:
    print(f"accuracy {hits.mean():.4f}")
    ddp.module.save("model.cyxmodel")
dist.destroy_process_group()
"""
Path("ported.py").write_text(PORTED)
model.set_values(first_values(), {})
model.save("first.cyxmodel")
command = ["-m", "cyxjax.launch", "--nproc-per-node", "2", "ported.py"]
done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
print(done.stdout + done.stderr)
assert done.returncode == 0
printed = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
assert np.abs(np.subtract(printed, losses)).max() < 5e-5

# %% [markdown]
# `cx.DistributedTrainer` compiles each step to one program and adds checkpoints and resuming, validation,
# mixed precision and other communication strategies: see `digits.ipynb`.
