"""Generators: the SGLang engine, workflows that turn a problem into trajectories, and the loop of a generator rank.

An engine is anything with this protocol and `name`, `tokenizer`, `version`, `max_new_tokens`, `longest` (no base class;
the other one is `toy.TransformersEngine`, for machines on which SGLang does not run):

    start(), watch(), close()                  watch() returns only by raising: the engine is broken
    generate(token_ids, max_new_tokens)        -> Generation: tokens, logprobs and versions, one of each a token
    parameters(), connect(first)               names and shapes that an update fills; what the first update says
    pause(interrupt), load(version), resume()  a weight update, from the trainer's notice to the next token
    proof()                                    what shows the trainer that the weights have arrived

An update in the middle of an answer keeps the partial answer with its log-probabilities and versions, throws the KV
cache away and decodes the rest from prompt + partial under the new weights. A piece that was cut this way is never
taken for a finished answer, and the token budget stays the original one.

A workflow is one async function `(problem, engine, score) -> [Trajectory, ...]`: `single_turn`, `multi_turn`, or one of
your own, named file.py:function (`recipes/tool_use.py`). `await score(problem, response)` gives the reward of a text.
Token ids from the engine reach the trainer untouched; no answer is tokenised again.

Left out, and why: no dynamic batching of our own (continuous batching is the engine's job), no top-p / top-k / penalty
when sampling for training (the returned log-probability would not be the policy's), no restart of a dead server (the
attempt ends, and torchrun's next one starts new servers).

    pytest tests/test_rollout.py tests/test_sglang.py
"""

import asyncio
import functools
import hashlib
import inspect
import json
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml

import packing
from packing import Generation, Problem, Trajectory
from reward import Scorer
from sandbox import Server, clean_environment, load_function
from sync import Channel, admission_limit

# -- What all engines share --------------------------------------------------------------------------------------------


class Gate:
    """Counts the requests inside an engine. Shut until there are weights, and while answers finish before an update
    that may not interrupt them."""

    def __init__(self):
        self.open, self.empty, self.inside = asyncio.Event(), asyncio.Event(), 0

    async def __aenter__(self) -> None:
        while not self.open.is_set():
            await self.open.wait()
        self.inside += 1

    async def __aexit__(self, *error) -> None:
        self.inside -= 1
        self.empty.set()

    async def drain(self) -> None:
        self.open.clear()
        while self.inside:
            self.empty.clear()
            await self.empty.wait()


# -- Engine: an SGLang server ------------------------------------------------------------------------------------------

HEALTH_EVERY = 5.0  # seconds between two looks at a server


class SGLangEngine:
    """One SGLang server of one generator rank, on loopback, with the weights of the trainer.

    The server starts with random weights and without a tokenizer: token ids go in, token ids and log-probabilities
    come out. Updates reach its workers over a process group of theirs and trainer rank 0; they are told of each here.
    It keeps interrupted answers itself (pause in retract mode) and says which version made which tokens.

    `parameters`: [(name, meta tensor), ...] of the model, as an update fills them. `settings`: of the server, by the
    names of its command line; `more`: the user's. `sessions`: an update may leave cut answers waiting. Deadlines in
    seconds.
    """

    name = "sglang"

    def __init__(self, parameters, tokenizer, *, who: str, folder: Path, settings: dict, more: dict, sessions: bool,
                 temperature: float, max_new_tokens: int, max_prompt_tokens: int, vocabulary: int, stop_ids: list[int],
                 startup_timeout: float, update_timeout: float, health_timeout: float, top_p: float = 1.0):  # fmt: skip
        self._parameters, self.tokenizer, self.who, self.folder = parameters, tokenizer, who, folder
        self.max_new_tokens, self.vocabulary = max_new_tokens, vocabulary
        self.longest = max_prompt_tokens + max_new_tokens
        self.startup_timeout, self.update_timeout, self.health_timeout = startup_timeout, update_timeout, health_timeout
        # Filters are off even where the model's folder asks for some: the log-probability must be the policy's.
        self.sampling = {"temperature": temperature, "top_p": top_p, "top_k": -1, "min_p": 0, "frequency_penalty": 0.0,
                         "presence_penalty": 0.0, "repetition_penalty": 1.0, "stop_token_ids": stop_ids}  # fmt: skip
        self.settings = {
            "tp-size": 1, "load-format": "dummy", "skip-tokenizer-init": True, "skip-server-warmup": True,
            "host": "127.0.0.1", "api-key": secrets.token_hex(16), "context-length": self.longest + 8,
            "enable-priority-scheduling": True, "default-priority-value": 0,  # a probe must not queue
            "log-level-http": "warning", **settings,
        }  # fmt: skip
        if self.settings["device"] == "cpu":  # what SGLang does where it has no kernels of its own
            self.settings |= {"attention-backend": "torch_native"}
            self.settings |= {"disable-overlap-schedule": True, "sleep-on-idle": True}
        self.settings |= more
        self.gate = Gate()
        self.version = -1  # no weights yet
        self.first: dict = {}  # what the first update said
        self.joined, self.paused, self.pauses, self.changed = False, False, 0, False
        self.sessions = sessions
        self.checksums: list[dict] = []  # of the served tensors, one for each worker
        self.seconds: Counter = Counter()  # parts of the last update

    # -- the server

    async def start(self) -> None:
        """Start the server and wait until it generates. Raises with the end of its log if it does not."""
        folder = self.folder.resolve()
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        environment = clean_environment(SGLANG_HEALTH_CHECK_TIMEOUT=str(int(self.health_timeout)))
        environment |= {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # it keeps some for itself, so it has more
                        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}  # those at the temperature of sampling
        if len(str(folder)) < 80:  # its sockets lie there, and the path of a socket has to be short
            environment["TMPDIR"] = str(folder / "tmp")
        if self.settings["device"] == "cpu":
            cores, workers = sorted(os.sched_getaffinity(0)), self.settings["tp-size"]
            shares = [cores[i::workers] or cores for i in range(workers)]  # SGLang wants a NUMA node for each, or this
            environment = {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND":
                           "|".join(",".join(map(str, share)) for share in shares)} | environment  # fmt: skip

        def command(port: int, nccl_port: int) -> list[str]:
            config = folder / "server.yaml"
            config.touch(mode=0o600)  # it holds the key
            config.write_text(yaml.safe_dump(self.settings | {"port": port, "nccl-port": nccl_port}))
            return ["-m", "sglang.launch_server", "--config", str(config)]

        name, key = f"SGLang server of {self.who}", {"Authorization": f"Bearer {self.settings['api-key']}"}
        self.server = Server(name, self.folder / "server.log", "/health_generate", key)
        await self.server.start(command, environment, self.startup_timeout)
        self.checksums = await self._checksums()

    async def watch(self) -> None:
        """Raises once the server has ended, or made no token for `health_timeout` seconds when asked. It is not asked
        between pause and resume, where it may not make any and the deadline of the update holds."""
        await self.server.watch(HEALTH_EVERY, self.health_timeout, lambda: (self.paused, self.pauses))

    async def close(self) -> None:
        await self.server.close()

    # -- generation

    async def generate(self, token_ids: list[int], max_new_tokens: int | None = None, **sampling) -> Generation:
        """Sample one answer. It has no deadline of its own: trainer 0 has one for the batch."""
        budget = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        packing.check_request(token_ids, budget, self.vocabulary, self.longest, sampling)
        body = {"input_ids": list(token_ids), "return_logprob": True,
                "sampling_params": self.sampling | {"max_new_tokens": budget}}  # fmt: skip
        async with self.gate:
            reply = await self.server.post("/generate", body)
        meta, answer = reply["meta_info"], Generation(tokens=reply["output_ids"])
        answer.logprobs = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
        for span in meta.get("weight_versions") or [{"version": meta["weight_version"], "end": len(answer.tokens)}]:
            answer.versions += [int(span["version"])] * (span["end"] - len(answer.versions))
        answer.finish_reason, answer.interruptions = meta["finish_reason"]["type"], len(set(answer.versions)) - 1
        if answer.finish_reason not in ("stop", "length"):
            raise self.server.error(f"cut an answer off: {meta['finish_reason']}")
        if not len(answer.tokens) == len(answer.logprobs) == len(answer.versions):
            raise self.server.error("sent different numbers of tokens, log-probabilities and versions")
        return answer

    # -- updates

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return self._parameters

    def connect(self, first: dict) -> None:
        self.first, dtype = first, getattr(torch, first["dtype"])
        self.buckets = packing.buckets(self._parameters, dtype, first["bucket_bytes"], align=dtype.itemsize)

    async def pause(self, interrupt: bool = True) -> None:
        """Returns once nothing is being decoded: answers under way are cut or, without `interrupt`, complete."""
        self.seconds.clear()
        with self._part("pause"):
            if not (interrupt and self.sessions):
                await self.gate.drain()
            self.paused, self.pauses = True, self.pauses + 1
            mode = {"mode": "retract" if self.sessions else "abort"}  # nothing is left to abort by then
            await self.server.post("/pause_generation", mode, self.update_timeout)

    async def load(self, version: int) -> None:
        """Receive an update while paused. If anything fails the server stays paused, and the attempt ends."""
        limit = self.update_timeout
        if not self.joined:
            with self._part("join"):
                await self.server.post("/init_weights_update_group", self.first["join"], limit)
            self.joined = True
        with self._part("begin"):
            if self.sessions:
                await self.server.post("/begin_weight_update", {}, limit)
        with self._part("buckets"):
            for bucket in self.buckets:
                body = {"names": [name for name, _, _ in bucket], "shapes": [list(t.shape) for _, t, _ in bucket],
                        "dtypes": [self.first["dtype"]] * len(bucket), "group_name": self.first["join"]["group_name"],
                        "load_format": "flattened_bucket", "flush_cache": False}  # fmt: skip
                if bucket is self.buckets[-1]:  # and away with the keys and values of the old weights
                    body |= {"weight_version": str(version), "flush_cache": True, "torch_empty_cache": False}
                await self.server.post("/update_weights_from_distributed", body, limit)
            if self.sessions:
                await self.server.post("/end_weight_update", {}, limit)
        with self._part("checksum"):
            before, self.checksums = self.checksums, await self._checksums()
        changed = {new != old for new, old in zip(self.checksums, before, strict=True)}
        if len(changed) > 1:  # only the first worker replies: another may have failed in silence
            raise self.server.error("loaded the update on some of its workers and not on others")
        if self.version < 0:  # random weights until now: every one of them has to be another
            same = [name for old, new in zip(before, self.checksums, strict=True) for name in new
                    if name.endswith(("weight", "bias")) and old[name] == new[name]]  # fmt: skip
            if same:
                raise self.server.error(f"said yes to the first update but did not load {', '.join(same[:5])}")
        self.changed, self.version = changed == {True}, version

    async def resume(self) -> None:
        with self._part("continue"):
            await self.server.post("/continue_generation", {"torch_empty_cache": False}, self.update_timeout)
        self.paused = False
        self.gate.open.set()

    async def proof(self) -> dict:
        """For `sync.Dispatcher`: did the served weights change, a digest of them, log p of the probe's tokens."""
        body = {"input_ids": self.first["probe"], "sampling_params": self.sampling | {"max_new_tokens": 1},
                "return_logprob": True, "logprob_start_len": 0, "priority": 100}  # fmt: skip
        with self._part("probe"):
            meta = (await self.server.post("/generate", body, self.update_timeout))["meta_info"]
        digest = hashlib.sha256(json.dumps(self.checksums, sort_keys=True).encode()).hexdigest()
        return {"changed": self.changed, "checksum": digest,
                "probe": [logprob for logprob, _, _ in meta["input_token_logprobs"][1:]]}  # fmt: skip

    async def _checksums(self) -> list[dict]:
        """{served tensor: hash} of each worker; the server fuses and slices tensors, so they are not the trainer's."""
        reply = await self.server.post("/weights_checker", {"action": "checksum"}, self.update_timeout)
        return [worker["checksums"] for worker in reply["ranks"]]

    @contextmanager
    def _part(self, name: str):
        start = time.monotonic()
        yield
        self.seconds[name] += time.monotonic() - start


# -- Workflows ---------------------------------------------------------------------------------------------------------

Score = Callable[[Problem, str], Awaitable[float]]
Workflow = Callable[[Problem, object, Score], Awaitable[list[Trajectory]]]
RETRY = "That answer is not right. Look for the mistake and try again, and give a complete answer in the same form."


async def single_turn(problem: Problem, engine, score: Score) -> list[Trajectory]:
    """One prompt, one answer, one reward."""
    return await multi_turn(problem, engine, score, turns=1)


async def multi_turn(problem: Problem, engine, score: Score, *, turns: int, discount: float = 1.0,
                     chat: bool = False) -> list[Trajectory]:  # fmt: skip
    """Up to `turns` answers, until one is right, in one trajectory. After a wrong one the user says so, or gives the
    next of the row's "hints". The reward is that of the last answer, times `discount` for each one before it; only
    the model's tokens are trained, all under that reward. It ends early where the budget of the prompt is used up."""
    trajectory = Trajectory(ticket=-1, index=-1)
    trajectory.append(problem.prompt_ids)
    hints, longest = problem.row.get("hints", []), len(problem.prompt_ids) + engine.max_new_tokens
    for turn in range(turns):
        answer = await engine.generate(trajectory.tokens.tolist(), longest - len(trajectory.tokens))
        trajectory.append(answer.tokens, answer.logprobs, answer.versions)
        trajectory.finish_reason = answer.finish_reason
        trajectory.score = await score(problem, engine.tokenizer.decode(answer.tokens, skip_special_tokens=True))
        trajectory.reward = trajectory.score * discount**turn
        if trajectory.score >= 1 or turn + 1 == turns or answer.finish_reason != "stop":
            break
        reply = user_turn(engine.tokenizer, hints[turn] if turn < len(hints) else RETRY, chat, answer.tokens[-1])
        if not reply or len(trajectory.tokens) + len(reply) >= longest:
            break
        trajectory.append(reply)
    return [trajectory]


def user_turn(tokenizer, says: str, chat: bool, last: int) -> list[int]:
    """Token ids of what comes between an answer that ended with token `last` and the next: with `chat` the user's
    message in the tokenizer's template, else the text itself. The conversation before it is not tokenised again."""
    if not chat:
        return tokenizer(says, add_special_tokens=False)["input_ids"]
    mark = "@ANSWER@"
    messages = [{"role": role, "content": text} for role, text in (("user", "?"), ("assistant", mark), ("user", says))]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(whole.partition(mark)[2], add_special_tokens=False)["input_ids"]
    return ids[1:] if ids[:1] == [last] else ids  # the template closes the answer, the model may have done so itself


def choose_workflow(cfg) -> Workflow:
    """The workflow that `cfg.workflow` names. ValueError if it is none."""
    if cfg.workflow == "single_turn":
        return single_turn
    if cfg.workflow == "multi_turn":
        return functools.partial(multi_turn, turns=cfg.turns, discount=cfg.turn_discount, chat=cfg.template == "chat")
    workflow, _ = load_function(cfg.workflow)
    if not inspect.iscoroutinefunction(workflow):
        raise ValueError(f"workflow={cfg.workflow} must be an `async def` of (problem, engine, score)")
    return workflow


@dataclass
class Group:
    """The trajectories sampled for one ticket, and what was found out on the way."""

    ticket: int
    trajectories: list[Trajectory]
    verdicts: Counter  # Verdict -> answers
    started: float  # seconds since the epoch: sampling began,
    generated: float  # ... the last answer was complete,
    scored: float  # ... the last reward was known


async def sample_and_score(ticket: int, problem: Problem, answers: int, engine, scorer: Scorer,
                           workflow: Workflow = single_turn) -> Group:  # fmt: skip
    """Run `workflow` `answers` times for one problem; each answer is scored as soon as it is complete."""
    group = Group(ticket, [], Counter(), time.time(), 0.0, 0.0)

    async def score(problem: Problem, response: str) -> float:
        group.generated = time.time()
        reward, verdict = await scorer.score(problem, response)
        group.verdicts[verdict] += 1
        return reward

    for trajectories in await asyncio.gather(*(workflow(problem, engine, score) for _ in range(answers))):
        group.trajectories += trajectories
    for index, one in enumerate(group.trajectories):
        one.ticket, one.index, one.score = ticket, index, one.reward if math.isnan(one.score) else one.score
        one.check()
        if not one.loss_mask.any() or math.isnan(one.reward) or len(one.tokens) > engine.longest:
            raise ValueError(f"a workflow returned {len(one.tokens)} tokens, {one.loss_mask.sum()} of them generated, "
                             f"with reward {one.reward}: a trajectory needs both, and at most {engine.longest} tokens")
    if not group.trajectories:
        raise ValueError("a workflow returned no trajectory")
    group.scored = time.time()
    return group


# -- The loop of a generator rank --------------------------------------------------------------------------------------


class Generator:
    """One generator rank: slots that sample groups, and one task that obeys trainer 0's notices, in their order.

    Because notices are handled one after the other, the newest (version, rejected) seen here is never newer than the
    weights that are loaded, which is what the proof of the staleness bound asks for.
    """

    def __init__(self, cfg, rank: int, engine, scorer: Scorer, problems: list[Problem], test: list[Problem]):
        self.cfg, self.rank, self.engine, self.scorer = cfg, rank, engine, scorer
        self.workflow, self.problems, self.test = choose_workflow(cfg), problems, test
        self.inbox, self.out = Channel(), Channel()
        self.record = (-1, 0)  # newest (version, rejected)
        self.skip: frozenset[int] = frozenset()
        self.moved = asyncio.Event()
        self.events: list[list] = []  # [name, lane, start s, duration s, arguments]
        self.state, self.since = "wait", time.time()
        self.seconds = Counter(generate=0.0, wait=0.0, sync=0.0, score=0.0)
        self.tokens, self.running = 0, 0

    async def run(self) -> None:
        self._send("ready", engine=self.engine.name)
        notices, watch = asyncio.ensure_future(self._notices()), asyncio.ensure_future(self.engine.watch())
        slots = [asyncio.ensure_future(self._slot(lane)) for lane in range(1, self.cfg.slots + 1)]
        # A slot ends only by an error; `stop` ends the job while they wait for tickets that will never be admitted.
        done, _ = await asyncio.wait([watch, notices, *slots], return_when=asyncio.FIRST_COMPLETED)
        for task in (watch, *slots):
            if task in done:
                task.result()  # raises
            task.cancel()
        await notices

    def _send(self, kind: str, **content) -> None:
        events, self.events = self.events, []
        stats = {**self.seconds, "tokens": self.tokens}
        self.out.push("inbox", {"kind": kind, "rank": self.rank, "events": events, "stats": stats, **content})

    def _switch(self, state: str) -> None:
        """Book the time since the last switch: a generator generates, waits or syncs, never two of them at once."""
        now = time.time()
        self.seconds[self.state] += now - self.since
        if self.state != "generate" and now - self.since > 1e-3:
            self._event("interrupted" if self.state == "sync" else "wait", 0, self.since, now)
        self.state, self.since = state, now

    def _event(self, name: str, lane: int, start: float, end: float, **arguments) -> None:
        self.events.append([name, lane, start, end - start, arguments])

    # -- notices

    async def _notices(self) -> None:
        who = f"generator rank {self.rank} waited for a notice of trainer rank 0"
        while True:
            notice = await asyncio.to_thread(self.inbox.pop, f"notices/{self.rank}", 2 * self.cfg.batch_timeout, who)
            if notice["do"] == "admit":
                self.record = max(self.record, (notice["version"], notice["rejected"]))
                self.skip = frozenset(notice["skip"])
                self.moved.set()
                self.moved = asyncio.Event()
            elif notice["do"] == "update":
                await self._update(notice["version"], notice["first"])
            elif notice["do"] == "evaluate":
                await self._evaluate(self.test[notice["ranks"].index(self.rank) :: len(notice["ranks"])])
            elif notice["do"] == "stop":
                return

    async def _update(self, version: int, first: dict | None) -> None:
        start = time.time()
        if first is not None:
            packing.check_manifest(first["manifest"], packing.manifest(self.engine.parameters()), self.rank)
            self.engine.connect(first | {"join": first["join"].get(str(self.rank))})
        await self.engine.pause(self.cfg.interrupt)
        self._switch("sync")
        self._send("paused", version=version)
        await self.engine.load(version)
        await self.engine.resume()
        self._switch("generate" if self.running else "wait")
        proof = await self.engine.proof()
        self._event("update", 0, start, time.time(), version=version, **self.engine.seconds)
        self._send("loaded", version=version, **proof)

    async def _evaluate(self, problems: list[Problem]) -> None:
        """pass@1 over `problems`, this rank's share of the held-out ones."""
        self._switch("generate")
        cfg, gate = self.cfg, asyncio.Semaphore(self.cfg.slots)

        async def one(problem: Problem) -> Group:
            async with gate:
                return await sample_and_score(-1, problem, cfg.eval_answers, self.engine, self.scorer, self.workflow)

        groups = await asyncio.gather(*(one(problem) for problem in problems))
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        verdicts = sum((group.verdicts for group in groups), Counter())
        self._event("evaluate", 0, self.since, time.time())
        self._switch("wait")
        self._send("evaluated", problems=len(groups), answers=len(trajectories),
                   reward=float(sum(t.score for t in trajectories)), verdicts=dict(verdicts),
                   tokens=sum(int(t.loss_mask.sum()) for t in trajectories))  # fmt: skip

    # -- slots

    def _limit(self) -> int:
        cfg, (version, rejected) = self.cfg, self.record
        if version > self.engine.version:
            raise RuntimeError(f"version {version} was announced, but {self.engine.version} is loaded: the bound fails")
        return admission_limit(version, rejected, groups=cfg.groups, max_staleness=cfg.max_staleness,
                               window=cfg.window, steps=cfg.steps)  # fmt: skip

    async def _slot(self, lane: int) -> None:
        await self.moved.wait()  # the first notice also says where tickets start and which are done
        while True:
            ticket = await asyncio.to_thread(self.out.next_ticket)
            if ticket in self.skip:
                continue
            while ticket >= self._limit():
                await self.moved.wait()
            self.running += 1
            if self.state == "wait":
                self._switch("generate")
            problem = self.problems[packing.problem_of_ticket(ticket, len(self.problems), self.cfg.seed)]
            group = await sample_and_score(ticket, problem, self.cfg.answers, self.engine, self.scorer, self.workflow)
            self.running -= 1
            if not self.running and self.state == "generate":
                self._switch("wait")
            headers = [trajectory.header() for trajectory in group.trajectories]
            pass_rate = float(np.mean([trajectory.score for trajectory in group.trajectories]))
            low, high = self.cfg.filter_lower, self.cfg.filter_upper  # 0 and 1 are off: one's own scores may go beyond
            accepted = (low == 0 or low <= pass_rate) and (high == 1 or pass_rate <= high)
            if accepted:  # arrays first, header after them: whoever reads the header finds the arrays
                await asyncio.to_thread(self._put, group)
            self._event("generate", lane, group.started, group.generated, ticket=ticket)
            self._event("score", lane, group.generated, group.scored, ticket=ticket)
            self.seconds["score"] += group.scored - group.generated
            self.tokens += sum(header["loss_tokens"] for header in headers)
            self._send("group", ticket=ticket, accepted=accepted, pass_rate=pass_rate, problem=problem.id,
                       head=min(header["head_version"] for header in headers), verdicts=dict(group.verdicts),
                       trajectories=headers if accepted else [])  # fmt: skip

    def _put(self, group: Group) -> None:
        for trajectory in group.trajectories:
            self.out.put(f"trajectory/{trajectory.ticket}/{trajectory.index}", trajectory.to_bytes())
