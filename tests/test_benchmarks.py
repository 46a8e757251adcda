r"""Benchmarks by name: files of every published form, shuffled options, what is refused; the table and its commands.

    pytest tests/test_benchmarks.py          # seconds; no network is asked
"""

import csv
import doctest
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import huggingface_hub
import pytest
import yaml
from conftest import ROOT

import evaluate
import recipes.data
import toy
from benchmarks import compare, load
from benchmarks.load import choose_template, load_benchmark, table
from recipes.data import template_text
from reward import Verdict, quick_verdict

IO = {"inputs": ["1 2\n"], "outputs": ["3\n"], "fn_name": "", "remote": False}
CALLS = json.dumps({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"})
STDIN = {"function": "", "inputs": ["1 2\n"], "outputs": ["3\n"]}
ARGUMENTS = {"function": "add", "inputs": ["[1, 2]"], "outputs": ["3"]}
# What a row looks like where it was published, and (id, prompt, key or tests) of the problem.
ROWS = {
    "aime24": [({"id": 60, "problem": "Q1", "solution": "...", "answer": "204", "url": "u", "year": "2024"},
                ("60", "Q1", "204")),
               ({"ID": "2024-I-4", "Problem": "Q2", "Solution": "...", "Answer": 116}, ("2024-I-4", "Q2", "116"))],
    "aime25": [({"problem": "Q1", "answer": 70, "id": "0"}, ("0", "Q1", "70")),
               ({"question": "Q2", "answer": "588"}, ("2", "Q2", "588"))],
    "amc23": [({"id": 0, "problem": "Q1", "answer": 27.0, "url": "u"}, ("0", "Q1", "27")),
              ({"id": 1, "question": "Q2", "answer": 0.25}, ("1", "Q2", "0.25"))],
    "math500": [({"problem": "Q1", "solution": "...", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "level": 2,
                  "subject": "Precalculus", "unique_id": "test/precalculus/807.json"},
                 ("test/precalculus/807.json", "Q1", "\\left( 3, \\frac{\\pi}{2} \\right)")),
                ({"problem": "Q2", "answer": "\\text{Evelyn}", "unique_id": "b"}, ("b", "Q2", "\\text{Evelyn}"))],
    "gsm8k": [({"question": "Q1", "answer": "She sells 16 - 7 = <<16-7=9>>9.\n#### 1,018"}, ("1", "Q1", "1018")),
              ({"question": "Q2", "answer": "So -3.\n#### -3"}, ("2", "Q2", "-3"))],
    "lcb_v5": [({"id": "a", "question": "Q1", "input_output": json.dumps(IO), "language": "PYTHON"},
                ("a", "Q1", STDIN)),
               ({"question_id": "abc379_a", "question_content": "Q2", "input_output": CALLS},
                ("abc379_a", "Q2", ARGUMENTS))],
    "codeforces": [({"idx": 0, "question": "Q1", "input_output": json.dumps(IO)}, ("0", "Q1", STDIN)),
                   ({"id": "1951A", "question": "Q2", "input_output": IO}, ("1951A", "Q2", STDIN))],
    "codecontests": [({"question": "Q1", "input_output": json.dumps(IO)}, ("1", "Q1", STDIN)),
                     ({"query_id": "c", "prompt": "Q2", "tests": {**IO, "kind": "stdin", "entry_point": None}},
                      ("c", "Q2", STDIN))],
}  # fmt: skip
PLAIN = "Which of these is prime?"
WRONG = ["4", "6. or\n so", "9 (nine)"]


def aime(number: int, **more) -> dict:
    return {"id": number, "problem": f"What is {number} + 1?", "answer": str(number + 1), **more}


def choice(number: int, letter: str = "C", alone: bool = True) -> dict:
    """A row as AReaL published it, the options in its `question` as well."""
    texts = WRONG[:2] + ["7 \n"] + WRONG[2:]
    shown = "\n".join(f"{a}. {text}" for a, text in zip("ABCD", texts, strict=True))
    row = {"id": number, "question": f"{PLAIN}\n\n\n{shown}", "options": texts, "answer": letter}
    return row | {"ori_question": PLAIN + "\n"} if alone else row


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """write(name, *rows, form="jsonl") -> path; nothing is asked for at the hub."""

    def unreachable(repo, file, repo_type):
        raise OSError(f"no network\nfor {repo}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    monkeypatch.chdir(tmp_path)

    def write(name, *rows, form="jsonl"):
        path = tmp_path / "data" / "benchmarks" / f"{name}.{form}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if form == "csv":
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row))
                writer.writeheader()
                writer.writerows(rows)
        else:
            path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path.relative_to(tmp_path))

    return write


# -- files and rows


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_published_form_become_problems(folder, name):
    folder(name, *(row for row, _ in ROWS[name]))
    problems = load_benchmark(name)
    task = "code" if table()["benchmarks"][name]["kind"] == "code" else "math"
    for problem, (row, (number, prompt, wanted)) in zip(problems, ROWS[name], strict=True):
        assert (problem.id, problem.prompt, problem.task) == (number, prompt, task)
        assert (problem.tests if task == "code" else problem.solutions) == (wanted if task == "code" else (wanted,))
        assert problem.row == {key: row[key] for key in row if key not in ("input_output", "tests")}


def test_every_benchmark_has_rows_here():
    assert ROWS.keys() | {"gpqa_diamond"} == table()["benchmarks"].keys()


def test_the_folder_goes_before_the_hub_and_the_hub_by_the_order_of_the_table(folder, tmp_path, monkeypatch):
    first, second = table()["benchmarks"]["aime24"]["source"]
    asked, files = [], {second: folder("hub", aime(1), aime(2))}

    def download(repo, file, repo_type):
        asked.append(f"{repo}/{file}")
        if asked[-1] in files and repo_type == "dataset":
            return files[asked[-1]]
        raise OSError("404")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert [p.id for p in load_benchmark("aime24")] == ["1", "2"] and asked == [first, second]
    folder("aime24", aime(3))
    assert [p.id for p in load_benchmark("aime24")] == ["3"] and len(asked) == 2
    assert [p.id for p in load_benchmark("aime24", folder=str(tmp_path / "none"))] == ["1", "2"]


def test_parquet_needs_pyarrow_and_says_so(folder, monkeypatch):
    path = folder("gsm8k", "PAR1", form="parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=f"^{path}: to read this form `pip install pyarrow`, or .* as JSON lines$"):
        load_benchmark("gsm8k")
    rows = [row for row, _ in ROWS["gsm8k"]]
    fake = ModuleType("pyarrow")
    fake.parquet = SimpleNamespace(read_table=lambda name: SimpleNamespace(to_pylist=lambda: rows * (name == path)))
    monkeypatch.setitem(sys.modules, "pyarrow", fake)
    assert [(p.id, *p.solutions) for p in load_benchmark("gsm8k")] == [("1", "1018"), ("2", "-3")]
    rows.append({"question": None, "answer": "1"})
    with pytest.raises(ValueError, match=f"^{path}:3: 'question' or 'prompt' must be text"):
        load_benchmark("gsm8k")


@pytest.mark.parametrize("name, row, reason", [
    ("aime24", "{", "not JSON"), ("aime24", ["a"], "a JSON object is needed"),
    ("aime24", {"answer": "1"}, "'problem' or .* must be text"), ("aime24", aime(1, problem=" "), "must be text"),
    ("aime24", aime(1, answer=None), "the answer must be text"), ("aime24", aime(1, answer=" "), "the answer must be"),
    ("aime24", aime(1, answer=True), "the answer must be"), ("aime24", aime(1, answer=float("nan")), "not nan"),
    ("aime24", aime(1, answer="\\boxed{"), "never closes"), ("math500", aime(1, answer="\\frac{"), "cannot be parsed"),
    ("gsm8k", {"question": "Q", "answer": "It is 3.\n#### "}, "the answer must be"),
    ("aime24", aime(1, id=1.5), "an id must be text or an integer"), ("aime24", aime(1, id=""), "an id must be"),
    ("aime24", aime(99), "id '99' was already used in data/benchmarks/aime24.jsonl:1$"),
    ("gpqa_diamond", choice(1, "E"), "the letter of one of 4 options, not 'E'"),
    ("gpqa_diamond", choice(1, 2), "the letter of"), ("gpqa_diamond", choice(1, ["C"]), "the letter of"),
    ("gpqa_diamond", choice(1) | {"options": ["7"], "answer": "A"}, "one of 1 options"),
    ("gpqa_diamond", choice(1) | {"options": "ABCD"}, "options must be a list of text"),
    ("gpqa_diamond", choice(1) | {"options": ["7", ""]}, "options must be a list of text"),
    ("gpqa_diamond", {"id": 1, "question": "Q", "answer": "C"}, "'Correct Answer' must be text"),
    ("codeforces", {"question": "Q"}, "no tests: 'input_output' or 'tests' is needed"),
    ("codeforces", {"question": "Q", "input_output": "{"}, "the tests of a program cannot be read"),
    ("codeforces", {"question": "Q", "input_output": {"inputs": [], "outputs": []}}, "without tests"),
    ("codeforces", {"question": "Q", "input_output": IO, "language": "CPP"}, "not in language 'CPP'"),
])  # fmt: skip
def test_a_row_that_cannot_be_judged_is_refused_with_file_and_line(folder, name, row, reason):
    good = {"gpqa_diamond": choice(99), "gsm8k": {"question": "Q", "answer": "#### 1"},
            "codeforces": {"id": 99, "question": "Q", "input_output": IO}}  # fmt: skip
    path = folder(name, good.get(name, aime(99)), "", row)
    with pytest.raises(ValueError, match=f"^{path}:3: .*{reason}") as error:
        load_benchmark(name)
    assert "\n" not in str(error.value)


def test_the_same_answer_of_several_rows_is_no_duplicate(folder):
    folder("aime24", aime(1, answer="2"), aime(2, answer="2"))
    assert [p.solutions for p in load_benchmark("aime24")] == [("2",), ("2",)]


def test_another_number_of_problems_is_a_warning(folder, capsys):
    path = folder("aime24", *map(aime, range(30)))
    assert len(load_benchmark("aime24")) == 30 and capsys.readouterr().err == ""
    folder("aime24", *map(aime, range(29)))
    assert len(load_benchmark("aime24")) == 29
    assert capsys.readouterr().err == f"warning: aime24: 29 problems in {path}, but 30 were published\n"
    folder("codecontests", ROWS["codecontests"][0][0])  # of which the number is not known
    assert len(load_benchmark("codecontests")) == 1 and capsys.readouterr().err == ""


def test_a_file_of_ones_own_is_in_the_format_of_the_training_data(folder, tmp_path):
    path = folder("mine", {"prompt": "Verbatim.", "answer": 4}, {"prompt": "b", "solutions": ["\\boxed{2}"]})
    found = [(p.id, p.prompt, p.solutions) for p in load_benchmark(path)]
    assert found == [("1", "Verbatim.", ("4",)), ("2", "b", ("\\boxed{2}",))]
    with pytest.raises(FileNotFoundError, match="^aime23: neither a file nor one of the benchmarks aime24, aime25, "):
        load_benchmark("aime23")
    with pytest.raises(FileNotFoundError, match="^owner/name/rows.jsonl: there is no such file, and the hub does not"):
        load_benchmark("owner/name/rows.jsonl")


# -- dates


def test_only_problems_of_the_window_are_kept(folder, capsys):
    dates = ["2024-09-30T23:59:59", "2024-10-01T00:00:00", "2024-12-31", "2025-02-28T19:00:00", "2025-03-01"]
    rows = [{"id": date, "question": "Q", "input_output": IO, "contest_date": date} for date in dates]
    path = folder("lcb_v5", *rows)
    assert [p.id for p in load_benchmark("lcb_v5")] == dates[1:4] and capsys.readouterr().err == ""
    folder("codecontests", *rows)  # has no window
    assert len(load_benchmark("codecontests")) == 5
    undated = rows[0] | {"contest_date": None, "id": "x"}
    folder("lcb_v5", rows[1], undated)
    with pytest.raises(ValueError, match=f"^{path}:2: None is no date like 2024-10-31, which other rows have"):
        load_benchmark("lcb_v5")
    folder("lcb_v5", rows[1] | {"contest_date": "Oct 2024"})
    with pytest.raises(ValueError, match=f"^{path}:1: 'Oct 2024' is no date"):
        load_benchmark("lcb_v5")
    folder("lcb_v5", rows[0], rows[4])
    with pytest.raises(ValueError, match=f"^{path}: no row is from 2024-10 .. 2025-02$"):
        load_benchmark("lcb_v5")
    folder("lcb_v5", undated, undated | {"id": "y"})
    assert len(load_benchmark("lcb_v5")) == 2
    assert "have no dates: taken as already cut to 2024-10 .. 2025-02" in capsys.readouterr().err


# -- options


def original(number: int, question: str = PLAIN) -> dict:
    wrong = {f"Incorrect Answer {i}": text for i, text in enumerate(WRONG, 1)}
    return {"Record ID": f"rec{number}", "Question": question, "Correct Answer": "7 \n", **wrong, "Explanation": "..."}


@pytest.mark.parametrize("form, row", [("jsonl", choice), ("jsonl", lambda n: choice(n, alone=False)),
                                       ("csv", original)])  # fmt: skip
def test_options_are_shuffled_and_the_key_follows(folder, form, row):
    folder("gpqa_diamond", *map(row, range(40)), form=form)
    problems = load_benchmark("gpqa_diamond", seed=1)
    assert problems == load_benchmark("gpqa_diamond", seed=1) and len(problems) == 40
    assert problems != load_benchmark("gpqa_diamond", seed=2)
    folder("gpqa_diamond", *map(row, reversed(range(40))), form=form)  # by id, not by place
    assert sorted(problems, key=lambda p: p.id) == sorted(load_benchmark("gpqa_diamond", 1), key=lambda p: p.id)
    for problem in problems:
        question, options = problem.prompt.split("\n\n")
        texts = re.fullmatch("A. (.*)\nB. (.*)\nC. (.*)\nD. (.*)", options, re.S).groups()
        (key,) = problem.solutions
        assert question == PLAIN and sorted(texts) == sorted(["7", *WRONG]) and problem.task == "stem"
        assert texts["ABCD".index(key)] == "7"
        for letter in "ABCD":
            right = Verdict.RIGHT if letter == key else Verdict.WRONG
            assert quick_verdict(f"So \\boxed{{{letter}}}", problem.solutions) == right
    counts = Counter(p.solutions[0] for p in problems)
    assert sum((counts[letter] - 10) ** 2 / 10 for letter in "ABCD") < 11.3, counts  # chi square of 3, 1 %


def test_a_question_that_mentions_options_elsewhere_keeps_them(folder):
    folder("gpqa_diamond", {"id": 1, "question": "A. 1\nB. 2 of what?", "options": ["1", "2"], "answer": "A"})
    assert load_benchmark("gpqa_diamond")[0].prompt.startswith("A. 1\nB. 2 of what?\n\nA. ")


def test_a_csv_is_reported_by_the_line_where_a_row_begins(folder):
    path = folder("gpqa_diamond", original(1, "Two\nlines?"), original(2), original(1), form="csv")
    # The first goes over lines 2 to 5: its question has two, and so have two of its options. The second over 6 to 8.
    with pytest.raises(ValueError, match=rf"^{path}:9: id 'rec1' was already used in {path}:2$"):
        load_benchmark("gpqa_diamond")


# -- no network


@pytest.mark.parametrize("name", [*ROWS, "gpqa_diamond"])
def test_without_a_network_one_reads_what_to_download_and_where_to_put_it(folder, name):
    with pytest.raises(FileNotFoundError) as error:
        load_benchmark(name)
    text, entry = str(error.value), table()["benchmarks"][name]
    assert text.startswith(f"{name}: it is not in data/benchmarks, and the hub gives none of its files.")
    assert "\n" not in text and "http" not in text and "no network for " in text
    for source in entry["source"]:
        owner, dataset, file = source.split("/", 2)
        assert f"{file} of the dataset {owner}/{dataset}" in text
        assert f"as data/benchmarks/{name}.{file.rpartition('.')[2]}" in text
    assert ("terms have to be accepted" in text) == (name == "gpqa_diamond")


def test_what_was_downloaded_can_be_put_there(folder):
    for name, entry in table()["benchmarks"].items():
        assert {source.rpartition(".")[2] for source in entry["source"]} <= set(load.FORMS), name
        assert all(recipes.data.on_hub(source) for source in entry["source"]), name


# -- the table

PUBLISHED = """
    R1-Distill-Qwen-7B 55.0 / 39.7 / 47.1; Light-R1-7B-DS 56.7 / 44.9 / 40.9; AReaL-boba-RL-7B 61.9 / 48.3 / 47.6;
    R1-Distill-Qwen-32B 72.6 / 54.9 / 63.2; QwQ-32B 78.9 / 70.2 / 64.6; Light-R1-32B-DS 76.2 / 67.8 / 63.5;
    AReaL-boba-SFT-32B 78.8 / 62.1 / 60.1;
    AReaL-boba-2-8B 63.0 / 1962 / 40.8; AReaL-boba-2-8B-Open 62.0 / 1933 / 41.4;
    AReaL-boba-2-14B 69.1 / 2044 / 46.1; AReaL-boba-2-14B-Open 67.3 / 1990 / 46.2;
    Qwen3-8B 58.8 / 1879 / 31.4; Qwen3-14B 65.4 / 1978 / 38.3"""


def test_the_published_numbers():
    columns = {"math": ["aime24", "aime25", "gpqa_diamond"], "code": ["lcb_v5", "codeforces", "codecontests"]}
    rows = re.findall(r"([\w.-]+) ([\d.]+) / ([\d.]+) / ([\d.]+)", PUBLISHED)
    assert [row[0] for row in rows] and {row[0] for row in rows} == table()["models"].keys()
    for name, *values in rows:
        row = table()["models"][name]
        kind, size = row["table"].split(", ")
        assert row["values"] == dict(zip(columns[kind], map(float, values), strict=True)), name
        assert name.endswith(size) or f"-{size}-" in name
        assert row["hub"].endswith(name.replace("R1-Distill", "DeepSeek-R1-Distill"))
    percentiles = {name: row["percentile"] for name, row in table()["models"].items() if "percentile" in row}
    assert percentiles == {"AReaL-boba-2-8B": 97.5, "AReaL-boba-2-14B": 98.2}
    counts = {name: entry["count"] for name, entry in table()["benchmarks"].items() if entry["count"]}
    assert counts == {"aime24": 30, "aime25": 30, "amc23": 40, "math500": 500, "gsm8k": 1319, "gpqa_diamond": 198}


def test_the_table_is_consistent():
    known, sampling = table()["benchmarks"], table()["sampling"]
    parts = {"math": {"prompt", "answer"}, "choice": {"prompt", "options", "answer"}, "code": {"prompt", "tests"}}
    for name, entry in known.items():
        assert parts[entry["kind"]] | {"id"} <= entry["fields"].keys() and entry["source"] and "count" in entry, name
        assert entry["template"].keys() == table()["families"].keys()
        assert all(template_text(template) for template in entry["template"].values())
        assert ("dates" in entry) <= ("date" in entry["fields"])
    for pair in table()["choice_templates"].items():
        assert all(map(template_text, pair)) and "choice letter" in template_text(pair[1])
    for name, row in table()["models"].items():
        assert row["values"].keys() <= known.keys() and row["sampling"] in sampling and template_text(row["template"])
        family = next(f for f, words in table()["families"].items() if any(w in row["hub"].lower() for w in words))
        like = known[next(iter(row["values"]))]["template"][family]
        assert template_text(row["template"]).endswith(template_text(like)), name  # but for a first token in front
    for name, how in sampling.items():
        assert how.keys() == {"samples", "temperature", "top_p", "max_new_tokens"}, name
        assert how["max_new_tokens"] == 32768
    wanted = {"rl": (32, 1.0, 1.0), "sft": (32, 0.6, 0.95), "code": (8, 1.0, 0.95), "greedy": (1, 0.0, 1.0)}
    assert {n: (how["samples"], how["temperature"], how["top_p"]) for n, how in sampling.items()} == wanted
    assert all(line["why"] and "sglang" in line for line in table()["engine"])
    settings = {name: value for line in table()["engine"] for name, value in (line["sglang"] or {}).items()}
    assert toy.check_settings(settings) == settings and settings["chunked-prefill-size"] == -1  # a user may set them


@pytest.mark.parametrize("name, template, model, wanted", [
    ("aime24", "", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "r1-distilled-qwen"),
    ("aime24", "", "inclusionAI/AReaL-boba-RL-7B", "r1-distilled-qwen"), ("math500", "", "toy", "chat"),
    ("aime24", "", "inclusionAI/AReaL-boba-2-8B", "qwen3-think"), ("lcb_v5", "", "Qwen/Qwen3-8B", "qwen3-think-pure"),
    ("aime24", "AReaL-boba", "x", "AReaL-boba"), ("aime24", "chat", "Qwen/Qwen3-8B", "chat"),
    ("gpqa_diamond", "", "qihoo360/Light-R1-7B-DS", "r1-distilled-qwen-gpqa"),
    ("gpqa_diamond", "AReaL-boba-SFT", "", "r1-distilled-qwen-gpqa"), ("gpqa_diamond", "chat", "", "chat"),
    ("gpqa_diamond", "", "Qwen/Qwen3-8B", "qwen3-think"), ("mine.jsonl", "", "Qwen/Qwen3-8B", ""),
    ("mine.jsonl", "qwen3", "", "qwen3"),
])  # fmt: skip
def test_templates_by_family_and_for_letters(name, template, model, wanted):
    assert choose_template(name, template, model) == wanted


@pytest.mark.parametrize("module", [load, compare])
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


# -- the commands

def shown(*args) -> str:
    """As a user runs it: from the root, without PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "benchmarks/compare.py", *args], cwd=ROOT, env=env, text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_a_command_for_every_row():
    lines = shown().splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("python evaluate.py ")]
    for words, (name, row) in zip(commands, table()["models"].items(), strict=True):
        args = evaluate.read_options(words[2:])  # exits for an option that it has not
        assert (args.model, args.sampling, args.template) == (row["hub"], row["sampling"], row["template"])
        assert args.benchmarks.split(",") == list(row["values"]) and args.out == f"results/{name}"
        assert yaml.safe_load(args.engine_args)["cuda-graph-backend-decode"] == "disabled"
        assert bool(args.standings) == ("codeforces" in row["values"])
        assert args.top_p == (1.0 if row["sampling"] == "rl" and name != "AReaL-boba-RL-7B" else 0.95)
        assert args.generator_tp == (4 if "32B" in name else 1)
        (cells,) = (line.split("|")[2:-1] for line in lines if line.split()[:2] == ["|", name])
        assert [float(cell.split()[0]) for cell in cells] == list(row["values"].values()), name
    titles = [line for line in lines if line and line[0] not in "|p"]
    assert titles == ["math, 7B", "math, 32B", "code, 8B", "code, 14B"]


def test_measured_numbers_stand_beside_the_published_ones(tmp_path):
    def leave(name, **benchmarks):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps({"benchmarks": benchmarks}))

    full = {"problems": 30, "samples": 32}
    leave("AReaL-boba-RL-7B", aime24={"pass@1": 0.6, "interval": [0.4512, 0.7449], **full},
          aime25={"pass@1": 0.41, "interval": [0.3, 0.4829], **full},
          gpqa_diamond={"pass@1": 0.5, "interval": [0.477, 0.6], "problems": 198, "samples": 4})  # fmt: skip
    leave("AReaL-boba-2-8B", lcb_v5={"pass@1": 0.63, "interval": [0.63, 0.7], "problems": 9, "samples": 8},
          codeforces={"rating": 1800.4, "percentile": 96.1, "pass@1": 0.3, "interval": [0.2, 0.4]})  # fmt: skip
    text = shown("--results", str(tmp_path))
    (row,) = re.findall(r"\| AReaL-boba-RL-7B .*", text)
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        "61.9, here 60.0 [45.1, 74.5] inside", "48.3, here 41.0 [30.0, 48.3] inside",
        "47.6, here 50.0 [47.7, 60.0] OUTSIDE; 4 samples for 32"]  # fmt: skip
    (row,) = re.findall(r"\| AReaL-boba-2-8B  .*", text)
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        "63.0, here 63.0 [63.0, 70.0] inside", "1962, here 1800 (percentile 97.5, here 96.1)", "40.8"]
    assert re.search(r"\| Light-R1-7B-DS +\| 56.7 +\| 44.9 ", text) and f"--out {tmp_path}/QwQ-32B " in text
    assert "QwQ" not in shown("--table", "math, 7B") and shown("--table", "math, 7B").count("evaluate.py") == 3
