"""Servers that start, are watched and end with whoever made them; what a rank says at its end. Pools: test_reward.py.

    pytest tests/test_sandbox.py             # servers only where aiohttp is installed
"""

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import ROOT, soon

import sandbox
from sandbox import Server, clean_environment, free_ports
from sync import StalenessError, die
from toy import sweep_shared_memory


def test_a_child_does_not_take_itself_for_a_rank(monkeypatch):
    gone = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK",
            "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}  # fmt: skip
    kept = {"PATH", "MY_RANK", "RANKS", "CUDA_VISIBLE_DEVICES"}
    [monkeypatch.setenv(name, "1") for name in gone | kept - {"PATH"}]
    environment = clean_environment(TMPDIR="/x")
    assert not gone & environment.keys() and environment["TMPDIR"] == "/x"
    assert all(environment[name] == os.environ[name] for name in kept)


def test_free_ports_differ_and_are_free():
    ports = free_ports(50)
    assert len(set(ports)) == 50
    with contextlib.ExitStack() as stack:
        [stack.enter_context(socket.socket()).bind(("127.0.0.1", port)) for port in ports]


def test_only_old_segments_of_servers_that_nobody_has_mapped_are_removed(tmp_path):
    names = ["sglang_loads_old", "sgl_shm_old", "sgl_shm_young", "sgl_shm_mapped", "psm_old", "my_sgl_shm_old"]
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 4096)
        if "young" not in name:
            os.utime(tmp_path / name, (time.time() - 60,) * 2)
    with open(tmp_path / "sgl_shm_mapped", "r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert sorted(sweep_shared_memory(str(tmp_path))) == ["sgl_shm_old", "sglang_loads_old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[2:])
    assert sweep_shared_memory(str(tmp_path)) == ["sgl_shm_mapped"]  # its process has let go
    assert sweep_shared_memory(str(tmp_path / "nowhere")) == []


# -- a server

CHILD = """
import http.server, subprocess, sys, time
port, second, log, what = sys.argv[1:]
print("start", port, second, flush=True)
starts = open(log).read().count("start")
if what in ("dies", "always taken") or what == "taken" and starts < 3:
    print("no such model" if what == "dies" else "OSError: [Errno 98] Address already in use")
    sys.exit(3)
class Handler(http.server.BaseHTTPRequestHandler):
    looks = 0
    def do_GET(self):
        Handler.looks += 1
        self.reply(200 if Handler.looks > 2 and what != "never" else 503, "")
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        time.sleep(60 if self.path == "/slow" else 0)
        self.reply(200 if self.path == "/echo" else 400, body)
    def reply(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def session(leader: int) -> list[int]:
    """The processes in the session of `leader` that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            state, _, _, leads = path.read_text().rpartition(")")[2].split()[:4]
            if int(leads) == leader and state not in "ZX":
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def serve(tmp_path):
    """serve(what, body): runs the coroutine `body(server)` on a server that has started, and sees that it ends."""
    pytest.importorskip("aiohttp", reason="aiohttp comes with SGLang, and only its servers need it")
    (tmp_path / "child.py").write_text(CHILD)

    def run(what, body):
        async def whole():
            server = Server("the server of rank 1", tmp_path / "log", "/health", {})

            def command(*ports):
                return [str(word) for word in (tmp_path / "child.py", *ports, tmp_path / "log", what)]

            try:
                start = server.start(command, clean_environment(), 1.0 if what == "never" else 20.0)
                await asyncio.wait_for(start, 30)
                await body(server)
            finally:
                await server.close()
                soon(lambda: not session(server.process.pid), 2)

        asyncio.run(whole())

    return run


async def works(server):
    assert await server.healthy(1.0) and await server.post("/echo", {"a": [1, "x"]}) == {"a": [1, "x"]}
    soon(lambda: len(session(server.process.pid)) == 2, 5)  # `serve` sees that both end
    with pytest.raises(RuntimeError, match='^the server of rank 1 .*refused /no: 400 {"b": 2}'):
        await server.post("/no", {"b": 2})
    with pytest.raises(RuntimeError, match="did not answer /slow within 1 s"):
        await asyncio.wait_for(server.post("/slow", {}, 1.0), 5)


@pytest.mark.parametrize("what, starts, error", [
    ("works", 1, None),
    ("never", 1, r"was not up after 1 s; the end of .*log:"),
    ("dies", 1, r"ended with status 3; the end of .*log:\n  \| start \d+ \d+\n  \| no such model$"),
    ("taken", 3, None),  # twice
    ("always taken", 3, r"ended with status 3; the end of .*log:\n  \| start .*\n  \| OSError.* already in use$"),
])  # fmt: skip
def test_a_server_starts_or_says_why_and_lost_ports_are_tried_three_times(serve, tmp_path, what, starts, error):
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"^the server of rank 1 \(process \d+\) {error}") if error else (
            contextlib.nullcontext()):  # fmt: skip
        serve(what, works)
    ports = re.findall(r"start (\d+) (\d+)", (tmp_path / "log").read_text())
    assert len(ports) == starts and len(set(sum(ports, ()))) == 2 * starts and time.monotonic() - begin < 15


def test_a_killed_server_is_noticed_within_a_second(serve):
    async def body(server):
        watch = asyncio.ensure_future(server.watch(60.0, 60.0, lambda: (False, 0)))
        slow = asyncio.ensure_future(server.post("/slow", {}))
        await asyncio.sleep(0.5)
        assert not watch.done()
        os.kill(server.process.pid, signal.SIGKILL)
        for waiting in (watch, slow):
            with pytest.raises(RuntimeError, match="^the server of rank 1 .*was killed by SIGKILL"):
                await asyncio.wait_for(waiting, 1.0 if waiting is watch else 5.0)

    serve("works", body)


def test_a_server_that_stands_still_is_noticed_but_not_while_it_is_excused(serve):
    async def body(server):
        excuse = (True, 1)
        watch = asyncio.ensure_future(server.watch(0.1, 1.0, lambda: excuse))
        os.kill(server.process.pid, signal.SIGSTOP)
        await asyncio.sleep(2.0)
        excuse = (False, 1)
        await asyncio.sleep(0.6)  # it is asked now
        excuse = (False, 2)  # there was a pause meanwhile
        await asyncio.sleep(1.0)
        os.kill(server.process.pid, signal.SIGCONT)
        await asyncio.sleep(1.5)
        assert not watch.done()
        os.kill(server.process.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="gave no sign of life within 1 s"):
            await asyncio.wait_for(watch, 4)

    serve("works", body)


def test_a_killed_rank_leaves_no_server(serve, tmp_path):
    program = f"""
import asyncio, sandbox
async def main():
    server = sandbox.Server("s", {str(tmp_path / "log")!r}, "/health", {{}})
    command = lambda *ports: [{str(tmp_path / "child.py")!r}, *map(str, ports), {str(tmp_path / "log")!r}, "works"]
    await server.start(command, sandbox.clean_environment(), 20.0)
    print(server.process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        assert child in session(child)
        parent.kill()
    try:
        soon(lambda: child not in session(child), 2)
    finally:  # what it started itself is its own affair
        [os.kill(pid, signal.SIGKILL) for pid in session(child)]


# -- the end of a rank

PROCESSES = multiprocessing.get_context("forkserver")  # fork would inherit threads


def ending(path, error, broken_stdout):
    """In a process of its own: threads that never end, and an error."""
    stderr = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(stderr, 2)
    if broken_stdout:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    sys.stdout = open(1, "w", closefd=False)  # buffered, whatever the environment says
    print("output that is not flushed yet", end="")
    threading.Thread(target=threading.Event().wait, daemon=False).start()
    try:
        raise error
    except Exception as caught:
        die("trainer", 3, caught)


@pytest.mark.parametrize("broken_stdout", [False, True])
def test_die_says_who_and_why_and_ends_the_process_at_once(tmp_path, broken_stdout):
    process = PROCESSES.Process(target=ending, args=(tmp_path / "stderr", ValueError("no such thing"), broken_stdout))
    process.start()
    begin = time.monotonic()
    process.join(30)
    seconds, alive = time.monotonic() - begin, process.is_alive()
    process.kill()
    lines = [line for line in (tmp_path / "stderr").read_text().splitlines() if line]
    assert not alive, "a blocked thread kept the process"
    assert process.exitcode == 1 and seconds < 10
    assert lines[0] == "[rank 3, trainer] ValueError: no such thing"
    assert lines[1].startswith("Traceback") and "raise error" in "".join(lines)


class Exited(BaseException):
    pass


@pytest.mark.parametrize("error, lost_peer", [
    (ValueError("no such thing"), False),
    (RuntimeError("problems are too hard"), False),
    (TimeoutError("trainer rank 0 waited 60 s for 'paused' (version 3) from generator rank(s) [2]"), False),
    (StalenessError("ticket 5"), False),
    (RuntimeError("SGLang server was killed by SIGKILL; the end of its log:\n  | backend=gloo"), False),
    (dist.DistNetworkError("Connection reset by peer"), True),
    (dist.DistStoreError("Broken pipe"), True),
    (dist.DistBackendError("NCCL communicator was aborted"), True),
    (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7"), True),
])
def test_an_error_that_only_says_that_a_peer_is_gone_comes_later(monkeypatch, capsys, error, lost_peer):
    slept = []

    def leave(code):
        raise Exited(code)

    def sleep(seconds):
        assert capsys.readouterr().err == ""  # nothing is said before
        slept.append(seconds)

    monkeypatch.setattr(sandbox.os, "_exit", leave)
    monkeypatch.setattr(sandbox.time, "sleep", sleep)
    with pytest.raises(Exited, match="1"):
        die("generator", 4, error)
    assert bool(slept) == lost_peer and sum(slept) < 10  # the whole job has to be gone within 15 s
    assert capsys.readouterr().err.lstrip().startswith(f"[rank 4, generator] {type(error).__name__}: {error}")
