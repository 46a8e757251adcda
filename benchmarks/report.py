"""What people look at after a run, or during it: curves, staleness and the timeline of every rank, as text and as PNG.

Reads a run's folder (recipes/ledger.py says what it holds). A run that still goes, or was killed, lacks the end of the
trace and the summary; what a folder lacks, or rows of another version do not have, is left out of the report.

At each moment a rank does one thing, the first of KINDS that covers it: interrupted and waiting go before work, as in
`rollout.Generator._switch`, so that the slots of a generator, which overlap, count once, and the particular goes before
what it lies in. Waiting shares are of the training loop: from a trainer's first wait for a batch to the last thing that
a trainer did, for a rank to the last thing that it told. Seconds of the timeline begin with the attempt's first event.

Left out, and why: smoothing (it hides the steps that went wrong), earlier attempts of a resumed run in the timeline
(days may lie between; the curves have them), each slot of a generator (https://ui.perfetto.dev shows it in trace.json).

    python benchmarks/report.py runs/toy                          # the terminal, and runs/toy/report.png
    python benchmarks/report.py runs/toy --window 30 40           # ten seconds of the timeline
    python benchmarks/report.py runs/a runs/b --out compared.png  # runs overlay; .pdf and .svg work, too
    pytest tests/test_report.py
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import yaml

KINDS = {  # what a rank does -> its letter and colour; the first that covers a moment names it
    "interrupted": ("i", "#d62728"), "wait": (".", "#d5d5d5"), "checkpoint": ("k", "#17becf"), "sync": ("s", "#9467bd"),
    "fetch": ("f", "#bcbd22"), "advantages": ("a", "#e377c2"), "log-probabilities": ("l", "#ff9e4a"),
    "train": ("t", "#2ca02c"), "evaluate": ("e", "#8c564b"), "generate": ("g", "#1f77b4"), "score": ("r", "#aec7e8"),
    "update": ("u", "#f7a8a8"), "warm start": ("w", "#c9a66b"), "other": ("o", "#333333"),
}  # fmt: skip
WAIT = list(KINDS).index("wait")
RL = {"pass_rate": "pass rate", "reward": "reward", "clip_fraction": "clip fraction",
      "length_mean": "length, tokens an answer", "tokens_per_second": "tokens a second"}  # fmt: skip
SFT = {"loss": "loss, nats a token", "held_out_loss": "held-out loss, nats"}
ALSO = {"truncated_fraction": "share that was cut off", "staleness_mean": "staleness, mean"}  # on the terminal


def read_lines(path: Path) -> list[dict]:
    """The objects of JSON lines, or of a Chrome trace: brackets and a line that is half written are none."""
    objects = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(TypeError, ValueError):
            objects.append(dict(json.loads(line.strip().rstrip(","))))
    return objects


def read_tracks(trace: list[dict]) -> tuple[dict[int, tuple], int]:
    """({rank: (role, edges, cells as `paint` has them)} of the last attempt, number of attempts). An attempt begins by
    naming its ranks; those that did nothing are left out."""
    roles, events, attempts, naming = {}, {}, 0, False
    for event in trace:
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # of another version
            rank, name = int(event["pid"]), event["name"]
            if event["ph"] == "M":
                if not naming:
                    roles, events, attempts = {}, {}, attempts + 1
                roles[rank] = event["args"]["name"].rpartition(" ")[2]
            elif event["ph"] == "X":
                kind, start, duration = name if name in KINDS else "other", event["ts"] / 1e6, event["dur"] / 1e6
                events.setdefault(rank, []).append((kind, start, start + max(0.0, duration)))
            naming = event["ph"] == "M"
    zero = min((start for each in events.values() for _, start, _ in each), default=0.0)
    return {rank: (roles.get(rank, "rank"), *paint(events[rank], zero)) for rank in sorted(events)}, attempts


def read_run(folder: Path) -> dict:
    """Everything that is drawn. ValueError with a sentence if the folder is no run's."""
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "trace.json")):
        raise ValueError(f"{folder} is no run's folder: it has neither metrics.jsonl nor trace.json")
    known = {"config.yaml": {}, "summary.json": {}}
    for name, parse in zip(known, (yaml.safe_load, json.loads), strict=True):
        with contextlib.suppress(OSError, TypeError, ValueError, yaml.YAMLError):
            known[name] = dict(parse((folder / name).read_text()))
    rows, (tracks, attempts) = read_lines(folder / "metrics.jsonl"), read_tracks(read_lines(folder / "trace.json"))
    notes = {"config.yaml is missing or cannot be read": not known["config.yaml"],
             "metrics.jsonl has no row: no step is done": not rows, "trace.json has no events: no timeline": not tracks,
             f"the timeline is of the last of {attempts} attempts": attempts > 1}  # fmt: skip
    return {"folder": folder, "name": folder.resolve().name, "rows": rows, "tracks": tracks,
            "config": known["config.yaml"], "summary": known["summary.json"],
            "notes": [sentence for sentence, holds in notes.items() if holds],
            "whole": (0.0, max((float(edges[-1]) for _, edges, _ in tracks.values()), default=0.0)),
            "titles": RL | ALSO if any("pass_rate" in row for row in rows) else SFT | RL | ALSO}  # fmt: skip


def number(value) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def curve(run: dict, name: str, against: str = "step") -> tuple[list[float], list[float]]:
    """x and y where a row has both; steps count from 1, as on the terminal of a run."""
    points = [(number(row.get(against)), number(row.get(name))) for row in run["rows"] if name in run["titles"]]
    points = [(x + (against == "step"), y) for x, y in points if x is not None and y is not None]
    return [x for x, _ in points], [y for _, y in points]


def staleness(run: dict) -> tuple[dict[int, float], int | None]:
    """{versions: share of all trained tokens}, and the bound."""
    counts, bound = Counter(), run["config"].get("max_staleness")
    for row in run["rows"]:
        ages = found if isinstance(found := row.get("staleness_histogram"), dict) else {}
        counts.update({int(age): tokens for age, tokens in ages.items() if age.isdecimal() and number(tokens)})
    return {age: counts[age] / counts.total() for age in sorted(counts)}, bound if type(bound) is int else None


def paint(events: list[tuple], zero: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """(edges, cells) of (kind, start, end) in seconds: from edges[i] to edges[i + 1], counted from `zero`, a rank did
    the kind number cells[i] of KINDS; -1 is not told."""
    order = list(KINDS)
    events = sorted(events, key=lambda event: -order.index(event[0]))  # what goes first is painted last
    starts, ends = (np.array([event[i] for event in events], dtype=float) - zero for i in (1, 2))
    edges = np.unique(np.concatenate([starts, ends]))
    cells = np.full(len(edges) - 1, -1)
    for event, first, last in zip(events, edges.searchsorted(starts), edges.searchsorted(ends), strict=True):
        cells[first:last] = order.index(event[0])
    return edges, cells


def fractions(edges: np.ndarray, cells: np.ndarray, start: float, end: float, columns: int = 1) -> np.ndarray:
    """[columns, kinds + 1]: the share of each equal part of start .. end that went into each kind, last the untold."""
    shares, bounds = np.zeros((columns, len(KINDS) + 1)), np.linspace(start, end, columns + 1)
    for kind in np.unique(cells[cells >= 0]):
        spent = np.concatenate([[0.0], np.cumsum(np.diff(edges) * (cells == kind))])
        shares[:, kind] = np.diff(np.interp(bounds, edges, spent)) / max(1e-9, (end - start) / columns)
    shares[:, -1] = (1 - shares.sum(1)).clip(0)
    return shares


def loop(run: dict) -> tuple[float, float]:
    """Start and end of the training loop, in seconds of the timeline; all of it if no trainer has waited yet."""
    trainers = [(edges, cells == WAIT) for role, edges, cells in run["tracks"].values() if role == "trainer"]
    starts = [float(edges[waits.argmax()]) for edges, waits in trainers if waits.any()]
    return (min(starts), max(float(edges[-1]) for edges, _ in trainers)) if starts else run["whole"]


def idle_shares(run: dict, window: tuple[float, float] | None = None) -> dict[int, float]:
    """{rank: share of the window (the training loop) that it waited}; ranks that tell nothing of it are left out."""
    start, end = window or loop(run)
    return {rank: float(fractions(edges, cells, start, min(end, edges[-1]))[0, WAIT])
            for rank, (_, edges, cells) in run["tracks"].items() if min(end, edges[-1]) > start}  # fmt: skip


def sparkline(values: list[float], columns: int = 40) -> str:
    parts = [float(part.mean()) for part in np.array_split(values, min(columns, len(values)))]
    low, high = min(parts), max(parts)
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (part - low) / (high - low))) if high > low else 3] for part in parts)


def table(run: dict, columns: int = 80) -> list[str]:
    config, summary = run["config"], run["summary"]
    steps, seconds = ([number(row.get(name)) or 0 for row in run["rows"]] for name in ("step", "seconds"))
    done, of = int(max(steps, default=-1)) + 1, config.get("sft_steps" if config.get("objective") == "sft" else "steps")
    lines = [f"{run['folder']}: {done}{'' if of is None else f' of {of}'} steps, {max(seconds, default=0):.0f} s"]
    if summary.get("steps") != done:
        age = time.time() - max(file.stat().st_mtime for file in run["folder"].glob("*.json*"))
        lines.append(f"  not finished: still going, or killed; last sign of life {max(0, age):.0f} s ago")
    elif number(summary.get("pass@1_before")) is not None and number(summary.get("pass@1_after")) is not None:
        lines.append(f"  pass@1 {summary['pass@1_before']:.3f} -> {summary['pass@1_after']:.3f}, held out")
    derived = config.get("derived")
    lines += [f"  {key} {derived[key]}" for key in ("ranks", "engine") if isinstance(derived, dict) and key in derived]
    curves = {title: values for name, title in run["titles"].items() if (values := curve(run, name)[1])}
    lines += [f"  {'':<26}   first   last 5   lowest  highest  by step"] if curves else []
    for title, values in curves.items():
        cells = (values[0], sum(values[-5:]) / len(values[-5:]), min(values), max(values))
        cells = "".join(f"{f'{cell:,.0f}' if abs(cell) >= 1000 else f'{cell:.3g}':>8} " for cell in cells)
        lines.append(f"  {title:<26}{cells} {sparkline(values, max(10, columns - 43))}")
    return lines


def staleness_bars(run: dict, columns: int = 40) -> list[str]:
    shares, bound = staleness(run)
    if not shares:
        return []
    mean, known = sum(age * share for age, share in shares.items()), bound is not None
    lines = [f"  staleness of trained tokens: mean {mean:.2f}, highest {max(shares)}, bound {bound if known else '?'}"]
    for age, share in sorted(({bound if known else 0: 0.0} | shares).items()):
        mark = "" if not known or age < bound else "<- bound" if age == bound else "ABOVE THE BOUND"
        lines.append(f"  {age:>6} {'█' * round(columns * share):<{columns}} {share:7.2%} {mark}".rstrip())
    return lines


def timeline(run: dict, window: tuple[float, float] | None = None, columns: int = 80) -> list[str]:
    """A line a rank: for each part of the window (the whole attempt) the letter of what took the most of it."""
    (start, end), (first, last), idle = window or run["whole"], window or loop(run), idle_shares(run, window)
    letters, seen, lines, means = [*(letter for letter, _ in KINDS.values()), " "], np.zeros(len(KINDS) + 1), [], ""
    for rank, (role, edges, cells) in run["tracks"].items():
        shares = fractions(edges, cells, start, end, columns)
        seen += shares.sum(0)
        text = "".join(letters[kind] for kind in shares.argmax(1))
        lines.append(f"  {rank:>4} {role:<9} {text} {f'{idle[rank]:4.0%}' if rank in idle else '   -'}")
    for role in ("trainer", "generator"):
        those = [share for rank, share in idle.items() if run["tracks"][rank][0] == role]
        means += f", {role}s {sum(those) / len(those):.1%}" if those else ""
    legend = [f"{letters[kind]} {name}" for kind, name in enumerate(KINDS) if seen[kind]]
    return [f"  waiting, from {first:.0f} s to {last:.0f} s{means}; a letter is {(end - start) / columns:.2g} s",
            *("  " + "  ".join(legend[place : place + 6]) for place in range(0, len(legend), 6)), *lines,
            f"{'':17}{f'{start:.0f} s':<{columns - 9}}{f'{end:.0f} s':>9}"]  # fmt: skip


def figure(runs: list[dict], window: tuple[float, float] | None = None):
    """A matplotlib figure: a panel for each curve that a run has, the staleness, and all ranks of all runs below."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = [(name, title, x) for name, title in (SFT | RL).items()
              for x in (("step", "seconds") if name in (*SFT, "pass_rate", "reward") else ("step",))
              if any(curve(run, name, x)[1] for run in runs)]  # fmt: skip
    panels += [("staleness", "share of trained tokens", "staleness, versions")] * any(staleness(run)[0] for run in runs)
    deep, ranks = math.ceil(len(panels) / 4), sum(len(run["tracks"]) for run in runs)
    heights = [2.9 * deep + 0.5] * bool(deep) + [1.6 + 0.3 * ranks] * bool(ranks)
    fig = Figure(figsize=(16, sum(heights)), layout="constrained")
    parts = fig.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for place, (name, title, against) in enumerate(panels):
        axis = parts[0].add_subplot(deep, 4, place + 1, label=f"{name}, {against}")
        axis.grid(alpha=0.3)
        axis.set(ylabel=title, xlabel={"seconds": "seconds of the run"}.get(against, against))
        for color, run in enumerate(runs):
            if (points := curve(run, name, against))[0]:
                axis.plot(*points, f"C{color}", lw=1.4, marker="." if len(points[0]) < 40 else None, label=run["name"])
            shares, bound = staleness(run) if name == "staleness" else ({}, None)
            places = [age + 0.8 * (color + 0.5) / len(runs) - 0.4 for age in shares]
            axis.bar(places, shares.values(), 0.8 / len(runs), color=f"C{color}")
            if shares and bound is not None and bound <= 2 * max(shares) + 8:  # else it is too far away to be drawn
                axis.axvline(bound + 0.5, color="black", lw=1.5, ls="--")
                axis.text(bound + 0.5, 1.02, f"bound {bound}", transform=axis.get_xaxis_transform(), ha="center")
        axis.xaxis.get_major_locator().set_params(integer=against != "seconds")
        if name not in ("reward", *SFT):
            axis.set_ylim(0, 1.02 if name == "pass_rate" else None)
    if ranks:
        draw_timeline(parts[-1].add_subplot(label="timeline"), runs, window)
    parts[0].legend(handles=[Patch(color=f"C{color}", label=run["name"]) for color, run in enumerate(runs)],
                    loc="outside upper center", ncols=6, frameon=False, fontsize="large")  # fmt: skip
    return fig


def draw_timeline(axis, runs: list[dict], window: tuple[float, float] | None) -> None:
    colors = np.array([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for _, color in KINDS.values()] + [[1] * 3])
    seen, names = np.zeros(len(colors)), []
    for run in runs:
        (start, end), idle = window or run["whole"], idle_shares(run, window)
        for rank, (role, edges, cells) in run["tracks"].items():
            shares, row = fractions(edges, cells, start, end, 1200), len(names)
            seen += shares.sum(0)  # colours mix by share
            axis.imshow((shares @ colors).clip(0, 1)[None], extent=(start, end, row + 0.42, row - 0.42), aspect="auto",
                        interpolation="nearest")  # fmt: skip
            axis.annotate(f" waits {idle[rank]:.0%}" if rank in idle else "", (1, row), va="center",
                          xycoords=("axes fraction", "data"))  # fmt: skip
            names.append(f"{run['name'] if len(runs) > 1 else ''} rank {rank}, {role}")
    axis.set(xlim=window or (0, max(1e-3, *(run["whole"][1] for run in runs))), ylim=(len(names) - 0.5, -0.5),
             yticks=range(len(names)), yticklabels=names, xlabel="seconds of the attempt")  # fmt: skip
    for (name, (_, color)), spent in zip(KINDS.items(), seen, strict=False):
        axis.plot([], [], "s", ms=10, color=color, label=name if spent else None)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=7, frameon=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the picture, instead of report.png of the first run")
    parser.add_argument("--window", nargs=2, type=float, metavar=("START", "END"), help="seconds of the timeline")
    args = parser.parse_args(argv)
    if args.window and not args.window[0] < args.window[1]:
        parser.error("--window: START must be less than END")
    sys.stdout.reconfigure(errors="replace")  # terminals without blocks
    runs, wrong, columns = [], [], max(40, min(160, shutil.get_terminal_size().columns - 22))
    for folder in args.runs:
        try:
            runs.append(run := read_run(folder))
            lines = table(run, columns) + staleness_bars(run) + [f"  {note}" for note in run["notes"]]
            print(*lines, *(timeline(run, args.window, columns) if run["tracks"] else ()), "", sep="\n")
        except (OSError, ValueError) as error:
            wrong.append(str(error))
    double = len({run["name"] for run in runs}) < len(runs)
    runs = [run | {"name": str(run["folder"])} if double else run for run in runs if run["rows"] or run["tracks"]]
    if runs:
        out = args.out or runs[0]["folder"] / "report.png"
        new = out.with_name(f".new-{out.name}")  # beside, then renamed: whoever looks never sees half of it
        try:
            figure(runs, args.window).savefig(new)
            os.replace(new, out)
            print(f"picture in {out}")
        except ImportError:
            print("no picture: matplotlib is not installed: pip install matplotlib")
        except (OSError, ValueError) as error:
            wrong.append(f"no picture: {error}")
    print(*(f"report.py: {sentence}" for sentence in wrong), sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
