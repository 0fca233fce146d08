# %% [markdown]
# # Ways to send gradients, compared
#
# What a replica sends in a step, what it holds, and what the network learns, with six of the ten strategies.
# Four virtual CPU devices stand in for four real ones: bytes, memory and accuracy are the same; the speed of
# a network is not, so nothing is timed.

# %%
import io
import json
from contextlib import redirect_stdout

import matplotlib.pyplot as plt

import cyxjax as cx
from cyxjax.cli.main import main as cyxjax

group = cx.distributed.init(cpu_devices=4)
print(f"{cx.distributed.get_num_replicas()} replicas in 1 process, {group.backend}")
cx.distributed.finalize()

# %% [markdown]
# `diloco` sends parameters once in `every` steps; `power_sgd` sends two thin matrices of `rank` for each
# weight matrix, after its first `start_iter` steps. The others have no options here.

# %%
STRATEGIES = {
    "mean": {},
    "bf16": {},
    "power_sgd": {"rank": 4, "start_iter": 10},
    "zero1": {},
    "fsdp": {},
    "diloco": {"every": 8, "outer_momentum": 0.5},
}
HIDDEN = [128, 128]


# %% [markdown]
# ## What a step sends, and what a replica holds
#
# `cyxjax plan` compiles the step and reads both from the program: nothing is estimated.


# %%
def planned(comm):
    words = ["--comm", comm, "--comm-options", json.dumps(STRATEGIES[comm]), "--cpu-devices", "4"]
    words += [
        "--model.name",
        "mlp",
        "--model.options",
        json.dumps({"hidden": HIDDEN}),
        "--data.name",
        "digits",
    ]
    printed = io.StringIO()
    with redirect_stdout(printed):
        cyxjax(["plan", "--json", *words])
    return json.loads(printed.getvalue())


def sent_bytes(comm, plan):
    """What a replica sends in a step, by ring algorithms, in the mean over many steps."""
    total = 0.0
    for one in plan["collectives"]:
        passes = 2 if one["kind"] == "all-reduce" else 1
        share = 1.0
        if one["in_branch"] and "every" in STRATEGIES[comm]:
            share = 1 / STRATEGIES[comm]["every"]
        elif one["in_branch"] and one["payload_bytes"] == plan["state_bytes"]["params"]:
            share = 0.0  # power_sgd: the plain mean, of its first steps
        total += share * passes * one["times"] * one["payload_bytes"] * (1 - 1 / one["num_replicas"])
    return total


plans = {comm: planned(comm) for comm in STRATEGIES}
sent = {comm: sent_bytes(comm, plan) / 1e6 for comm, plan in plans.items()}
held = {comm: sum(plan["state_bytes"].values()) / 1e6 for comm, plan in plans.items()}
for comm in STRATEGIES:
    print(f"{comm:10} sends {sent[comm]:.3f} MB a step, holds {held[comm]:.3f} MB")
assert sent["power_sgd"] < sent["bf16"] < 0.51 * sent["mean"]
assert held["fsdp"] < held["zero1"] < held["mean"]

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
for axes, values, title in ((left, sent, "MB sent in a step"), (right, held, "MB of state held")):
    bars = axes.barh(list(values), list(values.values()), color=["tab:gray", *["tab:blue"] * 5])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(f"{title}, by a replica of four")
plt.show()


# %% [markdown]
# Sending less costs memory (what rounding lost is kept and added to the next step), or replicas that differ
# for some steps; `zero1` and `fsdp` send as much or more, and hold a part.
#
# ## What is learned
#
# The same network, samples and order with each of them.


# %%
def trained(comm):
    trainer = cx.DistributedTrainer(
        cx.get_model("mlp")(hidden=HIDDEN), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1, momentum=0.9)
    )
    config = cx.TrainingConfig(epochs=8, batch_size=32, verbose=False, checkpoint_every_n_epochs=0)
    config.comm, config.comm_options = comm, STRATEGIES[comm]
    history = trainer.fit(data.train, data.val, config)
    return history, trainer.evaluate(data.test)[1]


data = cx.load_dataset("digits")
cx.distributed.init(cpu_devices=4)
results = {comm: trained(comm) for comm in STRATEGIES}
cx.distributed.finalize()
for comm, (_, accuracy) in results.items():
    print(f"{comm:10} test accuracy {accuracy:.3f}")
assert min(accuracy for _, accuracy in results.values()) > 0.9

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for comm, (history, accuracy) in results.items():
    left.plot(history.epochs, history.train_losses, marker=".", label=comm)
    place = (sent[comm], accuracy)
    above = sum(abs(sent[one] - sent[comm]) < 1e-3 for one in [*results][: [*results].index(comm)])
    right.plot(*place, "o")
    right.annotate(comm, place, textcoords="offset points", xytext=(6, 5 + 12 * above))
left.set(xlabel="epoch", ylabel="training loss", yscale="log")
left.legend(ncols=2, fontsize="small")
right.set(xlabel="MB sent in a step", ylabel="test accuracy", xscale="log", ylim=(0.9, 1.0))
right.margins(x=0.25)
for axes in (left, right):
    axes.grid(visible=True, alpha=0.3)
plt.show()

# %% [markdown]
# `mean`, `zero1` and `fsdp` have the same curve: they compute the same numbers. One test sample is 0.003 of
# accuracy; the others differ by a few samples, either way.
#
# On a fast network take `mean`. `scripts/bench` has measurements on slower networks and of larger models;
# `cyxjax plan --bandwidth 1Gbit` predicts them for your experiment.
