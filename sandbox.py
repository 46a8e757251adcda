"""Work that may hang or die, in processes that can be killed: a pool of workers, and servers.

`Pool` runs one function, named "file.py:name", on requests that may never end. Who asks holds sockets, GPU state and
threads and must neither fork nor be imported again. So a pool is one child process, in which pebble forks the workers:

    who        waits for                             and if it never comes
    call()     its reply, as a JSON line             PoolError, after two deadlines and 30 s without any news
    child      requests on stdin                     it ends with stdin, and with its parent
    its slots  the result of their one worker        pebble kills the worker, the reply is a timeout
    worker     one request                           it dies with the child

A slot is a thread with a pebble pool of one: a larger pool breaks when an idle worker dies, and its workers share a
lock that a killed one may hold. A request whose worker died by itself is tried once more; a second death, or an error
of the function, breaks the whole pool: it must stop a run and never look like a result. Left out: limits beyond time
and memory, and killing what a function started: this is for code that is trusted but may take for ever.

`Server` is a process that listens (SGLang), with all that it starts. It dies with the thread that made it, also when
that is killed; who asks it for something has a deadline of its own.
"""

import asyncio
import contextlib
import ctypes
import json
import multiprocessing
import os
import queue
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent import futures
from multiprocessing import connection
from pathlib import Path

from pebble import ProcessExpired, ProcessPool

GRACE_S = 30.0  # for the child to start, and on top of two deadlines (two tries) before silence means a broken pool
LOST_S = 3.0  # on top of one deadline: the worker died with pebble's lock, or before it took the request
MEMORY = 4 << 30  # bytes of address space for a worker; a power tower would take all there is
LAUNCHER = re.compile(r"RANK|WORLD_SIZE|(LOCAL|MASTER|TORCHELASTIC|GROUP|ROLE)_.*")  # what torchrun tells its ranks


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends. `parent`: its process id, if known, to notice an end that
    came before the call. What counts is the end of the THREAD that forked this process, so fork from one that stays."""
    if sys.platform == "linux":  # elsewhere the end of the pipe has to do
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
    if parent not in (None, os.getppid()):
        os._exit(1)


def die(role: str, rank: int, error: BaseException) -> None:
    """Print the error, rank first, and end this process at once; torchrun then ends the others.

    `os._exit` because threads blocked in a store or in a collective would keep the interpreter alive. An error that
    only says that a peer is gone is held back for some seconds: the peer's own error, or torchrun's report of its
    signal, is the cause and comes first (and torchrun usually ends this rank before the time is up).
    """
    text = f"{type(error).__name__}: {error}"
    kinds = {kind.__name__ for kind in type(error).__mro__}  # by name: a pool's child must not import torch
    what = text.partition("\n")[0]  # the log of a server that follows may say anything
    gone = any(words in what for words in ("Connection closed", "Connection reset", "gloo"))
    lost_peer = "DistError" in kinds or ("RuntimeError" in kinds and gone)
    if lost_peer:
        time.sleep(5)
    try:
        with contextlib.suppress(OSError):  # whoever read our output may be gone, too
            sys.stdout.flush()
        trace = "".join(traceback.format_exception(error))
        print(f"[rank {rank}, {role}] {text}\n{trace}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what the launcher told it: a child would take itself for a rank."""
    return {name: value for name, value in os.environ.items() if not LAUNCHER.fullmatch(name)} | more


# -- A server ----------------------------------------------------------------------------------------------------------


class Server:
    """A process that answers HTTP on the loopback, in a session of its own with all that it starts; its output is
    appended to `log`. `health`: a path that answers 200 if it works. aiohttp comes with SGLang, so it is imported late.
    """

    def __init__(self, name: str, log: Path, health: str, headers: dict[str, str]):
        import aiohttp

        self.name, self.log, self.health, self.process, self.url = name, log, health, None, ""
        self._timeout, self._errors = aiohttp.ClientTimeout, (aiohttp.ClientError, TimeoutError)
        # A connection for each request: the server closes idle ones, and one in that moment would be a lost request.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._http = aiohttp.ClientSession(connector=connector, headers=headers)

    async def start(self, command: Callable[[int, int], list[str]], environment: dict[str, str], timeout_s: float):
        """Start `python *command(port, second port)` and wait until it is healthy. Ports are tried three times, since
        another process may take one between our look and its use. Raises with the end of the log."""
        deadline = time.monotonic() + timeout_s
        for tries_left in (2, 1, 0):
            port, second = free_ports(2)
            self.url = f"http://127.0.0.1:{port}"
            become = [sys.executable, os.path.abspath(__file__), "become", str(os.getpid()), sys.executable]
            with open(self.log, "ab") as file:
                self._said_from = file.tell()
                self.process = subprocess.Popen([*become, *command(port, second)], env=environment, stdout=file,
                                                stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                return await self._until_healthy(deadline, timeout_s)
            except RuntimeError:
                lost = any(word in self._said().lower() for word in ("address already in use", "eaddrinuse"))
                if not tries_left or not lost:
                    raise
                self.kill()
                print(f"{self.name}: another process took a port; trying others", flush=True)

    async def _until_healthy(self, deadline: float, timeout_s: float) -> None:
        began = said = time.monotonic()
        while not await self.healthy(5.0):
            self.check()
            now = time.monotonic()
            if now > deadline:
                raise self.error(f"was not up after {timeout_s:.0f} s")
            if now - said > 20:
                print(f"{self.name} is starting, {now - began:.0f} s so far (its log: {self.log})", flush=True)
                said = now
            await asyncio.sleep(0.3)

    async def healthy(self, timeout_s: float) -> bool:
        try:
            async with self._http.get(self.url + self.health, timeout=self._timeout(timeout_s)) as reply:
                return reply.status == 200
        except self._errors:
            return False

    async def watch(self, every_s: float, timeout_s: float, excused: Callable[[], tuple]) -> None:
        """Raises at once when the process has ended, and when it was not healthy for `timeout_s` seconds. It is asked
        every `every_s` seconds, but not while `excused()[0]` is true; if `excused()` is another afterwards, the answer
        does not count."""
        look, last, before = None, time.monotonic(), excused()
        try:
            while True:
                await asyncio.sleep(0.2)
                self.check()
                if look is None and time.monotonic() - last > every_s and not (before := excused())[0]:
                    look = asyncio.ensure_future(self.healthy(timeout_s))
                elif look is not None and look.done():
                    if not look.result() and excused() == before:
                        raise self.error(f"gave no sign of life within {timeout_s:.0f} s")
                    look, last = None, time.monotonic()
        finally:
            if look is not None:
                look.cancel()

    async def post(self, path: str, body: dict, timeout_s: float | None = None) -> dict:
        """The reply to a POST of JSON. Raises, with this server's name, if it refuses, is gone, or takes longer than
        `timeout_s`."""
        try:
            async with self._http.post(self.url + path, json=body, timeout=self._timeout(timeout_s)) as reply:
                status, text = reply.status, await reply.text()
        except TimeoutError:
            raise self.error(f"did not answer {path} within {timeout_s:.0f} s") from None
        except self._errors as error:
            await asyncio.sleep(1.0)  # the end of the process, if that is it, says more than that of the connection
            self.check()
            raise self.error(f"broke off {path} ({error})") from error
        if status != 200:
            raise self.error(f"refused {path}: {status} {text[:500]}")
        return json.loads(text) if text.startswith("{") else {}

    def check(self) -> None:
        """Raises if the process has ended."""
        if (status := self.process.poll()) is not None:
            raise self.error(f"was killed by {signal.Signals(-status).name}" if status < 0 else
                             f"ended with status {status}")  # fmt: skip

    def error(self, what: str) -> RuntimeError:
        """To be raised: "<name> (process N) <what>", and the end of its log."""
        tail = "\n".join(f"  | {line}" for line in self._said().splitlines()[-20:])
        return RuntimeError(f"{self.name} (process {self.process.pid}) {what}; the end of {self.log}:\n{tail}")

    def _said(self) -> str:
        with open(self.log, "rb") as file:
            file.seek(self._said_from)
            return file.read().decode(errors="replace")

    async def close(self) -> None:
        await self._http.close()
        self.kill()

    def kill(self) -> None:
        """End it and all it started: it has nothing to save. May be called any number of times."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody has bound. One may be lost before it is bound for good; then try again."""
    with contextlib.ExitStack() as stack:  # held together, so they differ
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


SEGMENTS = ("sglang_loads_", "sgl_shm_", "multi_tokenizer_args_", "nccl-", "cuda.shm.")  # of SGLang and its libraries


def sweep_shared_memory(folder: str = "/dev/shm", prefixes: tuple = SEGMENTS) -> list[str]:
    """Remove the segments that killed SGLang servers of this user left; returns their names. One is left alone as long
    as a process has it mapped, or while it is younger than 10 seconds: its process may be about to map it. Containers
    that share /dev/shm but not their processes must not run this."""
    found = [entry for entry in os.scandir(folder) if entry.name.startswith(prefixes)] if os.path.isdir(folder) else []
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            mapped += maps.read_text()
    removed = []
    for entry in found:
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            status = entry.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > 10 and entry.path not in mapped:
                os.unlink(entry.path)
                removed.append(entry.name)
    return removed


# -- A pool ------------------------------------------------------------------------------------------------------------


class PoolError(RuntimeError):
    """The pool is broken: nothing it might still say can be trusted, and the run must stop."""


class Pool:
    """`workers` processes that apply `function` ("path/file.py:name", from a dict to anything JSON can hold), each
    killed when one request takes it longer than `deadline_s`. Make it before the process group exists; close() it.
    A function `before_fork()` in the same file, if there is one, runs once in the child: imports, caches."""

    def __init__(self, function: str, workers: int, deadline_s: float):
        assert workers >= 1 and deadline_s > 0, f"a pool needs workers and a deadline, not {workers} and {deadline_s} s"
        assert threading.current_thread() is threading.main_thread(), "a pool would die with the thread that made it"
        self._broken = ""
        self._silence_s = 2 * deadline_s + GRACE_S
        self._last_news = time.monotonic()
        self._lock = threading.Lock()  # guards _broken and _pending together
        self._pending: dict[int, futures.Future] = {}
        self._outbox: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        options, pipe = json.dumps([function, workers, deadline_s, os.getpid()]), subprocess.PIPE
        command = [sys.executable, os.path.abspath(__file__), "serve", options]
        # A session of its own, because Ctrl-C is for the job, which then closes or leaves its pool.
        self._child = subprocess.Popen(command, env=clean_environment(), stdin=pipe, stdout=pipe,
                                       start_new_session=True)
        hello = connection.wait([self._child.stdout], GRACE_S) and self._child.stdout.readline()
        hello = json.loads(hello or '{"error": "it ended, or was not ready in time"}')
        if "error" in hello:
            self.close()
            raise PoolError(f"the pool of {function} did not start: {hello['error']}")
        # Threads, because a pipe read or written by the event loop would stall it or need a buffer of its own.
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    async def call(self, request: dict) -> dict:
        """{"value": what the function returned} or {"timeout": True}. PoolError, now and ever after, once broken."""
        future: futures.Future = futures.Future()
        future.set_running_or_notify_cancel()  # whoever waits may be cancelled, the request goes on
        with self._lock:
            if self._broken:
                raise PoolError(f"the pool is broken: {self._broken}")
            self._pending[id(future)] = future
        self._outbox.put({"id": id(future), "request": request})
        answer = asyncio.wrap_future(future)
        while not (await asyncio.wait({answer}, timeout=self._silence_s))[0]:
            if time.monotonic() - self._last_news > self._silence_s:
                self._break(f"no reply from its process for {self._silence_s:.0f} s")
        return answer.result()

    def close(self) -> None:
        """End the child and its workers. May be called any number of times."""
        self._break("it was closed")
        self._outbox.put(None)  # the end of its stdin
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
            if "error" in (reply := json.loads(line)):
                self._break(reply["error"])
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


# The child and its workers. Fork is safe here, where there are only pipes and idle threads, but two forks at once would
# inherit each other's pipes, and the death of one worker would go unnoticed until the other dies too.
_function: Callable[[dict], object]  # set before the workers are forked
_forking = threading.Lock()


class _Context(multiprocessing.context.ForkContext):
    class Process(multiprocessing.context.ForkProcess):
        def start(self) -> None:
            with _forking:
                super().start()


def serve(function: str, workers: int, deadline_s: float, parent: int) -> None:
    """The child of a Pool: answer requests on stdin until it ends, or until SIGTERM."""
    global _function
    die_with_parent(parent)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # a stray print goes to stderr and not into the protocol
    jobs: queue.Queue[dict] = queue.Queue()
    try:
        module = runpy.run_path(function.rpartition(":")[0], run_name="worker")
        _function = module[function.rpartition(":")[2]]
        module.get("before_fork", lambda: None)()
        if heavy := {"torch", "transformers"} & set(sys.modules):  # a worker is a copy of this process
            raise ImportError(f"workers must not import {' or '.join(heavy)}")
        for pool in [_pool(replies) for _ in range(workers)]:
            threading.Thread(target=_slot, args=(pool, jobs, replies, deadline_s), daemon=True).start()
        _reply(replies, None, {"ready": True})
        for line in requests:
            jobs.put(json.loads(line))
    except Exception as error:  # whatever a file raises when it is imported
        _reply(replies, None, {"error": f"{type(error).__name__}: {error}"})
    finally:
        _forking.acquire()  # pebble would replace them
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()  # nobody is left behind, not even as a zombie
        os._exit(0)  # without waiting for pebble's threads


def _reply(replies: int, number: int | None, outcome: dict) -> None:
    with _forking:  # not two at once
        os.write(replies, json.dumps({"id": number, **outcome}).encode() + b"\n")


def _pool(replies: int, old: ProcessPool | None = None) -> ProcessPool:
    """A pebble pool of one worker, in the place of an old one. The thread that calls must live as long as the child."""
    pool = ProcessPool(1, initializer=_enter, initargs=(os.getpid(), replies), context=_Context())
    if pool.active and old is not None:  # asking starts the worker
        old.stop()
        old.join()
    return pool


def _slot(pool: ProcessPool, jobs: queue.Queue, replies: int, deadline_s: float) -> None:
    while True:
        try:
            job = jobs.get(timeout=0.1)
        except queue.Empty:
            pool = pool if pool.active else _pool(replies, pool)  # its worker died while idle
            continue
        outcome = {"error": "two workers did not even start on one request"}
        for _ in range(2):
            try:
                future = pool.schedule(_work, args=(job["request"],), timeout=deadline_s)
                outcome = json.loads(future.result(timeout=deadline_s + LOST_S))
                break
            except futures.TimeoutError:
                if future.done():  # else the request was lost
                    outcome = {"timeout": True}
                    break
            except (RuntimeError, ProcessExpired) as error:  # also BrokenProcessPool, for a death before the request
                outcome = {"error": f"two workers died on one request (status {getattr(error, 'exitcode', 'unknown')})"}
            pool = _pool(replies, pool)
        _reply(replies, job["id"], outcome)


def _enter(parent: int, replies: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler would have to wait for a long multiplication
    os.close(replies)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard < 0 else min(hard, MEMORY), hard))


def _work(request: dict) -> str:
    try:
        return json.dumps({"value": _function(request)})
    except BaseException as error:  # also sys.exit
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})


if __name__ == "__main__" and sys.argv[1:2] == ["serve"]:
    serve(*json.loads(sys.argv[2]))
elif __name__ == "__main__" and sys.argv[1:2] == ["become"]:  # a server; the order to die survives exec
    die_with_parent(int(sys.argv[2]))
    os.execv(sys.argv[3], sys.argv[3:])
