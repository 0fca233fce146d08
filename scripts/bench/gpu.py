"""Milliseconds per step and device memory of GPT-2 small in bfloat16 on one device, for several settings.

    python scripts/bench/gpu.py              # on a GPU: a table, one process per row
    python scripts/bench/gpu.py --quick      # a tiny GPT on any device, to test the program

Measures a whole public `fit` of 20 steps on random tokens, after a `fit` of 4 steps that compiles. Memory is
read from the device's allocator: its peak, and the bytes in use between steps; a CPU has no such statistics.
"""

import argparse
import json
import subprocess
import sys
import time

import numpy as np

ROWS = {
    "mean": {},
    "offload: optimizer": {"offload": "optimizer"},
    "remat: dots_saveable": {"remat": "dots_saveable"},
    "gpt with remat: true": {"model": {"remat": True}},
    "fsdp": {"comm": "fsdp"},
}
BATCH, WARM, TIMED = 8, 4, 20
QUICK = {"vocab_size": 96, "context_length": 32, "num_layers": 2, "num_heads": 2, "width": 32}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, to test the program")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)  # measures one row in this process
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measured(dict(ROWS[args.row]), args.quick)))
        return 0
    print("| setting | ms per step | peak, GB | between steps, GB |\n| --- | ---: | ---: | ---: |")
    failed = 0
    for name in ROWS:
        command = [sys.executable, __file__, "--row", name, *(["--quick"] if args.quick else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        failed |= done.returncode
        found = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {}
        print(f"| {name} | {' | '.join(f'{n:.2f}' for n in found.values()) or done.stderr[-200:]} |")
    return 1 if failed else 0


def measured(settings: dict, quick: bool) -> dict[str, float]:
    """`ms_step`, and GB of device memory if the device has statistics: `peak` and `held` (between steps)."""
    import jax

    import cyxjax as cx

    cx.distributed.init()
    sizes = (QUICK if quick else {}) | settings.pop("model", {})
    model = cx.get_model("gpt")(**sizes)
    tokens = np.random.default_rng(0).integers(
        0, model.vocab_size, (16 * BATCH, model.context_length + 1), np.int32
    )
    data = tokens[:, :-1], tokens[:, 1:]
    trainer = cx.distributed.DistributedTrainer(model, cx.CrossEntropyLoss(), cx.AdamOptimizer(1e-4))
    config = cx.distributed.DistributedTrainingConfig(
        epochs=100, batch_size=BATCH, max_steps=WARM, precision="bfloat16", verbose=False,
        checkpoint_every_n_epochs=0, resume="never", **settings,
    )  # fmt: skip
    trainer.fit(*data, config)
    config.max_steps = TIMED
    start = time.perf_counter()
    trainer.fit(*data, config)
    seconds = time.perf_counter() - start
    stats = jax.local_devices()[0].memory_stats() or {}
    held = [stats[key] / 1e9 for key in ("peak_bytes_in_use", "bytes_in_use") if key in stats]
    return {"ms_step": 1e3 * seconds / TIMED, **dict(zip(("peak", "held"), held, strict=False))}


if __name__ == "__main__":
    sys.exit(main())
