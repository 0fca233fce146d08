# %% [markdown]
# # Communication strategies compared
#
# This notebook compares six of the ten strategies by the bytes that a replica sends per step, the memory that
# it needs, and the accuracy. It uses four virtual CPU devices: bytes, memory and accuracy are those of real
# devices; the speed of a network is not, so this notebook measures no times.

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
# `diloco` sends the parameters once every `every` steps; `power_sgd` sends two factors of rank `rank` per
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
# ## Bytes per step, and memory per replica
#
# `cyxjax plan` compiles the step and reads both numbers from the compiled program; they are exact.


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
    """Bytes that a replica sends per step with ring algorithms, averaged over many steps."""
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
    print(f"{comm:10} sends {sent[comm]:.3f} MB per step, holds {held[comm]:.3f} MB")
assert sent["power_sgd"] < sent["bf16"] < 0.51 * sent["mean"]
assert held["fsdp"] < held["zero1"] < held["mean"]

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
for axes, values, title in ((left, sent, "MB sent per step"), (right, held, "MB of state")):
    bars = axes.barh(list(values), list(values.values()), color=["tab:gray", *["tab:blue"] * 5])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(f"{title}, per replica (of 4)")
plt.show()


# %% [markdown]
# Strategies that send less either need memory (the compression error is kept and added in the next step) or
# let the replicas differ for some steps. `zero1` and `fsdp` send as much as `mean` or more, but each replica
# holds only a part of the state.
#
# ## Accuracy
#
# Every strategy trains the same network on the same samples in the same order.


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
right.set(xlabel="MB sent per step", ylabel="test accuracy", xscale="log", ylim=(0.9, 1.0))
right.margins(x=0.25)
for axes in (left, right):
    axes.grid(visible=True, alpha=0.3)
plt.show()

# %% [markdown]
# `mean`, `zero1` and `fsdp` have the same curve: they compute the same numbers. The accuracy of the others is
# higher or lower by a few test samples; one sample is 0.003.
#
# On a fast network use `mean`. `scripts/bench/README.md` has measurements on slower networks and of larger
# models; `cyxjax plan --bandwidth 1Gbit` predicts them for your experiment.
