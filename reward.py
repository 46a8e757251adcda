"""Problems, the verdict on a response, and a pool of processes that can be killed to reach it.

Which answers are equal is decided in `math_verifier.py`, whose docstring lists the disputed rules; what a verdict is
worth is the trainer's configuration. Judging may never end (power towers), and the process that wants the verdict holds
sockets, GPU state and threads: it must neither fork nor be imported again. So `Scorer` starts one child by its path,
before the process group exists; the child imports sympy but neither torch nor transformers, and forks workers:

    who        waits for                                       and if it never comes
    score()    its verdict, as a JSON line from the child      ScorerError after two deadlines and 30 s without any news
    child      requests, verdicts, the next deadline           kills the late worker, forks another, answers "timeout"
    worker     one request                                     dies with the child, which dies with its parent

The answer of a worker that died by itself is tried once more. A second death, like every error that is not the answer's
fault, breaks the scorer and ends the run, because a wrong verdict would be learned from. Left out: pebble (its pool
breaks when an idle worker dies), limits for code that nobody trusts, rewards for prose.

    python reward.py check tests/data/math.jsonl    # examine the verifier: rows of id, response, gold, expected
"""

import argparse
import asyncio
import collections
import contextlib
import ctypes
import importlib.util
import itertools
import json
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from multiprocessing import connection

import math_verifier as mv
from math_verifier import extract_answer

LONGEST_INLINE = 20_000  # characters; looking for a box in more of them would hold up the event loop
START_S = 60.0  # the child must be ready within this; importing sympy on a busy machine takes a few seconds
GRACE_S = 30.0  # on top of two deadlines (an answer may be tried twice) before silence means a broken scorer
MATH_MEMORY = 4 << 30  # bytes of address space for a math worker; a power tower would take all there is


class Verdict(StrEnum):
    """Outcome for one response. Only `right` earns the reward; the others are separate counts in the metrics."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # no box
    UNPARSED = "unparsed"  # a box without a mathematical reading
    TIMEOUT = "timeout"


class ScorerError(RuntimeError):
    """The scorer is broken: no verdict can be trusted and the run must stop."""


@dataclass(frozen=True)
class Problem:
    """A prompt and its answer keys, any one of which is enough."""

    id: str
    prompt: str
    solutions: tuple[str, ...]
    task: str = "math"
    prompt_ids: tuple[int, ...] = ()  # the prompt as tokens, filled in where there is a tokenizer


def load_problems(path: str) -> list[Problem]:
    """Read JSON lines of `prompt` with `solutions` (list of text) or `answer` (text or number), and optionally of
    `query_id` (default: the line number) and `task` (math, the default, or stem, judged alike). Raises
    FileNotFoundError or a ValueError that names file, line and reason.

    Keys that are numbers, words or choice letters are accepted at once; the others go through the parser in a pool of
    up to four processes that is gone on return, a few milliseconds for each different one.
    """
    problems: list[Problem] = []
    lines: dict[str, int] = {}  # id -> line
    doubtful: dict[str, str] = {}  # key that needs the parser -> where it was met first
    for number, row in _rows(path):
        where = f"{path}:{number}"
        if row.get("task", "math") not in ("math", "stem"):
            raise ValueError(f"{where}: task {row['task']!r} is not supported, only math and stem are")
        prompt, solutions, answer = _text(row, "prompt", where), row.get("solutions"), row.get("answer")
        if solutions is None and answer is not None:
            is_number = isinstance(answer, int | float) and not isinstance(answer, bool) and answer - answer == 0
            solutions = [str(answer) if is_number else _text(row, "answer", where)]  # NaN is no number here
        if not isinstance(solutions, list) or not solutions or not all(isinstance(s, str) for s in solutions):
            raise ValueError(f"{where}: no answer key: give 'solutions', a non-empty list of text, or 'answer'")
        name = row.get("query_id", number)
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise ValueError(f"{where}: 'query_id' must be text or an integer, not {type(name).__name__}")
        if lines.setdefault(str(name), number) != number:
            raise ValueError(f"{where}: query_id {name!r} was already used on line {lines[str(name)]}")
        for solution in solutions:
            try:
                key = mv.answer_key(solution)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if mv.plain_number(key) is None and not mv.words(key) and not re.fullmatch(r"\(?[A-J]\)?", key):
                doubtful.setdefault(solution, where)
        problems.append(Problem(str(name), prompt, tuple(solutions)))
    requests = [{"problem": {"solutions": [s]}, "response": None} for s in doubtful]
    replies = judge_all(requests, min(4, os.cpu_count() or 1), deadline_s=10.0) if requests else []
    bad = [f"{where}: {reply.get('error', 'parsing the answer key takes over 10 s')}"
           for where, reply in zip(doubtful.values(), replies, strict=True) if reply.get("verdict") != Verdict.RIGHT]
    if bad:
        raise ValueError("; ".join(bad[:5]) + (f"; and {len(bad) - 5} keys more" if len(bad) > 5 else ""))
    return problems


def load_demonstrations(path: str) -> list[tuple[str, str]]:
    """Read (prompt, full text of the answer) from JSON lines for supervised training; errors as in load_problems."""
    return [(_text(row, "prompt", f"{path}:{n}"), _text(row, "answer", f"{path}:{n}")) for n, row in _rows(path)]


def _rows(path: str) -> list[tuple[int, dict]]:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file")
    rows = []
    with open(path, "rb") as file:
        for number, line in ((n, line) for n, line in enumerate(file, 1) if line.strip()):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError also stands for bytes that are not UTF-8
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a JSON object is needed, not {type(row).__name__}")
            rows.append((number, row))
    if not rows:
        raise ValueError(f"{path}:1: the file holds no rows")
    return rows


def _text(row: dict, field: str, where: str) -> str:
    if not isinstance(row.get(field), str) or not row[field].strip():
        raise ValueError(f"{where}: {field!r} must be text that is not empty")
    return row[field]


def quick_verdict(response: str, solutions: tuple[str, ...]) -> Verdict | None:
    """The verdict where no parser is needed (no box, same text, numbers, choice letters), else None; in linear time."""
    answer = extract_answer(response)
    text = mv.canonical(answer) if answer else ""
    if not text:
        return Verdict.NO_ANSWER
    keys = [mv.answer_key(solution) for solution in solutions]
    if text in keys:
        return Verdict.RIGHT
    number, letter, decided = mv.plain_number(text), mv.choice_letter(text), True
    for key in keys:
        if number is not None and (value := mv.plain_number(key)) is not None:
            right, known = mv.same_number(value, key, number, text), "," not in text + key  # 1,234 may be a list
        elif text.isdigit() and key.isdigit():  # too long for arithmetic
            right, known = text.lstrip("0") == key.lstrip("0"), True
        else:
            known = letter is not None and re.fullmatch(r"\(?[A-J]\)?", key) is not None
            right = known and letter == key.strip("()")
        if right:
            return Verdict.RIGHT
        decided &= known
    return Verdict.WRONG if decided else None


def math_verdict(response: str, solutions: tuple[str, ...]) -> Verdict:
    """The full judgement. May take for ever and all memory: call it in a process that can be killed. Raises ValueError
    for an answer key without a reading."""
    if (quick := quick_verdict(response, solutions)) is not None:
        return quick
    otherwise = Verdict.WRONG
    for key in [mv.parse_key(solution) for solution in solutions]:
        try:
            if mv.equal(key, mv.parse(mv.canonical(extract_answer(response)))):
                return Verdict.RIGHT
        except Exception:  # model text provokes anything in sympy; a broken verifier is found when the pool starts
            otherwise = Verdict.UNPARSED
    return otherwise


def judge_math(problem: dict, response: str | None) -> str:
    """What a worker runs unless told otherwise. Without a response it only checks that every key can be parsed."""
    if response is None:
        return Verdict.RIGHT if all(map(mv.parse_key, problem["solutions"])) else Verdict.UNPARSED
    return math_verdict(response, tuple(problem["solutions"]))


class Scorer:
    """Verdicts from a pool of `workers` processes, each killed when one answer takes it longer than `deadline_s`.

    `function="file.py:name"` replaces the built-in judgement: name(problem as a dict, response) -> a Verdict's value.
    Make it on the main thread and before the process group exists; close() it at the end.
    """

    def __init__(self, workers: int, deadline_s: float, function: str | None = None):
        if threading.current_thread() is not threading.main_thread():
            # The child is told to die with its parent, and Linux takes the thread that started it for that.
            raise RuntimeError("a Scorer must be made on the main thread: its processes die with the thread")
        self._broken: str | None = None
        self._function = function
        self._silence_s = 2 * deadline_s + GRACE_S
        self._pending: dict[int, tuple[asyncio.Future, str]] = {}  # touched by the event loop only
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._last_news = time.monotonic()
        command, pipe = _serve_command(workers, deadline_s, function), subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=_environment())
        hello = {"error": f"it was not ready within {START_S:.0f} s"}
        if connection.wait([self._child.stdout], START_S):
            hello = json.loads(self._child.stdout.readline() or '{"error": "it ended at once"}')
        if "error" in hello:
            self.close()
            raise ScorerError(f"the scoring process did not start: {hello['error']}")
        # Threads, because a pipe read or written by the event loop would stall it or need a buffer of its own.
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    async def score(self, problem: Problem, response: str) -> Verdict:
        """The verdict on one response. Raises ScorerError, now and ever after, when the scorer is broken or closed."""
        answered = len(response) - max(0, response.rfind("</think>"))  # characters that may hold the answer
        if self._broken is None and self._function is None and answered <= LONGEST_INLINE:
            try:
                if (verdict := quick_verdict(response, problem.solutions)) is not None:
                    return verdict
            except ValueError as error:  # a key that load_problems would have refused
                self._break(f"problem {problem.id!r}: {error}")
        self._loop = asyncio.get_running_loop()
        number, future = next(self._numbers), self._loop.create_future()
        self._pending[number] = (future, problem.id)
        request = {"id": number, "problem": asdict(problem), "response": response}
        self._outbox.put(json.dumps(request).encode() + b"\n")
        if self._broken is not None:
            self._fail_pending()
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=self._silence_s)
                if not future.done() and time.monotonic() - self._last_news > self._silence_s:
                    self._break(f"no verdict from the scoring process for {self._silence_s:.0f} s")
            return future.result()
        finally:
            self._pending.pop(number, None)

    def close(self) -> None:
        """End the child and its workers. May be called any number of times."""
        self._break("it was closed")
        self._outbox.put(None)
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=5)
        self._child.kill()  # where it has not ended yet; its workers die with it
        self._child.wait()
        with contextlib.suppress(OSError):  # a request may be left in the buffer
            self._child.stdin.close()

    def _break(self, cause: str) -> None:
        self._broken = self._broken or cause
        if self._loop is not None and self._pending:
            with contextlib.suppress(RuntimeError):  # as in _read
                self._loop.call_soon_threadsafe(self._fail_pending)

    def _fail_pending(self) -> None:
        for future, _ in self._pending.values():
            if not future.done():
                future.set_exception(ScorerError(f"the scorer is broken: {self._broken}"))

    def _settle(self, message: dict) -> None:
        self._last_news = time.monotonic()
        future, name = self._pending.get(message["id"], (None, ""))
        if "error" in message:
            self._break(f"problem {name!r}: {message['error']}")
        elif future is not None and not future.done():  # else whoever asked was cancelled
            future.set_result(Verdict(message["verdict"]))

    def _read(self) -> None:
        for line in self._child.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                return self._break(f"the scoring process said {line[:80]!r}")
            with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits any more
                self._loop.call_soon_threadsafe(self._settle, message)
        self._child.stdout.close()
        self._break(f"the scoring process ended with status {self._child.wait()}")

    def _write(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the child is gone or closed; the reader says why
            while (line := self._outbox.get()) is not None:
                self._child.stdin.write(line)
                self._child.stdin.flush()


def judge_all(requests: list[dict], workers: int, deadline_s: float) -> list[dict]:
    """Judge a batch without an event loop: dicts of problem and response in, dicts of verdict or error out."""
    lines = "".join(json.dumps({**request, "id": n}) + "\n" for n, request in enumerate(requests))
    command, pipe = _serve_command(workers, deadline_s, None), subprocess.PIPE
    run = subprocess.run(command, input=lines.encode(), stdout=pipe, env=_environment())
    hello, *messages = map(json.loads, run.stdout.splitlines() or [b"{}"])
    replies = {message["id"]: message for message in messages}
    if len(replies) < len(requests):
        raise ScorerError(f"the scoring process ended with status {run.returncode} {hello.get('error', '')}")
    return [replies[n] for n in range(len(requests))]


def _serve_command(workers: int, deadline_s: float, function: str | None) -> list[str]:
    if workers < 1 or not deadline_s > 0:
        raise ValueError(f"a scorer needs a worker and a positive deadline, not {workers} and {deadline_s} s")
    options = {"--workers": workers, "--deadline": deadline_s, "--parent": os.getpid(), "--function": function or ""}
    return [sys.executable, os.path.abspath(__file__), "serve", *(str(x) for pair in options.items() for x in pair)]


def _environment() -> dict[str, str]:
    """Ours without what a launcher tells its ranks, and with Python's integers: where they raise, GMP aborts."""
    launcher = re.compile(r"RANK|WORLD_SIZE|LOCAL_(RANK|WORLD_SIZE)|(MASTER|TORCHELASTIC|GROUP|ROLE)_.*")
    kept = {name: value for name, value in os.environ.items() if not launcher.fullmatch(name)}
    return kept | {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}


@dataclass
class _Worker:
    pid: int
    pipe: connection.Connection
    request: bytes | None = None
    id: int = -1
    deadline: float = float("inf")


def serve(workers: int, deadline_s: float, parent: int, function: str | None) -> None:
    """The child of a Scorer: answer requests on stdin until it ends and all are answered, or until SIGTERM."""
    die_with_parent(parent)
    os.setpgid(0, 0)  # Ctrl-C is for the job, which then closes or leaves its scorer
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # a stray print goes to stderr and not into the protocol

    def reply(**message) -> None:
        os.write(replies, json.dumps(message).encode() + b"\n")

    try:
        judge = _load_function(function) if function else judge_math
        # Fills the parser's caches before the fork. A verifier that cannot do this would call every answer unparsed.
        answer, key = r"\boxed{\sec^2(y), 2x>4, x^2+2x+1, \sqrt{8}}", r"(x+1)^2, \tan^2(y)+1, x>2, 2\sqrt2"
        if not function and math_verdict(answer, (key,)) != Verdict.RIGHT:
            raise RuntimeError(f"the verifier does not find {answer} equal to {key}")
        pool = [_fork(judge, requests, replies) for _ in range(workers)]
    except Exception as error:  # whatever a user's file raises when imported
        return reply(error=f"{type(error).__name__}: {error}")
    reply(ready=True)
    try:
        _serve_requests(pool, deadline_s, requests, reply, lambda: _fork(judge, requests, replies))
    finally:
        for worker in pool:
            _kill(worker)


def _serve_requests(pool: list[_Worker], deadline_s: float, requests: int, reply: Callable, fork: Callable) -> None:
    waiting: collections.deque[tuple[int, bytes]] = collections.deque()
    deaths: collections.Counter[int] = collections.Counter()  # by request
    unread, more = bytearray(), True
    while more or waiting or any(worker.request for worker in pool):
        for worker in pool:
            if waiting and worker.request is None:
                worker.id, worker.request = waiting.popleft()
                worker.deadline = time.monotonic() + deadline_s
                with contextlib.suppress(OSError):  # it died while idle: seen as the end of its pipe below
                    worker.pipe.send_bytes(worker.request)
        next_deadline = min(worker.deadline for worker in pool)
        patience = max(0.0, next_deadline - time.monotonic()) if next_deadline < float("inf") else None
        ready = connection.wait([worker.pipe for worker in pool] + [requests] * more, patience)
        if requests in ready:
            chunk = os.read(requests, 1 << 20)
            more = bool(chunk)
            unread += chunk
            if b"\n" in chunk:
                *lines, unread = unread.split(b"\n")
                waiting.extend((json.loads(line)["id"], bytes(line)) for line in lines)
        for index, worker in enumerate(pool):
            if worker.pipe in ready:
                try:
                    message = worker.pipe.recv_bytes()
                except (EOFError, OSError):
                    status, pool[index] = _kill(worker), fork()
                    deaths[worker.id] += 1
                    if worker.request is not None and deaths[worker.id] == 1:
                        waiting.appendleft((worker.id, worker.request))
                    elif worker.request is not None:
                        reply(id=worker.id, error=f"two workers died judging it, one with status {status}")
                else:
                    reply(id=worker.id, **json.loads(message))
                    worker.request, worker.deadline = None, float("inf")
            elif time.monotonic() > worker.deadline:
                _kill(worker)
                pool[index] = fork()
                reply(id=worker.id, verdict=Verdict.TIMEOUT)


def _fork(judge: Callable, *inherited: int) -> _Worker:
    """A new worker, ready. Forking is safe here and only here: one thread, and nothing open but pipes."""
    ours, theirs = connection.Pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)  # what a reward function starts is killed with its worker
        theirs.close()
        if forbidden := json.loads(ours.recv_bytes()):
            raise ImportError(f"workers must not import {' or '.join(forbidden)}")
        return _Worker(pid, ours)
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for descriptor in inherited:
            os.close(descriptor)
        if judge is judge_math:
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (MATH_MEMORY if hard < 0 else min(hard, MATH_MEMORY), hard))
        theirs.send_bytes(json.dumps([name for name in ("torch", "transformers") if name in sys.modules]).encode())
        while True:
            request = json.loads(theirs.recv_bytes())
            try:
                answer = {"verdict": Verdict(judge(request["problem"], request["response"]))}
            except Exception as error:  # of a reward function: reported, and the run stops there
                answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
            theirs.send_bytes(json.dumps(answer).encode())
    finally:
        os._exit(1)  # never back into the child's own loop


def _kill(worker: _Worker) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.pipe.close()
    return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends (the thread that started it, to be exact)."""
    if sys.platform == "linux":  # elsewhere the end of the pipe has to do
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
    if parent not in (None, os.getppid()):  # it died before the call
        os._exit(1)


def _load_function(spec: str) -> Callable[[dict, str], str]:
    path, _, name = spec.rpartition(":")
    found = importlib.util.spec_from_file_location("reward_function", path)
    if found is None:
        raise ValueError(f"{spec!r} does not name a function as file.py:function")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return getattr(module, name)


def check(path: str, workers: int, deadline_s: float) -> int:
    """Judge a file of rows of id, response, gold and expected, print what differs, return how much did."""
    rows = _rows(path)
    for number, row in rows:
        _text(row, "id", f"{path}:{number}"), _text(row, "gold", f"{path}:{number}")
        if not isinstance(row.get("response"), str) or not isinstance(row.get("expected"), bool):
            raise ValueError(f"{path}:{number}: 'response' must be text and 'expected' true or false")
    requests = [{"problem": {"solutions": [row["gold"]]}, "response": row["response"]} for _, row in rows]
    wrong = 0
    for (number, row), reply in zip(rows, judge_all(requests, workers, deadline_s), strict=True):
        verdict = reply.get("verdict", reply.get("error"))
        if (verdict == Verdict.RIGHT) != row["expected"] or "error" in reply:
            wrong += 1
            wanted, answer = "right" if row["expected"] else "not right", extract_answer(row["response"])
            print(f"{path}:{number}: {row['id']}: {verdict}, expected {wanted}: {answer!r} for {row['gold']!r}")
    print(f"{len(rows) - wrong} right, {wrong} wrong")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Examine the verifier with your own data.")
    commands = parser.add_subparsers(dest="command", required=True)
    examine = commands.add_parser("check", help="judge rows of id, response, gold, expected")
    server = commands.add_parser("serve", help="internal: the child of a Scorer")
    for command in (examine, server):
        command.add_argument("--workers", type=int, default=2, help="processes")
        command.add_argument("--deadline", type=float, default=5.0, help="seconds for one answer")
    examine.add_argument("file")
    server.add_argument("--parent", type=int, default=os.getppid(), help="process to die with")
    server.add_argument("--function", default="", help="file.py:function instead of the built-in judgement")
    args = parser.parse_args()
    if args.command == "serve":
        return serve(args.workers, args.deadline, args.parent, args.function)
    try:
        sys.exit(1 if check(args.file, args.workers, args.deadline) else 0)
    except (ValueError, OSError, ScorerError) as error:
        sys.exit(f"reward.py: {error}")


if __name__ == "__main__":
    main()
