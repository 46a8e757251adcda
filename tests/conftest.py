"""What the tests of whole jobs share: starting a job as a user does, with torchrun, and looking for what it leaves."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A job in seconds: a hardly trained toy, small batches, every other default as it is.
SMALL = ["--sft_steps", "150", "--groups", "4", "--answers", "4", "--minibatches", "2", "--steps", "4",
         "--max_new_tokens", "48", "--eval_problems", "8", "--eval_answers", "2"]  # fmt: skip


def soon(condition, seconds: float = 10.0) -> None:
    """Wait until another thread or process has made `condition` true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


class Job:
    """A running `torchrun`, with a mark in its environment by which whatever it leaves behind is found. Processes that
    hide their environment (SGLang's, which rename themselves) are found by the session of one that was marked. The
    engine is transformers unless a test names one: SGLang's servers take long to start."""

    def __init__(self, folder: Path, args: list[str], ranks: int, script: Path, launcher: list[str]):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK", "WORLD", "MASTER"))}
        self.mark = f"BOBA_TEST_JOB={os.getpid()}-{time.monotonic_ns()}"
        given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        path = os.pathsep.join([str(ROOT), *map(os.path.abspath, given)])  # the job runs in another folder
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "BOBA_TEST_JOB": self.mark.partition("=")[2]}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        self.folder, self.sessions = folder, set()
        args = args if "--engine" in args else [*args, "--engine", "transformers"]
        self.out = open(folder / f"out-{time.monotonic_ns()}", "w+")
        self.process = subprocess.Popen([*torchrun, *launcher, str(script), *args], cwd=folder, env=env,
                                        stdout=self.out, stderr=subprocess.STDOUT)  # fmt: skip

    def text(self) -> str:
        self.out.flush()
        return Path(self.out.name).read_text()

    def wait(self, seconds: float = 150) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the job hangs:\n{self.text()}") from None

    def ranks(self) -> dict[int, int]:
        """rank -> process id of the ranks that live."""
        found = {}
        for pid, env in self._alive():
            rank = [value[5:] for value in env if value.startswith("RANK=")]
            if rank:
                found[int(rank[0])] = pid
        return found

    def members(self) -> list[int]:
        """Process ids of everything that the job started and that lives, scoring workers included."""
        return [pid for pid, _ in self._alive()]

    def _alive(self) -> list[tuple[int, list[str]]]:
        alive = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    env = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                    state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue  # it ended meanwhile
                if self.mark in env and int(session) != os.getsid(0):
                    self.sessions.add(session)
                if (self.mark in env or session in self.sessions) and state != "Z":
                    alive.append((int(entry.name), env))
        return alive

    def kill(self) -> None:
        """kill -9 of everything at once, as when a machine goes down."""
        for pid in self.members():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass
        self.process.wait(10)

    def until(self, condition, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the job ended:\n{self.text()}"
            assert time.monotonic() < deadline, f"it did not come to that:\n{self.text()}"
            time.sleep(0.05)


@pytest.fixture
def job(tmp_path):
    """start(*args, ranks=2, script=train.py, launcher=[]) -> Job; nothing survives the test."""
    jobs = []

    def start(*args, ranks=2, script=ROOT / "train.py", launcher=()):
        jobs.append(Job(tmp_path, [str(a) for a in args], ranks, script, list(launcher)))
        return jobs[-1]

    yield start
    for each in jobs:
        each.kill()
        each.out.close()


@pytest.fixture(scope="session")
def warm_runs(tmp_path_factory) -> Path:
    """A runs folder that holds the warm start of SMALL, once for all tests."""
    return tmp_path_factory.mktemp("shared") / "runs"


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
