"""The published comparisons: a command that runs each row again and, once run, its numbers beside the published ones.

Numbers are percent, the mean over the samples; a rating, without an interval, for Codeforces. "inside" says that the
published one lies in the interval of the measured one, which is wide: AIME's 30 problems leave about 15 points on each
side.

`evaluate.py --out FOLDER/MODEL` leaves FOLDER/MODEL/results.json, which is read here. Left out: running anything.

    python benchmarks/compare.py                                   # the tables as published, a command for each row
    python benchmarks/compare.py --results results --table "math, 7B"
"""

import argparse
import json
import shlex
from pathlib import Path

import yaml

TABLE = Path(__file__).with_name("table.yaml")


def command(name: str, row: dict, table: dict, results: str) -> str:
    """What one types to run a row again. The options of `sampling` are spelled out by its name."""
    words = ["python", "evaluate.py", "--model", row["hub"], "--benchmarks", ",".join(row["values"]), "--sampling",
             row["sampling"], "--template", row["template"], "--out", f"{results or 'results'}/{name}", "--engine",
             "sglang", "--published_engine"]  # fmt: skip
    for option, value in row.get("options", {}).items():
        words += [f"--{option}", str(value)]
    for benchmark in row["values"]:
        if standings := table["benchmarks"][benchmark].get("standings"):
            words += ["--standings", f"data/benchmarks/{standings}"]
    return shlex.join(words)


def cell(published: float, measured: dict | None, entry: dict, samples: int) -> str:
    """Published, measured, interval, and what differs in how it was measured.

    >>> measured = {"pass@1": 0.6, "interval": [0.45, 0.75], "problems": 30, "samples": 4}
    >>> cell(61.9, measured, {"count": 30}, 32)
    '61.9, here 60.0 [45.0, 75.0] inside; 4 samples for 32'
    >>> cell(1962, {"rating": 1799.6}, {"metric": "rating"}, 8)
    '1962, here 1800'
    """
    metric = entry.get("metric", "pass@1")
    if not measured or measured.get(metric) is None:
        return str(published)
    if metric == "rating":
        text = f"{published}, here {measured[metric]:.0f}"
    else:
        low, high = (round(100 * bound, 1) for bound in measured["interval"])
        place = "inside" if low <= published <= high else "OUTSIDE"
        text = f"{published}, here {100 * measured[metric]:.1f} [{low}, {high}] {place}"
    wanted = {"problems": entry.get("count"), "samples": samples}
    return text + "".join(f"; {measured[what]} {what} for {number}" for what, number in wanted.items()
                          if number and measured.get(what) not in (None, number))  # fmt: skip


def compare(table: dict, results: str = "", only: str = "") -> str:
    """All tables, or one, each with its commands below."""
    parts = []
    for title in dict.fromkeys(row["table"] for row in table["models"].values()):
        models = {name: row for name, row in table["models"].items() if row["table"] == title}
        if only not in ("", title):
            continue
        names = list(next(iter(models.values()))["values"])
        lines = [["model", *names]]
        for name, row in models.items():
            file, found = Path(results) / name / "results.json", {}
            if results and file.is_file():
                found = json.loads(file.read_text())["benchmarks"]
            samples = table["sampling"][row["sampling"]]["samples"]
            cells = [cell(row["values"][b], found.get(b), table["benchmarks"][b], samples) for b in names]
            if "percentile" in row:
                here = found.get("codeforces", {}).get("percentile")
                both = f"{row['percentile']}" + ("" if here is None else f", here {here}")
                cells[names.index("codeforces")] += f" (percentile {both})"
            lines.append([name, *cells])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        rows = [f"| {' | '.join(f'{c:<{w}}' for c, w in zip(line, widths, strict=True))} |" for line in lines]
        commands = [command(name, row, table, results) for name, row in models.items()]
        parts.append("\n".join([title, "", *rows, "", *commands]))
    return "\n\n".join(parts)


def main() -> None:
    table = yaml.safe_load(TABLE.read_text())
    titles = list(dict.fromkeys(row["table"] for row in table["models"].values()))
    parser = argparse.ArgumentParser(description="The published comparisons, and how to run them again.")
    parser.add_argument("--results", default="", help="folder with a folder for each model that was run again")
    parser.add_argument("--table", default="", choices=["", *titles], help="one table only")
    args = parser.parse_args()
    print(compare(table, args.results, args.table))


if __name__ == "__main__":
    main()
