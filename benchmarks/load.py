r"""Benchmarks by name: their files from a folder or from the hub, their rows as problems to be asked and judged.

`table.yaml` says where a benchmark lies, which fields hold what and how many problems there are. `load_benchmark` takes
a name of the table, or the path of any JSONL in the format of the training data. Prompts are bare problems; a template
(`choose_template`) adds what the model is asked to do and the forced start of its answer.

    math      27.0 is the key 27; of a text with "####", as GSM8K's, the number after it is the key
    choice    options are shuffled by seed and id, so that the key is not always the same letter
    code      tests as published; months outside the table's window are left out where rows have dates

Refused, with file and line: an id that was used before, a row without problem, key or tests, a key without a reading.
Warned of: a number of problems that is not the published one.

Left out: few-shot examples (no published number has any), and downloads other than through the hub.

    pytest tests/test_benchmarks.py
"""

import csv
import functools
import random
import re
import sys
from pathlib import Path

import yaml

from packing import Problem
from recipes.data import load_problems, local_file, on_hub, parse_keys, tests_of
from reward import answer_key, needs_parser, read_rows

LETTERS = "ABCDEFGHIJ"
FORMS = ("jsonl", "csv", "parquet")


@functools.cache
def table() -> dict:
    return yaml.safe_load(Path(__file__).with_name("table.yaml").read_text())


def load_benchmark(name: str, seed: int = 0, folder: str = "data/benchmarks") -> list[Problem]:
    """The problems of a benchmark by name, or of a JSONL by path (here or on the hub). FileNotFoundError says what to
    download and where to put it, ValueError which row of which file is at fault."""
    known = table()["benchmarks"]
    if name not in known:
        if not Path(name).is_file() and not on_hub(name):
            raise FileNotFoundError(f"{name}: neither a file nor one of the benchmarks {', '.join(known)}")
        return load_problems(local_file(name))
    entry, path = known[name], find_file(name, folder)
    rows = dated(name, entry, path, read_file(path))
    problems, lines, keys = [], {}, {}
    for number, row in rows:
        where = f"{path}:{number}"
        problem = make_problem(entry, row, number, seed, where)
        if (first := lines.setdefault(problem.id, number)) != number:
            raise ValueError(f"{where}: id {problem.id!r} was already used in {path}:{first}")
        for key in problem.solutions:
            keys.setdefault(key, where)
        problems.append(problem)
    check_keys(keys)
    if entry["count"] not in (None, len(problems)):
        warn(f"{name}: {len(problems)} problems in {path}, but {entry['count']} were published")
    return problems


def choose_template(name: str, template: str = "", model: str = "") -> str:
    """The template for a benchmark: the one asked for, else the one of the model's family; for choices its variant that
    asks for a letter. A file of one's own has prompts that are complete.

    >>> choose_template("aime24", model="Qwen/Qwen3-8B"), choose_template("gpqa_diamond", "r1-distilled-qwen")
    ('qwen3-think', 'r1-distilled-qwen-gpqa')
    """
    entry = table()["benchmarks"].get(name)
    if not entry:
        return template
    words = table()["families"].items()
    family = next((family for family, parts in words if any(part in model.lower() for part in parts)), None)
    template = template or entry["template"].get(family, "chat")
    return table()["choice_templates"].get(template, template) if entry["kind"] == "choice" else template


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


# -- Files -------------------------------------------------------------------------------------------------------------


def find_file(name: str, folder: str) -> str:
    """NAME.jsonl, .csv or .parquet in the folder, else the first of the table's files that the hub or its cache has."""
    entry, reasons = table()["benchmarks"][name], []
    for path in (Path(folder) / f"{name}.{form}" for form in FORMS):
        if path.is_file():
            return str(path)
    for source in entry["source"]:
        try:
            return local_file(source)
        except FileNotFoundError as error:
            reasons.append(str(error).partition(" does not give ")[2] or str(error))
    choices = []
    for source in entry["source"]:
        owner, dataset, file = source.split("/", 2)
        choices.append(f"{file} of the dataset {owner}/{dataset}" + ", whose terms have to be accepted on the hub first"
                       * entry.get("gated", False) + f", as {Path(folder) / name}{Path(file).suffix}")  # fmt: skip
    if "also" in entry:
        choices.append(f"{entry['also']}, as {Path(folder) / name}.jsonl")
    raise FileNotFoundError(f"{name}: it is not in {folder}, and the hub gives none of its files. Where there is a "
                            f"network, download {'; or '.join(choices)}. (The hub: {'; '.join(reasons)})")  # fmt: skip


def read_file(path: str) -> list[tuple[int, dict]]:
    """(line, or number of the row in a parquet file; row) of a JSONL, CSV or parquet file."""
    if path.endswith(".csv"):
        rows, line = [], 2
        try:
            with open(path, newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file, restkey="")
                for row in reader:
                    rows.append((line, row))
                    line = reader.line_num + 1  # texts may go over several lines: where the next row begins
        except (csv.Error, ValueError) as error:
            raise ValueError(f"{path}:{line}: not CSV: {error}") from None
        if not rows:
            raise ValueError(f"{path}:1: the file holds no rows")
        return rows
    if path.endswith(".parquet"):
        try:
            from pyarrow import parquet  # no requirement: only files of some benchmarks are in this form
        except ImportError:
            raise ValueError(f"{path}: to read this form `pip install pyarrow`, or give the same rows as JSON "
                             f"lines") from None  # fmt: skip
        return list(enumerate(parquet.read_table(path).to_pylist(), 1))
    return read_rows(path)


def dated(name: str, entry: dict, path: str, rows: list) -> list:
    """The rows of the table's months. A file without any date is taken as it is: the published ones are cut already."""
    if "dates" not in entry:
        return rows
    first, last = entry["dates"]["first"], entry["dates"]["last"]
    dates = [field(row, entry["fields"]["date"]) for _, row in rows]
    if not any(dates):
        warn(f"{name}: the rows of {path} have no dates: taken as already cut to {first} .. {last}")
        return rows
    for (number, _), date in zip(rows, dates, strict=True):
        if not re.match(r"\d{4}-\d\d\b", str(date)):
            raise ValueError(f"{path}:{number}: {date!r} is no date like 2024-10-31, which other rows have")
    kept = [row for row, date in zip(rows, dates, strict=True) if first <= date[:7] <= last]
    if not kept:
        raise ValueError(f"{path}: no row is from {first} .. {last}")
    return kept


# -- Rows --------------------------------------------------------------------------------------------------------------


def field(row: dict, names: list[str]):
    """The value of the first of these names that the row has, None without one."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def text_field(row: dict, names: list[str], where: str) -> str:
    value = field(row, names)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {' or '.join(map(repr, names))} must be text that is not empty")
    return value.strip()


def make_problem(entry: dict, row: dict, number: int, seed: int, where: str) -> Problem:
    fields = entry["fields"]
    name = field(row, fields["id"])
    if type(name) not in (str, int, type(None)) or name == "":
        raise ValueError(f"{where}: an id must be text or an integer, not {name!r}")
    name, prompt = str(number if name is None else name), text_field(row, fields["prompt"], where)
    if entry["kind"] == "code":
        return Problem(name, prompt, task="code", tests=code_tests(row, fields["tests"], where),
                       row={key: row[key] for key in row if key not in fields["tests"]})  # fmt: skip
    if entry["kind"] == "choice":
        prompt, key = shuffle(*read_options(row, fields, prompt, where), f"{seed} {name}")
        return Problem(name, prompt, (key,), "stem", row=row)
    return Problem(name, prompt, (math_key(field(row, fields["answer"]), where),), row=row)


def math_key(answer, where: str) -> str:
    r"""
    >>> [math_key(answer, "rows.jsonl:1") for answer in (27.0, 70, 0.5, "9 + 9 = 18\n#### 1,018", r" \frac12")]
    ['27', '70', '0.5', '1018', '\\frac12']
    """
    if type(answer) in (int, float) and answer - answer == 0:  # neither true nor NaN
        return str(int(answer) if answer == int(answer) else answer)
    if not isinstance(answer, str) or not (text := answer.rpartition("####")[2].strip()):
        raise ValueError(f"{where}: the answer must be text that is not empty, or a number, not {answer!r}")
    return text.replace(",", "") if "####" in answer else text  # 1,018 could also be a list


def read_options(row: dict, fields: dict, prompt: str, where: str) -> tuple[str, list[str], int]:
    """(the question alone, its options, index of the right one), from a list and a letter or from the original's fields
    of the right and of wrong answers."""
    options = field(row, fields["options"])
    if options is None:
        texts = [text_field(row, [name], where) for name in fields["correct"] + fields["incorrect"]]
        return prompt, texts, 0
    right = field(row, fields["answer"])
    if not isinstance(options, list) or not all(isinstance(text, str) and text.strip() for text in options):
        raise ValueError(f"{where}: options must be a list of text")
    texts = [text.strip() for text in options]
    if not 2 <= len(texts) <= len(LETTERS) or right not in list(LETTERS[: len(texts)]):
        raise ValueError(f"{where}: the answer must be the letter of one of {len(texts)} options, not {right!r}")
    # Where the question ends with the options they are in an order that no longer holds.
    shown = r"\s+".join(rf"{letter}\.\s*{re.escape(text)}" for letter, text in zip(LETTERS, texts, strict=False))
    return re.sub(rf"\s*{shown}\s*$", "", prompt), texts, LETTERS.index(right)


def shuffle(question: str, options: list[str], right: int, seed: str) -> tuple[str, str]:
    """(prompt with options in the order of the seed, letter of the right one).

    >>> shuffle("Which is even?", ["1", "2", "3"], 1, "0 q7")
    ('Which is even?\\n\\nA. 2\\nB. 1\\nC. 3', 'A')
    """
    order = list(range(len(options)))
    random.Random(seed).shuffle(order)  # a string seed is hashed by sha512, the same everywhere
    lines = [f"{letter}. {options[index]}" for letter, index in zip(LETTERS, order, strict=False)]
    return "\n".join([f"{question}\n", *lines]), LETTERS[order.index(right)]


def code_tests(row: dict, names: list[str], where: str) -> dict:
    if not any(name in row for name in names):
        raise ValueError(f"{where}: no tests: {' or '.join(map(repr, names))} is needed")
    return tests_of(row, where)


def check_keys(keys: dict[str, str]) -> None:
    """{key: where it was met}: ValueError for what could never be judged, as for training data."""
    doubtful = {}
    for key, where in keys.items():
        try:
            answer_key(key)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if needs_parser(key):
            doubtful[key] = where
    parse_keys(doubtful)
