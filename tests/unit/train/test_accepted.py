"""The table of data forms in the documentation: `fit` reads each row as documented."""

import re
from pathlib import Path

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.train.feeding import fit_data
from cyxjax.train.feeding.fit_data import is_shared
from tests.unit.data.test_sources import Items, Table, npy, shard
from tests.unit.train.test_foreign_data import BATCHES, X, Y
from tests.unit.train.test_foreign_data import Table as Frame

PAGE = Path(cx.__file__).parents[1] / ".github" / "docs" / "model-loss-data.md"


def mapped(folder):
    np.save(folder / "x.npy", X)
    return np.load(folder / "x.npy", mmap_mode="r"), Y


def shards(folder):
    members = {"a.x.npy": npy(X[0]), "a.cls": b"1", "b.x.npy": npy(X[1]), "b.cls": b"0"}
    shard(folder / "train-0.tar", members)
    return (cx.data.TarShards(str(folder / "train-*.tar"), "x.npy", "cls"),)


def packed(folder):
    return (cx.data.pack([[1, 2, 3, 4], [5, 6, 7], [8, 9]], 4),)


BY_NUMBER, BATCH_BY_BATCH, SHARED = "by index", "batch by batch", "shared"
FORMS = {  # start of a table row -> (data of that form, how they are read)
    "arrays": ([lambda f: (X, Y), lambda f: ((X, X), Y), lambda f: ({"x": X, "y": Y},), mapped], BY_NUMBER),
    "frames": ([lambda f: (Frame(a=X[:, 0], b=X[:, 1], label=Y),)], BY_NUMBER),
    "`__len__` and": ([lambda f: (Items(),), lambda f: (list(zip(X, Y, strict=True)),)], BY_NUMBER),
    "a Hugging Face dataset": ([lambda f: (Table(),)], BY_NUMBER),
    "`cx.data.TarShards": ([shards], BY_NUMBER),
    "`cx.data.Mixture": ([lambda f: (cx.data.Mixture([(X, Y), (X, Y)], [3, 1]),)], BY_NUMBER),
    "`cx.data.pack": ([packed], BY_NUMBER),
    "a loader": ([lambda f: (cx.data.Batches(BATCHES),)], BATCH_BY_BATCH),
    "single samples": ([lambda f: (cx.data.Rows(list(zip(X, Y, strict=True))),)], SHARED),
}


def rows():
    table = PAGE.read_text(encoding="utf-8").partition("| given | read |\n| --- | --- |\n")[2]
    return re.findall(r"^\| (.+?) \| .+ \|$", table.partition("\n\n")[0], re.MULTILINE)


def test_each_row_of_the_table_is_tried_here():
    found = [[begin for begin in FORMS if row.startswith(begin)] for row in rows()]
    assert [one[0] if len(one) == 1 else one for one in found] == list(FORMS)


@pytest.mark.parametrize(
    ("begin", "number"), [(b, n) for b, (made, _) in FORMS.items() for n in range(len(made))]
)
def test_what_a_row_gives_is_read_as_it_says(begin, number, tmp_path):
    made, read = FORMS[begin]
    data, _ = fit_data.parse(made[number](tmp_path), cx.distributed.DistributedTrainingConfig(batch_size=4))
    assert data.indexed == (read == BY_NUMBER)
    assert is_shared(data.train) == (read == SHARED)
    pairs = [data.train.take(np.arange(2))] if data.indexed else list(data.train)[:1]
    targets = pairs[0][1]
    assert len(targets) == {BY_NUMBER: 2, BATCH_BY_BATCH: 8, SHARED: 4}[read]
    assert targets.dtype.kind == "i"
    if read != BATCH_BY_BATCH:
        given = made[number](tmp_path)
        with_val, _ = fit_data.parse((*given, *given), cx.distributed.DistributedTrainingConfig())
        assert with_val.val is not None
