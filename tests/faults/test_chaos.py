"""Runs killed, suspended, stalled and resized at random: every sample is read once per epoch, and with the
same layout the parameters are bit for bit those of an uninterrupted run."""

import random
import signal
import time

import psutil
import pytest

from cyxjax.cli import audit
from tests.support import jobs
from tests.support.launching import until
from tests.support.training import DROPPING, EPOCHS, SAMPLES, digests, newest_step, write_experiment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]
ROUNDS = 4
SIZES = (("--batch-size", 8), ("--batch-size", 5), ("--global-batch-size", 12), ("--global-batch-size", 32))
WORLDS = ((1, 1), (1, 2), (2, 2))  # (processes, devices over all of them)


def status(pid):
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def are_held_or_over(pids):
    found = {status(pid) for pid in pids}
    return psutil.STATUS_STOPPED in found or found == {psutil.STATUS_ZOMBIE}


def strike(draw, config, words=(), world=1):
    """One start with a kill, a suspension or a stall; how its ranks ended."""
    what, phase = draw.choice(["KILL", "STOP", "STALL"]), draw.choice(["data", "step", "checkpoint", "eval"])
    step = max(newest_step(config), 0) + draw.randint(0, 5)
    fault = f"{what}:{draw.randrange(world)}:{phase}:{step}" + (":3" if what == "STALL" else "")
    ranks = jobs.start(config, *words, world=world, fault=fault)
    pids = [rank.pid for rank in ranks]
    if what == "STOP":
        assert until(lambda: are_held_or_over(pids), 90), fault
        time.sleep(draw.uniform(0, 2))
        for pid in pids:
            if status(pid) == psutil.STATUS_STOPPED:
                psutil.Process(pid).send_signal(signal.SIGCONT)
    ended = jobs.wait(ranks)
    assert "Traceback" not in ended.text, f"{fault}: {ended.text}"
    return ended


def test_the_same_layout_gives_the_same_bits(tmp_path):
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    whole, config = (write_experiment(tmp_path / name, **DROPPING) for name in ("whole", "broken"))
    jobs.run(whole, world=2)
    for _ in range(ROUNDS):
        if strike(draw, config, world=2).codes == [0, 0]:
            break
    jobs.run(config, world=2)
    assert audit.main([str(tmp_path / "broken" / "run")]) == 0, seed
    assert newest_step(config) == newest_step(whole)
    assert digests(config) == digests(whole), seed


@pytest.mark.parametrize("saved_every", [pytest.param(1, marks=pytest.mark.wide), 4])
def test_any_sizes_one_after_another_leave_no_sample_out_and_none_twice(tmp_path, capsys, saved_every):
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    config = write_experiment(tmp_path, checkpoint_every_n_steps=saved_every, **DROPPING)
    sizes, done = [], [1]
    while len(sizes) < ROUNDS and any(done):
        (world, devices), size = draw.choice(WORLDS), draw.choice(SIZES)
        sizes.append((world, devices, *size))
        done = strike(draw, config, ("--cpu-devices", devices, *size), world).codes
    ended = jobs.run(config, code=None)
    assert ended.codes == [0], (seed, sizes, ended.text)
    assert audit.main([str(tmp_path / "run")]) == 0, (seed, sizes, capsys.readouterr().out)
    assert f"{EPOCHS} epochs of {SAMPLES} samples, {EPOCHS * SAMPLES} in all" in (capsys.readouterr().out), (
        seed,
        sizes,
    )
