# %% [markdown]
# # Digits, from data to a saved model
#
# Trains a Flax network on the handwritten digits that scikit-learn bundles, on every device this notebook's
# process can see. On a machine without GPUs it uses two virtual CPU devices.

# %%
import cyxjax as cx

group = cx.distributed.init(cpu_devices=2)
print(f"{cx.distributed.get_num_replicas()} replicas in 1 process, {group.backend}")

# %%
data = cx.load_dataset("digits")
print(data.info)
print(len(data.train), len(data.val), len(data.test))

# %% [markdown]
# The network is plain Flax. The trainer gives dropout a key per sample and averages the gradients over all
# samples, so two replicas compute the same update as one device with the whole batch.

# %%
from flax import linen as nn


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


# %%
trainer = cx.DistributedTrainer(Net(), cx.CrossEntropyLoss(), cx.AdamOptimizer(0.003))
history = trainer.fit(data.train, data.val, epochs=4, batch_size=32, checkpoint_every_n_epochs=0)
history  # displays a table of the epochs

# %%
history.plot()  # a matplotlib Figure; with a path it writes a file

# %%
loss, accuracy = trainer.evaluate(data.test)
print(f"test loss {loss:.4f}, accuracy {accuracy:.4f}")
assert accuracy > 0.85

# %% [markdown]
# A checkpoint contains everything that the next step depends on. To train in several processes, use
# `python -m cyxjax.launch` in a terminal.

# %%
trainer.save_checkpoint("digits_checkpoint")
fresh = cx.DistributedTrainer(Net(), cx.CrossEntropyLoss(), cx.AdamOptimizer(0.003))
fresh.load_checkpoint("digits_checkpoint")
assert fresh.evaluate(data.test) == (loss, accuracy)
