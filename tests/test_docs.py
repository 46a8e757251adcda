"""What README.md and docs/ say is so: printed files and commands work as printed, names exist. A reward of one's own.

    pytest tests/test_docs.py                # -m "slow or not slow": also the complete example, one to two minutes
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import timeit

import pytest
from conftest import ROOT, SMALL, rows

import train
from packing import Problem
from recipes.data import Refused, load_problems
from reward import Scorer, ScorerError, Verdict
from sandbox import PROGRAM_PROCESSES, sandbox_fault

PAGE = (ROOT / "docs" / "rewards.md").read_text()
PRINTED = dict(re.findall(r"file `([\w.]+)`[^\n]*:\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))  # name -> content
MAKE, TRAIN, WORKFLOW = re.findall(r"^    (?:torchrun --nproc_per_node 2 train.py )?(.*sums.jsonl.*)$", PAGE, re.M)


@pytest.fixture
def printed(tmp_path, monkeypatch):
    """The folder of someone who has saved the page's files next to ours, and made the data as printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)  # `python` is this one
    for name, text in PRINTED.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "reward.py").symlink_to(ROOT / "reward.py")
    subprocess.run(MAKE, shell=True, check=True)
    return tmp_path


def test_rows_of_all_formats_are_read_and_a_bad_one_is_reported_as_printed(printed):
    assert len(PRINTED) == PAGE.count("\n```\n") == 6
    assert [problem.task for problem in load_problems("rows.jsonl")] == ["math", "math", "code", "code"]
    (printed / "rows.jsonl").open("a").write('{"prompt": "no key"}\n')
    with pytest.raises(ValueError) as error:
        load_problems("rows.jsonl")
    assert f"\n    train.py: {error.value}\n" in PAGE
    sums = load_problems("sums.jsonl", own_reward=True)
    assert len(sums) == 600 and sums[-1].row == {"prompt": "59 + 9 =", "sum": 68}


@pytest.mark.parametrize("command", re.findall(r"^    (python reward.py check .+)$", PAGE, re.M))
def test_printed_checks_find_nothing_wrong(printed, command):
    answers = PRINTED[command.split()[-1]].splitlines()
    if '"tests"' in answers[0] and sandbox_fault():
        pytest.skip(sandbox_fault())
    done = subprocess.run(command, shell=True, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, f"{len(answers)} right, 0 wrong\n"), done.stderr


def test_defaults_and_verdicts_are_those_of_the_code():
    said = {}
    for names, values in re.findall(r"^\| (`--.+`) \| ([-\d., ]+) \|", PAGE, re.M):
        said |= zip(re.findall(r"\w+", names), map(float, values.split(",")), strict=True)
    assert len(said) == 7 and said.items() <= vars(train.Config()).items() and f"({PROGRAM_PROCESSES})" in PAGE
    verdicts = re.search(r"\*\*In a run\*\* `verdicts`(.*?)own function\)", PAGE, re.S)[1]
    assert set(re.findall("`([a-z_]+)`", verdicts)) == set(Verdict)


@pytest.mark.slow
def test_a_job_trains_the_printed_reward_in_the_printed_workflow(printed, job, warm_runs):
    (printed / "near.py").open("a").write("def near(row, response, near=near):\n    value = near(row, response)\n"
                                          "    open('log', 'a').write(f'{value}\\n')\n    return value\n")  # fmt: skip
    short = ["--steps", 2, "--eval_problems", 0, "--runs_dir", warm_runs, "--run_name", "docs"]
    one = job(*WORKFLOW.split(), *SMALL, *short)
    assert one.wait() == 0, one.text()
    scores, table = [*map(float, open("log"))], rows(warm_runs / "docs")
    assert len(set(scores)) > 2 and [row["verdicts"] for row in table] == [{"scored": 16}] * 2
    assert sum(16 * (row["reward"] + 0.002 * row["length_mean"]) for row in table) == pytest.approx(sum(scores))
    assert sum(16 * row["pass_rate"] for row in table) == pytest.approx(sum(score > 0.5 for score in scores))


@pytest.mark.slow
def test_the_printed_command_learns_what_the_page_says(printed, job):
    before, after = map(float, re.search(r"rises from about (0\.\d+)\s+to\s+over (0\.\d+)", PAGE).groups())
    one = job(*TRAIN.split())
    assert one.wait(400) == 0, one.text()
    summary, table = json.loads((printed / "runs/sums/summary.json").read_text()), rows(printed / "runs/sums")
    assert summary["problems"] == 60 and abs(summary["pass@1_before"] - before) < 0.1
    assert summary["pass@1_after"] > after and summary["length_after"] > 2 * summary["length_before"]
    assert table[-1]["reward"] > after > before + 0.1 > table[0]["reward"]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], ids=lambda page: page.name)
def test_links_files_and_flags_that_a_page_names_exist(page):
    text = re.sub(r"https?://[^\s)]+", "", page.read_text())
    ours = r"(?<![\w/.-])((?:docs|tests|recipes|benchmarks)/[\w./-]*\w|[\w.-]*\w\.(?:py|md|txt)\b(?!:\w))"
    names = {*re.findall(r"\]\(([^)#\s]+)", text), *re.findall(ours, text)}
    names -= {"file.py", *re.findall(r"file:? `?([\w.]+\.\w+)", text)}  # and what a page prints
    assert [name for name in names if not (page.parent / name).exists() and not (ROOT / name).exists()] == []
    scripts = "".join(script.read_text() for script in ROOT.glob("*.py"))
    options = re.findall(r'add(?:_argument)?\(\s*"--([\w-]+)', scripts)
    others = "config nproc_per_node nnodes rdzv_backend rdzv_endpoint rdzv-conf local-addr max-restarts no-deps"
    others = others.split()  # torchrun's, pip's
    assert set(re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", text)) <= {*vars(train.Config()), *options, *others}


def score(folder, function: str, *does: str, workers: int = 1, timeout: float = 20.0) -> list:
    """[(reward, verdict) or error, ...] of a reward of one's own, for rows that say what it does."""
    (folder / "own.py").write_text("import asyncio\nimport numpy as np\ndef before_fork(): globals()['READY'] = 7\n"
                                   "def plain(row, response): return eval(row['do'])\ndef other(problem): pass\n"
                                   "async def later(row, response): return await asyncio.sleep(*eval(row['do']))\n")

    async def go(scorer):
        problems = [Problem("p", "p", row={"do": do, "deep": {"x": [1, 2]}}) for do in does]
        return await asyncio.gather(*(scorer.score(p, "four") for p in problems), return_exceptions=True)

    cfg = train.Config(reward=f"{folder}/own.py:{function}", scorers=workers, score_timeout=timeout)
    with contextlib.closing(Scorer(cfg)) as scorer:
        return asyncio.run(go(scorer))


def test_any_finite_number_is_a_reward_and_all_columns_arrive(tmp_path):
    does = {"7": 7, "-0.25": -0.25, "True": 1, "np.float32(0.5)": 0.5, "np.int64(-3)": -3, "np.bool_(False)": 0,
            "READY": 7, "len(response)": 4, "row['deep']['x'][1]": 2}  # fmt: skip
    assert score(tmp_path, "plain", *does) == [(float(value), "scored") for value in does.values()]
    assert score(tmp_path, "later", "(0, np.float32(0.5))", "(0, READY)") == [(0.5, "scored"), (7.0, "scored")]


@pytest.mark.parametrize("function, do, error", [
    *(("plain", value, f" returned {value}, which is no finite number") for value in ("'1'", "None", "[1.0]", "{}")),
    ("plain", "np.float32('nan')", " returned nan,"), ("later", "(0, -np.inf)", " returned -inf,"),
    ("plain", "1 / 0", ": ZeroDivisionError: division by zero"), ("later", "row['x']", ": KeyError: 'x'"),
    ("plain", "exit(3)", ": SystemExit: 3"), ("other", "", ": TypeError: other() got an unexpected keyword argument"),
])  # fmt: skip
def test_no_finite_number_and_an_exception_are_errors_with_the_functions_name(tmp_path, function, do, error):
    (result,) = score(tmp_path, function, do)
    assert type(result) is ScorerError and f"own.py:{function}{error}" in str(result)


def test_endless_answers_score_nothing_and_slow_ones_are_scored_side_by_side(tmp_path):
    for function, does in (("plain", ("[1 for _ in iter(int, 1)]", "1")), ("later", ("(60, 1)", "(0, 1)"))):
        assert score(tmp_path, function, *does, timeout=1.0) == [(0.0, "timeout"), (1.0, "scored")]
    eight, found = ["(1, 0.5)"] * 8, []
    tries = (timeit.timeit(lambda: found.extend(score(tmp_path, "later", *eight, workers=4)), number=1) for _ in "12")
    assert any(seconds < 3 for seconds in tries) and {*found} == {(0.5, "scored")}  # the machine may be busy once


def test_a_reward_that_is_not_there_is_refused_in_a_sentence(printed):
    assert train.check(train.parse(["--reward", "near.py:near"]), 2).reward == "near.py:near"
    for spec, cause in (("absent.py:near", ".*there is no file 'absent.py'"), ("near.py:re", "near.py has no .* 're'")):
        with pytest.raises(Refused, match=f"^{spec}: {cause}$"):
            train.check(train.parse(["--reward", spec]), 2)
