"""Work that may hang or die, in processes that can be killed.

`Pool` runs one Python function, named as "file.py:name", on requests whose computation may never end (a verifier that
meets a power tower). Whoever asks holds sockets, GPU state and threads: it must neither fork nor be imported again. So
the pool is one child process, started by this file's path, and pebble's pools in it fork the workers:

    who        waits for                             and if it never comes
    call()     its reply, as a JSON line             PoolError, after two deadlines and 30 s without any news
    child      requests on stdin, for each of        stdin ends with the parent, which the kernel also tells the child
    its slots  the result of its one worker          pebble kills the worker; the reply is a timeout
    worker     one request                           dies with the child

A slot is a thread with a pebble pool of one worker. One pool for all would be shorter, but it breaks as a whole when an
idle worker dies, and its workers share a lock that a killed one may hold; a broken pool of one is simply replaced.

A request whose worker died by itself is tried once more. A second death, like an exception of the function, breaks the
whole pool: an error must stop a run and never look like a result. Left out: killing what a function itself has started,
and limits other than time and memory, so this much is for code that is trusted but may take for ever.

Test:  pytest tests/test_reward.py
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import importlib.util
import itertools
import json
import multiprocessing
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
from multiprocessing import connection

START_S = 60.0  # the child must be ready within this; importing sympy on a busy machine takes a few seconds
GRACE_S = 30.0  # on top of two deadlines (a request may be tried twice) before silence means a broken pool
LOST_S = 3.0  # on top of one deadline: the worker died with pebble's lock, or before it took the request
WATCH_S = 0.1  # how often a slot that waits for work looks whether its worker is alive
MEMORY = 4 << 30  # bytes of address space for a worker; a power tower would take all there is
LAUNCHER = re.compile(r"RANK|WORLD_SIZE|(LOCAL|MASTER|TORCHELASTIC|GROUP|ROLE)_.*")  # what torchrun tells its ranks
TOO_HEAVY = ("torch", "transformers")  # modules that no worker may hold


class PoolError(RuntimeError):
    """The pool is broken: nothing it might still say can be trusted, and the run must stop."""


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends. `parent`: its process id, if known, to notice an end that
    came before the call. What counts is the end of the THREAD that forked this process, so fork from one that stays."""
    if sys.platform == "linux":  # elsewhere the end of the pipe has to do
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
    if parent not in (None, os.getppid()):
        os._exit(1)


class Pool:
    """`workers` processes that apply `function` ("path/file.py:name", from a dict to anything JSON can hold), each
    killed when one request takes it longer than `deadline_s`. Make it before the process group exists; close() it.

    A function `before_fork()` in the same file, if there is one, runs once in the child: imports, caches.
    """

    def __init__(self, function: str, workers: int, deadline_s: float):
        if workers < 1 or not deadline_s > 0:
            raise ValueError(f"a pool needs a worker and a positive deadline, not {workers} and {deadline_s} s")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("a Pool must be made on the main thread: its processes die with the thread")
        self._broken = ""
        self._silence_s = 2 * deadline_s + GRACE_S
        self._last_news = time.monotonic()
        self._lock = threading.Lock()  # guards _broken and _pending together
        self._pending: dict[int, concurrent.futures.Future] = {}
        self._numbers = itertools.count()
        self._outbox: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        options = {"function": function, "workers": workers, "deadline_s": deadline_s, "parent": os.getpid()}
        self._child = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "serve", json.dumps(options)],
            env={name: value for name, value in os.environ.items() if not LAUNCHER.fullmatch(name)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        hello = {"error": f"it was not ready within {START_S:.0f} s"}
        if connection.wait([self._child.stdout], START_S):
            hello = json.loads(self._child.stdout.readline() or '{"error": "it ended at once"}')
        if "error" in hello:
            self.close()
            raise PoolError(f"the pool of {function} did not start: {hello['error']}")
        # Threads, because a pipe read or written by the event loop would stall it or need a buffer of its own.
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    async def call(self, request: dict) -> dict:
        """{"value": what the function returned} or {"timeout": True}. PoolError, now and ever after, once broken."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # whoever waits may be cancelled, the request goes on
        with self._lock:
            if self._broken:
                raise PoolError(f"the pool is broken: {self._broken}")
            number = next(self._numbers)
            self._pending[number] = future
        self._outbox.put({"id": number, "request": request})
        answer = asyncio.wrap_future(future)
        while not answer.done():
            await asyncio.wait({answer}, timeout=self._silence_s)
            if not answer.done() and time.monotonic() - self._last_news > self._silence_s:
                self._break(f"no reply from its process for {self._silence_s:.0f} s")
        return answer.result()

    def close(self) -> None:
        """End the child and its workers. May be called any number of times."""
        self._break("it was closed")
        self._outbox.put(None)
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=3)
        self._child.kill()  # where it has not ended yet; its workers die with it
        self._child.wait()

    def _break(self, cause: str) -> None:
        with self._lock:
            self._broken = self._broken or cause
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(PoolError(f"the pool is broken: {self._broken}"))

    def _read(self) -> None:
        for line in self._child.stdout:
            self._last_news = time.monotonic()
            reply = json.loads(line)
            if "error" in reply:
                self._break(reply["error"])
                continue
            with self._lock:
                future = self._pending.pop(reply.pop("id"), None)
            if future is not None:
                future.set_result(reply)
        self._break(f"its process ended with status {self._child.wait()}")

    def _write(self) -> None:
        with contextlib.suppress(OSError), self._child.stdin as pipe:  # the end of the child is noticed by _read
            while (message := self._outbox.get()) is not None:
                pipe.write(json.dumps(message).encode() + b"\n")
                pipe.flush()


# -- The child and its workers -----------------------------------------------------------------------------------------

_function: Callable[[dict], object]  # set before the workers are forked
_forking = threading.Lock()


class _Context(multiprocessing.context.ForkContext):
    """Fork is safe here, where there are only pipes and idle threads, but two at once would inherit each other's pipes,
    and the death of one worker would go unnoticed until the other dies too."""

    class Process(multiprocessing.context.ForkProcess):
        def start(self) -> None:
            with _forking:
                super().start()


def serve(function: str, workers: int, deadline_s: float, parent: int) -> None:
    """The child of a Pool: answer requests on stdin until it ends, or until SIGTERM."""
    die_with_parent(parent)
    os.setpgid(0, 0)  # Ctrl-C is for the job, which then closes or leaves its pool
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # a stray print goes to stderr and not into the protocol
    writing = threading.Lock()

    def reply(**message) -> None:
        with writing:
            os.write(replies, json.dumps(message).encode() + b"\n")

    jobs: queue.Queue[dict] = queue.Queue()
    started: queue.Queue[str] = queue.Queue()
    try:
        _load(function)
        for _ in range(workers):
            threading.Thread(target=_slot, args=(jobs, started, reply, replies, deadline_s), daemon=True).start()
        if problem := next(filter(None, (started.get() for _ in range(workers))), ""):
            raise ImportError(problem)
        reply(ready=True)
        for line in requests:
            jobs.put(json.loads(line))
    except Exception as error:  # whatever a file raises when it is imported
        reply(error=f"{type(error).__name__}: {error}")
    finally:
        _forking.acquire()  # pebble would replace them
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()  # nobody is left behind, not even as a zombie
        os._exit(0)  # without waiting for pebble's threads


def _load(function: str) -> None:
    global _function
    path, _, name = function.rpartition(":")
    spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    if spec is None:
        raise ValueError(f"{function!r} does not name a function as path/file.py:name")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _function = getattr(module, name)
    getattr(module, "before_fork", lambda: None)()


def _slot(jobs: queue.Queue, started: queue.Queue, reply: Callable, replies: int, deadline_s: float) -> None:
    """Serve jobs with one worker at a time. This thread lives as long as the child, so the worker may die with it."""
    from pebble import ProcessExpired, ProcessPool  # here, because the parent does without

    def fresh(old: ProcessPool | None = None) -> ProcessPool:
        pool = ProcessPool(1, initializer=_enter, initargs=(os.getpid(), replies), context=_Context())
        assert pool.active  # asking starts the worker
        if old is not None:
            old.stop()
            old.join()
        return pool

    try:
        pool = fresh()
        started.put(pool.schedule(_heavy).result(START_S))
        while True:
            try:
                job = jobs.get(timeout=WATCH_S)
            except queue.Empty:
                pool = pool if pool.active else fresh(pool)
                continue
            for deaths in (1, 2):
                future, status = None, "unknown"
                try:
                    future = pool.schedule(_work, args=(job["request"],), timeout=deadline_s)
                    outcome = json.loads(future.result(timeout=deadline_s + LOST_S))
                except (concurrent.futures.TimeoutError, RuntimeError, ProcessExpired) as error:
                    if future is not None and future.done() and isinstance(error, concurrent.futures.TimeoutError):
                        outcome = {"timeout": True}
                    else:  # the worker died, before or after pebble noticed: BrokenProcessPool is a RuntimeError
                        status = getattr(error, "exitcode", status)
                        pool = fresh(pool)
                        outcome = {"error": f"two workers died on one request, the last with status {status}"}
                        if deaths == 1:
                            continue
                reply(id=job["id"], **outcome)
                break
    except Exception as error:  # a fork that fails, say: no slot may vanish silently
        started.put(f"{type(error).__name__}: {error}")
        reply(error=f"a slot of the pool failed: {type(error).__name__}: {error}")


def _enter(parent: int, replies: int) -> None:
    """What a worker does first."""
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler would have to wait for a long multiplication
    os.close(replies)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard < 0 else min(hard, MEMORY), hard))


def _heavy() -> str:
    found = [name for name in TOO_HEAVY if name in sys.modules]
    return f"workers must not import {' or '.join(found)}" if found else ""


def _work(request: dict) -> str:
    try:
        return json.dumps({"value": _function(request)})
    except BaseException as error:  # also sys.exit
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})


if __name__ == "__main__":
    if sys.argv[1:2] != ["serve"]:
        sys.exit("sandbox.py is started by a Pool")
    serve(**json.loads(sys.argv[2]))
