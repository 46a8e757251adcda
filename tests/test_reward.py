"""Right answers are told from wrong ones, and judging them can neither hang nor quietly break a run.

    pytest tests/test_reward.py

`data/math.jsonl` is a table of answers with the right verdict and the reason. `data/math_siblings.jsonl` holds more of
the same kinds, several for each rule in the docstring of `math_verifier.py`; `python reward.py check` runs both files.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import math_verifier as mv
import reward
from reward import Problem, Scorer, ScorerError, Verdict, extract_answer, load_demonstrations, load_problems

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
TABLES = ("math.jsonl", "math_siblings.jsonl")
HARD = Problem("hard", "p", ("(x+1)^2",))  # its right answer needs the parser
RIGHT = r"\boxed{x^2+2x+1}"


def judge(response: str, *keys: str) -> Verdict:
    return reward.math_verdict(response, keys)


# --- the verdict


@pytest.mark.parametrize("table", TABLES)
def test_table_of_answers(table, capsys):
    rows = [json.loads(line) for line in (DATA / table).read_text().splitlines()]
    pairs = []
    for hang, deadline_s in ((False, 10.0), (True, 0.5)):  # what hangs is not waited for
        some = [row for row in rows if (row["id"] in ("m-huge-01", "m-huge-05")) == hang]
        requests = [{"problem": {"solutions": [row["gold"]]}, "response": row["response"]} for row in some]
        pairs += zip(some, reward.judge_all(requests, workers=2, deadline_s=deadline_s), strict=True)
    missed = [(row["id"], r) for row, r in pairs if row["expected"] and r.get("verdict") != "right"]
    granted = [(row["id"], r) for row, r in pairs if not row["expected"] and r.get("verdict", "right") == "right"]
    with capsys.disabled():
        wanted = sum(row["expected"] for row in rows)
        print(f"\n{table}: {len(missed)} false negatives in {wanted} right answers, "
              f"{len(granted)} false positives in {len(rows) - wanted} wrong ones")  # fmt: skip
    assert not missed and not granted
    assert {r["verdict"] for _, r in pairs} == {"right", "wrong", "no_answer", "unparsed"} | (
        {"timeout"} if table == "math.jsonl" else set()
    )  # the kinds of failure are told apart


def test_every_key_can_be_read_and_equals_itself():
    for key in {json.loads(line)["gold"] for table in TABLES for line in (DATA / table).read_text().splitlines()}:
        assert judge(rf"\boxed{{{key}}}", key) == Verdict.RIGHT, key
        assert mv.parse_key(key), key  # what load_problems asks for


@pytest.mark.parametrize("response, answer", [
    (r"\boxed{1} \boxed{2}", "2"), (r"\boxed{1} \boxed{2", "1"), (r"\boxed{\boxed{1}}", "1"),
    (r"\boxed{a\boxed{1}", "1"), (r"\boxed{\frac{1}{2}}, not \boxed{3", r"\frac{1}{2}"),
    (r"\boxed{\{1\}}", r"\{1\}"), (r"\boxed{\left\{1\right.}", r"\left\{1\right."), (r"\boxed{}", ""), ("", None),
    (r"\boxed{1}</think>", None), (r"</think>\boxed{1}</think> \boxed{ 2 }", "2"), (r"<think>\boxed{1}", "1"),
    (r"\boxed 1", None), (r"\boxed{1}}", "1"), (r"\boxed{{1}", None), (r"\fbox{1}", "1"), ("boxed{1}", None),
])  # fmt: skip
def test_last_complete_box(response, answer):
    assert extract_answer(response) == answer


BALANCED = st.recursive(st.sampled_from(["", "x", r"\}", r"\{", "1,2"]), lambda inner: st.one_of(
    st.builds("{{{}}}".format, inner), st.builds("{}{}".format, inner, inner)), max_leaves=8)  # fmt: skip


@given(BALANCED, st.text("{} x", max_size=9))
@settings(max_examples=200, deadline=None)
def test_any_balanced_box_is_found_whatever_surrounds_it(content, noise):
    response = rf"\boxed{{0}} {noise} \boxed{{{content}}}"
    assert extract_answer(response) == content.strip()
    assert extract_answer(response + r" \boxed{" + noise.replace("}", "")) == content.strip()


@given(st.fractions(-50, 50, max_denominator=40), st.fractions(-50, 50, max_denominator=40))
@settings(max_examples=150, deadline=None)
def test_numbers_are_compared_exactly_in_every_spelling(x, y):
    def spellings(value: Fraction) -> list[str]:
        sign, size = "-" if value < 0 else "", abs(value)
        whole, rest = divmod(size, 1)
        out = [f"{value.numerator}/{value.denominator}", rf"{sign}\dfrac{{{size.numerator}}}{{{size.denominator}}}"]
        if whole and rest:
            out += [rf"{sign}{whole}\frac{{{rest.numerator}}}{{{rest.denominator}}}", f"{sign}{whole} {rest}"]
        return out + [str(value.numerator)] * (value.denominator == 1)

    for one in spellings(x):
        for other in spellings(y):
            assert reward.quick_verdict(rf"\boxed{{{one}}}", (other,)) == ("right" if x == y else "wrong"), (one, other)


def test_any_one_of_several_keys_is_enough():
    assert reward.quick_verdict(r"\boxed{4}", ("3", r"\boxed{4}")) == Verdict.RIGHT
    assert reward.quick_verdict(r"\boxed{5}", ("3", "4")) == Verdict.WRONG
    assert reward.quick_verdict(r"\boxed{5}", ("3", r"\sqrt{25}")) is None  # left to the parser
    assert judge(r"\boxed{5}", "3", r"\sqrt{25}") == Verdict.RIGHT
    assert judge(r"\boxed{5x=}", "x=5", "5x") == Verdict.UNPARSED != judge(r"\boxed{6x}", "x=5", "5x")
    assert judge(r"\boxed{5}", r"<think>\boxed{6}</think> A full solution ends in \boxed{5}.") == Verdict.RIGHT


def test_same_text_needs_no_parser_and_numbers_with_commas_may_be_lists():
    assert reward.quick_verdict(r"\boxed{2^{2^{100}}}", (r"2^{2^{100}}",)) == Verdict.RIGHT
    assert reward.quick_verdict(r"\boxed{100,200}", ("100201",)) is None
    assert judge(r"\boxed{200,100}", "100,200") == Verdict.RIGHT


def test_examples_in_docstrings_hold():
    import doctest

    assert doctest.testmod(mv).failed == 0 == doctest.testmod(reward).failed


def test_toy_answers_take_no_time():
    responses = [f"{'thinking ' * 60}</think> So \\boxed{{{i}}}." for i in range(2000)]
    begin = time.perf_counter()
    verdicts = [reward.quick_verdict(response, ("17",)) for response in responses]
    assert time.perf_counter() - begin < 1.0  # it takes about 0.07 s
    assert verdicts.count(Verdict.RIGHT) == 1 and verdicts.count(Verdict.WRONG) == 1999


@pytest.mark.parametrize("piece", [r"\boxed{", "{", r"\boxed{}", "\\boxed{\\", r"\boxed{1}", " ", "</think>"])
def test_hostile_text_is_scanned_in_linear_time(piece):
    best = min(_time(lambda: reward.quick_verdict((piece * 50_000)[:50_000], ("5",))) for _ in range(3))
    assert best < 0.25  # 0.03 s; quadratic time would be minutes


@pytest.mark.parametrize("piece", r"√ ½ ５ 1, { \frac \frac{a (( \text{ and ^( 1. \, \( \quad a{ _1".split())
def test_hostile_answers_are_spelled_in_bounded_time(piece):
    answer = (piece * mv.LONGEST_ANSWER)[: mv.LONGEST_ANSWER]
    assert min(_time(lambda: mv.canonical.__wrapped__(answer)) for _ in range(3)) < 0.25


def _time(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# --- the pool

FUNCTIONS = """
    import os, signal, subprocess, sys, time

    def slow(problem, response):
        time.sleep(1)
        return "right"

    def spin(problem, response):
        if response == "spin":
            while True:
                pass
        print("a stray line that is not the protocol")
        return "right" if response in problem["solutions"] else "wrong"

    def die(problem, response):
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(problem, response):
        sys.exit(3)

    def fail(problem, response):
        raise ZeroDivisionError("no such thing")

    def mumble(problem, response):
        return "quite good"

    def nest(problem, response):
        subprocess.Popen(["sleep", "987"])
        time.sleep(60)

    def report(problem, response):
        open(response, "w").write(repr(sorted(os.environ)) + repr(sorted(sys.modules)))
        return "right"
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("functions") / "functions.py"
    file.write_text(textwrap.dedent(FUNCTIONS))
    return str(file)


@contextlib.contextmanager
def scorer(*args, **kwargs):
    made = Scorer(*args, **kwargs)
    try:
        yield made
    finally:
        made.close()


def children(pid: int) -> dict[int, str]:
    """Child process id -> state."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    found[int(entry.name)] = fields[0]
    return found


def until(condition, seconds: float) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "it did not come to that"
        time.sleep(0.005)
    return time.monotonic() - begin


def test_power_towers_end_at_the_deadline_and_the_pool_serves_on():
    hostile = [r"9^{9^{9^9}}", r"(10^{12})!", r"7^{7^{7^{7}}}", r"\binom{10^9}{10^8}", r"\sum_{k=1}^{10^{12}} k^k",
               "(" * 900 + "1" + ")" * 900, r"\sqrt{" * 300 + "2" + "}" * 300, "1+" * 900 + "1", "x" * 3000,
               "\\frac{1}{" * 200 + "2" + "}" * 200, "^" * 500, "1e999999999", "9" * 1999]  # fmt: skip

    async def go():
        with scorer(2, 0.5) as pool:
            begin = time.monotonic()
            problem = Problem("p", "p", ("3.5", "x"))
            verdicts = await asyncio.gather(*(pool.score(problem, rf"\boxed{{{text}}}") for text in hostile))
            assert time.monotonic() - begin < len(hostile) * 0.5 + 2
            assert verdicts[0] == verdicts[1] == Verdict.TIMEOUT
            assert Verdict.RIGHT not in verdicts and Verdict.UNPARSED in verdicts
            assert await pool.score(HARD, RIGHT) == Verdict.RIGHT

    asyncio.run(go())


def test_fifty_timeouts_leave_no_zombie_and_lose_no_worker(functions):
    async def go():
        with scorer(4, 0.05, function=f"{functions}:spin") as pool:
            before = children(pool._child.pid)
            assert len(before) == 4
            verdicts = await asyncio.gather(*(pool.score(HARD, "spin") for _ in range(50)))
            assert verdicts == [Verdict.TIMEOUT] * 50
            after = children(pool._child.pid)
            assert len(after) == 4 and "Z" not in after.values() and not set(after) & set(before)
            assert "Z" not in children(os.getpid()).values()
            assert await pool.score(HARD, "(x+1)^2") == Verdict.RIGHT and await pool.score(HARD, "") == Verdict.WRONG
        assert not any(Path(f"/proc/{pid}").exists() for pid in after)

    asyncio.run(go())


def test_what_a_late_function_started_is_killed_with_it(functions):
    async def go():
        with scorer(1, 0.3, function=f"{functions}:nest") as pool:
            (worker,) = children(pool._child.pid)
            task = asyncio.create_task(pool.score(HARD, ""))
            while not (grandchildren := children(worker)):
                await asyncio.sleep(0.01)
            assert await task == Verdict.TIMEOUT
            await asyncio.sleep(0.1)
            for pid in grandchildren:
                with contextlib.suppress(FileNotFoundError):  # a zombie may wait for whoever adopted it
                    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    asyncio.run(go())


def test_killed_worker_is_replaced_at_once_idle_or_busy(functions):
    async def go():
        with scorer(2, 5.0, function=f"{functions}:slow") as pool:
            (first, *_) = before = children(pool._child.pid)
            os.kill(first, signal.SIGKILL)
            took = until(lambda: len(set(children(pool._child.pid)) - {first}) == 2, 0.5)
            assert took < 0.5 and first in before
            answer = asyncio.create_task(pool.score(HARD, ""))
            await asyncio.sleep(0.3)
            for pid in children(pool._child.pid):  # one of them holds the answer
                os.kill(pid, signal.SIGKILL)
            assert await answer == Verdict.RIGHT  # tried once more
            assert len(children(pool._child.pid)) == 2

    asyncio.run(go())


def test_eight_slow_answers_on_four_workers_and_an_event_loop_that_does_not_notice(functions):
    async def go() -> tuple[float, float]:
        lags: list[float] = []

        async def tick():
            while True:
                begin = time.perf_counter()
                await asyncio.sleep(0.005)
                lags.append(time.perf_counter() - begin - 0.005)

        with scorer(4, 5.0, function=f"{functions}:slow") as pool:
            ticker = asyncio.create_task(tick())
            begin = time.monotonic()
            answers = [pool.score(HARD, "x" * 200_000) for _ in range(8)]
            assert await asyncio.gather(*answers) == [Verdict.RIGHT] * 8
            took = time.monotonic() - begin
            ticker.cancel()
        return took, max(lags)

    best = min(asyncio.run(go()) for _ in range(2))  # the machine may be busy with something else once
    assert best[0] < 3.0 and best[1] < 0.05


def test_ten_megabytes_are_judged():
    async def go():
        with scorer(1, 5.0) as pool:
            assert await pool.score(HARD, "x" * 10_000_000 + RIGHT) == Verdict.RIGHT
            assert await pool.score(HARD, "\\boxed{" * 100_000) == Verdict.NO_ANSWER
            assert await pool.score(HARD, RIGHT) == Verdict.RIGHT

    asyncio.run(go())


@pytest.mark.parametrize("name, cause", [
    ("die", "two workers died judging it, one with status -9"), ("leave", "two workers died"),
    ("fail", "ZeroDivisionError: no such thing"), ("mumble", "'quite good' is not a valid Verdict"),
])  # fmt: skip
def test_broken_function_is_an_error_for_everyone_and_never_a_verdict(functions, name, cause):
    async def go():
        with scorer(1, 5.0, function=f"{functions}:{name}") as pool:
            results = await asyncio.gather(*(pool.score(HARD, RIGHT) for _ in range(3)), return_exceptions=True)
            assert all(isinstance(result, ScorerError) for result in results)
            assert cause in str(results[0]) and "'hard'" in str(results[0])
            with pytest.raises(ScorerError, match="broken"):
                await pool.score(Problem("easy", "p", ("4",)), r"\boxed{4}")

    asyncio.run(go())


def test_key_that_no_parser_reads_is_an_error_and_not_a_wrong_answer():
    async def go():
        with scorer(1, 5.0) as pool:
            with pytest.raises(ScorerError, match="cannot be parsed"):
                await pool.score(Problem("bad", "p", (r"\frac{1",)), r"\boxed{7}")
        with scorer(1, 5.0) as pool:
            with pytest.raises(ScorerError, match="'empty'.*never closes"):
                await pool.score(Problem("empty", "p", (r"\boxed{1",)), r"\boxed{7}")

    asyncio.run(go())


@pytest.mark.parametrize("stop, cause", [(signal.SIGKILL, "status -9"), (signal.SIGSTOP, "no verdict")])
def test_dead_or_silent_child_is_an_error_now_and_later(functions, monkeypatch, stop, cause):
    monkeypatch.setattr(reward, "GRACE_S", 0.3)

    async def go():
        with scorer(2, 0.3 if stop == signal.SIGSTOP else 9.0, function=f"{functions}:slow") as pool:
            workers = children(pool._child.pid)
            answers = [asyncio.create_task(pool.score(HARD, "")) for _ in range(3)]
            await asyncio.sleep(0.1)
            begin = time.monotonic()
            os.kill(pool._child.pid, stop)
            results = await asyncio.gather(*answers, return_exceptions=True)
            assert [type(result) for result in results] == [ScorerError] * 3 and cause in str(results[0])
            assert time.monotonic() - begin < 3
            with pytest.raises(ScorerError, match=cause):
                await pool.score(HARD, "")
            pool._child.kill()
            until(lambda: all(_gone(pid) for pid in workers), 1)

    asyncio.run(go())


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_everything_dies_with_a_killed_parent(functions):
    program = f"""
        import asyncio, os, sys
        sys.path.insert(0, {str(ROOT)!r})
        from reward import Problem, Scorer
        pool = Scorer(2, 60.0, function={functions + ":spin"!r})
        print(pool._child.pid, flush=True)
        asyncio.run(pool.score(Problem("p", "p", ("1",)), "spin"))
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    workers = children(child)
    assert len(workers) == 2
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: all(_gone(pid) for pid in (child, *workers)), 2)


def test_workers_know_neither_torch_nor_the_launcher(functions, monkeypatch, tmp_path):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "ROLE_NAME"):
        monkeypatch.setenv(name, "0")

    async def go():
        with scorer(1, 5.0, function=f"{functions}:report") as pool:
            assert await pool.score(HARD, str(tmp_path / "report")) == Verdict.RIGHT
        with scorer(1, 5.0) as pool:
            assert await pool.score(HARD, RIGHT) == Verdict.RIGHT
            for pid in children(pool._child.pid):
                assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
                assert f"{reward.MATH_MEMORY} " in Path(f"/proc/{pid}/limits").read_text()

    asyncio.run(go())
    report = (tmp_path / "report").read_text()
    for word in ("'RANK'", "MASTER", "ELASTIC", "GROUP_", "ROLE_", "WORLD", "'torch'", "'transformers'", "'numpy'"):
        assert word not in report
    program = "import reward, sys; print({'torch', 'numpy', 'sympy', 'transformers'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert loaded.stdout.strip() == "set()"


def test_function_that_imports_torch_is_refused(tmp_path):
    (tmp_path / "heavy.py").write_text("import sys\nsys.modules['torch'] = sys\ndef f(p, r): return 'right'\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    for spec, cause in ((tmp_path / "heavy.py:f", "must not import torch"), (tmp_path / "broken.py:f", "nothing_of"),
                        (tmp_path / "absent.py:f", "FileNotFoundError"), (tmp_path / "heavy.py:g", "AttributeError"),
                        ("f", "file.py:function")):  # fmt: skip
        with pytest.raises(ScorerError, match=f"did not start.*{cause}"):
            Scorer(1, 1.0, function=str(spec))
    assert "Z" not in children(os.getpid()).values()


def test_close_ends_everything_and_may_be_repeated(functions):
    async def go():
        pool = Scorer(2, 30.0, function=f"{functions}:spin")
        workers = children(pool._child.pid)
        answer = asyncio.create_task(pool.score(HARD, "spin"))
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        pool.close()
        pool.close()
        assert time.monotonic() - begin < 2 and all(_gone(pid) for pid in workers) and pool._child.poll() is not None
        with pytest.raises(ScorerError, match="closed"):
            await answer
        with pytest.raises(ScorerError, match="closed"):
            await pool.score(HARD, "spin")

    asyncio.run(go())


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="positive deadline"):
        Scorer(1, 0.0)
    errors = []

    def make():
        with pytest.raises(RuntimeError, match="main thread") as error:
            Scorer(1, 1.0)
        errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert errors


# --- problems


def write(path: Path, *rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_problems_in_both_formats(tmp_path):
    file = write(tmp_path / "good.jsonl", {"prompt": "a", "solutions": [r"\boxed{4}", "4.0"], "query_id": 7},
                 "", {"prompt": "b", "answer": 27.0, "task": "stem"}, {"prompt": "c", "answer": "B"},
                 {"prompt": "d", "answer": r"x^2+\frac{1}{2}", "query_id": "x"})  # fmt: skip
    assert load_problems(file) == [
        Problem("7", "a", (r"\boxed{4}", "4.0")), Problem("3", "b", ("27.0",)), Problem("4", "c", ("B",)),
        Problem("x", "d", (r"x^2+\frac{1}{2}",))]  # fmt: skip
    assert load_demonstrations(write(tmp_path / "d.jsonl", {"prompt": "a", "answer": "b c"})) == [("a", "b c")]


GOOD = {"prompt": "p", "answer": "4"}


@pytest.mark.parametrize("row, reason", [
    ("{", "not JSON"), ("[1]", "JSON object"), ("null", "JSON object"), ("\xff{}", "not JSON"),
    ({"answer": "4"}, "'prompt'"), ({**GOOD, "prompt": " "}, "'prompt'"), ({**GOOD, "prompt": 3}, "'prompt'"),
    ({"prompt": "p"}, "no answer key"), ({"prompt": "p", "solutions": []}, "no answer key"),
    ({"prompt": "p", "solutions": "4"}, "no answer key"), ({"prompt": "p", "solutions": [4]}, "no answer key"),
    ({"prompt": "p", "answer": None}, "no answer key"), ({"prompt": "p", "answer": True}, "'answer'"),
    ({"prompt": "p", "answer": ""}, "'answer'"), ('{"prompt": "p", "answer": NaN}', "'answer'"),
    ({"prompt": "p", "answer": ["4"]}, "'answer'"), ({**GOOD, "task": "code"}, "'code' is not supported"),
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


def test_plain_keys_start_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(reward, "judge_all", None)
    keys = ("4", "-1.5", r"\frac{1}{2}", "Monday", "B", "1,234", r"\boxed{7}") * 100
    file = write(tmp_path / "plain.jsonl", *({"prompt": "p", "answer": key} for key in keys))
    assert len(load_problems(file)) == 700


# --- the command


def check(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "reward.py", "check", *args], capture_output=True, text=True)


def test_check_prints_what_differs(tmp_path):
    good = {"id": "a", "response": RIGHT, "gold": "(x+1)^2", "expected": True}
    done = check(write(tmp_path / "good.jsonl", good, {**good, "response": "", "expected": False}))
    assert (done.returncode, done.stdout) == (0, "2 right, 0 wrong\n")
    hang = {"id": "c", "response": r"\boxed{9^{9^{9^9}}}", "gold": "x", "expected": True}
    done = check(write(tmp_path / "odd.jsonl", good, {**good, "id": "b", "expected": False}, hang,
                       {**good, "id": "d", "gold": r"\frac{1"}), "--deadline", "0.5")  # fmt: skip
    first, second, third, last = done.stdout.splitlines()
    assert done.returncode == 1 and last == "1 right, 3 wrong"
    assert "odd.jsonl:2: b: right, expected not right" in first and "odd.jsonl:3: c: timeout, expected right" in second
    assert "odd.jsonl:4: d: ValueError: answer key" in third


def test_check_names_bad_rows(tmp_path):
    done = check(write(tmp_path / "bad.jsonl", {"id": "a", "response": "r", "gold": "1", "expected": "yes"}))
    assert done.returncode == 1 and "bad.jsonl:1: 'response' must be text and 'expected' true or false" in done.stderr
    assert "Traceback" not in done.stderr
    done = check(str(tmp_path / "absent.jsonl"))
    assert done.returncode == 1 and "absent.jsonl: no such file" in done.stderr and "Traceback" not in done.stderr
