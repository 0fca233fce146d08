"""Bytes per replica for each way to save memory, read from compiled training steps; nothing is trained.

    python scripts/bench/memory.py [--replicas 4] [--models mlp gpt] [--write]
    python scripts/bench/memory.py --quick    # two rows, as a test

Prints a Markdown table; `--write` puts it into README.md beside this file. Each row is compiled in its own
process; rows that cannot start within --limit-s (330 s) are marked. "parameters" and "optimizer state" are
the sizes of the state's arrays, "gradients" has one value per parameter. "kept for backward" is what the
forward pass keeps for the backward pass, without parameters; "temporaries" is what the compiler allocates for
gradients, activations and buffers together (`compiled.memory_analysis()`). "whole step" adds the arguments,
and the outputs that need new memory.
"""

import argparse
import json
import math
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.extend.core import Var
from peers import run, write

from cyxjax.core.losses import CrossEntropyLoss, as_per_example
from cyxjax.core.memory import with_remat
from cyxjax.core.mesh import build_mesh, put_replicated, put_rows
from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.precision import parse_policy, with_policy
from cyxjax.core.step import Batch, build_init, build_train_step
from cyxjax.files import scaled
from cyxjax.models.gpt import GPT
from cyxjax.models.networks import MLP
from cyxjax.observe.compiled_plan import memory_bytes, state_bytes
from cyxjax.sync.registry import build_sync

PyTree = Any
HERE = Path(__file__).parent
COLUMNS = (
    "parameters",
    "optimizer state",
    "gradients",
    "kept for backward",
    "temporaries",
    "whole step",
)


class Choice(NamedTuple):
    """One row: its differences from the plain step."""

    accumulation: int = 1
    remat: str = "none"
    blocks: bool = False  # the model's own `remat`, for each block
    precision: str = "float32"
    comm: str = "mean"
    regather: bool = True  # option of fsdp; False is ZeRO-2

    @property
    def is_about_activations(self) -> bool:
        """Whether it changes what is kept for the backward pass; in the MLP this is little."""
        return self.accumulation > 1 or self.remat != "none" or self.blocks

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.regather else {"regather": False}


class Case(NamedTuple):
    """A model, with inputs (samples, ...) and targets of one replica and optimizer step."""

    model: Any
    inputs: np.ndarray
    targets: np.ndarray


CHOICES = {
    "mean": Choice(),
    "accumulation 4": Choice(accumulation=4),
    "remat full": Choice(remat="full"),
    "remat dots_saveable": Choice(remat="dots_saveable"),
    "remat in the model, by block": Choice(blocks=True),
    "bfloat16": Choice(precision="bfloat16"),
    "zero1": Choice(comm="zero1"),
    "fsdp": Choice(comm="fsdp"),
    "fsdp, regather: false": Choice(comm="fsdp", regather=False),
    "fsdp, remat in the model, by block": Choice(comm="fsdp", blocks=True),
    "fsdp, bfloat16": Choice(comm="fsdp", precision="bfloat16"),
}


def main() -> int:
    args = parse()
    if args.cell:
        return cell(*args.cell, args.replicas)
    lines = [f"| model | choice | {' | '.join(COLUMNS)} |", f"| --- | --- |{' ---: |' * len(COLUMNS)}"]
    until, ran = time.monotonic() + args.limit_s, True
    for name, row in args.rows:
        found = read(*asked(name, row, args.replicas)) if time.monotonic() < until else "not begun in time"
        ran &= isinstance(found, list)
        shown = found if isinstance(found, list) else [found, *[""] * (len(COLUMNS) - 1)]
        lines.append(f"| {name} | {row} | {' | '.join(shown)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    heading = f"{args.replicas} virtual CPU devices, jax {metadata.version('jax')}, Adam."
    text = f"{heading}\n\n" + "\n".join(lines)
    print(text)
    if args.write:
        write(HERE / "README.md", text, "memory")
    return 0 if ran else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4, help="devices; virtual ones on CPU")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--limit-s", type=float, default=330.0, help="seconds after which no row starts")
    parser.add_argument("--write", action="store_true", help="write the table to README.md beside this file")
    parser.add_argument("--quick", action="store_true", help="two rows, to test the program")
    parser.add_argument("--cell", nargs=2, metavar=("MODEL", "CHOICE"), help="measure one row, print JSON")
    args = parser.parse_args()
    if args.quick and args.write:
        parser.error("--quick measures only two rows, too few for --write. HINT: omit one of the two.")
    rows = [(name, row) for name in args.models for row, choice in CHOICES.items()]
    args.rows = [(name, row) for name, row in rows if name == "gpt" or not CHOICES[row].is_about_activations]
    if args.quick:
        args.rows = [("mlp", "mean"), ("gpt", "fsdp, remat in the model, by block")]
    return args


def asked(name: str, row: str, replicas: int) -> tuple[str, str]:
    """(stdout, stderr) of the process that compiles one row."""
    return run([sys.executable, __file__, "--cell", name, row, "--replicas", str(replicas)], replicas)


def read(out: str, errors: str) -> list[str] | str:
    """The numbers that `cell` printed; otherwise the last line of its errors or output."""
    found = [line for line in out.splitlines() if line.startswith("[")]
    messages = (errors or out).strip().splitlines() or ["no result"]
    return json.loads(found[-1]) if found else f"not run: {messages[-1][:80]}".replace("|", "/")


def cell(name: str, row: str, replicas: int) -> int:
    jax.config.update("jax_num_cpu_devices", replicas)  # before jax initializes its devices
    if jax.device_count() < replicas:
        print(f"{jax.device_count()} devices found. HINT: --replicas {jax.device_count()}.", file=sys.stderr)
        return 2
    choice = CHOICES[row]
    print(
        json.dumps([scaled(count, "B") for count in measure(CASES[name](choice), choice, replicas)]),
        flush=True,
    )
    return 0


def mlp(choice: Choice) -> Case:
    """784-1024-1024-1024-1024-10, 3.9 M parameters, 1024 samples."""
    del choice
    x = np.zeros((1024, 784), np.float32)
    return Case(MLP(num_classes=10, hidden=(1024,) * 4), x, np.zeros(1024, np.int32))


def gpt(choice: Choice) -> Case:
    """4 blocks of width 128, 0.8 M parameters, 16 texts of 128 characters."""
    model = GPT(vocab_size=128, context_length=128, num_layers=4, num_heads=4, width=128, remat=choice.blocks)
    tokens = np.zeros((16, 128), np.int32)
    return Case(model, tokens, tokens)


CASES = {"mlp": mlp, "gpt": gpt}


def measure(case: Case, choice: Choice, replicas: int) -> tuple[int, ...]:
    """Bytes on one replica, in the order of COLUMNS."""
    mesh = build_mesh(jax.devices()[:replicas])
    fns = with_policy(with_remat(adapt(case.model), choice.remat), parse_policy(choice.precision))
    params, model_state = fns.init(jax.random.key(0), case.inputs[:1])
    sync = build_sync(choice.comm, optax.adam(1e-3), choice.options, params=lambda: params)
    state = build_init(sync, mesh)(params, model_state, 0)
    step: Any = build_train_step(
        fns, as_per_example(CrossEntropyLoss()), sync, mesh, accumulation=choice.accumulation
    )
    compiled = step.lower(state, global_batch(case, mesh)).compile()
    held, asked = state_bytes(state), memory_bytes(compiled)
    micro_batch = case.inputs[: len(case.inputs) // choice.accumulation]
    kept = kept_bytes(fns, params, model_state, micro_batch)
    whole = sum(asked.values())
    return held["params"], held["sync"], array_bytes(params), kept, asked["temporaries"], whole


def global_batch(case: Case, mesh: Any) -> Batch:
    """The global batch: the samples of `case` on every replica."""
    rows = len(case.inputs)
    here = (case.inputs, case.targets, np.ones(rows, np.float32))
    tiled = jax.tree.map(lambda a: np.concatenate([a] * mesh.size), here)
    total = put_replicated(mesh, np.float32(rows * mesh.size))
    return Batch(*put_rows(mesh, tiled), total, put_rows(mesh, np.zeros((mesh.size, 2), np.float32)))


def kept_bytes(fns: ModelFns, params: PyTree, model_state: PyTree, inputs: np.ndarray) -> int:
    """Bytes of the pullback's arrays that are neither parameters nor constants such as `inputs`."""

    def pullback(p: PyTree) -> PyTree:
        return jax.vjp(lambda q: fns.apply(q, model_state, inputs, jax.random.key(1), True)[0], p)[1]

    jaxpr = jax.make_jaxpr(pullback)(params).jaxpr
    given = {id(v) for v in (*jaxpr.invars, *jaxpr.constvars)}
    made = {id(v): v.aval for v in jaxpr.outvars if isinstance(v, Var) and id(v) not in given}
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in made.values())


def array_bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    sys.exit(main())
