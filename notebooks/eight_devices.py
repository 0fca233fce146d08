# %% [markdown]
# # Data parallelism on eight devices
#
# This notebook shows what happens to a batch, to gradients and to parameters when several devices train one
# model. It uses eight virtual CPU devices; the program is the same on real devices.

# %%
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import cyxjax as cx

group = cx.distributed.init(cpu_devices=8)
print(f"{cx.distributed.get_num_replicas()} replicas in 1 process, {group.backend}")

# %% [markdown]
# ## A batch is split over the devices
#
# Each device holds two of the sixteen samples. To the program it remains one array of shape (16,).

# %%
x = np.arange(16, dtype=np.float32)
spread = jax.device_put(x, NamedSharding(group.mesh, PartitionSpec("data")))
for shard in spread.addressable_shards:
    print(shard.device, "holds", np.asarray(shard.data))
print("together:", spread.shape)

# %% [markdown]
# ## The mean of the devices' gradients is the gradient of the batch
#
# The loss is `mean(w * x)`, so the gradient of `w` on a device is the mean of its samples.

# %%
own = [float(shard.data.mean()) for shard in spread.addressable_shards]
print("gradient on each device:    ", own)
print("mean of these gradients:    ", np.mean(own))
print("gradient of the whole batch:", x.mean())
assert np.mean(own) == x.mean() == 7.5

# %% [markdown]
# This holds if every device has the same number of samples. In a short last batch the mean of the devices'
# means differs from the mean of all samples. The trainer weights the gradients so that each sample counts
# once.

# %%
parts = np.split(x[:12], [2, 4, 6, 8, 9, 10, 11])  # twelve samples on eight devices
print("mean of means:", np.mean([part.mean() for part in parts]), " mean of samples:", x[:12].mean())
assert np.mean([part.mean() for part in parts]) != x[:12].mean()

# %% [markdown]
# ## One device and eight devices give the same parameters
#
# `check_replicas` trains three steps on one device and on eight, with the same global batches, and compares
# every parameter.

# %%
from flax import linen as nn


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.relu(nn.Dense(32)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


data = cx.load_dataset("digits")
images, labels = data.train.take(np.arange(256))
cx.distributed.finalize()
# raises an error if a parameter differs
cx.testing.check_replicas(Net(), cx.CrossEntropyLoss(), images, labels, replicas=8)
print("one device and eight agree")

# %% [markdown]
# ## After each step all devices hold the same parameters
#
# After a training run, every device holds a full copy of the parameters, and all copies are equal.

# %%
group = cx.distributed.init(cpu_devices=8)
trainer = cx.DistributedTrainer(Net(), cx.CrossEntropyLoss(), cx.AdamOptimizer(0.01))
history = trainer.fit(data.train, data.val, epochs=3, batch_size=8, checkpoint_every_n_epochs=0)
kernel = trainer.state.params["Dense_0"]["kernel"]
copies = [np.asarray(shard.data) for shard in kernel.addressable_shards]
print(
    len(copies), "copies of", copies[0].shape, "all equal:", all((copy == copies[0]).all() for copy in copies)
)
print("validation accuracy:", [f"{accuracy:.2f}" for accuracy in history.val_accuracies])
assert len(copies) == 8
assert history.val_accuracies[-1] > 0.7
cx.distributed.finalize()
