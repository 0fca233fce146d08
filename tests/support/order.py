"""The order of test files: longest first, files that wait for processes mixed with files that compute."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

WAITING = ("faults", "multiprocess")  # folders whose tests leave the cores idle at times
SHORT_S = 2  # estimate for a file that is not in the table

# Folder and file, seconds of its tests, of its slow tests, where either is long: from a run's `--junitxml`.
# A new file, or one that has become quick, only costs balance; a test refuses names that no longer exist.
SECONDS = """
device/augment 1 15
device/communication 10 0
device/convergence 0 50
device/ddp 10 0
device/exact 28 69
device/exchange 5 0
device/flax_examples 9 0
device/frozen 8 0
device/fsdp 6 37
device/fsdp_memory 10 2
device/global_losses 4 0
device/losses_as_written 8 0
device/memory 7 0
device/movers 8 8
device/offload 5 5
device/optimizers 4 20
device/precision 5 0
device/stored_parts 4 8
device/sync_contract 11 0
device/tasks 8 0
device/weighted_losses 4 0
faults/chaos 0 33
faults/checkpoint_hostile 5 0
faults/checkpoint_kill 7 0
faults/exact 14 67
faults/launch_dump 8 0
faults/launch_elastic 0 64
faults/launch_forming 14 0
faults/launch_matrix 53 0
faults/launch_suspended 10 55
faults/launch_upkeep 8 4
faults/mirror 30 15
faults/other_host 12 0
faults/polite_stop 0 30
faults/resume 40 35
faults/run_files 5 0
faults/run_matrix 18 0
faults/run_sink 8 0
faults/run_storage 16 0
faults/soak 0 26
faults/stream_resume 0 21
gallery/gallery 9 35
guides/cricket 13 0
guides/cyxwiz 9 0
guides/frameworm 18 0
guides/tensorbrain 7 0
house/documents 0 13
house/mutants 1 17
house/notebooks 0 39
house/readme 0 18
multiprocess/collectives 8 9
multiprocess/ddp 11 0
multiprocess/exact 0 40
multiprocess/exchange 9 10
multiprocess/launch_engines 6 0
multiprocess/launch_hosts 0 33
multiprocess/launch_limits 6 0
multiprocess/launch_recipes 6 0
multiprocess/launch_slurm 14 0
multiprocess/launch_supervisor 9 0
multiprocess/programs 7 15
multiprocess/save_memory 0 13
multiprocess/stall 5 0
multiprocess/stored_parts 0 16
multiprocess/train 12 31
unit/checkpoint/run_lock 7 0
unit/cli/init 4 0
unit/cli/main 10 0
unit/core/scores 9 0
unit/data/catalog 4 0
unit/launch/handshake 5 15
unit/launch/lowerings 6 15
unit/launch/rendezvous 11 0
unit/models/networks 10 0
unit/observe/console 4 22
unit/observe/report_in_browser 0 23
unit/observe/sinks 7 0
unit/testing 6 0
unit/train/black_box 8 0
unit/train/callbacks 7 0
unit/train/consistency 11 0
unit/train/earlier_runs 6 0
unit/train/saves 7 0
unit/train/foreign_data 5 0
unit/train/loss_spike 5 0
unit/train/off_is_off 9 0
unit/train/peers_habits 5 0
unit/train/steps 8 0
unit/train/stored_run 14 2
unit/train/stream_places 8 12
unit/train/trainer 9 0
unit/train/trainer_state 6 0
unit/train/worker_processes 6 0
"""


def begin_with_the_longest(files: Iterable[Path], slow: bool) -> list[Path]:
    """`files` in the order in which workers should take them; ties keep their order.

    slow: whether the slow tests are run.
    """
    seconds = {name: float(both[slow]) for name, *both in map(str.split, SECONDS.strip().splitlines())}
    took = {file: seconds.get(_name(file), SHORT_S) for file in files}
    total = Counter[bool]()
    for file in took:
        total[_waits(file)] += took[file]
    elapsed, at = Counter[bool](), {}
    for file in sorted(took, key=lambda file: -took[file]):
        # The fraction of its kind's time at which it begins: this mixes both kinds from first to last.
        at[file] = elapsed[_waits(file)] / (total[_waits(file)] or 1)  # 0: none of their tests is run
        elapsed[_waits(file)] += took[file]
    return sorted(took, key=lambda file: at[file])


def _waits(file: Path) -> bool:
    return file.parent.name in WAITING


def _name(file: Path) -> str:
    """`unit/cli/main` for tests/unit/cli/test_main.py."""
    room = file.parent.as_posix().rpartition("/tests/")[2]
    return f"{room}/{file.stem.removeprefix('test_')}"
