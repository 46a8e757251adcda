"""Real SGLang servers on a CPU: no stand-in answers for them, and nothing here is recorded.

They need an environment of their own (2.6 GB; `sglang_cpu/` says what is faked in it, and why):

    python3 -m venv V && . V/bin/activate
    pip install -r tests/sglang_cpu/requirements.txt
    pip install --no-deps -r tests/sglang_cpu/requirements-nodeps.txt
    PYTHONPATH=tests/sglang_cpu/shim pytest tests/test_sglang.py -m "slow or not slow"
"""

import asyncio
import copy
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from conftest import SMALL, rows, soon
from test_job import THIRDS, first_error, patched
from test_rollout import clean, tiny
from test_rollout import make as transformers_engine
from test_rollout import update as transformers_update

import rollout
import sync
import toy
from packing import manifest
from rollout import SGLangEngine

SHIM = Path(__file__).parent / "sglang_cpu" / "shim"
kernels = importlib.util.find_spec("sgl_kernel")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None or kernels is None or SHIM not in Path(kernels.origin).parents,
    reason="needs SGLang and its stand-ins for a CPU: `pip install -r tests/sglang_cpu/requirements.txt`, then `pip "
    "install --no-deps -r tests/sglang_cpu/requirements-nodeps.txt`, then PYTHONPATH=tests/sglang_cpu/shim pytest")
CPU, EOS, LONGEST = torch.device("cpu"), 60, 500
PROBE = [7, 1, 2, 3, 4, 5, 6, 8]
LAUNCHER = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
            "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"]  # fmt: skip


class Desk:
    """One engine with its server, and the trainer's side of its updates, in a thread that outlives every test."""

    def __init__(self, folder: Path, model, tp: int = 1, dtype: str = "float32", more: dict | None = None, **changes):
        self.model, self.tp, self.folder, self.dtype = model, tp, folder, dtype
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder / "model")
        settings = {"model-path": str(folder / "model"), "device": "cpu", "dtype": dtype, "tp-size": tp,
                    "random-seed": 1, "max-total-tokens": 32768}  # fmt: skip
        given = dict(who="generator rank 1", folder=folder, settings=settings, more=more or {}, sessions=True,
                     temperature=1.0, max_new_tokens=LONGEST - 16, max_prompt_tokens=16, vocabulary=64, stop_ids=[EOS],
                     startup_timeout=240, update_timeout=30, health_timeout=4)  # fmt: skip
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = self.do(self._make, given | changes)
        self.do(self.engine.start)
        self.group = None

    async def _make(self, given):
        return SGLangEngine(list(self.model.named_parameters()), None, **given)

    def do(self, function, *args, seconds=260):
        return asyncio.run_coroutine_threadsafe(function(*args), self.loop).result(seconds)

    def connect(self, **changes) -> None:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        self.store, self.invitations = sync.invite([1], self.tp, "gloo")
        self.first = {"manifest": manifest(self.model.named_parameters()), "probe": PROBE, "dtype": self.dtype,
                      "bucket_bytes": 1 << 14, "join": self.invitations[1]}  # fmt: skip
        self.engine.connect(self.first | changes)

    def send(self, model) -> int:
        if self.group is None:
            self.group = sync.join_servers(self.store, self.invitations, 30)
        dtype = getattr(torch, self.dtype)
        return sync.send_weights(list(model.named_parameters()), self.group, dtype=dtype, device=CPU,
                                 bucket_bytes=1 << 14, root=True, align=dtype.itemsize)  # fmt: skip

    async def update(self, version: int, model, interrupt: bool = True) -> dict:
        await self.engine.pause(interrupt)
        sent = asyncio.create_task(asyncio.to_thread(self.send, model))
        await self.engine.load(version)
        await self.engine.resume()
        return {"sent": await sent, **await self.engine.proof()}

    def close(self) -> None:
        self.do(self.engine.close)


@pytest.fixture(scope="module")
def models():
    return [tiny(seed, tied=True) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def desk(tmp_path_factory, models):
    """A server with the weights of models[0] as version 0; a test that breaks it makes one of its own."""
    with pytest.MonkeyPatch.context() as launcher:  # what torchrun tells a rank
        for name in LAUNCHER:
            launcher.setenv(name, "1")
        one = Desk(tmp_path_factory.mktemp("desk"), copy.deepcopy(models[0]))
    one.connect()
    one.version = 0
    one.do(one.update, 0, models[0])
    yield one
    one.close()


def newest(desk, model, interrupt=True) -> dict:
    desk.version += 1
    return desk.do(desk.update, desk.version, model, interrupt)


def check_logprobs(answer, prompt, by_version: dict, temperature=1.0, bound=1e-4) -> None:
    forwards = {v: clean(m, prompt + answer.tokens, temperature)[len(prompt) - 1 :] for v, m in by_version.items()}
    for i, (logprob, version) in enumerate(zip(answer.logprobs, answer.versions, strict=True)):
        assert abs(forwards[version][i] - logprob) < bound, (i, version)


# -- The server --------------------------------------------------------------------------------------------------------


def processes(desk) -> dict[int, str]:
    """process id -> name of all that belongs to the server."""
    out = subprocess.run(["ps", "-s", str(desk.engine.server.process.pid), "-o", "pid=,stat=,args="],
                         capture_output=True, text=True).stdout  # fmt: skip
    found = [line.split(None, 2) for line in out.splitlines()]
    return {int(pid): args for pid, stat, args in found if not stat.startswith("Z")}


def test_the_server_knows_nothing_of_the_launcher_and_nobody_without_the_key_is_served(desk):
    environment = Path(f"/proc/{desk.engine.server.process.pid}/environ").read_bytes().decode().split("\0")
    assert not {entry.partition("=")[0] for entry in environment} & set(LAUNCHER)
    config = desk.folder / "server.yaml"
    assert config.stat().st_mode & 0o077 == 0  # the key is in it
    settings = yaml.safe_load(config.read_text())
    assert settings["host"] == "127.0.0.1" and len(settings["api-key"]) == 32
    assert not [args for args in processes(desk).values() if settings["api-key"] in args]
    assert (desk.folder / "server.log").stat().st_size > 0

    async def knock(headers):
        import aiohttp

        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(desk.engine.server.url + "/generate", json={"input_ids": [1]}) as reply:
                return reply.status

    assert desk.do(knock, {}) == 401
    assert desk.do(knock, {"Authorization": f"Bearer {settings['api-key']}"}) == 200
    listening = subprocess.run(["ss", "-tlnH"], capture_output=True, text=True).stdout if shutil.which("ss") else ""
    assert f"0.0.0.0:{settings['port']} " not in listening


@pytest.mark.parametrize("prompt, budget, sampling, message", [
    ([1, 64], 5, {}, "no token 64: its vocabulary ends at 63"),
    ([1, -1], 5, {}, "no token -1"),
    ([], 5, {}, "without tokens"),
    ([1] * 16, LONGEST, {}, "do not fit into the 500"),
    ([1], 0, {}, "do not fit"),
    ([1], 5, {"top_p": 0.9}, "top_p: .* another distribution's"),
    ([1], 5, {"repetition_penalty": 1.1}, "repetition_penalty"),
])  # fmt: skip
def test_a_request_that_would_hurt_never_reaches_the_server(desk, prompt, budget, sampling, message):
    with pytest.raises(ValueError, match=message):
        desk.do(lambda: desk.engine.generate(prompt, budget, **sampling))
    assert desk.do(desk.engine.generate, [1, 2], 3).tokens  # it still serves


def test_the_longest_prompts_and_budgets_that_are_promised_are_served_in_full(desk, monkeypatch):
    monkeypatch.setitem(desk.engine.sampling, "stop_token_ids", [])
    for prompt, budget in ((16, LONGEST - 16), (LONGEST - 1, 1), (LONGEST - 4, 4)):
        answer = desk.do(desk.engine.generate, [1 + i % 50 for i in range(prompt)], budget)
        assert len(answer.tokens) == budget and answer.finish_reason == "length"


# -- Sampling ----------------------------------------------------------------------------------------------------------


def test_both_engines_give_the_policys_log_probabilities(desk, models):
    """And so the same distribution: each says of its own tokens what a clean forward says, to 1e-4."""
    current = models[desk.version % 3]
    newest(desk, current)
    prompts = [[7, 8, i] for i in range(1, 9)]

    async def many():
        return await asyncio.gather(*(desk.engine.generate(prompt, 100) for prompt in prompts))

    async def others():
        engine = await transformers_engine(copy.deepcopy(current))
        await transformers_update(engine, 0, current)
        answers = await asyncio.gather(*(engine.generate(prompt, 100) for prompt in prompts))
        await engine.close()
        return answers

    served, ours = desk.do(many), asyncio.run(others())
    for answers, version in ((served, desk.version), (ours, 0)):
        assert sum(len(answer.tokens) for answer in answers) > 100
        for prompt, answer in zip(prompts, answers, strict=True):
            check_logprobs(answer, prompt, {version: current})
            assert (answer.finish_reason == "stop") == (answer.tokens[-1] == EOS)
            assert answer.finish_reason == "stop" or len(answer.tokens) == 100
            assert EOS not in answer.tokens[:-1]


def test_sampling_follows_the_policy(desk, models):
    newest(desk, models[0])

    async def many():
        return await asyncio.gather(*(desk.engine.generate([5, 6, 7], 1) for _ in range(3000)))

    with torch.no_grad():
        p = models[0](torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([answer.tokens[0] for answer in desk.do(many)]), minlength=64) / 3000
    assert 0.5 * (counts - p).abs().sum() < 0.06  # total variation


# -- Interruption ------------------------------------------------------------------------------------------------------


async def interrupted(desk, versions: list, prompts, interrupt=True, seconds=0.5):
    """Answers to `prompts`, an update in the middle for each of `versions`; at which answers were done at each."""
    tasks = [asyncio.create_task(desk.engine.generate(prompt)) for prompt in prompts]
    done = []
    for version, model in versions:
        await asyncio.sleep(seconds)
        await desk.update(version, model, interrupt)
        done.append(sum(task.done() for task in tasks))
    return await asyncio.gather(*tasks), done


def test_tokens_before_an_update_are_the_old_versions_and_those_after_it_the_new_ones(desk, models, monkeypatch):
    # A common beginning, so that a prefix cache that was not flushed would be found again. EOS would end them early.
    monkeypatch.setitem(desk.engine.sampling, "stop_token_ids", [])
    first = newest(desk, models[0]) and desk.version
    prompts = [[9, 9, 9, 9, 9, 9, 9, 9, 1 + i] for i in range(6)]
    versions = [(first + 1, models[1]), (first + 2, models[2])]
    answers, _ = desk.do(interrupted, desk, versions, prompts)
    desk.version = first + 2
    by_version = {first + i: model for i, model in enumerate(models)}
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == LONGEST - 16 and answer.finish_reason == "length"  # the budget is the first one
        assert answer.versions == sorted(answer.versions)
        check_logprobs(answer, prompt, by_version)
    cut = [answer for answer in answers if len(set(answer.versions)) > 1]
    assert len(cut) >= 4 and all(answer.interruptions == len(set(answer.versions)) - 1 for answer in answers)
    # The two sides of a boundary are told apart: under the other version the same tokens are tenths off, not 1e-4.
    one = cut[0]
    edge = one.versions.index(one.versions[-1])
    wrong = clean(by_version[one.versions[0]], prompts[answers.index(one)] + one.tokens)[len(prompts[0]) - 1 :]
    assert (wrong[edge:] - torch.tensor(one.logprobs[edge:])).abs().mean() > 0.1


def test_without_interruption_answers_are_done_first_and_later_ones_wait(desk, models, monkeypatch):
    monkeypatch.setitem(desk.engine.sampling, "stop_token_ids", [])
    first = newest(desk, models[0]) and desk.version

    async def run():
        early = [asyncio.create_task(desk.engine.generate([3, i], 400)) for i in range(1, 5)]
        await asyncio.sleep(0.2)
        update = asyncio.create_task(desk.update(first + 1, models[1], interrupt=False))
        await asyncio.sleep(0.1)
        late = [asyncio.create_task(desk.engine.generate([4, i], 20)) for i in range(1, 5)]
        await asyncio.sleep(0.1)
        assert not update.done() and not any(task.done() for task in late)
        await update
        assert all(task.done() for task in early)
        return await asyncio.gather(*early), await asyncio.gather(*late)

    early, late = desk.do(run)
    desk.version = first + 1
    assert all(answer.versions == [first] * 400 for answer in early)
    assert all(answer.versions == [first + 1] * 20 for answer in late)


# -- Weights -----------------------------------------------------------------------------------------------------------


def test_an_update_is_proved_by_changed_sums_and_by_the_probe(desk, models):
    first, again, other = newest(desk, models[1]), newest(desk, models[1]), newest(desk, models[2])
    assert not again["changed"] and again["checksum"] == first["checksum"] and again["sent"] == first["sent"]
    assert other["changed"] and other["checksum"] != first["checksum"] and other["sent"] != first["sent"]
    for proof, model in ((first, models[1]), (other, models[2])):
        assert torch.allclose(torch.tensor(proof["probe"]), clean(model, PROBE), atol=1e-4)
    assert set(desk.engine.seconds) >= {"pause", "begin", "buckets", "checksum", "continue", "probe"}


@pytest.mark.parametrize("tied, tp, dtype", [
    (False, 1, "float32"), (True, 2, "float32"), pytest.param(False, 2, "bfloat16", marks=pytest.mark.slow),
])  # fmt: skip
def test_tied_and_untied_heads_arrive_on_one_and_two_workers(tmp_path, tied, tp, dtype):
    source = [tiny(seed, tied) for seed in (5, 6)]
    bound = 1e-4 if dtype == "float32" else 1.0  # these weights are large: in bfloat16 single tokens are off by tenths
    one = Desk(tmp_path, copy.deepcopy(source[0]), tp, dtype)
    try:
        one.connect()
        for version, model in enumerate(source):
            proof = one.do(one.update, version, model)
            gap = (torch.tensor(proof["probe"]) - clean(model, PROBE)).abs().mean()
            assert proof["changed"] and gap < (1e-4 if dtype == "float32" else sync.PROBE_GAP[dtype])
            answer = one.do(one.engine.generate, [5, 6, 7], 60)
            check_logprobs(answer, [5, 6, 7], {version: model}, bound=bound)
        assert len(one.engine.checksums) == tp
        answers, _ = one.do(interrupted, one, [(2, source[0])], [[9, 1 + i] for i in range(3)], True, 0.3)
        for i, answer in enumerate(answers):
            check_logprobs(answer, [9, 1 + i], {1: source[1], 2: source[0]}, bound=bound)
        if tp == 2:  # as if its second worker had failed to load, which no reply would say
            real, held = one.engine._checksums, one.engine.checksums

            async def half():
                return [(await real())[0], held[1]]

            one.engine._checksums = half
            with pytest.raises(RuntimeError, match="loaded the update on some of its workers and not on others"):
                one.do(one.update, 3, source[1])
    finally:
        one.close()
    soon(lambda: not processes(one), 5)


def test_a_failed_update_leaves_the_server_paused_and_names_what_did_not_load(tmp_path, models):
    one = Desk(tmp_path, copy.deepcopy(models[0]))
    try:
        names = [name for name, _ in one.engine.parameters()]
        hidden = next(i for i, name in enumerate(names) if name.endswith("1.mlp.down_proj.weight"))
        held = one.engine._parameters
        # SGLang answers 200 to a name it does not know and changes nothing; here the trainer's model is another one.
        one.engine._parameters = [(n.replace("down_proj", "away") if i == hidden else n, p)
                                  for i, (n, p) in enumerate(held)]  # fmt: skip
        one.connect()
        with pytest.raises(RuntimeError, match=r"generator rank 1 \(process \d+\) said yes to the first update but did "
                                               r"not load model.layers.1.mlp.down_proj.weight"):  # fmt: skip
            one.do(one.update, 0, models[0])
        assert one.engine.paused and one.engine.version == -1

        async def asks():  # an answer is neither begun, nor would the server give one
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(one.engine.generate([1, 2], 3), 1.5)
            with pytest.raises(RuntimeError, match="did not answer /generate within 2 s"):
                body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
                await one.engine.server.post("/generate", body, 2)

        one.do(asks)
        # The same with a shape that does not fit: refused, and it stays paused.
        one.engine._parameters = [(n, torch.empty(p.shape[::-1], device="meta") if i == hidden else p)
                                  for i, (n, p) in enumerate(held)]  # fmt: skip
        one.engine.connect(one.first)
        with pytest.raises(RuntimeError, match="refused /update_weights_from_distributed: 400"):
            one.do(one.update, 0, models[0])
        assert one.engine.paused
    finally:
        one.close()


# -- Faults ------------------------------------------------------------------------------------------------------------


def scheduler(desk) -> int:
    return next(pid for pid, name in processes(desk).items() if "scheduler" in name)


def test_a_hung_or_killed_server_is_noticed_while_it_decodes_but_not_while_it_may_not(tmp_path, models):
    one = Desk(tmp_path, copy.deepcopy(models[0]))
    try:
        one.connect()
        one.do(one.update, 0, models[0])
        one.engine.sampling["stop_token_ids"] = []  # long answers

        async def hang():
            watch = asyncio.create_task(one.engine.watch())
            os.kill(scheduler(one), signal.SIGSTOP)
            one.engine.paused = True  # as between pause and continue, where the update's deadline rules
            await asyncio.wait([watch], timeout=rollout.HEALTH_EVERY + one.engine.health_timeout + 3)
            assert not watch.done()
            one.engine.paused = False
            answer = asyncio.create_task(one.engine.generate([1, 2]))
            start = time.monotonic()
            with pytest.raises(RuntimeError, match=r"SGLang server of generator rank 1 \(process \d+\) gave no sign of "
                                                   r"life within 4 s; the end of .*server.log:\n  \| "):  # fmt: skip
                await watch
            # Stated: a look every 5 s, and engine_timeout for its answer.
            assert time.monotonic() - start < rollout.HEALTH_EVERY + one.engine.health_timeout + 2
            os.kill(scheduler(one), signal.SIGCONT)
            await answer

        async def die():
            watch = asyncio.create_task(one.engine.watch())
            answer = asyncio.create_task(one.engine.generate([1, 2]))
            await asyncio.sleep(0.3)
            os.kill(one.engine.server.process.pid, signal.SIGKILL)
            start = time.monotonic()
            for waiting in (watch, answer):
                with pytest.raises(RuntimeError, match=r"generator rank 1 \(process \d+\) was killed by SIGKILL"):
                    await waiting
            assert time.monotonic() - start < 3

        one.do(hang)
        one.do(die)
        soon(lambda: not processes(one), 5)  # its workers went with it
    finally:
        one.close()


def test_a_server_that_cannot_start_says_why(tmp_path, models):
    with pytest.raises(RuntimeError, match=r"(?s)SGLang server of generator rank 1 \(process \d+\) ended with status "
                                           r"2; the end of .*unrecognized arguments: --no-such-setting"):  # fmt: skip
        Desk(tmp_path, copy.deepcopy(models[0]), more={"no-such-setting": 3})


def test_a_port_that_was_lost_is_replaced(tmp_path, models, monkeypatch, capfd):
    import socket

    import sandbox

    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    real, given = sandbox.free_ports, []

    def lost(count):
        given.append(real(count))
        return [taken.getsockname()[1], given[-1][1]] if len(given) == 1 else given[-1]

    monkeypatch.setattr(sandbox, "free_ports", lost)
    one = Desk(tmp_path, copy.deepcopy(models[0]))
    one.close()
    assert len(given) == 2 and "another process took a port" in capfd.readouterr().out


# -- Whole jobs --------------------------------------------------------------------------------------------------------

JOB = [*SMALL, "--engine", "sglang", "--engine_timeout", 8, "--update_timeout", 30, "--batch_timeout", 120]


def nothing_is_left(job) -> None:
    """The kernel kills the server once its rank has ended, and the server's children after it."""
    soon(lambda: not job.members(), 5)


def segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("sglang_loads_", "sgl_shm_"))}


def test_a_job_with_two_servers_leaves_what_any_job_leaves(job, tmp_path, warm_runs):
    one = job(*JOB, "--trainers", 1, "--runs_dir", warm_runs, "--run_name", "two", "--cache_gb", 0.1, ranks=3)
    folder = warm_runs / "two"
    one.until(lambda: (folder / "metrics.jsonl").exists(), 300)
    assert len(one.members()) > 6  # seen while they run, so that they would be missed
    assert one.wait(120) == 0, one.text()
    other = job(*SMALL, "--runs_dir", warm_runs, "--run_name", "plain")
    assert other.wait() == 0, other.text()
    ours, theirs = rows(folder), rows(warm_runs / "plain")
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for name in ("tickets", "problems", "step"):
        assert [row[name] for row in ours] == [row[name] for row in theirs], name
    assert ours[0]["logprob_gap"] < 1e-4 and all(row["staleness_max"] <= 2 for row in ours)
    files = [{path.name for path in run.iterdir()} for run in (folder, warm_runs / "plain")]
    assert files[0] - files[1] == {"servers"} and not files[1] - files[0]
    reports = [json.loads((run / "summary.json").read_text()) for run in (folder, warm_runs / "plain")]
    assert reports[0].keys() == reports[1].keys() and [r["engine"] for r in reports] == ["sglang", "transformers"]
    events = json.loads((folder / "trace.json").read_text())
    updates = [event for event in events if event["name"] == "update"]
    assert {event["pid"] for event in updates} == {1, 2} and len(updates) == 2 * 5  # versions 0 to 4
    assert all({"pause", "buckets", "checksum", "continue", "probe"} <= event["args"].keys() for event in updates)
    assert re.search(r"engine +sglang \(0\.5\.\d+; asked for\), 2 groups in flight", one.text()), one.text()
    nothing_is_left(one)


KILL = """
if RANK == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import rollout, subprocess
    real_pause = rollout.SGLangEngine.pause
    async def pause(self, *args):
        if self.version == 2:  # answers of the next steps are being decoded
            found = subprocess.run(["ps", "-s", str(self.server.process.pid), "-o", "pid=,args="], capture_output=True,
                                   text=True).stdout.splitlines()
            os.kill(next(int(line.split()[0]) for line in found if "scheduler" in line), signal.SIGKILL)
            await asyncio.sleep(60)
        await real_pause(self, *args)
    import asyncio
    rollout.SGLangEngine.pause = pause
"""


def test_a_job_whose_server_was_killed_goes_on_exactly_with_new_ones(job, tmp_path, warm_runs):
    settings = [*JOB, "--steps", 5, "--checkpoint_every", 2, "--filter_upper", 0.9, "--max_staleness", 1]
    straight = job(*settings, "--engine", "transformers", "--runs_dir", warm_runs, "--run_name", "straight-sglang",
                   script=patched(tmp_path, THIRDS))  # fmt: skip
    assert straight.wait() == 0, straight.text()
    again = job(*settings, "--runs_dir", warm_runs, "--run_name", "again", script=patched(tmp_path, THIRDS + KILL),
                launcher=["--max-restarts", "1"])  # fmt: skip
    assert again.wait(240) == 0, again.text()
    assert re.search(r"\[rank 1, generator\] RuntimeError: SGLang server of generator rank 1 \(process \d+\) "
                     r"(was killed|ended|gave no sign of life)", first_error(again.text())), again.text()  # fmt: skip
    ours, theirs = rows(warm_runs / "again"), rows(warm_runs / "straight-sglang")
    assert [row["step"] for row in ours] == list(range(5))
    for name in ("tickets", "problems", "answers"):  # no ticket lost, none trained twice
        assert [row[name] for row in ours] == [row[name] for row in theirs], name
    for row in ours:  # nothing was scored for having been cut: every third ticket is right, of the others every second
        assert row["reward"] == pytest.approx(0.5) and sum(row["verdicts"].values()) == row["answers"]
    nothing_is_left(again)


@pytest.mark.parametrize("victim", [0, 1])
def test_no_server_outlives_a_killed_rank_and_its_segments_are_swept(job, warm_runs, victim):
    one = job(*JOB, "--steps", 1000, "--runs_dir", warm_runs, "--run_name", f"orphan{victim}", "--cache_gb", 0.1)
    folder = warm_runs / f"orphan{victim}"
    one.until(lambda: (folder / "metrics.jsonl").exists() and len(rows(folder)) >= 2, 240)
    assert len(one.members()) >= 6  # torchrun, two ranks, the server and its two children
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in one.members())
    left = {name for name in segments() if name in maps}
    assert left
    os.kill(one.ranks()[victim], signal.SIGKILL)
    assert one.wait(20) != 0
    assert "-9" in first_error(one.text()) and f"local_rank: {victim}" in first_error(one.text()), one.text()
    nothing_is_left(one)
    for name in left & segments():
        os.utime(f"/dev/shm/{name}", (1, 1))  # older than the 10 s of grace
    toy.sweep_shared_memory()  # what every start of a server begins with
    assert not left & segments()


def test_wrong_weights_on_a_server_end_the_job(job, tmp_path, warm_runs):
    spoil = """
import ppo
real = ppo.probe
ppo.probe = lambda *args: [value + 0.01 for value in real(*args)]  # as if the trainer had other weights
send = train.send_weights
def without_gaps(*args, align, **more):  # the toy's tensors would not show them
    assert align == 4, align
    return send(*args, align=align, **more)
train.send_weights = without_gaps
"""
    one = job(*JOB, "--runs_dir", warm_runs, "--run_name", "spoilt", "--cache_gb", 0.1, script=patched(tmp_path, spoil))
    assert one.wait(240) != 0
    assert re.search(r"\[rank 0, trainer\] RuntimeError: generator rank 1 holds other weights than the trainer at "
                     r"version 0: they disagree by 0\.0\d+ nats a token about the probe", first_error(one.text()))
    nothing_is_left(one)


@pytest.mark.slow
@pytest.mark.parametrize("tp, interrupt, roles", [
    (1, "true", "generators [2-3]"), (2, "false", "generators [2], their tensor-parallel helpers [3]"),
])  # fmt: skip
def test_four_ranks_have_two_servers_or_one_over_two_of_them(job, warm_runs, tp, interrupt, roles):
    one = job(*JOB, "--trainers", 2, "--generator_tp", tp, "--interrupt", interrupt, "--cache_gb", 0.1, "--run_name",
              f"tp{tp}", "--runs_dir", warm_runs, ranks=4)  # fmt: skip
    assert one.wait(400) == 0, one.text()
    table = rows(warm_runs / f"tp{tp}")
    assert roles in one.text() and len(table) == 4 and table[0]["logprob_gap"] < 1e-4
    nothing_is_left(one)


@pytest.mark.slow
def test_the_toy_learns_on_sglang(job, tmp_path):
    one = job("--engine", "sglang", "--run_name", "toy")
    assert one.wait(500) == 0, one.text()
    summary = json.loads((tmp_path / "runs" / "toy" / "summary.json").read_text())
    assert summary["pass@1_before"] < 0.4 and summary["pass@1_after"] >= 0.9 and summary["engine"] == "sglang"
    assert summary["max_staleness_seen"] <= summary["max_staleness_bound"] == 2
    nothing_is_left(one)
