"""The report page: what it says is what the folder says, and nothing in a folder can break or enter it."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from cyxjax.cli.report import main
from cyxjax.errors import ConfigError
from cyxjax.observe.events import EventLog, read_events
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.report import predictions
from cyxjax.observe.report.chart import NUM_COLOURS, Line, line_chart, powers, smoothed, thinned, ticks
from cyxjax.observe.report.facts import Audit, RunFacts, curves_of, read_facts
from cyxjax.observe.report.outcome import headline
from cyxjax.observe.report.page import page
from cyxjax.observe.report.predictions import confusion_matrix, png
from cyxjax.run_folder import RunFolder

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Reader(HTMLParser):
    """Refuses tags that do not close in their order; keeps the text, and the tags that are there."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text, self.attributes = [], set(), [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def write_run(root, *, lr="0.1", val=(0.5, 0.25), metrics=()):
    """A run of two epochs of four steps."""
    root.mkdir(parents=True)
    folder = RunFolder(root)
    history = DistributedTrainingHistory(
        train_losses=[1.0, 0.5], val_losses=[0.75, 0.625], val_accuracies=list(val),
        learning_rates=[0.1, 0.1], epochs=[0, 1], val_epochs=[0, 1], steps=[4, 8], num_steps=8,
        total_time_seconds=125.0, samples_per_second=1234.0,
        effective_batch_size=64, world_size=2, num_replicas=2, goodput=0.75,
    )  # fmt: skip
    history.save(folder.history)
    folder.config.write_text(f"epochs: 2\noptimizer: {{name: adam, lr: {lr}}}\n")
    folder.goodput.write_text(
        json.dumps({"seconds": {"step": 75.0, "compile": 20.0, "input": 5.0, "redone": 0.0}})
    )
    lines = metrics or [json.dumps({"step": s, "loss": 1 / s, "learning_rate": 0.1}) for s in range(1, 9)]
    folder.metrics.write_text("".join(line + "\n" for line in lines))
    return folder


def read(folder, **more):
    return read_facts(
        folder, {"epochs": 2, "optimizer": {"lr": 0.1}}, {"epochs": 10, "optimizer": {"lr": 0.1}}, **more
    )


def test_the_page_of_a_run_says_what_came_out_first(tmp_path):
    run = write_run(tmp_path / "run")
    assert headline(read(run)) == "Recorded: 2 epochs, 8 steps in 2 min 5 s."  # with `report: false`
    for event in ("start", "end"):
        EventLog(run.events, pytest.fail).log(event)
    seen = Reader(page([read(run, audit=Audit(True, ["8 steps: every sample came once"]))]))
    assert seen.words.index("Finished: 2 epochs, 8 steps in 2 min 5 s.") < seen.words.index("Curves")
    for part in (
        "0.5000 best validation accuracy",  # the highest
        "0.6250 best validation loss",  # the lowest
        "steps that count: 75.0 s, 75.0%",
        "epochs 2 10",  # key, value, default; the learning rate is the default
        "Passed: 8 steps: every sample came once",
    ):
        assert part in seen.words
    assert "script" not in seen.tags
    assert not [value for name, value in seen.attributes if name in ("src", "href") or "http" in str(value)]


def test_a_folder_with_nothing_whole_in_it_still_has_a_page(tmp_path):
    folder = write_run(tmp_path / "run")
    folder.history.write_text('{"train_losses": [1.0, ')
    folder.goodput.write_text("[" * 100_000)
    folder.metrics.write_bytes(
        b'\xff\xfe{"step": 1}\n[]\n{"step": "nan", "loss": 1}\n{"step": 2, "loss": 0.125}\n{"st'
    )
    facts = read(folder)
    assert facts.curves["loss"] == [(2.0, 0.125)]
    seen = Reader(page([facts]))
    for part in (
        "The run is in progress, or was interrupted; step 2 was recorded.",
        "history.json cannot be read",
        "goodput.json cannot be read",
    ):
        assert part in seen.words
    assert Reader(page([read_facts(RunFolder(tmp_path / "none"))])).words.count("does not exist") == 3


HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">&"\'\x00\x1b[31m\u202e'


def test_nothing_from_a_folder_becomes_markup(tmp_path):
    folder = write_run(
        tmp_path / "<b>run</b>", metrics=[json.dumps({"step": s, HOSTILE: 1.0}) for s in (1, 2)]
    )
    log = EventLog(folder.events, print)
    log.log(
        "start", step=0, world_size=HOSTILE, environment={HOSTILE: HOSTILE}, fingerprint={HOSTILE: [HOSTILE]}
    )
    log.log("save", step=1)
    log.log("end", step=HOSTILE)
    log.log("test", metrics={HOSTILE: 1.0})
    log.log("predictions", confusion=[[1, 0], [1, 1]], classes=[HOSTILE, HOSTILE])
    facts = read_facts(folder, {HOSTILE: HOSTILE}, {HOSTILE: 1}, Audit(False, [HOSTILE]))
    for runs in ([facts], [facts, facts]):
        text = page(runs)
        seen = Reader(text)
        assert not seen.tags & {"script", "img"}
        assert not [name for name, _ in seen.attributes if name.startswith("on")]
        assert not {"\x00", "\x1b", "\u202e"} & set(text)
    assert "<script>alert(1)</script>" in seen.words  # as text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, -1e308, 5e-324, 0.0, "nan", True])
def test_a_value_of_any_kind_can_be_drawn(tmp_path, value):
    lines = [json.dumps({"step": step, "loss": number}) for step, number in enumerate([1.0, value, 0.5], 1)]
    text = page([read(write_run(tmp_path / "run", metrics=lines))])
    Reader(text)
    for points in re.findall(r'points="([^"]*)"', text):
        assert re.fullmatch(r"(-?\d+\.\d,-?\d+\.\d ?)*", points)
    assert (">step 2: training loss" in text) is (value in (5e-324, 0.0))


def test_thinning_keeps_the_ends_and_every_spike():
    points = [(float(i), 0.0) for i in range(100_000)]
    points[54_321:54_323] = spikes = [(54_321.0, 9.0), (54_322.0, -9.0)]
    kept = thinned(points)
    assert len(kept) <= 400
    assert {points[0], points[-1], *spikes} <= set(kept)
    assert kept == sorted(kept)


def test_smoothing_starts_at_the_first_value_and_follows_the_mean():
    # 100 points over a span of 4 % forget with 3/4: after one 4 and one 0 the mean is (3/16*4) / (3/16+1/4)
    first, second, *_ = smoothed([(0.0, 4.0), (1.0, 0.0)] + [(2.0 + i, 0.0) for i in range(98)])
    assert first == (0.0, 4.0)
    assert second[1] == pytest.approx(12 / 7)


def test_ticks_are_round_and_inside():
    assert ticks(0.03, 0.97) == [0.2, 0.4, pytest.approx(0.6), 0.8]
    assert ticks(-3, 12) == [0, 5, 10]
    assert powers(0.02, 30) == [0.1, 1.0, 10.0]
    assert len(powers(1e-200, 1e200)) <= 6


def test_a_step_made_again_counts_as_made_last_and_what_is_no_number_is_no_point():
    made = [{"step": 7, "loss": 3.0}, {"step": 7, "loss": 1.0}, {"step": 8, "loss": "nan"}, {"loss": 2.0}]
    assert curves_of(made) == {"loss": [(7.0, 1.0)]}


def test_classes_are_told_by_recall_and_precision(tmp_path):
    folder = write_run(tmp_path / "run")
    EventLog(folder.events, print).log("predictions", confusion=[[3, 1], [0, 0]], classes=["cat", "dog"])
    # labels 0 0 1, predicted 0 1 1
    assert confusion_matrix([[2, 1], [0, 1], [0, 3]], [0, 0, 1], 2) == [[1, 1], [0, 1]]
    words = Reader(page([read(folder)])).words
    for part in (
        "4 test samples, 3 correct (75.0%)",
        "cat 4 0.750 1.000 0.857",  # samples, recall, precision, F1 = 2 * 3 / (4 + 3)
        "dog 0 - 0.000 0.000",
    ):
        assert part in words


def test_marks_tell_a_resume_from_a_restart(tmp_path):
    folder = write_run(tmp_path / "run")
    for start, *end in ((0,), (2, 4), (4,)):
        log = EventLog(folder.events, print)
        log.log("start", step=start, world_size=2)
        log.log("save", step=start + 1)
        for step in end:
            log.log("end", step=step)
    text = page([read(folder)])
    for part in (
        "restart at step 2, 2 processes",
        "resume at step 4, 2 processes",
        "save at step 3",
        "interrupted (until its last event)",
    ):
        assert part in text


def rows_of(text):
    """The texts of the first table, row by row."""
    table = text[text.index("<table") : text.index("</table>")]
    cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in table.split("<tr")[1:]]
    return [[re.sub("<[^>]*>", "", cell) for cell in row] for row in cells]


def test_runs_are_compared_best_first_in_a_table(tmp_path, capsys):
    for name, lr, val in (("a", "0.1", 0.5), ("deep/b", "10.0", 0.9), ("c", "9.0", 0.7)):
        write_run(tmp_path / "runs" / name, lr=lr, val=(0.25, val))
        (tmp_path / "runs" / name / "checkpoints").mkdir()
    assert main([str(tmp_path / "runs")]) == 0
    out = tmp_path / "runs" / "report.html"
    assert capsys.readouterr().out == f"{out}\n"
    text = out.read_text()
    heads, *rows = rows_of(text)
    assert heads[:3] == ["run", "best validation accuracy", "best validation loss"]
    assert "epochs" not in heads  # the same in all
    lr = heads.index("optimizer.lr")
    assert [(row[0], row[lr]) for row in rows] == [("b", "10.0"), ("c", "9.0"), ("a", "0.1")]
    named = [str(tmp_path / "runs" / name) for name in ("a", "c")]
    assert main([*named, "--output", str(tmp_path / "two.html")]) == 0
    assert [row[0] for row in rows_of((tmp_path / "two.html").read_text())[1:]] == ["c", "a"]
    assert "script" not in Reader(text).tags


def test_what_the_defaults_lack_is_changed():
    config = {"epochs": "3", "global_batch_size": "8"}
    run = RunFacts("r", "r", config=config, defaults={"epochs": "3"})
    assert run.changed == {"global_batch_size": "8"}
    assert "global_batch_size" in page([run])


def test_of_many_runs_the_best_are_drawn(tmp_path):
    runs = [read(write_run(tmp_path / f"run{i:02}", val=(0.0, i / 20))) for i in range(NUM_COLOURS + 2)]
    text = page(runs)
    assert len(rows_of(text)) == 1 + len(runs)
    curves = text[text.index('id="curves"') : text.index('id="where-the-time-went"')]
    drawn = [f"run{i:02}" in curves for i in range(len(runs))]
    assert drawn == [False, False] + [True] * NUM_COLOURS


def test_curves_are_drawn_over_steps_epochs_or_time_as_chosen(tmp_path):
    records = [
        {"step": s, "epoch": (s - 1) // 4, "loss": 1 / s, "total_time_seconds": 60.0 * s} for s in range(1, 9)
    ]
    records += [
        {"step": s, "epoch": s // 4 - 1, "train_loss": 1.0, "val_loss": 2.0, "seconds": 240.0} for s in (4, 8)
    ]
    folder = write_run(tmp_path / "run", metrics=[json.dumps(record) for record in records])
    folder.events.write_text(json.dumps({"event": "save", "at_unix_s": 1.0, "step": 4}) + "\n")
    text = page([read(folder)])
    parts = re.split(r'<div class="choice-\d">', text)[1:]
    assert len(parts) == 3
    for part, shown in zip(parts, ("step 6", "epoch 1.5", "minutes 6"), strict=True):
        assert f"<title>{shown}: training loss 0.1667" in part
        assert part.count('class="mark save" d="M356.0') >= 1  # halfway, on each axis
    assert text.count(" checked>") == 1
    both = page([read(folder), read(write_run(tmp_path / "old"))])  # without times: not offered
    assert "<label" in both
    assert "minutes" not in both


def test_the_command_tells_a_script_writes_into_the_run_folder_or_says_what_is_wrong(tmp_path, capsys):
    run, nothing = tmp_path / "run", tmp_path / "nothing"
    write_run(run)
    for event in ("test", "start"):  # what was tested before the newest start is no result of it
        EventLog(run / "events.jsonl", pytest.fail).log(event, step=0, world_size=2, metrics={"loss": 9.0})
    assert main([str(run), "--json"]) == 0
    assert not (run / "report.html").exists()
    (summary,) = json.loads(capsys.readouterr().out)
    assert (summary["name"], summary["headline"][-20:]) == ("run", "step 8 was recorded.")
    assert [*summary["results"].items()][0] == ("best val_accuracy", 0.5)
    assert (summary["starts"][0]["world_size"], summary["starts"][0]["ended"]) == (2, False)
    assert summary["audit"].keys() == {"good", "lines"}
    assert main([str(run)]) == 0
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    nothing.mkdir()
    (nothing / "config.yaml").write_text("epochs: 3\n")  # of a project; no run
    with pytest.raises(ConfigError, match="/nothing .*run_dir"):
        main([str(nothing)])
    with pytest.raises(ConfigError, match=r"folder\.html: .*--output"):
        main([str(run), "--output", str(tmp_path / "no" / "such" / "folder.html")])


def test_events_of_a_new_run_begin_anew_and_those_of_one_cut_short_go_on(tmp_path):
    path = tmp_path / "events.jsonl"

    def logged(*, starts_over=False, **steps):
        log = EventLog(path, print)
        log.begin(next(iter(steps.values())), starts_over)
        for name, step in steps.items():
            log.log(name, step=step)
        return [event["event"] for event in read_events(path)]

    logged(start=0)  # cut short before its first save
    assert logged(start=0, end=4, test=4) == ["start", "start", "end", "test"]
    assert logged(start=4, end=8)[4:] == ["start", "end"]  # raised `epochs`
    assert logged(start=0) == ["start"]  # trained anew
    assert logged(start=0, starts_over=True) == ["start"]  # although the last one was cut short
    assert (tmp_path / "events.jsonl.old").exists()


def picture(value):
    return base64.b64encode(png(np.full((2, 2, 3), value, np.uint8))).decode()


def test_test_samples_are_pictures_and_texts_of_the_page_itself(tmp_path):
    images = [
        {"png": picture(9), "caption": "cat, taken for <dog>", "right": False},
        {"png": picture(8), "caption": "cat", "right": True},
        {"png": '"><svg onload=x>', "caption": ""},
        "no picture",
    ]
    texts = [{"prompt": "To be, ", "continued": "<b>or not", "stood there": "or not to"}]
    shown = predictions.samples(
        RunFacts("r", "r", events=[{"event": "samples", "images": images, "texts": texts}])
    )
    found = Reader(shown)
    sources = [value for name, value in found.attributes if name == "src"]
    assert sources[:2] == [f"data:image/png;base64,{picture(n)}" for n in (9, 8)]
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert found.words.startswith("cat, taken for <dog> cat prompt continuation by the model")
    assert "<b>or not" in found.words
    assert {"b", "svg"}.isdisjoint(found.tags)
    for strange in ({}, {"images": 3, "texts": {}}):
        assert predictions.samples(RunFacts("r", "r", events=[{"event": "samples", **strange}])) == ""


def test_a_plot_shows_its_values_under_the_pointer():
    lines = [Line("training loss", [(0.0, 2.0), (10.0, 1.0)]), Line("validation loss", [(10.0, 1.5)])]
    drawn = line_chart("loss", lines)
    assert "<title>step 10: training loss 1, validation loss 1.5</title>" in drawn
    many = line_chart("loss", [Line("training loss", [(float(x), 1.0 + x) for x in range(1000)])])
    assert 30 <= many.count('class="values"') <= 60
