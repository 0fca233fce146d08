"""Training whose run folder is copied to an S3 server that is cut off, fails, is slow or is full."""

import os
import shutil

import pytest

from cyxjax.cli import audit
from cyxjax.cli import hash as hashes
from cyxjax.errors import EXIT_CONFIG, EXIT_OK
from cyxjax.observe.events import read_events
from tests.support.object_store import BUCKET, object_store
from tests.support.training import EPOCHS, STEPS_PER_EPOCH, checkpoints, newest_step, write_experiment
from tests.support.waiting import until

pytestmark = pytest.mark.multiprocess
LAST, URL, SECRET = EPOCHS * STEPS_PER_EPOCH, f"s3://{BUCKET}/run", "hunter2hunter2hunter2"


@pytest.fixture
def store(monkeypatch):
    pytest.importorskip("s3fs", reason="pip install 'cyxjax[s3]'")
    pytest.importorskip("moto.server", reason="pip install 'moto[s3]' flask flask-cors")
    with object_store() as store:
        for name, value in {
            "AWS_ENDPOINT_URL": store.url,
            "AWS_ACCESS_KEY_ID": "AKIA" + "A" * 16,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }.items():
            monkeypatch.setenv(name, value)
        yield store


def manifests(store):
    """Steps whose manifest was written, in that order."""
    return [int(path.split("/")[-2][-8:]) for path in store.writes if path.endswith("MANIFEST.json")]


def test_a_run_killed_in_an_upload_goes_on_elsewhere_from_the_step_before_with_the_same_bits(
    jobs, store, tmp_path
):
    constant = {"schedule": {"name": "constant"}}  # one of cosine ends with `max_steps`
    whole = write_experiment(tmp_path / "whole", **constant)
    assert jobs.run(whole).codes == [EXIT_OK]
    config = write_experiment(tmp_path / "cut", mirror=URL, **constant)
    assert jobs.run(config, "--max-steps", 4).codes == [EXIT_OK]
    store.hold("/arrays/")
    [pid] = jobs.start(config, "--max-steps", 10)
    assert until(store.holds.is_set, 60)
    assert until(lambda: "end" in [e["event"] for e in read_events(tmp_path / "cut/run/events.jsonl")], 60)
    os.kill(pid, 9)
    assert jobs.wait(config, 1).codes == [-9]
    store.release()
    assert manifests(store) == [4]
    shutil.rmtree(tmp_path / "cut/run")  # another machine
    ended = jobs.run(config)
    assert ended.codes == [EXIT_OK], ended.text
    assert "Took step 4" in ended.text
    assert "Resuming from step 4" in ended.text
    assert newest_step(config) == LAST
    assert audit.main([str(tmp_path / "cut/run")]) == 0
    assert hashes.main([str(tmp_path / "cut/run"), str(tmp_path / "whole/run")]) == 0
    # What went up is the whole run: taken once more, it is over.
    shutil.rmtree(tmp_path / "cut/run")
    ended = jobs.run(config)
    assert ended.codes == [EXIT_OK], ended.text
    assert f"Took step {LAST}" in ended.text
    assert audit.main([str(tmp_path / "cut/run")]) == 0


def test_a_server_that_refuses_is_told_once_and_neither_stops_nor_keeps_the_run(jobs, store, tmp_path):
    config = write_experiment(tmp_path, mirror=URL, resume="never")
    store.refuse_with = 503
    ended = jobs.run(config, fault="PATIENCE:0:mirror:2")
    assert ended.codes == [EXIT_OK], ended.text
    assert ended.text.count("WARNING") == 2, ended.text  # that it fails, and at the end that it is not whole
    assert ended.text.count(f"mirror={URL}") == 1
    assert newest_step(config) == LAST
    assert manifests(store) == []
    # The server recovers: the same command brings up what is missing.
    store.refuse_with = 0
    ended = jobs.run(config, "--resume", "auto")
    assert ended.codes == [EXIT_OK], ended.text
    assert "WARNING" not in ended.text
    assert LAST in manifests(store)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_bucket_that_is_not_there_ends_the_start(jobs, store, tmp_path, resume):
    config = write_experiment(tmp_path, mirror="s3://nosuch/run", resume=resume)
    ended = jobs.run(config)
    assert ended.codes == [EXIT_CONFIG], ended.text
    assert "'nosuch'" in ended.text.splitlines()[-1]
    assert not checkpoints(config).exists()
    assert not store.writes


def test_two_ranks_go_on_from_the_step_that_rank_0_took(jobs, store, tmp_path):
    config = write_experiment(tmp_path, mirror=URL, cpu_devices=None)
    ended = jobs.run(config, "--max-steps", 9, world=2)
    assert ended.codes == [EXIT_OK] * 2, ended.text
    shutil.rmtree(tmp_path / "run")
    ended = jobs.run(config, world=2)
    assert ended.codes == [EXIT_OK] * 2, ended.text
    assert "Resuming from step 9" in ended.text
    assert audit.main([str(tmp_path / "run")]) == 0


def test_credentials_stand_nowhere(jobs, store, tmp_path):
    config = write_experiment(tmp_path, mirror=URL)
    store.refuse_with = 403
    ended = jobs.run(config, "--resume", "never", "--max-steps", 5)
    texts = [
        ended.text,
        *(p.read_text(errors="replace") for p in (tmp_path / "run").rglob("*") if p.is_file()),
    ]
    assert not [text for text in texts if SECRET in text or "AKIA" in text]
    for url in (f"s3://me:{SECRET}@{BUCKET}/run", f"s3://{BUCKET}/run?secret={SECRET}"):
        ended = jobs.run(config, "--mirror", url)
        assert ended.codes == [2], ended.text
        assert SECRET not in ended.text
