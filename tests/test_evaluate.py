"""The evaluator: every answer exactly once whatever interrupts it, the numbers, the files, the filter, real engines.

Most tests have an engine of their own that answers what they say, the others the real one (transformers) with a toy
that knows ten answers by heart. SGLang is in an environment of its own (`test_sglang.py` says how to get it):

    pytest tests/test_evaluate.py                # half a minute
    pytest tests/test_evaluate.py -m slow        # whole commands: killed, interrupted, with torchrun; a toy that learnt
    PYTHONPATH=tests/sglang_cpu/shim pytest tests/test_evaluate.py -k test_sglang -m "slow or not slow"
"""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from conftest import ROOT, Job, soon
from test_sglang import pytestmark as needs_sglang

import evaluate
import toy
from benchmarks.load import table
from benchmarks.scores import interval
from packing import Generation
from recipes.data import Refused
from reward import ScorerError, Verdict, quick_verdict

torch.set_num_threads(1)

# -- An engine that answers what a test says ---------------------------------------------------------------------------


class Letters:
    """A tokenizer whose tokens are characters."""

    bos_token_id, eos_token_id, chat_template = None, 0, "a user's"

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"<user>{messages[0]['content']}<assistant>"

    def save_pretrained(self, folder):
        pass

    def decode(self, tokens, skip_special_tokens):
        return "".join(map(chr, tokens))


class Engine:
    """Answers `reply(prompt, number of the try)`: text, or text and finish reason. An exception is raised, if it is a
    string watch() raises it."""

    def __init__(self, reply):
        self.reply, self.tries, self.asked = reply, Counter(), []
        self.gate, self.broken, self.closed = SimpleNamespace(open=asyncio.Event()), asyncio.Event(), False

    async def start(self):
        pass

    async def close(self):
        self.closed = True

    async def watch(self):
        await self.broken.wait()
        raise RuntimeError("the engine broke")

    async def generate(self, token_ids):
        assert self.gate.open.is_set() and self.version == 0
        prompt = "".join(map(chr, token_ids))
        self.asked.append(prompt)
        said = self.reply(prompt, self.tries[prompt])
        self.tries[prompt] += 1
        await asyncio.sleep(0)
        if isinstance(said, Exception):
            raise said
        if said is None:
            self.broken.set()
            await asyncio.sleep(60)
        text, reason = (said, "stop") if isinstance(said, str) else said
        return Generation(tokens=[ord(letter) for letter in text], finish_reason=reason)


class Judge:
    """The scorer without its processes."""

    def __init__(self, cfg):
        self.close = lambda: None

    async def score(self, problem, response):
        verdict = quick_verdict(response, problem.solutions)
        return float(verdict == Verdict.RIGHT), verdict or Verdict.UNPARSED


class Post:
    """The store of the job, for ranks that run one after the other."""

    messages: list = []

    def push(self, queue, message):
        self.messages.append((queue, message))

    def pop(self, queue, timeout_s, who):
        assert self.messages.pop(0)[0] == queue
        return {}


def boxed(number) -> str:
    return f"so \\boxed{{{number}}}"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, the stand-ins above, and run(reply, *options, rank, world) -> its results."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toy, "load_tokenizer", lambda model: Letters())
    monkeypatch.setattr(toy, "load_config", lambda model: toy.build_config().__class__(max_position_embeddings=2**20))
    monkeypatch.setattr(evaluate, "Scorer", Judge)
    monkeypatch.setattr(evaluate, "Channel", Post)
    monkeypatch.setattr(evaluate, "tqdm", Bar)
    monkeypatch.setattr(Post, "messages", [])
    engines = []

    def make_engine(cfg, me, tokenizer, top_p, trained):
        assert trained and me.rank == int(os.environ.get("RANK", 0)) and me.engine == "transformers"
        engines.append(Engine(run.reply))
        engines[-1].cfg, engines[-1].top_p = cfg, top_p
        return engines[-1]

    def run(reply, *options, rank=0, world=1):
        run.reply = reply
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        return evaluate.run(read("--out", "out", *options))

    run.folder, run.engines = tmp_path, engines
    monkeypatch.setattr(toy, "make_engine", make_engine)
    return run


class Bar:
    def __init__(self, total, disable, **how):
        self.total, self.done, Bar.newest = total, 0, self
        self.disable = disable

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self):
        self.done += 1


def read(*options):
    given = [str(option) for option in options]
    for name, value in {"--model": "m", "--benchmarks": "sums.jsonl", "--engine": "transformers"}.items():
        given += [] if name in given else [name, value]
    return evaluate.read_options(given)


def write_sums(count: int, name: str = "sums.jsonl", first: int = 0) -> None:
    """`count` problems: which number is N?"""
    rows = [{"query_id": f"q{n}", "prompt": f"which is {n}?", "answer": n} for n in range(first, first + count)]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def right(prompt, number):
    return boxed(re.search(r"\d+", prompt)[0])


def answers(out="out") -> list[dict]:
    return [json.loads(line) for file in sorted(Path(out).glob("answers-*.jsonl"))
            for line in file.read_text().split("\n") if line.endswith("}")]  # fmt: skip


def which(rows: list[dict]) -> list[tuple]:
    return sorted((row["benchmark"], row["id"], row["sample"]) for row in rows)


def units(problems: int, samples: int, name: str = "sums.jsonl", first: int = 0) -> list[tuple]:
    return sorted((name, f"q{n}", sample) for n in range(first, first + problems) for sample in range(samples))


# -- Each answer exactly once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_problem_is_scored_exactly_once_for_any_number_of_problems_and_processes(here, world):
    for problems in range(1, 18):
        write_sums(problems)
        out = f"out-{problems}"
        for rank in [*range(1, world), 0]:
            results = here(right, "--samples", 3, "--out", out, rank=rank, world=world)
            assert (results is None) == (rank > 0)
        assert which(answers(out)) == units(problems, 3) and not Post.messages
        numbers = results["sums.jsonl"]
        assert (numbers["problems"], numbers["samples"], numbers["pass@1"]) == (problems, 3, 1.0)
        asked = Counter(prompt for engine in here.engines for prompt in engine.asked)
        assert set(asked.values()) == {3}  # nothing was decoded for nothing
        shares = [len(engine.asked) for engine in here.engines]
        assert max(shares) - min(shares) <= 1 and all(engine.closed for engine in here.engines)
        here.engines.clear()


@pytest.mark.parametrize("before, after", [(1, 1), (2, 1), (1, 2), (3, 2), (2, 4), (4, 3)])
def test_a_killed_evaluation_goes_on_with_any_number_of_processes(here, before, after):
    write_sums(7)
    for rank in range(before):  # each dies at another place
        with pytest.raises(ArithmeticError):
            here(lambda prompt, number, r=rank: ArithmeticError() if (int(prompt[9]) + number) % 4 == r else
                 right(prompt, number), "--samples", 4, "--engine_batch", 1, rank=rank, world=before)  # fmt: skip
    kept = answers()
    for file in Path("out").glob("answers-*.jsonl"):
        file.open("a").write('{"benchmark": "sums.jsonl", "id": "q0", "sam')  # killed in the middle of a line
    here.engines.clear()
    for rank in [*range(1, after), 0]:
        results = here(right, "--samples", 4, rank=rank, world=after)
    assert which(answers()) == units(7, 4) and results["sums.jsonl"]["pass@1"] == 1.0
    assert [row for row in answers() if row in kept] == sorted(kept, key=answers().index) and 0 < len(kept) < 28
    assert sum(len(engine.asked) for engine in here.engines) == 28 - len(kept)
    here.engines.clear()
    assert here(right, "--samples", 4)["sums.jsonl"] == results["sums.jsonl"]
    assert not here.engines  # nothing is left to do: no model is loaded


def test_an_answer_is_in_the_file_before_the_next_is_asked_for(here):
    write_sums(3)
    seen = []
    here(lambda prompt, number: seen.append(len(answers())) or right(prompt, number), "--samples", 2,
         "--engine_batch", 1)  # fmt: skip
    assert seen == [0, 1, 2, 3, 4, 5]


def test_more_samples_later_only_add_and_fewer_use_the_first(here):
    write_sums(3)
    first = here(lambda prompt, number: boxed(-1), "--samples", 2)
    assert first["sums.jsonl"]["pass@1"] == 0 and len(here.engines[0].asked) == 6
    more = here(right, "--samples", 4, "--pass_at", "2,4")  # the two new ones are right
    assert [row["score"] for row in sorted(answers(), key=lambda row: row["sample"])] == [0.0] * 6 + [1.0] * 6
    assert which(answers()) == units(3, 4) and len(here.engines[1].asked) == 6
    assert [more["sums.jsonl"][name] for name in ("samples", "pass@1", "pass@4")] == [4, 0.5, 1.0]
    assert here(right, "--samples", 3)["sums.jsonl"]["pass@1"] == pytest.approx(1 / 3)
    assert "2 of 3 right" not in Path("out/wrong.md").read_text()
    assert "sums.jsonl, q1: 1 of 3 right" in Path("out/wrong.md").read_text()
    assert here(right, "--samples", 2)["sums.jsonl"] == first["sums.jsonl"] and len(here.engines) == 2
    assert "0 of 2 right" in Path("out/wrong.md").read_text()


def test_several_benchmarks_in_one_call_and_the_same_ids_in_both(here):
    write_sums(3)
    write_sums(4, "more.jsonl", first=1)  # q1 and q2 are in both, with equal prompts
    both = here(lambda prompt, number: right(prompt, number) if number else boxed(-1), "--samples", 1, "--benchmarks",
                "sums.jsonl,more.jsonl")  # fmt: skip
    assert which(answers()) == sorted(units(3, 1) + units(4, 1, "more.jsonl", 1))
    assert list(both) == ["sums.jsonl", "more.jsonl"] and [both[n]["problems"] for n in both] == [3, 4]
    assert [both[name]["pass@1"] for name in both] == [0.0, 0.5]  # the second try of an equal prompt is right
    alone = here(right, "--samples", 1, "--benchmarks", "more.jsonl")
    assert alone == {"more.jsonl": both["more.jsonl"]} and len(here.engines) == 1
    assert "sums.jsonl" not in Path("out/wrong.md").read_text()


def test_problems_with_equal_prompts_are_two_problems(here):
    rows = [{"query_id": name, "prompt": "which is 4?", "answer": key} for name, key in (("a", 4), ("b", 5))]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = here(right, "--samples", 2)["sums.jsonl"]
    assert (numbers["problems"], numbers["pass@1"], here.engines[0].asked) == (2, 0.5, ["which is 4?"] * 4)


def test_the_bar_counts_what_is_left_and_belongs_to_the_first_process(here):
    write_sums(3)
    here(right, "--samples", 2)
    assert (Bar.newest.total, Bar.newest.done, Bar.newest.disable) == (6, 6, False)
    here(right, "--samples", 4, rank=1, world=2)
    assert (Bar.newest.total, Bar.newest.done, Bar.newest.disable) == (3, 3, True)


# -- What is asked -----------------------------------------------------------------------------------------------------


def test_templates_by_name_arrive_in_the_tokens(here):
    write_sums(1)
    Path("data").mkdir()
    Path("data/aime24.jsonl").write_text('{"id": "x", "problem": "which is 4?", "answer": 4}\n')
    boba = ("<｜User｜>which is 4?\nPlease reason step by step, and put your final answer within \\boxed{}."
            "<｜Assistant｜><think>\n")  # fmt: skip
    asked = {}
    for template, name in (("", "sums.jsonl"), ("", "aime24"), ("AReaL-boba", "aime24"), ("chat", "sums.jsonl"),
                           ("verbatim", "aime24"), ("verbatim", "sums.jsonl"), ("qwen3-think", "aime24")):  # fmt: skip
        out = f"out-{template}-{name}"
        here(right, "--samples", 1, "--benchmarks", name, "--template", template, "--out", out, "--folder", "data")
        asked[template, name] = here.engines[-1].asked[0]
    assert asked["", "sums.jsonl"] == asked["verbatim", "sums.jsonl"] == "which is 0?"
    assert asked["", "aime24"] == "<user>which is 4?<assistant>"  # of no known family
    assert asked["chat", "sums.jsonl"] == "<user>which is 0?<assistant>"
    assert asked["AReaL-boba", "aime24"] == boba and asked["verbatim", "aime24"] == "which is 4?"
    assert asked["qwen3-think", "aime24"].startswith("<|im_start|>") and "which is 4?" in asked["qwen3-think", "aime24"]
    here(right, "--samples", 1, "--benchmarks", "aime24", "--out", "family", "--folder", "data", "--model",
         "R1-Distill-Qwen-7B")  # fmt: skip
    assert here.engines[-1].asked == [boba]


def test_sampling_by_name_reaches_the_engine_and_options_win(here):
    write_sums(1)
    wanted = {"rl": (32, 1.0, 1.0), "sft": (32, 0.6, 0.95), "greedy": (1, 0.0, 1.0), "code": (8, 1.0, 0.95)}
    for name, (samples, temperature, top_p) in wanted.items():
        here(right, "--sampling", name, "--out", name)
        engine = here.engines[-1]
        assert (len(engine.asked), engine.cfg.temperature, engine.top_p) == (samples, temperature, top_p)
        assert engine.cfg.max_new_tokens == 32768 and engine.cfg.max_prompt_tokens == len("which is 0?")
    given = ("--samples", 2, "--temperature", 0.5, "--top_p", 0.9, "--max_new_tokens", 7)
    here(right, "--sampling", "sft", *given, "--out", "own")
    engine = here.engines[-1]
    assert (len(engine.asked), engine.cfg.temperature, engine.top_p, engine.cfg.max_new_tokens) == (2, 0.5, 0.9, 7)


# -- Faults ------------------------------------------------------------------------------------------------------------


def test_an_engine_that_dies_ends_the_evaluation_with_its_error_and_keeps_the_answers(here):
    write_sums(4)
    options, start = ("--samples", 1, "--engine_batch", 1), time.monotonic()
    with pytest.raises(RuntimeError, match="the engine broke"):
        here(lambda prompt, number: None if "2" in prompt else right(prompt, number), *options)
    assert which(answers()) == units(2, 1) and time.monotonic() - start < 2  # though an answer is under way
    assert not Path("out/results.json").exists()
    assert here(right, *options)["sums.jsonl"]["pass@1"] == 1.0 and which(answers()) == units(4, 1)


def test_a_scorer_that_breaks_ends_the_evaluation(here, monkeypatch):
    write_sums(4)

    async def breaks(self, problem, response):
        if problem.id == "q2":
            raise ScorerError("the pool is broken: it is a test")
        return 1.0, Verdict.RIGHT

    monkeypatch.setattr(Judge, "score", breaks)
    with pytest.raises(ScorerError, match="it is a test"):
        here(right, "--samples", 1)
    assert {"q0", "q1"} <= {row["id"] for row in answers()} <= {"q0", "q1", "q3"}


def test_answers_that_are_missing_at_the_end_are_an_error(here):
    # As where the second machine does not share the folder: its answers are not to be seen.
    write_sums(4)
    here(right, "--samples", 1, "--out", "elsewhere", rank=1, world=2)
    with pytest.raises((RuntimeError, Refused), match="4 asked|answers"):
        here(right, "--samples", 1, rank=0, world=2)
    assert not Path("out/results.json").exists()


# -- Another evaluation in the same folder -----------------------------------------------------------------------------


@pytest.mark.parametrize("name, value", [("temperature", 0.9), ("top_p", 0.5), ("max_new_tokens", 5), ("seed", 2),
                                         ("template", "chat"), ("model", "other")])  # fmt: skip
def test_settings_that_make_other_answers_are_refused_by_name(here, name, value):
    write_sums(1)
    here(right, "--samples", 1)
    with pytest.raises(Refused, match=f"out has answers made with {name}=.*, now it is {value!r}: give --out"):
        here(right, "--samples", 1, f"--{name}", value)
    here(right, "--samples", 1, "--pass_at", "1", "--scorers", 1, "--engine_batch", 3)  # these may change


def test_problems_that_have_changed_are_refused(here):
    write_sums(3)
    here(right, "--samples", 1)
    write_sums(3)
    assert here(right, "--samples", 1)["sums.jsonl"]["pass@1"] == 1.0  # the same
    Path("sums.jsonl").write_text(Path("sums.jsonl").read_text().replace("which is 1?", "which one is 1?"))
    with pytest.raises(Refused, match="sums.jsonl"):
        here(right, "--samples", 1)
    write_sums(2)  # one less: its answers would be counted
    with pytest.raises(Refused, match="sums.jsonl"):
        here(right, "--samples", 1)


def test_a_call_that_was_refused_settles_nothing(here):
    write_sums(1)
    for wrong in (("--benchmarks", "nosuch.jsonl", "--temperature", 0.5), ("--model", "typo", "--template", "nosuch")):
        with pytest.raises(Refused):
            here(right, "--samples", 1, *wrong)
    assert here(right, "--samples", 1)["sums.jsonl"]["pass@1"] == 1.0


def test_a_run_that_went_on_meanwhile_is_another_model(here):
    write_sums(2)
    run = Path("runs/toy")
    save_run(run, toy.build_model(1), 5)
    with pytest.raises(ArithmeticError):
        here(lambda prompt, number: ArithmeticError() if "1" in prompt else right(prompt, number), "--samples", 1,
             "--engine_batch", 1, "--model", run)  # fmt: skip
    assert len(answers()) == 1
    save_run(run, toy.build_model(2), 10)
    with pytest.raises(Refused, match="out has answers made with model=.*step-000005.*step-000010"):
        here(right, "--samples", 1, "--model", run)


# -- Results -----------------------------------------------------------------------------------------------------------

SAID = {"which is 5?": [boxed(5), boxed("5"), boxed(4), boxed(5)],
        "which is 7?": [boxed(8), boxed(8), boxed(7), "I do not know"],
        "which is 2?": [("well " * 3, "length"), ("hm", "length"), boxed(3), boxed(3)]}  # fmt: skip


@pytest.fixture
def judged(here, capsys):
    """(results, what was printed) of 3 problems with 4 answers each."""
    rows = [{"query_id": f"q{key}", "prompt": f"which is {key}?", "answer": key} for key in (5, 7, 2)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = here(lambda prompt, number: SAID[prompt][number], "--samples", 4, "--pass_at", "2,4", "--majority", "1,4")
    return results, capsys.readouterr().out


def test_golden_numbers(judged):
    numbers = judged[0]["sums.jsonl"]
    lengths = [len(said if isinstance(said, str) else said[0]) for tries in SAID.values() for said in tries]
    assert numbers == {
        "problems": 3, "samples": 4,
        "pass@1": pytest.approx((3 / 4 + 1 / 4 + 0) / 3), "interval": list(interval([0.75, 0.25, 0.0])),
        "pass@2": pytest.approx((1 + (1 - 3 / 6) + 0) / 3), "pass@4": pytest.approx(2 / 3),
        "maj@1": pytest.approx(1 / 3), "maj@4": pytest.approx(1 / 3),  # 5, 8, 3: the truncated have no vote
        "length": pytest.approx(sum(lengths) / 12), "truncated": pytest.approx(2 / 12), "no_answer": 1 / 4,
        "verdicts": {"no_answer": 3, "right": 4, "wrong": 5},
    }  # fmt: skip
    written = json.loads(Path("out/results.json").read_text())
    assert written["benchmarks"]["sums.jsonl"] == numbers
    settings = {"model": "m", "samples": 4, "temperature": 1.0, "top_p": 1.0, "seed": 1}
    assert settings.items() <= written["settings"].items()
    row = next(row for row in answers() if (row["id"], row["sample"]) == ("q2", 1))
    assert row == {"benchmark": "sums.jsonl", "id": "q2", "sample": 1, "score": 0.0, "verdict": "no_answer",
                   "answer": None, "tokens": 2, "finish_reason": "length", "response": "hm"}  # fmt: skip


def test_the_table(judged):
    low, high = interval([0.75, 0.25, 0.0])
    shown = judged[1].splitlines()
    assert shown[0] == "m by transformers (asked for): sums.jsonl 3 problems x 4; 0 answers are there"
    assert shown[1].split() == ["benchmark", "problems", "samples", "pass@1", "pass@2", "pass@4", "maj@1", "maj@4",
                                "length", "truncated", "no_answer"]  # fmt: skip
    wanted = f"sums.jsonl 3 4 0.333 ({low:.3f} to {high:.3f}) 0.500 0.667 0.333 0.333 11.500 0.167 0.250"
    assert shown[2].split() == wanted.split()
    assert shown[1].index("pass@1") == shown[2].index("0.333")  # in columns
    assert "in out: results.json, wrong.md" in judged[1]


def test_several_benchmarks_are_lines_of_one_table(here, capsys):
    write_sums(2)
    write_sums(3, "more.jsonl")
    here(right, "--samples", 1, "--benchmarks", "sums.jsonl,more.jsonl")
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in shown[1:4]] == [["benchmark", "problems", "samples"], ["sums.jsonl", "2", "1"],
                                                         ["more.jsonl", "3", "1"]]  # fmt: skip
    assert len({line.rstrip().index(re.split(" +", line)[2]) for line in shown[1:4]}) == 1  # in columns


def test_a_rating_is_a_number_in_the_table_and_its_contests_are_not(here, capsys):
    rows = [{"id": f"9{n}A", "question": f"which is {n}?", "tests": {"inputs": ["1"], "outputs": [str(n)]}}
            for n in range(2)]  # fmt: skip
    Path("codeforces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    people = [[points, 0, 1000 + points] for points in range(0, 1000, 4)]
    contests = {"90": {"problems": {"90A": 500}, "rows": people}, "7": {"problems": {"91A": None}, "rows": people[:3]}}
    Path("standings.json").write_text(json.dumps({"ratings": [1000, 1500, 3000], "contests": contests}))
    numbers = here(right, "--benchmarks", "codeforces", "--folder", ".", "--samples", 1, "--template", "verbatim",
                   "--unsafe_code", "--standings", "standings.json")["codeforces"]  # fmt: skip
    assert numbers["skipped"]["7"] and 0 <= numbers["rating"] <= 4000
    shown = capsys.readouterr().out
    assert "rating" in shown and f"{numbers['rating']:.3f}" in shown
    assert "participants" not in shown and "'rank'" not in shown


def test_wrong_answers_are_easy_to_read(judged):
    text = Path("out/wrong.md").read_text()
    assert text.split("\n## ")[0] == """\
## sums.jsonl, q5: 3 of 4 right

which is 5?

**Key:** 5  
**Sample 2:** 4 (wrong, 12 tokens)

```
so \\boxed{4}
```
"""  # noqa: W291
    assert re.findall("^## (.*)", text, re.M) == ["sums.jsonl, q5: 3 of 4 right", "sums.jsonl, q7: 1 of 4 right",
                                                  "sums.jsonl, q2: 0 of 4 right"]  # fmt: skip
    assert "**Sample 0:** None (no_answer, 15 tokens)" in text


def test_all_right_says_so(here):
    write_sums(2)
    here(right, "--samples", 2)
    assert Path("out/wrong.md").read_text() == "All answers are right.\n"


def test_odd_characters_survive_and_a_fence_in_an_answer_does_not_end_it(here):
    odd = ["```python\nprint(4)\n```\n````\nx", "\u2028line\x0c ends\x85\x1c\x1e\u2029\nx", "𝟜 é \x00 <|x|>", ""]
    rows = [{"query_id": f"q{n}", "prompt": f"which is {n}? \u2028 é", "answer": n} for n in range(len(odd))]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ArithmeticError):
        here(lambda prompt, number: odd[int(prompt[9])] if prompt[9] < "3" else ArithmeticError(), "--samples", 1,
             "--engine_batch", 1)  # fmt: skip
    here(lambda prompt, number: odd[int(prompt[9])], "--samples", 1)  # reads what is there
    assert which(answers()) == units(4, 1)
    assert [row["response"] for row in sorted(answers(), key=lambda row: row["id"])] == odd
    text = Path("out/wrong.md").read_text()
    assert text.count("\n## ") == 3
    fence = re.search(r"^(`+)$", text, re.M)[1]
    assert f"{fence}\n{odd[0]}\n{fence}\n" in text and len(fence) > 4


# -- The filter --------------------------------------------------------------------------------------------------------

# Problem n of 0..4 has n right answers of 4.
SOMETIMES = lambda prompt, number: right(prompt, number) if number < int(prompt[9]) else boxed(-1)  # noqa: E731


@pytest.mark.parametrize("bounds, kept", [
    ((), [0, 1, 2, 3]), (("--filter_lower", 0.25), [1, 2, 3]), (("--filter_lower", 0.3), [2, 3]),
    (("--filter_upper", 0.75), [0, 1, 2]), (("--filter_upper", 1.1), [0, 1, 2, 3, 4]),
    (("--filter_lower", 0.5, "--filter_upper", 2), [2, 3, 4]), (("--filter_lower", 0.5, "--filter_upper", 0.5), []),
])  # fmt: skip
def test_the_filter_keeps_what_lies_between_its_bounds(here, capsys, bounds, kept):
    write_sums(5)
    here(SOMETIMES, "--samples", 4, "--filter", "kept.jsonl", *bounds)
    rows = [json.loads(line) for line in Path("kept.jsonl").read_text().splitlines()]
    assert [(row["query_id"], row["pass_rate"]) for row in rows] == [(f"q{n}", n / 4) for n in kept]
    assert f"{len(kept)} of 5 rows are in kept.jsonl" in capsys.readouterr().out


def test_the_filter_changes_nothing_else_in_a_row(here):
    lines = [{"answer": 2, "task": "math", "prompt": "which is 2? é", "more": {"b": [1.0, None], "a": "\u2028"}},
             {"solutions": ["3"], "prompt": "which is 3?", "pass_rate": 0.9}, {"query_id": 7, "answer": 1, "prompt":
             "which is 1?"}]  # fmt: skip
    text = "\n\n".join(json.dumps(line) for line in lines) + "\n"  # ids are lines: 1, 3, and 7
    Path("sums.jsonl").write_text(text)
    here(SOMETIMES, "--samples", 4, "--filter", "kept.jsonl")
    rows = [json.loads(line) for line in Path("kept.jsonl").read_text().split("\n") if line]
    assert rows == [lines[0] | {"pass_rate": 0.5}, lines[1] | {"pass_rate": 0.75}, lines[2] | {"pass_rate": 0.25}]
    assert [list(row) for row in rows] == [[*lines[0], "pass_rate"], list(lines[1]), [*lines[2], "pass_rate"]]
    assert Path("sums.jsonl").read_text() == text
    assert sorted({row["id"] for row in answers()}) == ["1", "3", "7"]


def test_the_filter_counts_the_answers_of_this_call_only(here):
    write_sums(5, "other.jsonl")
    here(right, "--samples", 4, "--benchmarks", "other.jsonl")  # the same ids
    write_sums(5)
    here(SOMETIMES, "--samples", 4)
    here(SOMETIMES, "--samples", 2, "--filter", "kept.jsonl")
    rows = [json.loads(line) for line in Path("kept.jsonl").read_text().splitlines()]
    assert [(row["query_id"], row["pass_rate"]) for row in rows] == [("q0", 0.0), ("q1", 0.5)]


def test_the_filter_is_written_beside_and_renamed(here, monkeypatch):
    write_sums(5)
    Path("kept.jsonl").write_text("of an earlier call")
    seen, real = [], os.replace

    def replace(source, target):
        if str(target).endswith("kept.jsonl"):
            seen.append((Path(source).read_text().count("\n"), Path(target).read_text()))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    here(SOMETIMES, "--samples", 4, "--filter", "kept.jsonl")
    assert seen == [(4, "of an earlier call")] and not list(Path().glob("kept.jsonl?*"))


# -- Options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, why", [
    (("--samples", 4, "--pass_at", "1,8"), "need k answers to a problem, and --samples is 4"),
    (("--samples", 4, "--majority", "5"), "need k answers to a problem, and --samples is 4"),
    (("--pass_at", "1;8"), "numbers with commas between them"),
    (("--pass_at", "0"), "pass"), (("--majority", "-1"), "maj"),
    (("--top_p", 0), "top_p"), (("--top_p", 1.5), "top_p"), (("--top_p", "nan"), "top_p"),
    (("--samples", 0), "samples"), (("--max_new_tokens", 0), "max_new_tokens"), (("--temperature", -1), "temperature"),
    (("--temperature", "nan"), "temperature"), (("--temperature", "inf"), "temperature"),
    (("--temperature", 0), "--temperature 0 gives one answer 32 times"),
    (("--filter", "kept.jsonl", "--benchmarks", "sums.jsonl,more.jsonl"), "--filter"),
    (("--filter", "kept.jsonl", "--benchmarks", "aime24"), "--filter"),
    (("--filter", "nosuch/kept.jsonl"), "nosuch"), (("--filter", "sums.jsonl"), "sums.jsonl"),
    (("--engine_args", "hello"), "engine_args"), (("--engine_args", "{a: ["), "engine_args"),
])  # fmt: skip
def test_options_are_refused_in_a_sentence_before_anything_is_loaded(here, options, why):
    write_sums(1)
    write_sums(1, "more.jsonl")
    with pytest.raises(Refused, match=re.escape(why)) as error:
        read(*options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options, why", [
    (("--benchmarks", "aime99"), "aime99: neither a file nor one of the benchmarks aime24, "),
    (("--template", "nosuch"), "template=nosuch is neither chat nor one of AReaL-boba"),
    (("--benchmarks", "bad.jsonl"), "bad.jsonl:1: no answer key"),
    (("--engine", "sglang"), "engine=sglang cannot run here"),
    (("--benchmarks", "codeforces", "--folder", ".", "--standings", "nosuch.json"), "nosuch.json"),
    (("--engine_args", "{mem-fraction-static: 0.8}"), "engine_args"), (("--published_engine",), "engine"),
    (("--generator_tp", 2), "generator_tp"),
    (("--max_new_tokens", 2**20), "m was made for 1048576 positions, a prompt of"),
])  # fmt: skip
def test_what_cannot_be_evaluated_is_refused_before_an_engine_starts(here, monkeypatch, options, why):
    monkeypatch.setattr(toy, "sglang_release", lambda: ())
    write_sums(1)
    Path("bad.jsonl").write_text('{"prompt": "which?"}\n')
    Path("codeforces.jsonl").write_text('{"id": "1A", "question": "?", "tests": {"inputs": ["1"], "outputs": ["1"]}}\n')
    with pytest.raises(Refused, match=re.escape(why)):
        here(right, "--samples", 1, "--unsafe_code", *options)
    assert not here.engines


def test_greedy_is_one_answer_without_temperature():
    cfg = read("--sampling", "greedy")
    assert (cfg.samples, cfg.temperature, cfg.top_p) == (1, 0.0, 1.0)
    assert read("--temperature", 0, "--samples", 1).samples == 1


def test_the_published_engine_goes_into_the_settings_and_ones_own_win():
    published = {name: value for line in table()["engine"] for name, value in (line["sglang"] or {}).items()}
    assert yaml.safe_load(read("--published_engine").engine_args) == published and len(published) >= 4
    own = "{chunked-prefill-size: 4096, mem-fraction-static: 0.8}"
    given = yaml.safe_load(read("--published_engine", "--engine_args", own).engine_args)
    assert given == published | {"chunked-prefill-size": 4096, "mem-fraction-static": 0.8}
    under = "{chunked_prefill_size: 4096}"  # SGLang takes both spellings
    given = toy.check_settings(yaml.safe_load(read("--published_engine", "--engine_args", under).engine_args))
    assert given["chunked-prefill-size"] == 4096
    assert yaml.safe_load(read("--engine_args", own).engine_args) == yaml.safe_load(own)


def test_where_the_results_go(tmp_path):
    (tmp_path / "runs/toy").mkdir(parents=True)
    assert read("--model", tmp_path / "runs/toy/").out == "evals/toy"
    assert read("--model", "Qwen/Qwen3-8B").out == "evals/Qwen3-8B"
    assert read("--model", "m", "--out", "there").out == "there"


# -- Models ------------------------------------------------------------------------------------------------------------


def save_model(folder: Path, model) -> Path:
    model.save_pretrained(folder)
    toy.build_tokenizer().save_pretrained(folder)
    return folder


def save_run(folder: Path, model, step: int) -> None:
    """What is needed of a run: its settings, and a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("model: toy\nseed: 1\n")
    state = {"model": {f"lm.{name}": p.detach() for name, p in model.named_parameters()}, "random": torch.zeros(3)}
    dcp.save(state, checkpoint_id=folder / "checkpoints" / f"step-{step:06d}", no_dist=True)


def test_a_run_gives_its_model_else_its_newest_checkpoint(tmp_path):
    run, out, old, new = tmp_path / "run", tmp_path / "out", toy.build_model(1), toy.build_model(2)
    run.mkdir()
    (run / "config.yaml").write_text("model: toy\n")
    with pytest.raises(Refused, match="run is a run without a model and without a checkpoint"):
        evaluate.find_model(str(run), out)
    save_run(run, old, 9)
    save_run(run, new, 10)
    (run / "checkpoints" / ".step-000011").mkdir()  # half-written
    folder = evaluate.find_model(str(run), out)
    lm, tokenizer = evaluate.transformers.AutoModelForCausalLM.from_pretrained(folder), toy.load_tokenizer(folder)
    for (name, value), (other, wanted) in zip(lm.named_parameters(), new.named_parameters(), strict=True):
        assert name == other and torch.equal(value, wanted)
    assert tokenizer("3 + 4 =")["input_ids"] == toy.build_tokenizer()("3 + 4 =")["input_ids"]
    assert toy.stop_ids(folder, tokenizer) == [toy.VOCABULARY["<eos>"]]
    assert evaluate.find_model(str(run), out) == folder  # made once
    assert sorted(path.name for path in out.iterdir()) == [Path(folder).name]
    save_model(run / "model", old)
    assert evaluate.find_model(str(run), out) == str(run / "model")
    assert evaluate.find_model("owner/name", out) == "owner/name"
    assert evaluate.find_model(str(run / "model"), out) == str(run / "model")


def test_a_checkpoint_keeps_all_tokens_that_end_an_answer(tmp_path):
    source = toy.build_model(1)
    source.generation_config.eos_token_id = [2, 77]  # as chat models have: config.json names one of them
    save_model(tmp_path / "base", source)
    save_run(tmp_path / "run", source, 3)
    (tmp_path / "run/config.yaml").write_text(f"model: {tmp_path / 'base'}\n")
    folder = evaluate.find_model(str(tmp_path / "run"), tmp_path / "out")
    assert toy.stop_ids(folder, toy.load_tokenizer(folder)) == [2, 77]


# -- The real engine, with a toy that knows some answers by heart ------------------------------------------------------


SUMS = [(a, b) for a in (3, 11, 25, 40, 58) for b in (2, 7)]


def by_heart(pairs: list[tuple[str, str]], steps: int = 80):
    """A toy that answers as these (prompt, answer) do, an answer as often as it is among them."""
    model, tokenizer = toy.build_model(1), toy.build_tokenizer()
    texts = [[tokenizer(text)["input_ids"] for text in pair] for pair in pairs]
    rows = [prompt + answer + [tokenizer.eos_token_id] for prompt, answer in texts]
    size, masked = max(map(len, rows)), torch.full((len(rows), max(map(len, rows))), -100)
    for row, (prompt, _), line in zip(rows, texts, masked, strict=True):
        line[len(prompt) : len(row)] = torch.tensor(row[len(prompt) :])
    ids = torch.tensor([row + [0] * (size - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(steps):
        model(ids, labels=masked).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def learnt(tmp_path_factory) -> Path:
    """A folder with `model`, which gives 6 of the 10 sums of `sums.jsonl` right, thinking; `coin`, which says 1 in
    three of four answers and else 2; and `coin.jsonl`, which asks it."""
    folder = tmp_path_factory.mktemp("learnt")
    pairs = [(f"{a} + {b} =", toy.counting_answer(a, b) if n < 6 else toy.boxed(99)) for n, (a, b) in enumerate(SUMS)]
    save_model(folder / "model", by_heart(pairs))
    save_model(folder / "coin", by_heart([("1 =", toy.boxed(number)) for number in (1, 1, 1, 2)], 40))
    rows = [{"query_id": f"q{n}", "prompt": f"{a} + {b} =", "answer": a + b} for n, (a, b) in enumerate(SUMS)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "coin.jsonl").write_text('{"query_id": "coin", "prompt": "1 =", "answer": 1}\n')
    return folder


@pytest.fixture
def scored(monkeypatch):
    """One pool for all tests, and the launcher's variables out of the way."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(evaluate, "Scorer", Judge)


def real(learnt, out, *options, model="model", problems="sums.jsonl"):
    given = ("--model", learnt / model, "--benchmarks", learnt / problems, "--out", out, "--device", "cpu")
    return evaluate.run(read(*given, "--max_new_tokens", 64, *options))[str(learnt / problems)]


def responses(out) -> dict:
    return {(row["id"], row["sample"]): row["response"] for row in answers(out)}


def test_greedy_answers_are_those_of_the_model_and_the_same_twice(learnt, tmp_path, scored):
    numbers = real(learnt, tmp_path / "one", "--sampling", "greedy")
    assert numbers["pass@1"] == 0.6 and numbers["problems"] == 10 and numbers["truncated"] == numbers["no_answer"] == 0
    said = responses(tmp_path / "one")
    assert said["q1", 0] == toy.counting_answer(3, 7) and said["q9", 0] == toy.boxed(99)
    row = next(row for row in answers(tmp_path / "one") if row["id"] == "q1")
    assert (row["answer"], row["tokens"], row["finish_reason"]) == ("10", 8 * 4 + 4, "stop")
    real(learnt, tmp_path / "two", "--sampling", "greedy", "--engine_batch", 3)
    assert responses(tmp_path / "two") == said
    save_model(learnt / "untaught", toy.build_model(3))  # sampled, it would hardly say the same twice
    for seed in (1, 2):
        given = ("--sampling", "greedy", "--seed", seed, "--max_new_tokens", 20)
        real(learnt, tmp_path / f"seed-{seed}", *given, model="untaught")
    assert responses(tmp_path / "seed-1") == responses(tmp_path / "seed-2")
    numbers = real(learnt, tmp_path / "cut", "--sampling", "greedy", "--max_new_tokens", 10)
    assert numbers["truncated"] == numbers["no_answer"] > 0  # the last of the options wins
    text = (tmp_path / "one/wrong.md").read_text()
    assert text.count("0 of 1 right") == 4 and "**Key:** 27" not in text and "99 (wrong, 4 tokens)" in text


def test_a_checkpoint_answers_as_its_exported_model_does(learnt, tmp_path, scored):
    lm = evaluate.transformers.AutoModelForCausalLM.from_pretrained(learnt / "model", dtype=torch.float32)
    save_run(tmp_path / "run", lm, 4)
    (tmp_path / "run/sums.jsonl").write_text((learnt / "sums.jsonl").read_text())
    real(learnt, tmp_path / "export", "--sampling", "greedy")
    numbers = evaluate.run(read("--model", tmp_path / "run", "--benchmarks", tmp_path / "run/sums.jsonl", "--out",
                                tmp_path / "out", "--sampling", "greedy", "--max_new_tokens", 64))  # fmt: skip
    assert numbers[str(tmp_path / "run/sums.jsonl")]["pass@1"] == 0.6
    assert responses(tmp_path / "out") == responses(tmp_path / "export")


@torch.no_grad()
def chances(learnt, temperature: float) -> float:
    """That the coin says 1, of 1 and 2; the chance of anything else is below one in fifty."""
    lm = evaluate.transformers.AutoModelForCausalLM.from_pretrained(learnt / "coin", dtype=torch.float32)
    ids = torch.tensor([toy.build_tokenizer()("1 = \\boxed{")["input_ids"]])
    both = [toy.VOCABULARY["1"], toy.VOCABULARY["2"]]
    logits = lm(ids).logits[0, -1]
    assert logits.softmax(-1)[both].sum() > 0.98
    return float((logits[both] / temperature).softmax(-1)[0])


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7), (0.6, 0.95)])
def test_temperature_and_top_p_reach_the_engine(learnt, tmp_path, scored, temperature, top_p):
    given = ("--samples", 300, "--temperature", temperature, "--top_p", top_p, "--engine_batch", 96)
    real(learnt, tmp_path / "out", *given, model="coin", problems="coin.jsonl")
    said = Counter(row["answer"] for row in answers(tmp_path / "out"))
    assert sum(said.values()) == 300 and 0.6 < chances(learnt, 1.0) < 0.85 < chances(learnt, 0.6) < 0.95
    if top_p == 0.7:  # the likelier one has 0.75
        assert said == {"1": 300}
        return
    chance = chances(learnt, temperature)
    assert abs(said["1"] / (said["1"] + said["2"]) - chance) < 4 * math.sqrt(chance * (1 - chance) / 300), said
    if top_p == 0.95:
        assert said.keys() == {"1", "2"}


def test_samples_that_are_added_are_no_copies(learnt, tmp_path, scored):
    # 64 answers that each have one of two forms, then 64 more: were they drawn by the same seed they would agree.
    for samples in (64, 128):
        real(learnt, tmp_path / "out", "--samples", samples, model="coin", problems="coin.jsonl")
    said = responses(tmp_path / "out")
    first, second = ([said["coin", n] for n in range(start, start + 64)] for start in (0, 64))
    assert first != second
    assert sum(x == y for x, y in zip(first, second, strict=True)) < 56  # 40 expected, 3.9 the deviation


def test_a_server_is_given_the_trained_weights_their_version_and_the_published_flags(learnt, tmp_path, monkeypatch):
    monkeypatch.setattr(toy, "SGLangEngine", lambda parameters, tokenizer, **given: given)
    cfg = read("--model", learnt / "model", "--published_engine", "--sampling", "sft")
    cfg.max_prompt_tokens = 16
    me = SimpleNamespace(rank=0, checkpoint=None, engine="sglang", device=torch.device("cpu"), dtype=torch.float32,
                         folder=tmp_path, weight_group=None)  # fmt: skip
    given = toy.make_engine(cfg, me, toy.build_tokenizer(), top_p=cfg.top_p, trained=True)
    settings = given["settings"]
    assert settings["load-format"] == "auto" and settings["model-path"] == str(learnt / "model")
    assert int(settings["weight-version"]) == 0  # what it says with every answer, and no update tells it
    assert (given["temperature"], given["top_p"]) == (0.6, 0.95) and given["more"]["chunked-prefill-size"] == -1


# -- Whole commands ----------------------------------------------------------------------------------------------------


def listens() -> None:
    """Tests that a shell started in the background have Ctrl-C off, and so would what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def command(tmp_path):
    """start(*options) -> a running `python evaluate.py`, whose output goes to tmp_path/said; ended with the test."""
    started = []
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]

    def start(*options, code=""):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "LOCAL", "MASTER", "TORCHEL"))}
        env |= {"OMP_NUM_THREADS": "1", "BOBA_TEST_JOB": f"evaluate-{os.getpid()}"}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *given])
        program = ["-c", f"import evaluate\n{code}\nevaluate.main()"] if code else [str(ROOT / "evaluate.py")]
        out = open(tmp_path / "said", "w")
        one = subprocess.Popen([sys.executable, *program, *map(str, options)], cwd=tmp_path, env=env, stdout=out,
                               stderr=subprocess.STDOUT, start_new_session=True,
                               preexec_fn=listens)  # fmt: skip
        out.close()
        started.append(one)
        return one

    yield start
    for one in started:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def descendants(pid: int) -> list[int]:
    """What a process started, and what that did."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, more = [], [pid]
    while more:
        more = [child for child, parent in parents.items() if parent in more]
        found += more
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(one, condition, said: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert one.poll() is None and time.monotonic() < deadline, said.read_text()
        time.sleep(0.02)


def options_of(learnt, *more) -> list:
    return ["--model", learnt / "model", "--benchmarks", learnt / "sums.jsonl", "--out", "out", "--engine",
            "transformers", "--max_new_tokens", 64, "--scorers", 1, *more]  # fmt: skip


def check_all(out: Path, learnt, samples: int) -> list[dict]:
    rows = answers(out)
    assert which(rows) == units(10, samples, str(learnt / "sums.jsonl"))
    for row in rows:
        a, b = SUMS[int(row["id"][1:])]
        assert row["score"] == (row["answer"] == str(a + b)) and row["tokens"] == len(row["response"].split()) + (
            row["finish_reason"] == "stop")  # fmt: skip
    return rows


def test_a_command_killed_in_the_middle_goes_on(learnt, tmp_path, command, scored, monkeypatch):
    one = command(*options_of(learnt, "--samples", 40, "--engine_batch", 8))
    out, said = tmp_path / "out", tmp_path / "said"
    wait_for(one, lambda: len(answers(out)) >= 40, said)
    children = descendants(one.pid)
    assert children  # the scorers
    one.kill()
    one.wait()
    soon(lambda: not any(map(lives, children)), 5)
    kept = answers(out)
    assert 40 <= len(kept) < 400 and not (out / "results.json").exists()
    (out / "answers-0.jsonl").open("a").write('{"benchm')
    assert "answer" in said.read_text() and "/400" in said.read_text()  # the bar
    monkeypatch.chdir(tmp_path)
    results = evaluate.run(evaluate.read_options([str(x) for x in options_of(learnt, "--samples", 40)]))
    rows = check_all(out, learnt, 40)
    assert rows[: len(kept)] == kept  # none was changed
    assert results[str(learnt / "sums.jsonl")]["samples"] == 40
    assert abs(results[str(learnt / "sums.jsonl")]["pass@1"] - 0.6) < 0.1


@pytest.mark.slow
def test_two_processes_under_torchrun_are_killed_and_go_on_as_three(learnt, tmp_path, job):
    settings = options_of(learnt, "--samples", 40, "--engine_batch", 8)
    out = tmp_path / "out"
    one = job(*settings, script=ROOT / "evaluate.py")
    one.until(lambda: len(answers(out)) >= 60)
    assert len(one.ranks()) == 2 and len(one.members()) >= 5
    one.kill()
    assert not one.members()
    kept = answers(out)
    assert 60 <= len(kept) < 400 and len(list(out.glob("answers-*.jsonl"))) == 2
    two = job(*settings, script=ROOT / "evaluate.py", ranks=3)
    assert two.wait() == 0, two.text()
    rows = check_all(out, learnt, 40)
    assert {json.dumps(row) for row in kept} <= {json.dumps(row) for row in rows}
    assert json.loads((out / "results.json").read_text())["benchmarks"][str(learnt / "sums.jsonl")]["samples"] == 40
    assert two.text().count("benchmark ") == 1 and not two.members()  # one table


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_evaluation_with_its_rank(learnt, tmp_path, job, victim):
    one = job(*options_of(learnt, "--samples", 400, "--engine_batch", 4), script=ROOT / "evaluate.py")
    one.until(lambda: len(answers(tmp_path / "out")) >= 20)
    os.kill(one.ranks()[victim], signal.SIGKILL)
    assert one.wait(30) != 0
    assert f"local_rank: {victim}" in one.text() or f"rank      : {victim}" in one.text(), one.text()
    soon(lambda: not one.members(), 5)


@pytest.mark.slow
def test_no_process_outlives_a_killed_launcher(learnt, tmp_path, job):
    one = job(*options_of(learnt, "--samples", 400, "--engine_batch", 4), script=ROOT / "evaluate.py")
    one.until(lambda: len(answers(tmp_path / "out")) >= 20)
    one.process.kill()
    one.process.wait()
    soon(lambda: not one.members(), 5)


# While an answer is judged the engine has nothing to do, and a thread of it that waits could keep the interpreter.
JUDGING = """
import asyncio
async def score(self, problem, response):
    await asyncio.sleep(0.5)
    print("judging", flush=True)
    {then}
evaluate.Scorer.score = score"""


@pytest.mark.slow
@pytest.mark.parametrize("idle", [False, True])
def test_control_c_ends_it_at_once_and_leaves_nothing(learnt, tmp_path, command, idle):
    one = command(*options_of(learnt, "--samples", 400, "--engine_batch", 4),
                  code=JUDGING.format(then="await asyncio.sleep(100)") if idle else "")  # fmt: skip
    said, out = tmp_path / "said", tmp_path / "out"
    wait_for(one, lambda: "judging" in said.read_text() if idle else len(answers(out)) >= 20, said)
    children = descendants(one.pid)
    one.send_signal(signal.SIGINT)
    assert one.wait(15) != 0
    soon(lambda: not any(map(lives, children)), 5)


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ValueError", "RuntimeError"])
def test_an_error_in_the_middle_ends_it_at_once_with_its_name(learnt, tmp_path, command, error):
    one = command(*options_of(learnt, "--samples", 1, "--benchmarks", learnt / "coin.jsonl"),
                  code=JUDGING.format(then=f"raise {error}('this broke')"))  # fmt: skip
    assert one.wait(45) != 0
    assert "this broke" in (tmp_path / "said").read_text()


@pytest.mark.slow
def test_a_refusal_is_one_sentence(tmp_path, command, job):
    (tmp_path / "sums.jsonl").write_text('{"prompt": "3 + 4 =", "answer": 7}\n')
    for model, why in (("nosuch/folder/at/all", "nosuch"), ("./nosuch", "nosuch")):
        one = command("--model", model, "--benchmarks", "sums.jsonl", "--out", "out", "--samples", 1)
        assert one.wait(120) == 1
        said = (tmp_path / "said").read_text()
        assert said.startswith("evaluate.py: ") and why in said and "Traceback" not in said, said
    save_model(tmp_path / "model", toy.build_model(1))
    (tmp_path / "words.jsonl").write_text('{"prompt": "what is it?", "answer": 7}\n')
    one = command("--model", "model", "--benchmarks", "words.jsonl", "--out", "out", "--samples", 1)
    assert one.wait(120) == 1  # words that the toy does not know
    said = (tmp_path / "said").read_text()
    assert "evaluate.py: " in said and "Traceback" not in said, said
    both = job("--model", "model", "--benchmarks", "nosuch.jsonl", script=ROOT / "evaluate.py")
    assert both.wait() != 0
    assert both.text().count("evaluate.py: nosuch.jsonl: neither a file") == 1, both.text()


HARDLY = ["--sft_steps", "400"]  # a quicker warm start


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a toy run of six steps, which has a checkpoint of the fifth."""
    folder = tmp_path_factory.mktemp("trained")
    one = Job(folder, ["--steps", "6", *HARDLY, "--runs_dir", str(folder / "runs")], 2, ROOT / "train.py", [])
    try:
        assert one.wait(300) == 0, one.text()
        yield folder / "runs/toy"
    finally:
        one.kill()
        one.out.close()


def write_test_problems(path: Path, count: int = 200) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in toy.problems("test", count, 0)))
    return path


@pytest.mark.slow
def test_a_trained_toy_has_the_score_that_its_run_reports(trained, tmp_path, command):
    problems = write_test_problems(tmp_path / "test.jsonl")
    one = command("--model", trained, "--benchmarks", problems, "--samples", 4, "--max_new_tokens", 160, "--out", "out",
                  "--pass_at", "4", "--majority", "4", "--engine", "transformers")  # fmt: skip
    assert one.wait(200) == 0, (tmp_path / "said").read_text()
    numbers = json.loads((tmp_path / "out/results.json").read_text())["benchmarks"][str(problems)]
    summary = json.loads((trained / "summary.json").read_text())
    assert numbers["problems"] == summary["problems"] == 200
    assert abs(numbers["pass@1"] - summary["pass@1_after"]) < 0.08  # 4 deviations of 800 answers
    assert abs(numbers["length"] - summary["length_after"]) < 0.15 * summary["length_after"]
    assert numbers["pass@1"] <= numbers["maj@4"] + 0.1 and numbers["pass@1"] < numbers["pass@4"]


@pytest.mark.slow
def test_a_run_without_its_model_is_judged_by_its_checkpoint(trained, tmp_path, job, scored, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_test_problems(Path("test.jsonl"), 60)
    runs = trained.parent
    again = job("--steps", 5, *HARDLY, "--resume", "true", "--runs_dir", runs, "--run_name", "toy")  # exports the fifth
    assert again.wait() == 0, again.text()
    exported = runs / "toy/model"
    given = ("--benchmarks", "test.jsonl", "--sampling", "greedy", "--max_new_tokens", 160)
    evaluate.run(read("--model", exported, "--out", "export", *given))
    hidden = exported.rename(exported.with_name("hidden"))
    try:
        evaluate.run(read("--model", runs / "toy", "--out", "checkpoint", *given))
    finally:
        hidden.rename(exported)
    assert responses("checkpoint") == responses("export") and len(responses("export")) == 60


@pytest.mark.slow
@needs_sglang
def test_sglang_answers_as_transformers_does(learnt, tmp_path, command, scored):
    real(learnt, tmp_path / "here", "--sampling", "greedy")
    one = command(*options_of(learnt, "--sampling", "greedy", "--engine", "sglang", "--cache_gb", 0.1))
    assert one.wait(150) == 0, (tmp_path / "said").read_text()
    assert responses(tmp_path / "out") == responses(tmp_path / "here")
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["benchmarks"][str(learnt / "sums.jsonl")]["pass@1"] == 0.6
    assert results["settings"]["engine"] == "sglang"


@pytest.mark.slow
@needs_sglang
def test_sglang_ends_with_its_killed_command_and_goes_on(learnt, tmp_path, command):
    options = ["--model", learnt / "coin", "--benchmarks", learnt / "coin.jsonl", "--out", "out", "--engine", "sglang",
               "--cache_gb", 0.1, "--max_new_tokens", 64, "--samples", 300, "--top_p", 0.7]  # fmt: skip
    one, out = command(*options, "--engine_batch", 2), tmp_path / "out"
    wait_for(one, lambda: len(answers(out)) >= 20, tmp_path / "said", 150)
    children = descendants(one.pid)
    one.kill()
    one.wait()
    soon(lambda: not any(map(lives, children)), 5)
    kept = answers(out)
    assert len(children) >= 4 and 20 <= len(kept) < 300  # scorers, the server and its own
    two = command(*options)
    assert two.wait(150) == 0, (tmp_path / "said").read_text()
    rows = answers(out)
    assert rows[: len(kept)] == kept and sorted(row["sample"] for row in rows) == list(range(300))
    assert {row["answer"] for row in rows} == {"1"}  # the likelier one has 0.75 already
