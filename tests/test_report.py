"""The report on a run: numbers, letters and colours against folders made by hand, whose answers are known.

    pytest tests/test_report.py                 # -m "slow or not slow": also of a real run, half a minute
"""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from conftest import ROOT, SMALL
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import report
from recipes.ledger import Records
from rollout import Generator

TRAINER = [("warm start", 0, 10), ("sync", 10, 11), ("wait", 12, 16), ("fetch", 16, 17), ("advantages", 17, 17.5),
           ("log-probabilities", 17.5, 19), ("train", 19, 27), ("sync", 27, 28), ("wait", 28, 30), ("train", 30, 32)]
GENERATOR = [  # slots 1 and 2 overlap, in the second half with the update that interrupts both
    (0, "wait", 2, 10), (0, "interrupted", 10, 11), (0, "wait", 11, 12), (1, "generate", 12, 18),
    (2, "generate", 13, 20), (1, "score", 18, 22), (0, "wait", 22, 24), (1, "generate", 24, 30),
    (2, "generate", 25, 29), (0, "update", 26.5, 28.5), (0, "interrupted", 27, 28), (1, "score", 30, 31),
    (0, "wait", 31, 32), (0, "evaluate", 32, 34),
]  # fmt: skip
START = 1.8e9  # a time of day


def lines(*objects) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


def rl_row(step: int) -> dict:
    return {"step": step, "seconds": 10.0 * (step + 1), "pass_rate": step / 10, "reward": step / 8 - 0.5,
            "clip_fraction": 0.01 * step, "length_mean": 100.0 + step, "truncated_fraction": 0.25 * (step == 3),
            "staleness_mean": 1.0, "staleness_histogram": {"0": 100, "1": 300} if step else {"0": 400},
            "tokens_per_second": 1000.0 * (step + 1), "loss": 0.5, "logprob_gap": None}  # fmt: skip


def make(folder, rows=8, config=True, summary=True, shift=0.0, **settings):
    """A run of one trainer and one generator, written by the code that writes those of a job."""
    folder.mkdir(parents=True)
    records = Records(folder, 0, True, rows, 0, {})
    records.name_tracks(1, 2)
    records.write_events(0, [[name, 0, START + a, b - a, {}] for name, a, b in TRAINER])
    records.write_events(1, [[name, lane, START + a + shift, b - a, {}] for lane, name, a, b in GENERATOR])
    records._close_trace()
    (folder / "metrics.jsonl").write_text(lines(*map(rl_row, range(rows))))
    if config:
        settings = {"objective": "rl", "steps": 8, "max_staleness": 2} | settings
        derived = {"ranks": "2: trainers [0], generators [1]", "engine": "transformers (why)"}
        (folder / "config.yaml").write_text(yaml.safe_dump({**settings, "derived": derived}))
    if summary:
        content = {"steps": rows, "pass@1_before": 0.125, "pass@1_after": 0.75, "problems": 8}
        (folder / "summary.json").write_text(json.dumps(content))
    return folder


def printed(capsys, *args, code=0) -> str:
    assert report.main([str(each) for each in args]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return out + err


def axes(fig) -> dict:
    return {axis.get_label(): axis for part in fig.subfigs for axis in part.axes}


def shares_of(*events) -> dict:
    """{kind: share} of the time from the first to the last of (kind, start, end)."""
    edges, cells = report.paint(list(events))
    (shares,) = report.fractions(edges, cells, edges[0], edges[-1])
    return {name: pytest.approx(share) for name, share in zip([*report.KINDS, ""], shares, strict=True) if share}


# -- who did what when


def test_a_moment_counts_once_however_many_slots_overlap():
    slots = [("generate", k, k + 5) for k in range(4)]  # 0 .. 8, up to four at once
    assert shares_of(*slots) == {"generate": 1}
    assert shares_of(*slots, ("wait", 8, 10)) == {"generate": 0.8, "wait": 0.2}
    assert shares_of(*slots, ("interrupted", 2, 3), ("wait", 8, 10)) == {
        "interrupted": 0.1, "generate": 0.7, "wait": 0.2}  # fmt: skip
    assert shares_of(("generate", 0, 4), ("score", 3, 6), ("wait", 8, 10)) == {
        "generate": 0.4, "score": 0.2, "": 0.2, "wait": 0.2}  # fmt: skip
    assert shares_of(("update", 0, 10), ("interrupted", 4, 5), ("generate", 0, 2)) == {
        "update": 0.7, "interrupted": 0.1, "generate": 0.2}  # fmt: skip


def test_what_lies_in_something_larger_is_counted_there_once():
    nested = [("warm start", 0, 10), ("train", 2, 6), ("wait", 3, 4)]
    for events in (nested, nested[::-1]):  # a phase that lies in another is written first
        assert shares_of(*events) == {"warm start": 0.6, "train": 0.3, "wait": 0.1}
    assert shares_of(("train", 0, 5), ("train", 5, 5), ("other", 5, 10)) == {"train": 0.5, "other": 0.5}


def test_columns_are_shares_of_their_own_part():
    edges, cells = report.paint([("train", 10, 14), ("wait", 15, 16)])
    shares = report.fractions(edges, cells, 8, 16, 4)  # 8-10 nothing, 10-14 train, 14-15 nothing, 15-16 wait
    train = list(report.KINDS).index("train")
    assert shares[:, train].tolist() == [0, 1, 1, 0] and shares[:, -1].tolist() == [1, 0, 0, 0.5]
    assert shares[:, report.WAIT].tolist() == [0, 0, 0, 0.5] and np.allclose(shares.sum(1), 1)


def test_waiting_shares_are_of_the_training_loop_or_of_the_window(tmp_path):
    run = report.read_run(make(tmp_path / "run"))
    assert run["whole"] == (0, 34) and report.loop(run) == (12, 32)
    assert report.idle_shares(run) == {0: pytest.approx(6 / 20), 1: pytest.approx(3 / 20)}
    assert report.idle_shares(run, (10, 14)) == {0: pytest.approx(2 / 4), 1: pytest.approx(1 / 4)}
    assert report.idle_shares(run, (30, 40)) == {0: 0, 1: pytest.approx(1 / 4)}  # up to the last that each told
    assert report.idle_shares(run, (40, 50)) == {}


def test_shares_are_those_that_a_generator_and_a_trainer_book_themselves(tmp_path, monkeypatch):
    """States through `Generator._switch`, phases through `Records.phase`, on a clock of our own: shares are theirs."""
    clock = [START]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    records = Records(tmp_path, 0, True, 1, 0, {})
    generator = SimpleNamespace(state="wait", since=START, seconds=Counter(), events=[])
    generator._event = lambda *args, **more: Generator._event(generator, *args, **more)
    random = np.random.default_rng(0)
    records.name_tracks(1, 2)
    for state in random.choice(["generate", "wait", "sync"], 200):
        start, generator_was = clock[0], generator.state
        for name in random.choice(["wait", "fetch", "train", "sync"], 2):
            with records.phase(str(name)):
                clock[0] += random.uniform(0.01, 1)
        if generator_was == "generate":  # slots that overlap fill what is not waited or synchronised
            generator._event("generate", 1, start, clock[0] - 0.002)
            generator._event("generate", 2, start + 0.002, clock[0])
        Generator._switch(generator, str(state))
    records.write_events(0, records.take_events())
    records.write_events(1, generator.events)
    records._close_trace()
    run, span = report.read_run(tmp_path), clock[0] - START
    for rank, booked, kinds in ((0, records.seconds, {}), (1, generator.seconds, {"sync": "interrupted"})):
        _, edges, cells = run["tracks"][rank]
        (shares,) = report.fractions(edges, cells, 0, span)
        for name, seconds in booked.items():
            share = shares[list(report.KINDS).index(kinds.get(name, name))]
            assert share * span == pytest.approx(seconds, abs=5e-3), (rank, name)


def test_of_a_run_that_went_on_the_last_attempt_is_drawn(tmp_path):
    folder = make(tmp_path / "run", summary=False)
    trace = (folder / "trace.json").read_text()
    later = trace.replace("[\n", "").replace(str(int(START))[:4], str(int(START) + 10**6)[:4])  # eleven days later
    assert later != trace
    (folder / "trace.json").write_text(trace.replace("]\n", "") + later)
    run = report.read_run(folder)
    assert run["whole"] == (0, 34) and report.loop(run) == (12, 32)
    assert run["notes"] == ["the timeline is of the last of 2 attempts"]


# -- on the terminal


def test_the_terminal_has_the_numbers_of_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")  # 68 for the timeline: half a second a letter
    out = printed(capsys, make(tmp_path / "run"))
    table = {title.strip(): cells.split() for title, cells in re.findall(r"^  (\D{26})(.+)", out, re.M)}
    assert f"{tmp_path}/run: 8 of 8 steps, 80 s" in out and "pass@1 0.125 -> 0.750" in out
    assert "not finished" not in out and "ranks 2: trainers [0], generators [1]" in out
    assert table["pass rate"] == ["0", "0.5", "0", "0.7", "▁▂▃▄▅▆▇█"]  # first, mean of the last 5, lowest, highest
    assert table["reward"][:4] == ["-0.5", "0.125", "-0.5", "0.375"]
    assert table["clip fraction"][:4] == ["0", "0.05", "0", "0.07"]
    assert table["length, tokens an answer"][:4] == ["100", "105", "100", "107"]
    assert table["tokens a second"][:4] == ["1,000", "6,000", "1,000", "8,000"]
    assert table["share that was cut off"] == ["0", "0.05", "0", "0.25", "▁▁▁█▁▁▁▁"]
    assert table["staleness, mean"][:4] == ["1", "1", "1", "1"] and "loss, nats a token" not in table
    bars = re.findall(r"^ +(\d+) (█*) +([\d.]+)%(.*)$", out, re.M)
    assert [(age, share, mark) for age, _, share, mark in bars] == [
        ("0", "34.38", ""), ("1", "65.62", ""), ("2", "0.00", " <- bound")]  # 1100 and 2100 of 3200 tokens
    assert [len(bar) for _, bar, *_ in bars] == [14, 26, 0] and "mean 0.66, highest 1, bound 2" in out
    assert "waiting, from 12 s to 32 s, trainers 30.0%, generators 15.0%; a letter is 0.5 s" in out
    trainer, generator = re.findall(r"^ +\d (?:trainer  |generator) (.{68}) +(\d+)%$", out, re.M)
    assert trainer == ("w" * 20 + "ss  ........ffalll" + "t" * 16 + "ss....tttt    ", "30")
    assert generator == ("    ................ii.." + "g" * 16 + "rrrr....ggggggiiggggrr..eeee", "15")
    legend = ("i interrupted  . wait  s sync  f fetch  a advantages  l log-probabilities\n"
              "  t train  e evaluate  g generate  r score  w warm start\n")  # fmt: skip
    assert legend in out  # no checkpoint; and what an update did is covered by more particular names
    assert (tmp_path / "run" / "report.png").stat().st_size > 20_000


def test_above_the_bound_is_said(tmp_path):
    bars = report.staleness_bars(report.read_run(make(tmp_path / "run", max_staleness=0)))
    assert bars[1].endswith("34.38% <- bound") and bars[2].endswith("65.62% ABOVE THE BOUND")


def test_long_curves_are_means_of_parts_and_flat_ones_are_flat():
    assert report.sparkline([0.0, 2.0, 4.0, 4.0], 2) == "▁█" and report.sparkline([3.0] * 3) == "▄▄▄"
    assert len(report.sparkline(list(range(1001)))) == 40


def test_supervised_runs_have_their_losses(tmp_path, capsys):
    folder = tmp_path / "sft"
    folder.mkdir()
    losses = [{"step": k, "loss": 5.0 - k, "tokens": 9, "seconds": k + 1.0} for k in range(4)]
    losses[1]["held_out_loss"], losses[3]["held_out_loss"] = 4.5, 2.5
    (folder / "metrics.jsonl").write_text(lines(*losses))
    (folder / "config.yaml").write_text(yaml.safe_dump({"objective": "sft", "sft_steps": 4, "steps": 40}))
    out = printed(capsys, folder)
    assert "4 of 4 steps, 4 s" in out and "staleness" not in out and "no timeline" in out
    assert re.search(r"  loss, nats a token +5 +3.5 +2 +5  ", out)
    assert re.search(r"  held-out loss, nats +4.5 +3.5 +2.5 +4.5  █▁", out)
    panels = axes(report.figure([report.read_run(folder)]))
    assert list(panels) == ["loss, step", "loss, seconds", "held_out_loss, step", "held_out_loss, seconds"]
    assert panels["held_out_loss, step"].lines[0].get_xydata().tolist() == [[2, 4.5], [4, 2.5]]


# -- what is missing, cut or of another version


def test_a_run_that_still_goes_has_a_report(tmp_path, capsys):
    folder = make(tmp_path / "run", rows=3, summary=False)
    whole = report.read_run(folder)["tracks"]
    for name in ("trace.json", "metrics.jsonl"):
        text = (folder / name).read_text().removesuffix("\n]\n").rstrip()
        (folder / name).write_text(text[: text.rindex("\n") + 20])  # the last line is half written
    out = printed(capsys, folder)
    assert re.search(r"2 of 8 steps, 20 s\n  not finished: still going, or killed; last sign of life \d+ s ago", out)
    assert "generators 15.0%" in out and "picture in" in out
    for rank, (role, edges, cells) in report.read_run(folder)["tracks"].items():
        assert (role, *map(list, (edges, cells))) == (whole[rank][0], *map(list, whole[rank][1:]))


@pytest.mark.parametrize("missing, sentence, kept", [
    (["summary.json"], "not finished", "trainers 30.0%"),
    (["config.yaml"], "config.yaml is missing or cannot be read", "bound ?"),
    (["trace.json"], "trace.json has no events: no timeline", "pass rate"),
    (["metrics.jsonl"], "metrics.jsonl has no row: no step is done", "trainers 30.0%"),
    (["metrics.jsonl", "config.yaml", "summary.json"], "metrics.jsonl has no row: no step is done", "trainers 30.0%"),
])  # fmt: skip
@pytest.mark.parametrize("how", ["missing", "empty", "rubbish"])
def test_without_a_file_the_rest_is_drawn(tmp_path, capsys, monkeypatch, missing, sentence, kept, how):
    folder = make(tmp_path / "run")
    if how != "missing":  # a second each
        monkeypatch.setattr(Figure, "savefig", lambda figure, path: path.touch())
    for name in missing:
        (folder / name).unlink() if how == "missing" else (folder / name).write_bytes(b"\xff[{: 7" * (how == "rubbish"))
    out = printed(capsys, folder)
    assert sentence in out and kept in out and (folder / "report.png").exists()


def test_nothing_done_yet_is_a_sentence_and_no_picture(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").touch()
    out = printed(capsys, tmp_path)
    assert "no step is done" in out and "no timeline" in out and [*tmp_path.iterdir()] == [tmp_path / "metrics.jsonl"]


def test_rows_of_another_version_lose_only_what_they_lack(tmp_path, capsys):
    folder = make(tmp_path / "run", rows=0)
    odd = [{"step": 0, "pass_rate": 0.5}, {"pass_rate": 0.6}, {"step": 1, "pass_rate": "high", "reward": None},
           {"step": 2, "pass_rate": 0.75, "staleness_histogram": [1], "seconds": float("nan"), "reward": float("inf")}]
    (folder / "metrics.jsonl").write_text(lines(*odd) + "7\n[]\nnull\n")
    trace = [{"name": "train", "ph": "X"}, {"ph": "M", "pid": 0}, 7,
             {"name": ["x"], "ph": "X", "pid": 3, "ts": 1, "dur": 1},
             {"name": "train", "ph": "X", "pid": "one", "ts": 1, "dur": 1},
             {"name": "new", "ph": "X", "pid": 0, "tid": 0, "ts": START * 1e6, "dur": 4e6}]  # fmt: skip
    (folder / "trace.json").write_text(lines(*trace))
    out = printed(capsys, folder)
    assert re.search(r"  pass rate +0.5 +0.625 +0.5 +0.75  ▁█\n", out) and "3 of 8 steps, 0 s" in out
    assert "reward" not in out and "staleness of" not in out and "o other" in out
    assert [*axes(report.figure([report.read_run(folder)]))] == ["pass_rate, step", "timeline"]


def test_a_folder_that_is_no_run_is_said_and_the_others_are_drawn(tmp_path, capsys):
    run, empty = make(tmp_path / "run"), tmp_path / "warm"
    empty.mkdir()
    for folder in (empty, tmp_path / "nowhere"):
        out = printed(capsys, folder, run, code=1)
        assert f"report.py: {folder} is no run's folder: it has neither" in out and f"picture in {run}" in out
    assert [*empty.iterdir()] == []


def test_the_summary_of_an_attempt_before_is_not_taken_for_the_runs(tmp_path, capsys):
    folder = make(tmp_path / "run", rows=5)
    with open(folder / "metrics.jsonl", "a") as file:  # it goes on
        file.write(lines(rl_row(5)))
    out = printed(capsys, folder)
    assert "6 of 8 steps" in out and "not finished" in out and "pass@1" not in out


# -- the picture


def test_runs_overlay_in_every_panel(tmp_path):
    runs = [report.read_run(make(tmp_path / name, rows=rows, max_staleness=bound))
            for name, rows, bound in (("a", 8, 2), ("b", 5, 4))]  # fmt: skip
    for count in (1, 2):
        fig = report.figure(runs[:count])
        panels, both = axes(fig), ("pass_rate", "reward")
        assert list(panels) == [*(f"{name}, {x}" for name in both for x in ("step", "seconds")),
                                *(f"{name}, step" for name in ("clip_fraction", "length_mean", "tokens_per_second")),
                                "staleness, staleness, versions", "timeline"]  # fmt: skip
        for name, panel in panels.items():
            if name.endswith(("step", "seconds")):
                assert [line.get_label() for line in panel.lines] == ["a", "b"][:count], name
                assert panel.get_xlabel() and panel.get_ylabel()
        assert [text.get_text() for text in fig.subfigs[0].legends[0].texts] == ["a", "b"][:count]
        rows = [label.get_text().strip() for label in panels["timeline"].get_yticklabels()]
        assert rows == (["rank 0, trainer", "rank 1, generator"] if count == 1 else
                        ["a rank 0, trainer", "a rank 1, generator", "b rank 0, trainer", "b rank 1, generator"])
    line = panels["pass_rate, seconds"].lines[1]
    assert line.get_xydata() == pytest.approx(np.array([[10.0 * k + 10, k / 10] for k in range(5)]))
    stale = panels["staleness, staleness, versions"]
    assert [line.get_xdata()[0] for line in stale.lines] == [2.5, 4.5]  # the bounds, right of what they allow
    assert [text.get_text() for text in stale.texts] == ["bound 2", "bound 4"]
    assert [bar.get_height() for bar in stale.patches] == pytest.approx([11 / 32, 21 / 32, 8 / 20, 12 / 20])
    assert [bar.get_x() for bar in stale.patches] == pytest.approx([-0.4, 0.6, 0.0, 1.0])


@pytest.mark.parametrize("window, spent", [(None, (0, 34)), ((26, 29), (26, 29))])
def test_pixels_of_the_timeline_are_what_the_ranks_did(tmp_path, window, spent):
    """The rendered picture itself: along the row of each rank, colours in order and in the proportion of their time."""
    fig = report.figure([report.read_run(make(tmp_path / "run"))], window)
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    pixels, panel = np.asarray(canvas.buffer_rgba())[:, :, :3], axes(fig)["timeline"]
    dark = (pixels.max(2) < 128).mean()
    assert 0.003 < dark < 0.05, f"{dark:.2%} of the picture are dark: text and axes"
    boxes = [axis.get_window_extent() for axis in axes(fig).values()]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    texts = [text for axis in axes(fig).values() for text in (axis.xaxis.label, axis.yaxis.label, *axis.texts)]
    for axis in (side for each in axes(fig).values() for side in (each.xaxis, each.yaxis)):
        low, high = sorted(axis.get_view_interval())  # ticks beyond are not drawn
        texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    texts = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text().strip()]
    assert len(texts) > 50 and not [(a, b) for i, (a, one) in enumerate(texts) for b, two in texts[:i]
                                    if one.overlaps(two)], "labels overlap"  # fmt: skip
    assert all(fig.bbox.x0 <= box.x0 < box.x1 <= fig.bbox.x1 for _, box in texts)
    assert all(fig.bbox.y0 <= box.y0 < box.y1 <= fig.bbox.y1 for _, box in texts)
    legends = [fig.subfigs[0].legends[0].get_window_extent(), panel.get_legend().get_window_extent()]
    assert all(fig.bbox.containsx(box.x0) and fig.bbox.containsx(box.x1) for box in legends)
    assert not any(one.overlaps(box) for one in legends for box in boxes)
    assert {axis.get_subplotspec().get_geometry()[:2] for axis in fig.subfigs[0].axes} == {(2, 4)}
    run = report.read_run(tmp_path / "run")
    for rank, (_, edges, cells) in run["tracks"].items():
        (left, y), (right, _) = panel.transData.transform([(spent[0], rank), (spent[1], rank)])
        row = pixels[pixels.shape[0] - round(y), round(left) + 2 : round(right) - 2].astype(int)
        (shares,) = report.fractions(edges, cells, *spent)
        for (name, (_, color)), share in zip(report.KINDS.items(), shares, strict=False):
            rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
            found = (abs(row - rgb).max(1) <= 2).mean()
            assert found == pytest.approx(share, abs=0.01), (rank, name)


def test_the_picture_goes_where_it_is_told_and_nothing_else_is_written(tmp_path, capsys):
    runs = [make(tmp_path / name / "toy") for name in "ab"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    (tmp_path / "out").mkdir()
    out = printed(capsys, *runs, "--out", tmp_path / "out" / "x.png", "--window", 12, 16)
    assert (tmp_path / "out" / "x.png").read_bytes()[:4] == b"\x89PNG" and [*(tmp_path / "out").iterdir()] == [
        tmp_path / "out" / "x.png"]  # fmt: skip
    assert "trainers 100.0%, generators 0.0%" in out and out.count(f"{tmp_path}/") == 3
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "out" not in path.parts}
    assert after == {path: after.get(path) for path in before}
    for name, why in (("x.bmpp", "not supported"), ("no/x.png", "No such file")):
        out = printed(capsys, runs[0], "--out", tmp_path / "out" / name, code=1)
        assert re.search(f"report.py: no picture: .*{why}", out) and "trainers 30.0%" in out
    with pytest.raises(SystemExit):
        report.main([str(runs[0]), "--window", "9", "8"])
    assert "START must be less than END" in capsys.readouterr().err


def test_runs_of_one_name_are_told_apart(tmp_path, capsys, monkeypatch):
    runs, drawn = [make(tmp_path / name / "toy", rows=2) for name in "ab"], []
    figure = report.figure
    monkeypatch.setattr(report, "figure", lambda runs, window: drawn.append(runs) or figure(runs, window))
    printed(capsys, *runs)
    assert [run["name"] for run in drawn[0]] == [*map(str, runs)] and (runs[0] / "report.png").exists()
    assert not (runs[1] / "report.png").exists()


def test_without_matplotlib_the_terminal_has_everything_else(tmp_path, capsys, monkeypatch):
    folder = make(tmp_path / "run")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    out = printed(capsys, folder)
    assert "no picture: matplotlib is not installed: pip install matplotlib\n" in out and "trainers 30.0%" in out
    assert not (folder / "report.png").exists()


def test_the_printed_command_works_from_anywhere_on_a_poor_terminal(tmp_path):
    make(tmp_path / "runs" / "toy")
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "report.py", "runs/toy"], cwd=tmp_path, text=True,
                          capture_output=True, env={"PYTHONIOENCODING": "ascii", "COLUMNS": "20"})  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("picture in runs/toy/report.png\n")


@pytest.mark.slow
def test_a_real_run_is_drawn_while_it_goes_and_when_it_is_done(job, tmp_path, warm_runs, capsys):
    folder = warm_runs / "reported"
    one = job(*SMALL, "--steps", 30, "--runs_dir", warm_runs, "--run_name", "reported", ranks=3)
    one.until(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text().count("\n") > 2)
    out = printed(capsys, folder, "--out", tmp_path / "early.png")
    assert "not finished" in out and "of 30 steps" in out
    assert one.wait() == 0, one.text()
    out = printed(capsys, folder)
    assert "30 of 30 steps" in out and "not finished" not in out and "pass@1" in out and "ABOVE" not in out
    run = report.read_run(folder)
    rows, (start, end) = run["rows"], report.loop(run)
    shares = report.staleness(run)[0]
    assert sum(age * share for age, share in shares.items()) == pytest.approx(
        sum(row["staleness_mean"] * row["loss_tokens"] for row in rows) / sum(row["loss_tokens"] for row in rows))
    waited = sum(row["trainer_seconds"]["wait"] for row in rows)
    assert report.idle_shares(run)[0] * (end - start) == pytest.approx(waited, abs=0.05)
    idle = sum(report.idle_shares(run)[rank] * (end - start) for rank in (1, 2))
    assert idle == pytest.approx(sum(row["generator_seconds"]["wait"] for row in rows), rel=0.1, abs=0.5)
    assert [role for role, *_ in run["tracks"].values()] == ["trainer", "generator", "generator"]
    assert (folder / "report.png").stat().st_size > 50_000
