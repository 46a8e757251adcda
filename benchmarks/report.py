"""What people look at after a run, or during it: curves, staleness and the timeline of every rank, as text and as PNG.

Reads what a run's folder holds (`Records` in evaluate.py says what): metrics.jsonl, trace.json, config.yaml and
summary.json. A run that still goes, or was killed, lacks the end of the trace and the summary. What a folder lacks, or
rows of another version do not have, is left out of the report.

At each moment a rank does one thing, the first of KINDS that covers it: interrupted and waiting go before work, as in
`rollout.Generator._switch`, so that the many slots of a generator, which overlap, count once, and the particular goes
before what it lies in. Waiting shares are of the training loop, from the first time that a trainer waits for a batch to
the last thing that a trainer did: warm start and evaluation would hide what one looks for. A rank whose last events are
not told yet counts up to the last one told. Seconds of the timeline begin with the attempt's first event.

Left out, and why: smoothing (it hides the steps that went wrong; the table has the mean of the last 5), earlier
attempts of a resumed run in the timeline (days may lie between; the curves have them), each slot of a generator
(https://ui.perfetto.dev shows trace.json in every detail), curves against seconds on the terminal.

    python benchmarks/report.py runs/toy                          # the terminal, and runs/toy/report.png
    python benchmarks/report.py runs/toy --window 30 40           # ten seconds of the timeline
    python benchmarks/report.py runs/a runs/b --out compared.png  # runs overlay; .pdf and .svg work, too
    pytest tests/test_report.py
"""

import argparse
import json
import math
import os
import shutil
import sys
import textwrap
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
RL = {"pass_rate": "pass rate", "reward": "reward", "clip_fraction": "clip fraction",
      "length_mean": "length, tokens an answer", "tokens_per_second": "tokens a second"}  # fmt: skip
SFT = {"loss": "loss, nats a token", "held_out_loss": "held-out loss, nats a token"}
ALSO = {"truncated_fraction": "share that was cut off", "staleness_mean": "staleness, mean"}  # on the terminal

# -- A run's folder ----------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> tuple[list[dict], int]:
    """(objects of JSON lines or of a Chrome trace, lines that are none). The last line may be half written."""
    objects, wrong, lines = [], 0, path.read_text(errors="replace").splitlines() if path.exists() else []
    for line_number, line in enumerate(lines, 1):
        if (text := line.strip().rstrip(",")) not in ("", "[", "]"):
            try:
                objects.append(dict(json.loads(text)))
            except (TypeError, ValueError):
                wrong += line_number < len(lines)
    return objects, wrong


def read_tracks(events: list[dict]) -> tuple[dict[int, dict], int]:
    """({rank: {"role", "events": [(kind, start s, end s), ...], "painted"}} of the last attempt, number of attempts).
    An attempt begins by naming its ranks. Ranks that did nothing are left out."""
    tracks, attempts, naming = {}, 0, False
    for event in events:
        try:
            rank, name, kind = int(event["pid"]), event["name"], event["ph"]
            if kind == "M":
                if not naming:
                    tracks, attempts, naming = {}, attempts + 1, True
                tracks[rank] = {"role": event["args"]["name"].rpartition(" ")[2], "events": []}
            elif kind == "X":
                start, end, naming = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, False
                role = "generator" if name in ("generate", "interrupted", "update") else "trainer"
                track = tracks.setdefault(rank, {"role": role, "events": []})
                track["events"].append((name if name in KINDS else "other", start, max(start, end)))
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # of another version
    tracks = {rank: tracks[rank] for rank in sorted(tracks) if tracks[rank]["events"]}
    zero = min((start for track in tracks.values() for _, start, _ in track["events"]), default=0.0)
    for track in tracks.values():
        track["events"] = [(name, start - zero, end - zero) for name, start, end in track["events"]]
        track["painted"] = paint(track["events"])
    return tracks, attempts


def read_run(folder: Path) -> dict:
    """Everything that is drawn. ValueError with a sentence if the folder is no run's."""
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "trace.json")):
        raise ValueError(f"{folder} is no run's folder: it has neither metrics.jsonl nor trace.json")
    notes, known = [], {}
    for name in ("config.yaml", "summary.json"):
        try:
            known[name] = dict(yaml.safe_load((folder / name).read_text()))  # JSON is YAML
        except (OSError, TypeError, ValueError, yaml.YAMLError):
            known[name] = {}
            notes += [f"{name} is missing or cannot be read"] if name == "config.yaml" else []
    (rows, wrong), (events, bad) = read_lines(folder / "metrics.jsonl"), read_lines(folder / "trace.json")
    tracks, attempts = read_tracks(events)
    notes += [] if rows else ["metrics.jsonl has no row: no step is done"]
    notes += [] if tracks else ["trace.json has no events: no timeline"]
    notes += [f"the timeline is of the last of {attempts} attempts"] if attempts > 1 else []
    notes += [f"left out: {wrong} lines of metrics.jsonl and {bad} of trace.json are no JSON"] if wrong + bad else []
    return {"folder": folder, "name": folder.resolve().name, "rows": rows, "tracks": tracks, "notes": notes,
            "config": known["config.yaml"], "summary": known["summary.json"],
            "titles": RL | ALSO if any("pass_rate" in row for row in rows) else RL | ALSO | SFT}  # fmt: skip


def number(value) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def curve(run: dict, name: str, against: str = "step") -> tuple[list[float], list[float]]:
    """x and y where a row has both; steps count from 1, as on the terminal of a run."""
    rows = run["rows"] if name in run["titles"] else ()
    points = [(number(row.get(against)), number(row.get(name))) for row in rows]
    points = [(x + (against == "step"), y) for x, y in points if x is not None and y is not None]
    return [x for x, _ in points], [y for _, y in points]


def staleness(run: dict) -> tuple[dict[int, float], int | None]:
    """{versions: share of all trained tokens}, and the bound."""
    counts, bound = Counter(), run["config"].get("max_staleness")
    for row in run["rows"]:
        found = row.get("staleness_histogram")
        counts.update({int(age): tokens for age, tokens in found.items() if age.isdecimal() and number(tokens)}
                      if isinstance(found, dict) else {})  # fmt: skip
    return {age: counts[age] / counts.total() for age in sorted(counts)}, bound if type(bound) is int else None


# -- Who did what when -------------------------------------------------------------------------------------------------


def paint(events: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """(edges, cells): from edges[i] to edges[i + 1] a rank did the kind number cells[i] of KINDS; -1 is not told."""
    order = {name: i for i, name in enumerate(KINDS)}
    events = sorted(events, key=lambda event: -order[event[0]])  # what goes first is painted last
    starts, ends = (np.array([event[i] for event in events], dtype=float) for i in (1, 2))
    edges = np.unique(np.concatenate([starts, ends]))
    cells = np.full(max(0, len(edges) - 1), -1)
    for (name, _, _), first, last in zip(events, edges.searchsorted(starts), edges.searchsorted(ends), strict=True):
        cells[first:last] = order[name]
    return edges, cells


def fractions(painted: tuple[np.ndarray, np.ndarray], start: float, end: float, columns: int = 1) -> np.ndarray:
    """[columns, kinds + 1]: the share of each equal part of start .. end that went into each kind, last the untold."""
    edges, cells = painted
    shares, bounds = np.zeros((columns, len(KINDS) + 1)), np.linspace(start, end, columns + 1)
    for kind in np.unique(cells[cells >= 0]):
        spent = np.concatenate([[0.0], np.cumsum(np.diff(edges) * (cells == kind))])
        shares[:, kind] = np.diff(np.interp(bounds, edges, spent)) / max(1e-9, (end - start) / columns)
    shares[:, -1] = (1 - shares.sum(1)).clip(0)
    return shares


def whole(run: dict) -> tuple[float, float]:
    return 0.0, max((float(track["painted"][0][-1]) for track in run["tracks"].values()), default=0.0)


def loop(run: dict) -> tuple[float, float]:
    """Start and end of the training loop, in seconds of the timeline; all of it if no trainer has waited yet."""
    events = [event for track in run["tracks"].values() if track["role"] == "trainer" for event in track["events"]]
    starts = [start for name, start, _ in events if name == "wait"]
    return (min(starts), max(end for *_, end in events)) if starts else whole(run)


def idle_shares(run: dict, window: tuple[float, float] | None = None) -> dict[int, float]:
    """{rank: share of the window (the training loop) that it waited}; ranks that tell nothing of it are left out."""
    (start, end), wait = window or loop(run), list(KINDS).index("wait")
    told = {rank: min(end, float(track["painted"][0][-1])) for rank, track in run["tracks"].items()}
    return {rank: float(fractions(run["tracks"][rank]["painted"], start, last)[0, wait])
            for rank, last in told.items() if last > start}  # fmt: skip


# -- On the terminal ---------------------------------------------------------------------------------------------------


def sparkline(values: list[float], columns: int = 40) -> str:
    parts = [float(part.mean()) for part in np.array_split(values, min(columns, len(values)))]
    low, high = min(parts), max(parts)
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (part - low) / (high - low))) if high > low else 3] for part in parts)


def table(run: dict) -> list[str]:
    config, summary = run["config"], run["summary"]
    steps, seconds = ([number(row.get(name)) or 0 for row in run["rows"]] for name in ("step", "seconds"))
    done, of = int(max(steps, default=-1)) + 1, config.get("sft_steps" if config.get("objective") == "sft" else "steps")
    lines = [f"{run['folder']}: {done}{'' if of is None else f' of {of}'} steps, {max(seconds, default=0):.0f} s"]
    if summary.get("steps") != done:
        age = time.time() - max(file.stat().st_mtime for file in run["folder"].glob("[mt][er]*.json*"))
        lines.append(f"  not finished: still going, or killed; last sign of life {max(0, age):.0f} s ago")
    elif number(summary.get("pass@1_before")) is not None and number(summary.get("pass@1_after")) is not None:
        lines.append(f"  pass@1 {summary['pass@1_before']:.3f} -> {summary['pass@1_after']:.3f}, held out")
    derived = config.get("derived")
    lines += [f"  {key} {derived[key]}" for key in ("ranks", "engine") if isinstance(derived, dict) and key in derived]
    curves = {title: values for name, title in run["titles"].items() if (values := curve(run, name)[1])}
    lines += [f"  {'':<26}    first   last 5   lowest  highest  by step"] if curves else []
    for title, values in curves.items():
        cells = (values[0], sum(values[-5:]) / len(values[-5:]), min(values), max(values))
        cells = "".join(f"{f'{cell:,.0f}' if abs(cell) >= 1000 else f'{cell:.3g}':>9}" for cell in cells)
        lines.append(f"  {title:<26}{cells}  {sparkline(values)}")
    return lines


def staleness_bars(run: dict, columns: int = 40) -> list[str]:
    shares, bound = staleness(run)
    if not shares:
        return []
    mean, most, known = sum(age * share for age, share in shares.items()), max(shares), bound is not None
    lines = [f"  staleness, share of trained tokens: mean {mean:.2f}, highest {most}, bound {bound if known else '?'}"]
    for age in sorted({*shares, *([bound] if known else [])}):
        share, mark = shares.get(age, 0.0), "" if not known or age < bound else "<- bound"
        mark = mark if not known or age <= bound else "ABOVE THE BOUND"
        lines.append(f"  {age:>6} {'█' * round(columns * share):<{columns}} {share:7.2%} {mark}".rstrip())
    return lines


def timeline(run: dict, window: tuple[float, float] | None = None, columns: int = 80) -> list[str]:
    """A line a rank: for each part of the window (the whole attempt) the letter of what took the most of it."""
    if not run["tracks"]:
        return []
    (start, end), (first, last), idle = window or whole(run), window or loop(run), idle_shares(run, window)
    letters, seen, lines, means = [*(letter for letter, _ in KINDS.values()), " "], np.zeros(len(KINDS) + 1), [], ""
    for rank, track in run["tracks"].items():
        shares = fractions(track["painted"], start, end, columns)
        seen += shares.sum(0)
        text = "".join(letters[kind] for kind in shares.argmax(1))
        lines.append(f"  {rank:>4} {track['role']:<9} {text} {f'{idle[rank]:4.0%}' if rank in idle else '   -'}")
    for role in ("trainer", "generator"):
        those = [share for rank, share in idle.items() if run["tracks"][rank]["role"] == role]
        means += f", {role}s {sum(those) / len(those):.1%}" if those else ""
    legend = "  ".join(f"{letter} {name}" for (name, (letter, _)), spent in zip(KINDS.items(), seen, strict=False)
                       if spent)  # fmt: skip
    return [f"  waiting, from {first:.0f} s to {last:.0f} s{means}; a letter is {(end - start) / columns:.2g} s",
            *textwrap.wrap(legend, columns + 14, initial_indent="  ", subsequent_indent="  "), *lines,
            f"{'':17}{f'{start:.0f} s':<{columns - 9}}{f'{end:.0f} s':>9}"]  # fmt: skip


# -- As a picture ------------------------------------------------------------------------------------------------------


def figure(runs: list[dict], window: tuple[float, float] | None = None):
    """A matplotlib figure: a panel for each curve that a run has, the staleness, and all ranks of all runs below."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = [(name, title, x) for name, title in (SFT | RL).items()
              for x in (("step", "seconds") if name in (*SFT, "pass_rate", "reward") else ("step",))
              if any(curve(run, name, x)[1] for run in runs)]  # fmt: skip
    panels += [("staleness", "share of trained tokens", "")] * any(staleness(run)[0] for run in runs)
    deep, ranks = math.ceil(len(panels) / 4), sum(len(run["tracks"]) for run in runs)
    heights = [2.9 * deep + 0.5] * bool(deep) + [1.6 + 0.3 * ranks] * bool(ranks)
    fig = Figure(figsize=(16, sum(heights)), layout="constrained")
    parts = list(fig.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    for place, (name, title, against) in enumerate(panels):
        axis = parts[0].add_subplot(deep, 4, place + 1, label=f"{name} {against}".strip())
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set(ylabel=title, xlabel={"step": "step", "seconds": "seconds of the run"}.get(against))
        if name == "staleness":
            draw_staleness(axis, runs)
            continue
        for color, run in enumerate(runs):
            x, y = curve(run, name, against)
            if x:
                axis.plot(x, y, f"C{color}", lw=1.4, marker="." if len(x) < 40 else None, label=run["name"])
        axis.xaxis.get_major_locator().set_params(integer=against == "step")
        if name not in ("reward", *SFT):
            axis.set_ylim(0, 1.02 if name == "pass_rate" else None)
    if ranks:
        draw_timeline(parts[-1].add_subplot(label="timeline"), runs, window)
    handles = [Patch(color=f"C{color}", label=run["name"]) for color, run in enumerate(runs)]
    parts[0].legend(handles=handles, loc="outside upper center", ncols=6, frameon=False, fontsize="large")
    return fig


def draw_staleness(axis, runs: list[dict]) -> None:
    width, bounds = 0.8 / len(runs), set()
    for color, (shares, bound) in enumerate(map(staleness, runs)):
        axis.bar([age - 0.4 + width * (color + 0.5) for age in shares], shares.values(), width, color=f"C{color}")
        bounds |= {bound} if shares and bound is not None else set()
    for bound in bounds:
        axis.axvline(bound + 0.5, color="black", lw=1.5, ls="--")
        axis.annotate(f"bound {bound}", (bound + 0.5, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    axis.set(xlabel="staleness, versions", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)


def draw_timeline(axis, runs: list[dict], window: tuple[float, float] | None) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    colors = np.array([*(to_rgb(color) for _, color in KINDS.values()), (1, 1, 1)])
    seen, names = np.zeros(len(colors)), []
    for run in runs:
        (start, end), idle = window or whole(run), idle_shares(run, window)
        for rank, track in run["tracks"].items():
            shares, row = fractions(track["painted"], start, end, 1200), len(names)
            seen += shares.sum(0)  # colours mix by share
            axis.imshow((shares @ colors).clip(0, 1)[None], extent=(start, end, row + 0.42, row - 0.42), aspect="auto",
                        interpolation="nearest")  # fmt: skip
            text = f" waits {idle[rank]:.0%}" if rank in idle else ""
            axis.annotate(text, (1, row), xycoords=("axes fraction", "data"), va="center")
            names.append(f"{run['name'] if len(runs) > 1 else ''} rank {rank}, {track['role']}")
    axis.set(xlim=window or (0, max(1e-3, *(whole(run)[1] for run in runs))), ylim=(len(names) - 0.5, -0.5),
             xlabel="seconds of the attempt")  # fmt: skip
    axis.set_yticks(range(len(names)), names)
    handles = [Patch(color=KINDS[kind][1], label=kind) for kind, spent in zip(KINDS, seen, strict=False) if spent]
    axis.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=7, frameon=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the picture, instead of report.png of the first run")
    parser.add_argument("--window", nargs=2, type=float, metavar=("START", "END"), help="seconds of the timeline")
    args = parser.parse_args(argv)
    if args.window and not 0 <= args.window[0] < args.window[1]:
        parser.error("--window: START must be at least 0 and less than END")
    sys.stdout.reconfigure(errors="replace")  # terminals without blocks
    runs, wrong = [], []
    for folder in args.runs:
        try:
            runs.append(read_run(folder))
        except (OSError, ValueError) as error:
            wrong.append(str(error))
    if len({run["name"] for run in runs}) < len(runs):
        runs = [run | {"name": str(run["folder"])} for run in runs]
    columns = max(40, min(160, shutil.get_terminal_size().columns - 22))
    for run in runs:
        lines = table(run) + staleness_bars(run) + timeline(run, args.window, columns)
        print("\n".join(lines + [f"  {note}" for note in run["notes"]]) + "\n")
    runs = [run for run in runs if run["rows"] or run["tracks"]]
    try:
        if runs:
            out = args.out or runs[0]["folder"] / "report.png"
            new = out.with_name(f".new-{out.name}")  # beside, then renamed: whoever looks never sees half of it
            figure(runs, args.window).savefig(new)
            os.replace(new, out)
            print(f"picture in {out}")
    except ImportError:
        print("no picture: matplotlib is not installed: pip install matplotlib")
    except (OSError, ValueError) as error:
        wrong.append(f"no picture: {error}")
    for sentence in wrong:
        print(f"report.py: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
