"""A job on two hosts, each with a torchrun of its own: who trains where, what crosses the cable, a host that vanishes.

    pytest tests/test_hosts.py -v                           # under a minute; the ids say how the hosts were made
    pytest tests/test_hosts.py -v -m "slow or not slow"     # also four ranks, and a cable that is cut: two minutes
    BOBA_TEST_HOSTS=loopback pytest tests/test_hosts.py -v  # the second way, on a machine that allows the first

[namespaces]: two network namespaces, joined by a cable (a veth pair) and by nothing else. Each has a name, an address
and a loopback of its own, so whatever listens at the wrong one is never reached. It takes root, `ip` and `unshare`.
[loopback], elsewhere: two torchruns side by side on this host; that shows roles and deadlines, but not which address is
used, and no cable can be cut.

Not covered: SGLang, NCCL and GPUs on several hosts; a run's folder on a network file system (here it is one disk); a
network that is slow or loses packets; more than two hosts; a host that comes back under --max-restarts.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, SMALL, Job, rows, soon

NAMES = ["boba-a", "boba-b"]
ADDRESSES = ["10.77.0.1", "10.77.0.2"]  # known in the namespaces only. torchrun orders the hosts' ranks by this text
# Different answers have different rewards, so every step has something to learn and weights to send.
REWARD = "import zlib\ndef differ(row, response): return zlib.crc32(response.encode()) % 97 / 97\n"
FIND_PORT = "import socket, sys; s = socket.create_server((sys.argv[1], 0)); print(s.getsockname()[1])"


# -- Two hosts ---------------------------------------------------------------------------------------------------------


@dataclass
class Host:
    name: str
    address: str
    endpoint: str  # its name or address, at which its torchrun sees that the rendezvous is its own
    enter: list[str]  # goes before a command
    environment: dict[str, str]  # of its ranks

    def run(self, *command: str) -> str:
        done = subprocess.run([*self.enter, *command], check=True, stdout=subprocess.PIPE, text=True, timeout=20)
        return done.stdout.strip()


@contextlib.contextmanager
def two_namespaces(folder: Path, debian: bool = False):
    """Two hosts and a cable. A namespace lives as long as a process in it: first a `cat` whose input this process has,
    so none outlives the tests and their jobs, however they end. Each host has its own /etc/hosts, as two machines
    have. `debian`: there a host's own name is 127.0.1.1, so the job must find the card itself, and torchrun be told
    the rendezvous by that host's name."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            known = dict(zip(NAMES, ADDRESSES, strict=True), localhost="127.0.0.1")
            if debian:
                known[name] = "127.0.1.1"
            table = folder / f"hosts-of-{name}"
            table.write_text("".join(f"{value} {key}\n" for key, value in known.items()))
            setup = """echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts || exit
                       echo 5 > /proc/sys/net/ipv4/tcp_retries2  # a dead connection ends after 12 s, not 15 minutes
                       echo up && exec cat"""
            command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", setup, name, str(table)]
            keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(keeper.communicate, timeout=10)  # closes its input, which ends it
            if keeper.stdout.readline() != "up\n":
                raise OSError("this machine makes no namespaces")
            enter = ["nsenter", "--target", str(keeper.pid), "--net", "--uts", "--mount"]
            hosts.append(Host(name, address, name if debian else address, enter, {}))
        hosts[0].run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(keeper.pid))
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "cable")
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "link", "set", "cable", "up")
        yield hosts


def ways() -> list[str]:
    """How hosts are made on this machine. It is tried once, when the tests are collected: 0.1 s."""
    if os.environ.get("BOBA_TEST_HOSTS") == "loopback" or os.geteuid() or not shutil.which("ip"):
        return ["loopback"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            with two_namespaces(Path(folder)) as (a, b):
                found = a.run(sys.executable, "-c", FIND_PORT, a.address)
                return ["namespaces"] if found else ["loopback"]
        except (OSError, subprocess.SubprocessError):
            return ["loopback"]


@pytest.fixture(params=ways())
def two_hosts(request, tmp_path):
    """make(debian=False) -> [host a, host b]."""
    with contextlib.ExitStack() as stack:

        def make(**settings) -> list[Host]:
            if request.param == "namespaces":
                return stack.enter_context(two_namespaces(tmp_path, **settings))
            addresses = dict(zip(NAMES, ["127.0.0.1", "127.0.0.2"], strict=True))  # all of 127 is loopback
            return [Host(name, at, at, [], {"GLOO_SOCKET_IFNAME": "lo"}) for name, at in addresses.items()]

        make.way = request.param
        yield make


# -- One job on both ---------------------------------------------------------------------------------------------------


class Agent(Job):
    """One host's torchrun and all that it starts; `Job` finds and kills them by a mark that is this host's own."""

    def __init__(self, host: Host, endpoint: str, folder: Path, args: list[str], ranks: int):
        self.host, self.folder, self.sessions = host, folder, set()
        self.mark = f"BOBA_TEST_JOB={host.name}-{os.getpid()}-{time.monotonic_ns()}"
        foreign = ("TORCHELASTIC", "RANK", "WORLD", "MASTER", "GLOO")
        env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | host.environment
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "BOBA_TEST_JOB": self.mark.partition("=")[2]}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", str(ranks),
                    "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", host.address]  # fmt: skip
        command = [*host.enter, "env", f"--chdir={folder}", *torchrun, str(ROOT / "train.py"), *args]
        self.out = open(folder / f"out-{host.name}", "w+")
        self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=self.out, stderr=subprocess.STDOUT)


@pytest.fixture
def two_agents(two_hosts, tmp_path, warm_runs):
    """start(hosts, *args, ranks on each, meet: the host of the rendezvous) -> [agent a, agent b]; none survives."""
    agents = []

    def start(hosts: list[Host], *args, ranks: int = 1, meet: int = 0) -> list[Agent]:
        (tmp_path / "reward.py").write_text(REWARD)
        port = hosts[meet].run(sys.executable, "-c", FIND_PORT, hosts[meet].address)
        args = [*SMALL, "--engine", "transformers", "--runs_dir", str(warm_runs), 
                "--reward", "reward.py:differ", *map(str, args)]  # fmt: skip
        for host in hosts:
            agents.append(Agent(host, f"{hosts[meet].endpoint}:{port}", tmp_path, args, ranks))
        return agents

    yield start
    for agent in agents:
        agent.kill()
        agent.out.close()


def said(agents: list[Agent]) -> str:
    return "\n".join(f"-- {agent.host.name} --\n{agent.text()}" for agent in agents)


def end(agents: list[Agent], seconds: float) -> list[int]:
    """The exit statuses, once all have ended; AssertionError if that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while any(agent.process.poll() is None for agent in agents):
        assert time.monotonic() < deadline, f"the job still runs:\n{said(agents)}"
        time.sleep(0.05)
    return [agent.process.returncode for agent in agents]


def peers(pid: int) -> set[tuple[str, str]]:
    """(own address, other's address or 0.0.0.0 of a listener) of a process's IPv4 sockets. A rank has those of gloo
    only: torch's stores speak IPv6."""
    files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, *ends, _, _, _, _, _, _, inode = line.split()[:10]
        if f"socket:[{inode}]" in files:
            raw = (bytes.fromhex(end.partition(":")[0]) for end in ends)
            found.add(tuple(socket.inet_ntoa(address[:: 1 if sys.byteorder == "big" else -1]) for address in raw))
    return found


def check_run(folder: Path, steps: int) -> dict:
    """A complete run within its bound; returns config.yaml."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == steps and summary["max_staleness_seen"] <= summary["max_staleness_bound"] == 2
    table = rows(folder)
    assert [row["step"] for row in table] == list(range(steps))
    assert all(row["staleness_max"] <= 2 and row["grad_norm"] > 0 for row in table)
    assert table[0]["logprob_gap"] < 1e-4  # the generators have the trainers' weights
    return yaml.safe_load((folder / "config.yaml").read_text())


@pytest.mark.slow
def test_one_host_trains_and_the_other_generates(two_hosts, two_agents, warm_runs):
    hosts = a, b = two_hosts()
    agents = two_agents(hosts, "--run_name", "hosts")
    agents[0].until(lambda: "run in " in said(agents))  # all process groups are connected by then
    trainer, generator = (agent.ranks() for agent in agents)
    assert list(trainer) == [0] and list(generator) == [1]
    if two_hosts.way == "namespaces":
        spaces = [os.readlink(f"/proc/{pid}/ns/net") for pid in (trainer[0], generator[1], os.getpid())]
        assert len(set(spaces)) == 3
        for pid, me, other in ((trainer[0], a, b), (generator[1], b, a)):
            assert peers(pid) == {(me.address, "0.0.0.0"), (me.address, other.address)}
    assert end(agents, 120) == [0, 0], said(agents)
    settings = check_run(warm_runs / "hosts", steps=4)
    assert settings["derived"]["ranks"] == "2: trainers [0], generators [1]"
    events = json.loads((warm_runs / "hosts" / "trace.json").read_text())
    did = {(event["pid"], event["name"]) for event in events}
    assert {(0, "train"), (0, "sync"), (1, "generate"), (1, "score")} <= did
    assert not {(1, "train"), (0, "generate")} & did
    assert not any(agent.members() for agent in agents)


@pytest.mark.slow
def test_of_two_hosts_with_two_ranks_each_one_trains_and_the_other_generates(two_hosts, two_agents, warm_runs):
    """The default split goes between the hosts, wherever the rendezvous is: here at the generators' host."""
    agents = two_agents(two_hosts(debian=True), "--run_name", "four", ranks=2, meet=1)
    agents[0].until(lambda: "run in " in said(agents))
    assert [sorted(agent.ranks()) for agent in agents] == [[0, 1], [2, 3]]
    assert end(agents, 180) == [0, 0], said(agents)
    settings = check_run(warm_runs / "four", steps=4)
    assert settings["derived"]["ranks"] == "4: trainers [0-1], generators [2-3]"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "unplugged"])
def test_a_host_that_vanishes_ends_the_job_with_what_is_missing(two_hosts, two_agents, warm_runs, how):
    if how == "unplugged" and two_hosts.way == "loopback":
        pytest.skip("there is no cable")
    hosts = two_hosts()
    folder = warm_runs / f"vanished-{how}"
    agents = two_agents(hosts, "--run_name", folder.name, "--steps", 1000, "--update_timeout", 10,
                        "--batch_timeout", 30)  # fmt: skip
    agents[0].until(lambda: (folder / "metrics.jsonl").exists() and len(rows(folder)) >= 2)
    if how == "killed":
        agents[1].kill()
        soon(lambda: not agents[1].members())
    else:
        hosts[1].run("ip", "link", "set", "cable", "down")
    assert end(agents[:1], 45) == [1], said(agents)  # the longer deadline, and what torchrun takes
    errors = [line for line in agents[0].text().splitlines() if line.startswith("[rank 0, trainer]")]
    missing = ("generator rank(s) [1]", "last heard of {1: ", "by peer [")  # for an update, a batch; in a broadcast
    assert len(errors) == 1 and any(words in errors[0] for words in missing), said(agents)
    end(agents, 60)  # the host that was cut off ends, too
    soon(lambda: not any(agent.members() for agent in agents))
