"""Work that may hang, die or do harm, in processes that can be killed: a pool of workers, servers, foreign programs.

`Pool` runs one trusted function, named "file.py:name", on requests that may never end. Who asks holds sockets, GPU
state and threads and must neither fork nor be imported again. So a pool is one child process, which forks the workers.
`call` waits for a reply until two deadlines and 30 s have brought no news (PoolError); the child kills a worker at a
request's deadline, and ends with its stdin and with its parent; workers end with the child. A request whose worker died
by itself is tried once more; a second death, or an error of the function, breaks the pool: neither is a result.

`Server` is a process that listens (SGLang), with all that it starts. It dies with the thread that made it, also when
that is killed; who asks it for something has a deadline of its own.

`run_program` is for code that nobody trusts (what a model wrote). It runs in bubblewrap: no network, no other process
in sight, of the file system only the system's and Python's own folders, read-only, and an empty scratch folder in
memory; all gone with its first process; time, memory, output, files and processes are bounded; only data comes back.
Not covered: holes of the kernel (do not run as root, use a virtual machine for more), load within the bounds, what one
can read in /usr. It needs Linux with user namespaces (Ubuntu: `sysctl kernel.apparmor_restrict_unprivileged_userns=0`)
and bubblewrap 0.8: `apt install bubblewrap`. With `unsafe=True` programs run as you, with your files and network.
"""

import asyncio
import collections
import contextlib
import ctypes
import functools
import json
import os
import re
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

GRACE_S = 30.0  # for the child to start, and on top of two deadlines (two tries) before silence means a broken pool
MEMORY = 4 << 30  # bytes of address space for a worker; a power tower would take all there is
LAUNCHER = re.compile(r"RANK|WORLD_SIZE|(LOCAL|MASTER|TORCHELASTIC|GROUP|ROLE)_.*")  # what torchrun tells its ranks


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends. `parent`: its process id, if known, to notice an end that
    came before the call. What counts is the end of the THREAD that forked this process, so fork from one that stays."""
    if sys.platform == "linux":  # elsewhere the end of the pipe has to do
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
    if parent not in (None, os.getppid()):
        os._exit(1)


def load_function(spec: str) -> tuple[Callable, dict]:
    """The function named "path/file.py:name", and all names of that file. ValueError in a sentence if there is none."""
    path, _, name = spec.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(f"{spec}: file.py:function is needed, and there is no file {path!r}")
    try:
        names = runpy.run_path(path, run_name="boba_file")
    except Exception as error:  # whatever a file raises when it is imported
        raise ValueError(f"{spec}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(names.get(name)):
        raise ValueError(f"{spec}: {path} has no function {name!r}")
    return names[name], names


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what the launcher told it, or a child would take itself for a rank."""
    return {name: value for name, value in os.environ.items() if not LAUNCHER.fullmatch(name)} | more


# -- A server ----------------------------------------------------------------------------------------------------------


class Server:
    """A process that answers HTTP on the loopback and logs to `log`; its path `health` answers 200 if it works."""

    def __init__(self, name: str, log: Path, health: str, headers: dict[str, str]):
        import aiohttp  # comes with SGLang

        self.name, self.log, self.health, self.process, self.url = name, log, health, None, ""
        self._timeout, self._errors = aiohttp.ClientTimeout, (aiohttp.ClientError, TimeoutError)
        # A connection for each request: the server closes idle ones, and one in that moment would be a lost request.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._http = aiohttp.ClientSession(connector=connector, headers=headers)

    async def start(self, command: Callable[[int, int], list[str]], environment: dict[str, str], timeout_s: float):
        """Start `python *command(port, second port)`, wait until it is healthy; raises with the end of the log. Ports
        are tried three times: another process may take one between our look and its use."""
        began = time.monotonic()
        for tries_left in (2, 1, 0):
            port, second = free_ports(2)
            self.url = f"http://127.0.0.1:{port}"
            become = [sys.executable, os.path.abspath(__file__), "become", str(os.getpid()), sys.executable]
            with open(self.log, "ab") as file:
                self._said_from = file.tell()
                self.process = subprocess.Popen([*become, *command(port, second)], env=environment, stdout=file,
                                                stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                return await self._until_healthy(began, timeout_s)
            except RuntimeError:
                if not tries_left or not re.search("(?i)address already in use|eaddrinuse", self._said()):
                    raise
                self.kill()
                print(f"{self.name}: another process took a port; trying others", flush=True)

    async def _until_healthy(self, began: float, timeout_s: float) -> None:
        said = 0.0
        while not await self.healthy(5.0):
            self.check()
            spent = time.monotonic() - began
            if spent > timeout_s:
                raise self.error(f"was not up after {timeout_s:.0f} s")
            if spent - said > 20:
                print(f"{self.name} is starting, {spent:.0f} s so far (its log: {self.log})", flush=True)
                said = spent
            await asyncio.sleep(0.3)

    async def healthy(self, timeout_s: float) -> bool:
        with contextlib.suppress(*self._errors):
            async with self._http.get(self.url + self.health, timeout=self._timeout(timeout_s)) as reply:
                return reply.status == 200
        return False

    async def watch(self, every_s: float, timeout_s: float, excused: Callable[[], tuple]) -> None:
        """Raises at once when the process has ended, and when it was not healthy for `timeout_s` seconds, asked every
        `every_s` seconds: but not while `excused()[0]` is true, nor if `excused()` is another afterwards."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.2)
            self.check()
            if time.monotonic() - last > every_s and not (before := excused())[0]:
                if not await self.healthy(timeout_s) and excused() == before:
                    self.check()  # if it has ended, that says more
                    raise self.error(f"gave no sign of life within {timeout_s:.0f} s")
                last = time.monotonic()

    async def post(self, path: str, body: dict, timeout_s: float | None = None) -> dict:
        """The reply to a POST of JSON. Raises, with this server's name, if it refuses, is gone, or takes too long."""
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
        return self.log.read_bytes()[self._said_from :].decode(errors="replace")

    async def close(self) -> None:
        await self._http.close()
        self.kill()

    def kill(self) -> None:
        """End it and all it started: it has nothing to save. May be called any number of times."""
        with contextlib.suppress(ProcessLookupError, AttributeError):  # it has ended, or was never started
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody has bound. One may be lost before it is bound for good; then try again."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]  # together, so they differ
    return [(each.getsockname()[1], each.close())[0] for each in held]


# -- A pool ------------------------------------------------------------------------------------------------------------


class PoolError(RuntimeError):
    """The pool is broken: nothing it might still say can be trusted, and the run must stop."""


class Pool:
    """Up to `workers` processes at once that call `function` ("path/file.py:name", sync or async, with the names of a
    request; it returns what JSON can hold), each killed after `deadline_s`. Make it before the process group exists;
    close() it. If that file has a function `before_fork()`, it runs once in the child: imports, caches."""

    def __init__(self, function: str, workers: int, deadline_s: float):
        assert workers >= 1 and deadline_s > 0, f"a pool needs workers and a deadline, not {workers} and {deadline_s} s"
        assert threading.current_thread() is threading.main_thread(), "a pool would die with the thread that made it"
        self._broken, self._last_news = "", time.monotonic()
        self.deadline_s, self.grace_s = deadline_s, GRACE_S
        self._lock, self._writing = threading.Lock(), threading.Lock()  # the first for _broken and _pending together
        self._pending: dict[int, futures.Future] = {}
        command = [sys.executable, os.path.abspath(__file__), "serve", json.dumps([function, workers, os.getpid()])]
        # A session of its own, because Ctrl-C is for the job, which then closes or leaves its pool.
        self._child = subprocess.Popen(command, env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       start_new_session=True)
        ready = select.select([self._child.stdout], [], [], GRACE_S)[0]
        hello = json.loads((ready and self._child.stdout.readline()) or '{"error": "it ended, or was not up in time"}')
        if "error" in hello:
            self.close()
            raise PoolError(f"the pool of {function} did not start: {hello['error']}")
        threading.Thread(target=self._read, daemon=True).start()

    async def call(self, request: dict, deadline_s: float | None = None) -> dict:
        """{"value": what the function returned} or {"timeout": True}. PoolError, now and ever after, once broken."""
        silence_s = 2 * (deadline_s := deadline_s or self.deadline_s) + self.grace_s
        future: futures.Future = futures.Future()
        future.set_running_or_notify_cancel()  # whoever waits may be cancelled, the request goes on
        with self._lock:
            if self._broken:
                raise PoolError(f"the pool is broken: {self._broken}")
            self._pending[id(future)] = future
        message = {"id": id(future), "request": request, "deadline_s": deadline_s}
        asyncio.get_running_loop().run_in_executor(None, self._write, json.dumps(message).encode() + b"\n")
        answer = asyncio.wrap_future(future)
        while not (await asyncio.wait({answer}, timeout=silence_s))[0]:
            if time.monotonic() - self._last_news > silence_s:
                self._break(f"no reply from its process for {silence_s:.0f} s")
        return answer.result()

    def close(self) -> None:
        """End the child and its workers. May be called any number of times."""
        self._break("it was closed")
        self._child.kill()  # its workers die with it
        self._child.wait()

    def _write(self, line: bytes) -> None:  # in a thread: a full pipe would stall the event loop
        with self._writing, contextlib.suppress(OSError):  # the end of the child is noticed by _read
            self._child.stdin.write(line)
            self._child.stdin.flush()

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


def serve(function: str, count: int, parent: int) -> None:
    """The child of a Pool: answer requests on stdin until it ends. It has one thread, so a fork is safe; a worker that
    ends, idle or busy, is replaced at once."""
    die_with_parent(parent)
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # a stray print goes to stderr and not into the protocol

    def tell(**reply) -> None:
        os.write(replies, json.dumps(reply).encode() + b"\n")

    try:
        apply, names = load_function(function)
        names.get("before_fork", lambda: None)()
        if heavy := {"torch", "transformers"} & set(sys.modules):  # a worker is a copy of this process
            raise ImportError(f"workers must not import {' or '.join(heavy)}")
    except Exception as error:  # whatever a file raises when it is imported
        return tell(error=f"{type(error).__name__}: {error}")
    me, waiting, workers, rest = os.getpid(), collections.deque(), {}, b""  # workers: our socket -> who is behind it

    def hire() -> None:
        ours, theirs = socket.socketpair()
        if not (pid := os.fork()):
            _work(function, apply, theirs, me)
        os.setpgid(pid, pid)  # so that what it started can be ended with it
        theirs.close()
        workers[ours] = SimpleNamespace(pid=pid, job=None, said=b"", deadline=0.0)

    tell(ready=[hire() for _ in range(count)])
    while True:
        for ours, worker in workers.items():
            if waiting and not worker.job:
                worker.job = waiting.popleft()
                worker.deadline = time.monotonic() + worker.job["deadline_s"]
                with contextlib.suppress(OSError):  # it died just now, which is noticed below
                    ours.sendall(json.dumps(worker.job["request"]).encode() + b"\n")
        patience = min((w.deadline - time.monotonic() for w in workers.values() if w.job), default=None)
        ready = select.select([requests, *workers], [], [], patience and max(0.0, patience))[0]
        if requests in ready:
            if not (chunk := os.read(requests, 1 << 20)):
                return
            *lines, rest = (rest + chunk).split(b"\n")
            waiting.extend(map(json.loads, lines))
        for ours, worker in list(workers.items()):
            chunk = b"" if ours in ready else None
            with contextlib.suppress(OSError):  # it died with a request unread
                chunk = ours.recv(1 << 16) if ours in ready else None
            worker.said += chunk or b""
            job, whole, late = worker.job, worker.said.endswith(b"\n"), time.monotonic() > worker.deadline
            if whole:
                tell(id=job["id"], **json.loads(worker.said))
                worker.job, worker.said = None, b""
            elif chunk == b"" or (job and late):
                del workers[ours]
                ours.close()
                os.killpg(worker.pid, signal.SIGKILL)
                status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
                hire()
                if job and not late and "tried" not in job:
                    waiting.appendleft(job | {"tried": True})
                elif job:
                    died = {"error": f"two workers died on one request (status {status})"}
                    tell(id=job["id"], **({"timeout": True} if late else died))


def _work(name: str, function: Callable, pipe: socket.socket, parent: int) -> None:
    """A worker: a reply a request, a line each. It never returns."""
    die_with_parent(parent)
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, 1 << 12)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard < 0 else min(hard, MEMORY), hard))
    with pipe.makefile("rw") as lines:
        for line in lines:
            try:
                value = function(**json.loads(line))
                value = asyncio.run(value) if asyncio.iscoroutine(value) else value
                reply = json.dumps({"value": value}, default=float)  # numpy's numbers
            except BaseException as error:  # also sys.exit
                traceback.print_exc()
                reply = json.dumps({"error": f"{name}: {type(error).__name__}: {error}"[:1000]})
            lines.write(reply + "\n")
            lines.flush()
    os._exit(0)


# -- A program that nobody trusts --------------------------------------------------------------------------------------

PROGRAM_MEMORY = 1 << 30  # bytes: address space of each of its processes, and what all of them hold together
PROGRAM_FILES = 32 << 20  # bytes of each file and in each of its two scratch folders, also of its output
PROGRAM_PROCESSES = 64  # with their threads

# Runs inside. It binds itself; its status 3 says that this is no program. A function is given what puzzle sites give.
DRIVER = """
def main():
    import json, os, resource, sys, traceback, types
    _, program, function, user, memory, files, processes = sys.argv
    for limit, most in (("AS", memory), ("FSIZE", files), ("NPROC", processes), ("CORE", 0)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (int(most), int(most)))
    if user:  # of root only, who has no bound on processes
        os.setgroups([]), os.setgid(int(user)), os.setuid(int(user))
    sys.argv[:], sys.modules["__main__"] = ["answer.py"], types.ModuleType("__main__")
    names, dumps, write = vars(sys.modules["__main__"]), json.dumps, os.write
    if function:
        arguments, result = json.load(sys.stdin), os.dup(1)
        os.dup2(2, 1)  # what it prints is not its result
        puzzles = "math", "itertools", "functools", "bisect", "heapq", "collections", "typing"
        exec("".join(f"import {name}; from {name} import *;" for name in puzzles) + "from builtins import *", names)
    try:
        program = compile(program, "answer.py", "exec", dont_inherit=True)
    except SyntaxError:
        traceback.print_exc()
        sys.exit(3)
    try:
        exec(program, names)
        if function:
            call = getattr(names["Solution"](), function) if "Solution" in names else names[function]
            data = dumps(call(*arguments), default=lambda value: value.tolist()).encode()
            while data:
                data = data[write(result, data):]
    except SystemExit:  # to leave is fine, whatever the status
        pass
main()
"""


class SandboxError(RuntimeError):
    """No sandbox could be made, so nothing is known about the program."""


# What a program left. outcome: "" (no error), syntax, error, timeout, limit; output: bytes; errors: the end of stderr.
Ran = collections.namedtuple("Ran", "outcome output errors", defaults=(b"", ""))


@functools.cache
def _bubble() -> list[str]:
    apart = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--cap-drop", "ALL"]
    apart += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.getuid() == 0 else ["--unshare-user"]
    scratch, binds = ["--perms", "1777", "--size", str(PROGRAM_FILES), "--tmpfs"], []
    python = (sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent))
    for folder in ("/usr", "/bin", "/lib", "/lib64", *python):
        for parent in list(Path(folder).parents)[-2::-1]:  # from the top; left to bubblewrap they are closed to others
            binds += ["--dir", str(parent)]
        binds += ["--ro-bind-try", folder, folder]
    return ["bwrap", *apart, "--die-with-parent", "--new-session", "--proc", "/proc", "--remount-ro", "/proc", "--dev",
            "/dev", *scratch, "/dev/shm", "--remount-ro", "/dev", *scratch, "/tmp", *binds, "--remount-ro", "/",
            "--chdir", "/tmp"]  # fmt: skip


@functools.cache
def _rules() -> bytes:
    """A seccomp program. Refused is what no namespace and no limit binds: memory that no process is seen to hold
    (memfd, System V, io_uring), new user namespaces, all sockets but UNIX, INET, INET6, NETLINK (vsock gets out)."""
    allow, refuse, absent, kill = ((6, 0, 0, action) for action in (0x7FFF0000, 0x50001, 0x50026, 0x80000000))
    numbers = {"x86_64": (0xC000003E, 41, 56, 319, 29, 68, 272, 308),  # memfd_create, shmget, msgget, unshare, setns
               "aarch64": (0xC00000B7, 198, 220, 279, 194, 186, 97, 268)}  # fmt: skip
    arch, sockets, clone, *refused = (*numbers[os.uname().machine], 447, 425)  # memfd_secret, io_uring_setup
    rules = [(0x20, 0, 0, 4), (0x15, 1, 0, arch), kill, (0x20, 0, 0, 0), (0x35, 0, 1, 1 << 30), refuse]
    rules += [rule for number in refused for rule in ((0x15, 0, 1, number), refuse)]
    rules += [(0x15, 0, 1, 435), absent]  # clone3, whose flags are out of sight: the C library then takes clone
    rules += [(0x15, 0, 4, clone), (0x20, 0, 0, 16), (0x45, 0, 1, 0x10000000), refuse, allow]  # CLONE_NEWUSER
    rules += [(0x15, 1, 0, sockets), allow, (0x20, 0, 0, 16)]
    rules += [rule for family in (1, 2, 10, 16) for rule in ((0x15, 0, 1, family), allow)] + [refuse]
    return b"".join(a.to_bytes(2, "little") + bytes((b, c)) + d.to_bytes(4, "little") for a, b, c, d in rules)


@functools.cache
def sandbox_fault() -> str:
    """Why this machine cannot run programs in a sandbox, "" if it can."""
    if not shutil.which("bwrap"):
        return "bubblewrap is not installed (Debian, Ubuntu: apt install bubblewrap)"
    try:
        return "" if run_program("print(6 * 7)", timeout_s=30).output == b"42\n" else "bubblewrap runs no Python here"
    except (KeyError, SandboxError) as error:  # KeyError: a processor that the rules are not written for
        return str(error)


def run_program(program: str, stdin: str = "", *, function: str = "", timeout_s: float, output_bytes: int = 1 << 20,
                unsafe: bool = False) -> Ran:  # fmt: skip
    """Run a Python program on `stdin`, or, with `function`, call that (or that method of its class `Solution`) with the
    JSON list in `stdin`; `output` is then the result's JSON. It blocks a thread that must live on. SandboxError."""
    text = program.encode(errors="replace")
    if len(text) > 120_000 or b"\0" in text:  # it travels on the command line
        return Ran("syntax", errors="a program may have 120000 bytes, and no NUL")
    user = "" if unsafe or os.getuid() else str(60_000 + threading.get_native_id() % 5000)  # its processes are counted
    command = [sys.executable, "-I", "-X", "utf8", "-X", "int_max_str_digits=0", "-c", DRIVER, text, function, user,
               str(PROGRAM_MEMORY), str(PROGRAM_FILES), str(PROGRAM_PROCESSES)]  # fmt: skip
    environment = {name: os.environ.get(name, "") for name in ("PATH", "LD_LIBRARY_PATH")}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "HOME": "/tmp"}
    with contextlib.ExitStack() as stack:
        given, output, errors, status, rules = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(5))
        [os.fchmod(file.fileno(), 0o666) for file in (given, output, errors)]  # for open("/dev/stdin")
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        folder, kept = "/", ()
        if unsafe:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        else:
            rules.write(_rules())
            rules.seek(0)
            kept = (status.fileno(), rules.fileno())
            command = [*_bubble(), "--json-status-fd", str(kept[0]), "--seccomp", str(kept[1]), "--", *command]
        process = subprocess.Popen(command, stdin=given, stdout=output, stderr=errors, cwd=folder, env=environment,
                                   pass_fds=kept, start_new_session=True)
        deadline, pause, outcome = time.monotonic() + timeout_s, 0.002, ""
        try:
            while process.poll() is None and not outcome:
                time.sleep(pause := min(0.05, 1.1 * pause))
                memory, family = 0, [process.pid]
                for pid in family:  # which grows: a process and all that it started
                    with contextlib.suppress(OSError, IndexError):  # it has ended
                        memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
                        children = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
                        family += map(int, " ".join(children).split())
                outcome = "limit" if memory > PROGRAM_MEMORY else "timeout" if time.monotonic() > deadline else ""
        finally:
            with contextlib.suppress(ProcessLookupError):  # what is in bubblewrap dies with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if output.seek(0, os.SEEK_END) > output_bytes:
            outcome = outcome or "limit"
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
        _, _, said = output.seek(0), status.seek(0), errors.read().decode(errors="replace")
        if not unsafe and not outcome and b"exit-code" not in status.read():
            raise SandboxError(f"bubblewrap cannot make a sandbox here: {said.strip() or 'it was killed'}")
        ended = {0: "", 3: "syntax"}.get(process.returncode, "error")
        return Ran(outcome or ended, output.read(output_bytes), said)


if __name__ == "__main__" and sys.argv[1] == "serve":
    serve(*json.loads(sys.argv[2]))
elif __name__ == "__main__":  # become a server; the order to die survives exec
    die_with_parent(int(sys.argv[2]))
    os.execv(sys.argv[3], sys.argv[3:])
