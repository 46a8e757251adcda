"""Generators: engines that sample, workflows that turn a problem into trajectories, and the loop of a generator rank.

An engine is anything with this protocol, and with `name`, `version`, `dtype` and `tokenizer` (no base class):

    generate(token_ids, max_new_tokens) -> Generation     tokens, logprobs and versions, one of each a token
    pause(), load(version, fn), resume(), close()         a weight update interrupts what is being decoded
    parameters()                                          what an update fills, in the trainer's order

An update in the middle of an answer keeps the partial answer with its log-probabilities and versions, throws the KV
cache away and decodes the rest from prompt + partial under the new weights. A piece that was cut this way is never
taken for a finished answer, and the token budget stays the original one.

A workflow is one async function `(problem, engine, score) -> [Trajectory, ...]`; `single_turn` below is the only one
most runs need. Token ids from the engine reach the trainer untouched; nothing is tokenised again.

Left out, and why: no dynamic batching of our own (continuous batching is the engine's job), no top-p / top-k / penalty
when sampling for training (the returned log-probability would not be the policy's), no speculative decoding.

    pytest tests/test_rollout.py
"""

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import toy
from packing import Trajectory, problem_of_ticket
from reward import Problem, Scorer, Verdict
from sync import Channel, admission_limit, check_manifest, manifest, receive_weights

# -- Models and tokenizers ---------------------------------------------------------------------------------------------


def load_tokenizer(model: str):
    return toy.build_tokenizer() if model == "toy" else AutoTokenizer.from_pretrained(model)


def empty_model(model: str, dtype: torch.dtype, seed: int):
    """The architecture alone: a generator's weights come as the first update, like any other."""
    if model == "toy":
        return toy.build_model(seed, dtype)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=dtype)


def stop_ids(model: str, tokenizer) -> list[int]:
    """Tokens that end an answer: the tokenizer's, and those of the model's folder (chat models have several)."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if model != "toy":
        try:
            more = GenerationConfig.from_pretrained(model).eos_token_id
        except OSError:  # the folder has no generation_config.json
            more = AutoConfig.from_pretrained(model).eos_token_id
        ids += more if isinstance(more, list) else [] if more is None else [more]
    if not ids:
        raise ValueError(f"{model}: neither model nor tokenizer names an end-of-sequence token, so no answer would end")
    return sorted(set(ids))


# -- Engine: transformers' continuous batching -------------------------------------------------------------------------


@dataclasses.dataclass
class Generation:
    """What was generated for one prompt. The three lists have equal lengths."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str = ""  # "stop": ended by itself; "length": the budget was used up
    interruptions: int = 0  # weight updates that fell into it


@dataclasses.dataclass
class _Piece:
    """One request to the continuous batching manager: all its tokens are of one version."""

    future: asyncio.Future
    latest: object = None  # the newest GenerationOutput that was streamed for it


class TransformersEngine:
    """Samples with transformers' continuous batching (paged cache); runs on any machine.

    The manager has a generation thread of its own. A second thread here, the pump, takes its streamed results; during
    an update the pump holds the manager's pause, so that draining the results, loading the weights and cancelling the
    interrupted requests all happen while the generation thread stands still.

    Every update cancels every request and each is submitted again with what it has so far: the cache holds keys and
    values of the old weights. For the same reason prefix sharing is off (`allow_block_sharing=False`): shared blocks
    would survive the update.
    """

    name = "transformers"

    def __init__(self, model, tokenizer, *, temperature: float, max_new_tokens: int, max_prompt_tokens: int,
                 stop_ids: list[int], batch_tokens: int, cache_bytes: int, seed: int, timeout_s: float):  # fmt: skip
        self.model, self.tokenizer, self.dtype = model.eval(), tokenizer, model.dtype
        self.max_new_tokens, self.stop_ids, self.timeout_s = max_new_tokens, set(stop_ids), timeout_s
        self.version = -1  # no weights yet
        page = 64
        config, size = model.config.get_text_config(), model.dtype.itemsize
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        block_bytes = 2 * page * config.num_hidden_layers * heads * width * size
        longest = -(-(max_prompt_tokens + max_new_tokens) // page)
        blocks = min(cache_bytes // block_bytes, longest * batch_tokens)
        if blocks < longest:
            raise ValueError(
                f"one answer of {max_prompt_tokens} + {max_new_tokens} tokens needs {longest} cache blocks of "
                f"{block_bytes} bytes and only {blocks} fit into {cache_bytes} bytes: raise cache_gb"
            )
        # Everything but the temperature is off: the log-probability must be that of the policy that is trained.
        self.manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens,
                eos_token_id=sorted(self.stop_ids), pad_token_id=min(self.stop_ids),
            ),  # fmt: skip
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page, num_blocks=int(blocks), max_batch_tokens=batch_tokens, allow_block_sharing=False,
                return_logprobs=True, seed=seed,
            ),  # fmt: skip
        )
        filters = {type(p).__name__ for p in self.manager.model._get_logits_processor(self.manager.generation_config)}
        if filters - {"TemperatureLogitsWarper"}:
            raise RuntimeError(f"sampling would be filtered by {filters}: log-probabilities would not be the policy's")
        self._pieces: dict[str, _Piece] = {}
        self._loaded = asyncio.Event()  # set once there are weights; nothing is submitted before
        self._loop = asyncio.get_running_loop()
        self._pause_asked: asyncio.Future | None = None
        self._resume = threading.Event()
        self._closing = False
        self._counter = 0
        self.manager.start()
        self._pump_thread = threading.Thread(target=self._pump, daemon=True, name="pump")
        self._pump_thread.start()

    # -- generation

    async def generate(self, token_ids: list[int], max_new_tokens: int | None = None) -> Generation:
        """Sample one answer. The only place where an answer grows: tokens, log-probabilities and versions together."""
        budget = max_new_tokens or self.max_new_tokens
        answer = Generation()
        while True:
            output, version, finished = await self._piece(list(token_ids) + answer.tokens, budget - len(answer.tokens))
            if output is not None:
                if len(output.logprobs) != len(output.generated_tokens):
                    raise RuntimeError(f"{len(output.generated_tokens)} tokens, {len(output.logprobs)} log-probs")
                answer.tokens += output.generated_tokens
                answer.logprobs += output.logprobs
                answer.versions += [version] * len(output.generated_tokens)
            if finished:
                answer.finish_reason = "stop" if answer.tokens[-1] in self.stop_ids else "length"
                return answer
            answer.interruptions += bool(answer.tokens)

    async def _piece(self, token_ids: list[int], budget: int):
        """(output, version, finished): decode until the answer ends or an update interrupts it."""
        await self._loaded.wait()
        self._counter += 1
        name, version = f"r{self._counter}", self.version
        piece = self._pieces[name] = _Piece(self._loop.create_future())
        if self.manager.add_request(token_ids, name, max_new_tokens=budget, streaming=True) is None:
            raise RuntimeError("the generation thread is gone") from self._fatal()
        finished = await piece.future
        return piece.latest, version, finished

    def _fatal(self):
        return self.manager.background_thread_status.fatal_error

    # -- the pump thread

    def _pump(self) -> None:
        try:
            while not self._closing:
                if self._pause_asked is not None:
                    self._hold()
                output = self.manager.get_result(timeout=0.02)
                if output is not None:
                    self._note(output)
                elif not self.manager.is_running() and not self._closing:
                    raise RuntimeError(f"the generation thread stopped: {self._fatal()}")
        except BaseException as error:
            self._call(self._break, error)

    def _call(self, fn, *args) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(fn, *args)

    def _break(self, error: BaseException) -> None:
        """The engine is broken: everybody who waits for it gets the error."""
        futures = [piece.future for piece in self._pieces.values()]
        if self._pause_asked is not None:
            futures.append(self._pause_asked)
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _note(self, output) -> None:
        piece = self._pieces.get(output.request_id)
        if piece is None:
            return  # of a request that an update cancelled: its last step ran on the old cache
        if output.error is not None:
            raise RuntimeError(f"continuous batching: {output.error}")
        piece.latest = output
        if output.is_finished():
            del self._pieces[output.request_id]
            self._call(_resolve, piece.future, True)

    def _hold(self) -> None:
        """Stand still from `pause` to `resume`. All results of the old weights are noted before anything is cut."""
        with self.manager.pause():
            while (output := self.manager.get_result(timeout=0)) is not None:
                self._note(output)
            self._call(_resolve, self._pause_asked, None)
            self._pause_asked = None
            self._resume.wait()
            self._resume.clear()
            # All of them, also those that were submitted meanwhile: `version` is new by now, and whoever submits from
            # here on has read it; whoever read the old one is in the list and has not run yet.
            interrupted, self._pieces = self._pieces, {}
            for name, piece in interrupted.items():
                self.manager.cancel_request(name)
                self._call(_resolve, piece.future, False)
            self._call(self._loaded.set)

    # -- updates

    async def pause(self) -> None:
        """Returns once nothing is being decoded. Answers under way keep what they have."""
        self._pause_asked = future = self._loop.create_future()
        try:
            await asyncio.wait_for(asyncio.shield(future), self.timeout_s)
        except TimeoutError:
            raise TimeoutError(f"continuous batching did not pause within {self.timeout_s:.0f} s") from None

    async def load(self, version: int, fn: Callable[[list], int]) -> int:
        """Run `fn(named parameters)`, which fills them in place, while paused; returns what it returns."""
        checksum = await asyncio.to_thread(fn, self.parameters())
        self.version = version
        return checksum

    def resume(self) -> None:
        """Go on; interrupted answers are submitted again under the weights that are loaded now."""
        self._resume.set()

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model.named_parameters())  # tied weights appear once

    def close(self) -> None:
        self._closing = True
        self._resume.set()
        self._pump_thread.join(5)
        self.manager.stop(block=True, timeout=5, hard_stop=True)


def _resolve(future: asyncio.Future, result) -> None:
    if not future.done():
        future.set_result(result)


# -- Workflows ---------------------------------------------------------------------------------------------------------

Score = Callable[[Problem, str], Awaitable[float]]


async def single_turn(problem: Problem, engine, score: Score) -> list[Trajectory]:
    """One prompt, one answer, one reward between 0 and 1."""
    answer = await engine.generate(problem.prompt_ids)
    trajectory = Trajectory(ticket=-1, index=-1)
    trajectory.append(problem.prompt_ids)
    trajectory.append(answer.tokens, answer.logprobs, answer.versions)
    trajectory.finish_reason = answer.finish_reason
    trajectory.reward = await score(problem, engine.tokenizer.decode(answer.tokens, skip_special_tokens=True))
    return [trajectory]


@dataclasses.dataclass
class Group:
    """The trajectories sampled for one ticket, and what was found out on the way."""

    ticket: int
    trajectories: list[Trajectory]
    verdicts: Counter  # Verdict -> answers
    started: float  # seconds since the epoch: sampling began,
    generated: float  # ... the last answer was complete,
    scored: float  # ... the last reward was known


async def sample_and_score(ticket: int, problem: Problem, answers: int, engine, scorer: Scorer,
                           workflow=single_turn) -> Group:  # fmt: skip
    """Sample `answers` trajectories for one problem, each scored as soon as it is complete."""
    verdicts: Counter = Counter()
    group = Group(ticket, [], verdicts, time.time(), 0.0, 0.0)

    async def score(problem: Problem, response: str) -> float:
        group.generated = time.time()
        verdict = await scorer.score(problem, response)
        verdicts[verdict] += 1
        return float(verdict == Verdict.RIGHT)

    for trajectories in await asyncio.gather(*(workflow(problem, engine, score) for _ in range(answers))):
        group.trajectories += trajectories
    for index, trajectory in enumerate(group.trajectories):
        trajectory.ticket, trajectory.index = ticket, index
        trajectory.check()
    group.scored = time.time()
    return group


# -- The loop of a generator rank --------------------------------------------------------------------------------------


class Generator:
    """One generator rank: slots that sample groups, and one task that obeys trainer 0's notices, in their order.

    Because notices are handled one after the other, the newest (version, rejected) seen here is never newer than the
    weights that are loaded, which is what the proof of the staleness bound asks for.
    """

    def __init__(self, cfg, rank: int, engine, scorer: Scorer, problems: list[Problem], test: list[Problem],
                 group, device: torch.device):  # fmt: skip
        self.cfg, self.rank, self.engine, self.scorer = cfg, rank, engine, scorer
        self.group, self.device, self.problems, self.test = group, device, problems, test
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
        slots = [asyncio.ensure_future(self._slot(lane)) for lane in range(1, self.cfg.slots + 1)]
        notices = asyncio.ensure_future(self._notices())
        # A slot ends only by an error; `stop` ends the job while they wait for tickets that will never be admitted.
        done, _ = await asyncio.wait([notices, *slots], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        for task in slots:
            task.cancel()

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
                await self._update(notice["version"], notice["manifest"])
            elif notice["do"] == "evaluate":
                await self._evaluate(self.test[notice["ranks"].index(self.rank) :: len(notice["ranks"])])
            elif notice["do"] == "stop":
                return

    async def _update(self, version: int, names: list[list] | None) -> None:
        self._switch("sync")
        if names is not None:  # the first update says what all will carry
            check_manifest(names, manifest(self.engine.parameters()), self.rank)
        await self.engine.pause()
        self._send("paused", version=version)

        def receive(named):
            return receive_weights(named, self.group, dtype=self.engine.dtype, device=self.device,
                                   bucket_bytes=self.cfg.bucket_mb << 20)  # fmt: skip

        checksum = await self.engine.load(version, receive)
        self.engine.resume()
        self._switch("generate" if self.running else "wait")
        self._send("loaded", version=version, checksum=checksum)

    async def _evaluate(self, problems: list[Problem]) -> None:
        """pass@1 over `problems`, this rank's share of the held-out ones."""
        self._switch("generate")
        cfg, gate = self.cfg, asyncio.Semaphore(self.cfg.slots)

        async def one(problem: Problem) -> Group:
            async with gate:
                return await sample_and_score(-1, problem, cfg.eval_answers, self.engine, self.scorer)

        groups = await asyncio.gather(*(one(problem) for problem in problems))
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        verdicts = sum((group.verdicts for group in groups), Counter())
        self._event("evaluate", 0, self.since, time.time())
        self._switch("wait")
        self._send("evaluated", problems=len(groups), answers=len(trajectories),
                   reward=float(sum(t.reward for t in trajectories)), verdicts=dict(verdicts),
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
            problem = self.problems[problem_of_ticket(ticket, len(self.problems), self.cfg.seed)]
            group = await sample_and_score(ticket, problem, self.cfg.answers, self.engine, self.scorer)
            self.running -= 1
            if not self.running and self.state == "generate":
                self._switch("wait")
            headers = [trajectory.header() for trajectory in group.trajectories]
            pass_rate = float(np.mean([trajectory.reward for trajectory in group.trajectories]))
            accepted = self.cfg.filter_lower <= pass_rate <= self.cfg.filter_upper
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
