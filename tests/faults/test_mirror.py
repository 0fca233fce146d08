"""Training with a mirror on an S3 server that is unreachable, fails, is slow or is full."""

import shutil

import pytest

from cyxjax.cli import audit
from cyxjax.cli import hash as hashes
from cyxjax.errors import EXIT_CONFIG, EXIT_SECONDARY
from tests.support import jobs
from tests.support.object_store import BUCKET, object_store
from tests.support.training import DROPPING, LAST, begun_by, checkpoints, newest_step, write_experiment
from tests.support.waiting import until

pytestmark = pytest.mark.multiprocess
URL, SECRET = f"s3://{BUCKET}/run", "hunter2hunter2hunter2"


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
    """The steps whose manifest was written, in order."""
    return [int(path.split("/")[-2][-8:]) for path in store.writes if path.endswith("MANIFEST.json")]


def test_a_run_killed_in_an_upload_goes_on_elsewhere_from_the_step_before_with_the_same_bits(store, tmp_path):
    whole = write_experiment(tmp_path / "whole", keep_last=99, **DROPPING)
    jobs.run(whole, world=2)
    config = write_experiment(tmp_path / "cut", mirror=URL, **DROPPING)
    begun_by(config, whole, 8)
    store.held = "/step_0000001"  # 12, 16 and 18
    [rank] = jobs.start(config, fault="STALL:0:compile:8:2")
    assert until(store.holds.is_set, 60)
    assert until(lambda: newest_step(config) == LAST, 60)
    rank.kill()
    assert jobs.wait([rank]).codes == [-9]
    store.go_on.set()
    assert max(manifests(store)) == 8
    shutil.rmtree(tmp_path / "cut/run")  # another machine, where rank 0 downloads for both
    ended = jobs.run(config, world=2)
    assert "Took step 8" in ended.text
    assert "Resuming from step 8" in ended.text
    assert audit.main([str(tmp_path / "cut/run")]) == 0
    assert hashes.main([str(tmp_path / "cut/run"), str(tmp_path / "whole/run")]) == 0
    assert max(manifests(store)) == newest_step(config) == LAST


def test_a_server_that_refuses_is_told_once_without_credentials_and_neither_stops_nor_keeps_the_run(
    store, tmp_path
):
    config = write_experiment(tmp_path, mirror=URL, resume="never", report=True)
    store.refuse_with = 403
    ended = jobs.run(config, fault="PATIENCE:0:mirror:2")
    assert ended.text.count("WARNING") == 2, ended.text  # that it fails, and at the end that it is incomplete
    assert ended.text.count(f"mirror={URL}") == 1
    assert newest_step(config) == LAST
    assert manifests(store) == []
    files = [path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [text for text in (ended.text, *files) if SECRET in text or "AKIA" in text]
    # The server recovers: the same command uploads what is missing.
    store.refuse_with = 0
    ended = jobs.run(config, "--resume", "auto")
    assert "WARNING" not in ended.text
    assert LAST in manifests(store)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_bucket_that_is_not_there_ends_the_start_on_all_ranks(store, tmp_path, resume):
    config = write_experiment(tmp_path, mirror="s3://nosuch/run", resume=resume)
    ended = jobs.run(config, world=2, code=None)
    assert "'nosuch'" in ended.text.splitlines()[-1]  # of rank 1, which gets the error too
    assert not checkpoints(config).exists()
    assert (ended.codes, store.writes) == ([EXIT_CONFIG, EXIT_SECONDARY], [])


@pytest.mark.parametrize(
    "url", [f"s3://me:{SECRET}@{BUCKET}/run", f"s3://{BUCKET}/run?secret={SECRET}"], ids=["user", "query"]
)
def test_a_place_with_credentials_in_it_is_refused_and_not_shown(tmp_path, url):
    ended = jobs.run(write_experiment(tmp_path), "--mirror", url, code=EXIT_CONFIG)
    assert SECRET not in ended.text
