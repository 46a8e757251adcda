"""Right answers are told from wrong ones, and judging them can neither hang nor quietly break a run.

    pytest tests/test_reward.py            # the tables of answers and the fifty timeouts too: -m "slow or not slow"

`data/math.jsonl` is a table of answers with the right verdict and the reason. `data/math_siblings.jsonl` holds more of
the same kinds, several for each rule in the docstring of `reward.py`, which runs both files: `python reward.py check`.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import reward
import sandbox
from packing import Problem
from recipes import data
from recipes.data import load_demonstrations, load_problems
from reward import Scorer, Verdict, extract_answer
from sandbox import Pool, PoolError
from train import Config

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
HARD = Problem("hard", "p", ("(x+1)^2",))  # its right answer needs the parser
RIGHT = r"\boxed{x^2+2x+1}"


def judge(response: str, *keys: str) -> Verdict:
    return reward.math_verdict(response, keys)


# --- the verdict


@pytest.mark.parametrize("table", ["math.jsonl", pytest.param("math_siblings.jsonl", marks=pytest.mark.slow)])
def test_table_of_answers(table):
    rows = [json.loads(line) for line in (DATA / table).read_text().splitlines()]
    pairs = [(row["gold"], row["response"]) for row in rows]
    # Every key equals itself, which takes no parser, and has a reading, which load_problems asks for.
    assert all(judge(rf"\boxed{{{key}}}", key) == Verdict.RIGHT for key, _ in pairs)
    requests = [{"solutions": [key], "response": response, "keys": True} for key, response in pairs]
    verdicts = reward.examine(requests, workers=2, deadline_s=2.0)
    missed = [(row["id"], v) for row, v in zip(rows, verdicts, strict=True) if row["expected"] and v != "right"]
    granted = [row["id"] for row, v in zip(rows, verdicts, strict=True) if not row["expected"] and v == "right"]
    assert not missed and not granted
    assert set(verdicts) >= {"right", "wrong", "no_answer", "unparsed"}  # the kinds of failure are told apart


@pytest.mark.parametrize("answer, key, verdict", [
    ("1, 234", "1234", "wrong"), ("100, 200", "100,200", "right"), (r"2\frac{x}{3}", r"\frac{2x}{3}", "right"),
    (r"(2\frac13,1)", r"(\frac73,1)", "right"), ("(3,2)", "(4,1)", "wrong"),
    (r"5\text{ cm}", r"5\text{ cm}^2", "wrong"),
    (r"5\text{ km}", r"5\text{ kilometers}", "right"), (r"10\text{ million}", "10", "unparsed"),
    (r"2^{2^{2^{2}}}", "65536", "right"), ("x+10^{-20}", "x", "wrong"), (r"\text{Yes.}", "yes", "right"),
    ("9" * 3000, "8" * 3000, "wrong"), ("{" * 3000, "8", "no_answer"), ("5x=", "5x", "unparsed"),
])  # fmt: skip
def test_rules_that_the_tables_do_not_show(answer, key, verdict):
    assert judge(rf"\boxed{{{answer}}}", key) == verdict


@pytest.mark.parametrize("response, answer", [
    (r"\boxed{1} \boxed{2}", "2"), (r"\boxed{1} \boxed{2", "1"), (r"\boxed{\boxed{1}}", "1"),
    (r"\boxed{a\boxed{1}", "1"), (r"\boxed{\frac{1}{2}}, not \boxed{3", r"\frac{1}{2}"),
    (r"\boxed{\{1\}}", r"\{1\}"), (r"\boxed{\left\{1\right.}", r"\left\{1\right."), (r"\boxed{}", ""), ("", None),
    (r"\boxed{1}</think>", None), (r"</think>\boxed{1}</think> \boxed{ 2 }", "2"), (r"<think>\boxed{1}", "1"),
    (r"\boxed 1", None), (r"\boxed{1}}", "1"), (r"\boxed{{1}", None), (r"\fbox{1}", "1"), ("boxed{1}", None),
])  # fmt: skip
def test_last_complete_box(response, answer):
    assert extract_answer(response) == answer


def test_any_one_of_several_keys_is_enough():
    assert reward.quick_verdict(r"\boxed{4}", ("3", r"\boxed{4}")) == Verdict.RIGHT
    assert reward.quick_verdict(r"\boxed{5}", ("3", "4")) == Verdict.WRONG
    for text in (r"\dfrac73", "2 1/3", r"2\frac{1}{3}", "14/6", r"\frac{-7}{-3}", "002.0"):
        assert reward.quick_verdict(rf"\boxed{{{text}}}", ("7/3",)) == ("wrong" if text == "002.0" else "right")
    assert reward.quick_verdict(r"\boxed{5}", ("3", r"\sqrt{25}")) is None  # left to the parser
    assert judge(r"\boxed{5}", "3", r"\sqrt{25}") == Verdict.RIGHT
    assert judge(r"\boxed{5x=}", "x=5", "5x") == Verdict.UNPARSED != judge(r"\boxed{6x}", "x=5", "5x")
    assert judge(r"\boxed{5}", r"<think>\boxed{6}</think> A full solution ends in \boxed{5}.") == Verdict.RIGHT


@pytest.mark.parametrize("piece", r"\boxed{ { \boxed{} \boxed{\ \boxed{1} √ ½ 1, \frac \frac{a (( and ^( \quad".split())
def test_hostile_text_is_read_in_linear_time(piece):
    response, answer = (piece * 50_000)[:50_000], (piece * reward.LONGEST_ANSWER)[: reward.LONGEST_ANSWER]
    assert min(_time(lambda: reward.quick_verdict(response, ("5",))) for _ in range(3)) < 0.25  # quadratic: minutes
    assert min(_time(lambda: reward.canonical.__wrapped__(answer)) for _ in range(3)) < 0.25


def _time(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# --- the pool

FUNCTIONS = """
import os, signal, sys, time

def work(do, ballast=""):
    print("a stray line that is not the protocol")
    if do == "sleep": time.sleep(1)
    if do == "multiply": return len(str(9**9**9))
    if do == "die": os.kill(os.getpid(), signal.SIGKILL)
    if do == "leave": sys.exit(3)
    if do == "fail": raise ZeroDivisionError("no such thing")
    if do == "nothing JSON can hold": return {1, 2}
    if do == "report": return [sorted(os.environ), sorted(sys.modules), sys.stdin.read()]
    while do == "spin": pass
    return do
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("functions") / "functions.py"
    file.write_text(FUNCTIONS)
    return f"{file}:work"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> set[int]:
    """Process ids of the children, zombies included."""
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            found.update(map(int, thread.read_text().split()))
    return found


def until(condition, seconds: float) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "it did not come to that"
        time.sleep(0.005)


def on_pool(*args):
    """Decorator: run the coroutine now, with a pool that is closed at its end."""

    async def go(body):
        with contextlib.closing(Pool(*args)) as pool:
            return await body(pool)

    return lambda body: asyncio.run(go(body))


def test_fifty_timeouts_leave_no_zombie_and_lose_no_worker(work):
    @on_pool(work, 4, 0.05)
    async def after(pool):
        before = children(pool._child.pid)
        replies = await asyncio.gather(*(pool.call({"do": "spin"}) for _ in range(50)))
        assert replies == [{"timeout": True}] * 50 and len(before) == 4
        after = children(pool._child.pid)
        assert len(after) == 4 and all(map(alive, after)) and not after & before
        assert all(map(alive, children(os.getpid())))
        assert await pool.call({"do": "x"}, 5.0) == {"value": "x"}
        return after

    until(lambda: not any(map(alive, after)), 1)


def test_a_killed_worker_is_replaced_at_once_idle_or_busy(work):
    @on_pool(work, 2, 5.0)
    async def _(pool):
        (first, *_) = children(pool._child.pid)
        os.kill(first, signal.SIGKILL)
        until(lambda: len(children(pool._child.pid) - {first}) == 2, 0.5)
        answer = asyncio.create_task(pool.call({"do": "sleep"}))
        await asyncio.sleep(0.3)
        killed = children(pool._child.pid)
        os.kill(pool._child.pid, signal.SIGSTOP)  # or it would give the answer to the one that is killed next
        for pid in killed:  # one of them holds the answer
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(alive, killed)), 5)
        os.kill(pool._child.pid, signal.SIGCONT)
        until(lambda: len(children(pool._child.pid) - killed) == 2, 0.5)
        assert await answer == {"value": "sleep"}  # tried once more
        assert all(map(alive, children(pool._child.pid)))


def test_eight_slow_answers_on_four_workers_and_an_event_loop_that_does_not_notice(work):
    async def go(pool) -> tuple[float, float]:
        begin, lags = time.perf_counter(), []
        request = {"do": "sleep", "ballast": "x" * 200_000}
        replies = asyncio.gather(*(pool.call(request) for _ in range(8)))
        while not replies.done():
            tick = time.perf_counter()
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - tick - 0.005)
        assert await replies == [{"value": "sleep"}] * 8
        return time.perf_counter() - begin, max(lags)

    best = min(on_pool(work, 4, 5.0)(go) for _ in range(2))  # the machine may be busy with something else once
    assert best[0] < 3.0 and best[1] < 0.05


@pytest.mark.parametrize("do, cause", [
    ("die", "two workers died on one request"), ("leave", ".*functions.py:work: SystemExit: 3"),
    ("fail", ".*functions.py:work: ZeroDivisionError: no such thing"), ("nothing JSON can hold", ".* TypeError: .*set"),
])  # fmt: skip
def test_broken_function_is_an_error_for_everyone(work, do, cause):
    @on_pool(work, 1, 5.0)
    async def _(pool):
        pending = asyncio.gather(*(pool.call({"do": do}) for _ in range(3)), return_exceptions=True)
        assert [type(result) for result in await pending] == [PoolError] * 3
        with pytest.raises(PoolError, match=f"broken: {cause}"):
            await pool.call({"do": "x"})


@pytest.mark.parametrize("stop, cause", [(signal.SIGKILL, "status -9"), (signal.SIGSTOP, "no reply")])
def test_dead_or_silent_child_is_an_error_now_and_later(work, stop, cause):
    @on_pool(work, 2, 9.0)
    async def _(pool):
        if stop == signal.SIGSTOP:
            pool.deadline_s, pool.grace_s = 0.1, 0.3
        answers = [asyncio.create_task(pool.call({"do": "sleep"}, 9.0 if stop == signal.SIGKILL else None))
                   for _ in range(3)]  # fmt: skip
        await asyncio.sleep(0.05)
        workers = children(pool._child.pid)
        os.kill(pool._child.pid, stop)
        for call in (*answers, pool.call({"do": "x"})):
            with pytest.raises(PoolError, match=cause):
                await asyncio.wait_for(call, 3)
        pool._child.kill()
        until(lambda: not any(map(alive, workers)), 1)


def test_everything_dies_with_a_killed_parent(work):
    program = f"import asyncio, sandbox; pool = sandbox.Pool({work!r}, 2, 60.0); print(pool._child.pid, flush=True);"
    command = [sys.executable, "-c", program + "asyncio.run(pool.call({'do': 'spin'}))"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        workers = children(child)
        assert len(workers) == 2
        time.sleep(0.2)
        parent.kill()
    until(lambda: not any(map(alive, (child, *workers))), 2)


def test_workers_know_neither_torch_nor_the_launcher(work, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "ROLE_NAME"):
        monkeypatch.setenv(name, "0")

    @on_pool(work, 1, 5.0)
    async def report(pool):
        return (await pool.call({"do": "report"}))["value"]

    environment, modules, stdin = report
    assert stdin == "" and not [name for name in environment if sandbox.LAUNCHER.fullmatch(name)]
    assert not {"torch", "transformers", "numpy", "sympy"} & set(modules)
    program = "import reward, sys; print({'torch', 'numpy', 'sympy', 'transformers'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert loaded.stdout.strip() == "set()"


def test_pool_that_cannot_start_says_why(tmp_path):
    (tmp_path / "heavy.py").write_text("import sys\nsys.modules['torch'] = sys\ndef f(request): return 1\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    for spec, cause in ((tmp_path / "heavy.py:f", "must not import torch"), (tmp_path / "broken.py:f", "nothing_of"),
                        (tmp_path / "absent.py:f", "no file"), (tmp_path / "heavy.py:g", "has no function 'g'"),
                        ("f", "file.py:function is needed")):  # fmt: skip
        with pytest.raises(PoolError, match=f"did not start.*{cause}"):
            Pool(str(spec), 1, 1.0)
    assert all(map(alive, children(os.getpid())))
    with pytest.raises(AssertionError, match="needs workers and a deadline"):
        Pool("f", 1, 0.0)


def test_close_ends_everything_and_may_be_repeated(work):
    @on_pool(work, 2, 30.0)
    async def _(pool):
        answer = asyncio.create_task(pool.call({"do": "multiply"}))
        await asyncio.sleep(0.2)
        workers = children(pool._child.pid)
        assert _time(pool.close) < 2 and pool._child.poll() is not None
        until(lambda: not any(map(alive, workers)), 1)
        for late in (answer, pool.call({"do": "x"})):
            with pytest.raises(PoolError, match="closed"):
                await late


def score(problem: Problem, *responses: str, workers: int = 1, deadline_s: float = 5.0) -> list:
    async def go():
        with contextlib.closing(Scorer(Config(scorers=workers, score_timeout=deadline_s))) as scorer:
            return await asyncio.gather(*(scorer.score(problem, r) for r in responses), return_exceptions=True)

    replies = asyncio.run(go())
    assert all(isinstance(reply, Exception) or reply[0] == (reply[1] == Verdict.RIGHT) for reply in replies)
    return [reply if isinstance(reply, Exception) else reply[1] for reply in replies]


def test_power_towers_end_at_the_deadline_and_the_scorer_serves_on():
    hostile = [r"9^{9^{9^9}}", r"(10^{12})!", r"7^{7^{7^{7}}}", r"\binom{10^9}{10^8}", r"\sum_{k=1}^{10^{12}} k^k",
               "(" * 900 + "1" + ")" * 900, r"\sqrt{" * 300 + "2" + "}" * 300, "1+" * 900 + "1", "x" * 3000,
               "\\frac{1}{" * 200 + "2" + "}" * 200, "^" * 500, "1e999999999", "9" * 1999]  # fmt: skip
    begin = time.monotonic()
    responses = [rf"\boxed{{{text}}}" for text in hostile]
    verdicts = score(Problem("p", "p", ("3.5", "x")), *responses, r"\boxed{\frac{14}{4}+0}", workers=2, deadline_s=0.5)
    assert time.monotonic() - begin < len(hostile) * 0.7 + 10
    assert verdicts[0] == verdicts[1] == Verdict.TIMEOUT and verdicts[-1] == Verdict.RIGHT
    assert Verdict.RIGHT not in verdicts[:-1] and Verdict.UNPARSED in verdicts
    assert all(isinstance(verdict, Verdict) for verdict in verdicts)


def test_scorer_judges_ten_megabytes_and_refuses_keys_without_a_reading():
    huge = ["x" * 10_000_000 + RIGHT, "\\boxed{" * 100_000]
    assert score(HARD, RIGHT, r"\boxed{x}", *huge) == ["right", "wrong", "right", "no_answer"]
    for key, cause in ((r"\frac{1", "ValueError: Exception at"), (r"\boxed{1", "never closes")):
        (error,) = score(Problem("bad", "p", (key,)), r"\boxed{7}")
        assert isinstance(error, PoolError) and cause in str(error)


# --- problems


def write(path: Path, *rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_problems_in_both_formats(tmp_path, monkeypatch):
    file = write(tmp_path / "good.jsonl", {"prompt": "a", "solutions": [r"\boxed{4}", "4.0"], "query_id": 7},
                 "", {"prompt": "b", "answer": 27.0, "task": "stem"}, {"prompt": "c", "answer": "B"},
                 {"prompt": "d", "answer": r"x^2+\frac{1}{2}", "query_id": "x"})  # fmt: skip
    problems = load_problems(file)
    assert problems[0].row == {"prompt": "a", "solutions": [r"\boxed{4}", "4.0"], "query_id": 7}
    assert problems == [
        Problem("7", "a", (r"\boxed{4}", "4.0")), Problem("3", "b", ("27.0",), "stem"), Problem("4", "c", ("B",)),
        Problem("x", "d", (r"x^2+\frac{1}{2}",))]  # fmt: skip
    assert load_demonstrations(write(tmp_path / "d.jsonl", {"prompt": "a", "answer": "b c"})) == [("a", "b c")]
    # Plain keys need no process.
    monkeypatch.setattr(data, "examine", None)
    keys = ("4", "-1.5", r"\frac{1}{2}", "Monday", "B", "1,234", r"\boxed{7}") * 100
    file = write(tmp_path / "plain.jsonl", *({"prompt": "p", "answer": key} for key in keys))
    assert len(load_problems(file)) == 700


GOOD = {"prompt": "p", "answer": "4"}


@pytest.mark.parametrize("row, reason", [
    ("{", "not JSON"), ("[1]", "JSON object"), ("null", "JSON object"), ("\xff{}", "not JSON"),
    ({"answer": "4"}, "'prompt'"), ({**GOOD, "prompt": " "}, "'prompt'"), ({**GOOD, "prompt": 3}, "'prompt'"),
    ({"prompt": "p"}, "no answer key"), ({"prompt": "p", "solutions": []}, "no answer key"),
    ({"prompt": "p", "solutions": "4"}, "no answer key"), ({"prompt": "p", "solutions": [4]}, "no answer key"),
    ({"prompt": "p", "answer": None}, "no answer key"), ({"prompt": "p", "answer": True}, "'answer'"),
    ({"prompt": "p", "answer": ""}, "'answer'"), ('{"prompt": "p", "answer": NaN}', "'answer'"),
    ({"prompt": "p", "answer": ["4"]}, "'answer'"),
    ({**GOOD, "task": "code"}, "tests of a program cannot be read: KeyError"),
    ({**GOOD, "task": "prose"}, "'prose' is not supported"),
    ({**GOOD, "task": None}, "not supported"), ({**GOOD, "query_id": [1]}, "'query_id'"),
    ({**GOOD, "query_id": "1"}, "already used on line 1"), ({"prompt": "p", "answer": r"\boxed{4"}, "never closes"),
    ({"prompt": "p", "answer": r"\boxed{}"}, "empty"), ({"prompt": "p", "answer": r"\frac{1}{"}, "cannot be parsed"),
    ({"prompt": "p", "answer": "3 +* (4"}, "cannot be parsed"), ({"prompt": "p", "answer": "?!"}, "cannot be parsed"),
    ({"prompt": "p", "solutions": ["4", r"\foo\bar{{"]}, "cannot be parsed"),
])  # fmt: skip
def test_bad_row_names_file_line_and_reason(tmp_path, row, reason):
    file = tmp_path / "bad.jsonl"
    text = row if isinstance(row, str) else json.dumps(row)
    file.write_bytes(json.dumps(GOOD).encode() + b"\n" + text.encode("latin-1") + b"\n")
    with pytest.raises(ValueError) as error:
        load_problems(str(file))
    assert f"{file}:2" in str(error.value) and reason in str(error.value) and "\n" not in str(error.value)


def test_missing_and_empty_files(tmp_path):
    for load in (load_problems, load_demonstrations):
        with pytest.raises(FileNotFoundError, match="absent.jsonl: no such file"):
            load(str(tmp_path / "absent.jsonl"))
        with pytest.raises(ValueError, match="empty.jsonl:1: the file holds no rows"):
            load(write(tmp_path / "empty.jsonl", "", " "))
    with pytest.raises(ValueError, match="d.jsonl:1: 'answer'"):
        load_demonstrations(write(tmp_path / "d.jsonl", {"prompt": "a", "answer": 3}))
    bad = [{"prompt": "p", "answer": "+*" + "(" * i} for i in range(1, 9)]
    with pytest.raises(ValueError, match="b.jsonl:1: .*b.jsonl:5: .*and 3 keys more"):
        load_problems(write(tmp_path / "b.jsonl", *bad))


# --- the command


def check(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "reward.py", "check", *args], capture_output=True, text=True)


def test_check_prints_what_differs(tmp_path):
    good = {"id": "a", "response": RIGHT, "gold": "(x+1)^2", "expected": True}
    done = check(write(tmp_path / "good.jsonl", good, {**good, "response": "", "expected": False}))
    assert (done.returncode, done.stdout) == (0, "2 right, 0 wrong\n")
    hang = {"id": "c", "response": r"\boxed{9^{9^{9^9}}}", "gold": "x", "expected": True}
    done = check(write(tmp_path / "odd.jsonl", good, {**good, "id": "b", "expected": False}, hang,
                       {**good, "id": "d", "gold": r"\frac{1"}), "--deadline", "2")  # fmt: skip
    first, second, third, last = done.stdout.splitlines()
    assert done.returncode == 1 and last == "1 right, 3 wrong"
    assert "odd.jsonl:2: b: right, expected not right" in first and "odd.jsonl:3: c: timeout, expected right" in second
    assert "odd.jsonl:4: d: an answer key cannot be parsed" in third
    bad = write(tmp_path / "bad.jsonl", {"id": "a", "response": "r", "gold": "1", "expected": "yes"})
    for file, cause in ((bad, "bad.jsonl:1: 'id', 'response', 'gold' must be text"), ("absent.jsonl", "no such file")):
        done = check(file)
        assert done.returncode == 1 and cause in done.stderr and "Traceback" not in done.stderr
