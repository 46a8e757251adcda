"""What makes a laptop enough: a tiny Qwen3, its tokenizer and problems, built in code, and an engine for any machine.

The job needs a model that can be taught something within a minute on a laptop, without a download. This one adds two
numbers. "a + b =" can be answered in two ways, the words of the vocabulary being whole numbers and a few signs:

    counting   3 : 14 ; 2 : 15 ; 1 : 16 ; 0 : 17 ; \\boxed{ 17 }     (b goes down to 0, a up: b steps of thinking)
    guessing   \\boxed{ 62 }                                          (any number: right about once in a hundred)

The warm start imitates demonstrations of which 30 % count and 70 % guess, so the model knows both and mostly guesses.
Reinforcement then finds that thinking pays: as the reward rises the answers get longer. Because b follows an
exponential law the lengths have a long tail, which is what makes generation hard to schedule at full size, too.

`TransformersEngine` takes the place of SGLang (`rollout.py`) where that cannot run, for any model.
Left out: a chat template (the prompt is the text itself), subtraction and other tasks (one story is enough), a general
tokenizer (an unknown word is an error, not <unk>, since silently reading it as something else would hide a mistake).

    python toy.py                     # a few problems and demonstrations, and the number of parameters
    pytest tests/test_toy.py
"""

import asyncio
import dataclasses
import functools
import hashlib
import importlib.util
import os
import random
import threading
import time
from collections.abc import Callable

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollout import SESSIONS_SINCE, Gate, Generation, SGLangEngine, check_request, check_settings, sglang_release
from sync import receive_weights

LARGEST = 99  # every number from 0 to this one is one token, so a + b never exceeds it
LARGEST_A = 90  # 99 + 0 is the only way for a to be 99: seen in one split at most, so never learnt or never tested
MEAN_B = 7.0  # mean of the exponential law of b before rounding down and cutting
CUT_B = 30  # no b above this one: the longest counting answer has 4 * (CUT_B + 1) + 4 tokens
COUNTING = 0.3  # fraction of the demonstrations that count
TEST_ONE_IN = 3  # one prompt in so many belongs to the test split
MAX_POSITIONS = 512

SPECIAL = ["<pad>", "<bos>", "<eos>"]
SIGNS = ["+", "=", ":", ";", "\\boxed{", "}"]
VOCABULARY = {word: i for i, word in enumerate(SPECIAL + SIGNS + [str(n) for n in range(LARGEST + 1)])}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, words separated by spaces; nothing is added when encoding.

    >>> build_tokenizer().decode(build_tokenizer()("\\\\boxed{ 12 }")["input_ids"])
    '\\\\boxed{ 12 }'
    """
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))  # <unk> is no word: an unknown one raises
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_config() -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        initializer_range=0.12,  # the usual 0.02 is for wide models: from there counting needs several times the steps
        pad_token_id=VOCABULARY["<pad>"],
        bos_token_id=VOCABULARY["<bos>"],
        eos_token_id=VOCABULARY["<eos>"],
    )


def build_model(seed: int, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """The untrained model. The same seed gives the same weights; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(build_config())
    return model.to(dtype)


def counting_answer(a: int, b: int) -> str:
    """
    >>> counting_answer(14, 1)
    '1 : 14 ; 0 : 15 ; \\\\boxed{ 15 }'
    """
    steps = [f"{b - i} : {a + i} ;" for i in range(b + 1)]
    return " ".join(steps + [boxed(a + b)])


def boxed(number: int) -> str:
    return f"\\boxed{{ {number} }}"


def problems(split: str, count: int, seed: int) -> list[dict]:
    """`count` rows of the "train" or "test" split, the same in every process for the same seed.

    Test problems differ from each other, so that none counts twice in pass@1. Train problems are drawn independently
    and may repeat (of 1,000 some 620 differ): there are at most 100 pairs for a given b, so forbidding repeats would
    use up the small b and bend their law towards the large ones. 200 test problems feel a little of that already.
    """
    rng = random.Random(f"problems {split} {seed}")  # a string seed is hashed by sha512, not by hash()
    rows, seen = [], set()
    while len(rows) < count:
        a, b = draw_pair(split, rng)
        if split == "test":
            if len(seen) >= 400:
                raise ValueError(f"the toy has too few distinct test problems for {count}; ask for 400 or fewer")
            if (a, b) in seen:
                continue
            seen.add((a, b))
        row = {"query_id": f"toy-{split}-{len(rows)}", "prompt": f"{a} + {b} =", "solutions": [boxed(a + b)]}
        rows.append(row | {"task": "math"})
    return rows


def demonstrations(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` pairs (prompt, answer) of the train split for the warm start, without the end-of-sequence token."""
    rng = random.Random(f"demonstrations {seed}")
    pairs = []
    for _ in range(count):
        a, b = draw_pair("train", rng)
        answer = counting_answer(a, b) if rng.random() < COUNTING else boxed(rng.randint(0, LARGEST))
        pairs.append((f"{a} + {b} =", answer))
    return pairs


def draw_pair(split: str, rng: random.Random) -> tuple[int, int]:
    """a uniform, b by the cut exponential law, from the prompts that belong to the split."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")
    while True:
        b = int(rng.expovariate(1 / MEAN_B))
        a = rng.randint(0, min(LARGEST_A, LARGEST - min(b, LARGEST)))
        if b <= CUT_B and split_of(f"{a} + {b} =") == split:
            return a, b


def split_of(prompt: str) -> str:
    """By a hash of the prompt: no list of test problems to keep, and no way for the same prompt to be in both."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % TEST_ONE_IN == 0 else "train"


# -- Models by name, and the engine that this machine can run ----------------------------------------------------------

SGLANG_TESTED = ((0, 5, 23),)  # releases that the tests ran


def choose_engine(engine: str, cuda: bool) -> tuple[str, str]:
    """("sglang" or "transformers", why) for the setting `engine`. ValueError if SGLang is asked for and cannot run."""
    if engine == "transformers":
        return engine, "asked for"
    release, missing = sglang_release(), ""
    version, tested = (".".join(map(str, numbers)) for numbers in (release, SGLANG_TESTED[-1]))
    if not release:
        missing = "SGLang is not installed, see requirements-sglang.txt"
    elif cuda and torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 0)):
        missing = "this host has fewer GPUs than ranks, and a server of SGLang needs one for itself"
    elif not cuda and (torch.version.cuda or not importlib.util.find_spec("sgl_kernel")):  # PyPI's has those of CUDA
        missing = f"SGLang {version} is installed, but there is no GPU and it has no CPU kernels"
    if missing and engine == "sglang":
        raise ValueError(f"engine=sglang cannot run here: {missing}")
    if missing:
        return "transformers", f"auto: {missing}"
    untested = "" if release in SGLANG_TESTED else f"; warning: UNTESTED, the tests run {tested}"
    return "sglang", f"{version}{untested}; {'asked for' if engine == 'sglang' else 'auto: it is installed'}"


def check_engine(cfg, world: int, cuda: bool) -> None:
    """ValueError, in a sentence, for settings of the engine that cannot work; `interrupt` off where SGLang cannot."""
    tp, generators, local = cfg.generator_tp, world - cfg.trainers, int(os.environ.get("LOCAL_WORLD_SIZE", world))
    try:
        more = yaml.safe_load(cfg.engine_args or "{}")
    except yaml.YAMLError:
        more = None
    if not isinstance(more, dict):
        raise ValueError(f"engine_args={cfg.engine_args!r} is no YAML mapping of names to values")
    sglang = choose_engine(cfg.engine, cuda)[0] == "sglang"
    if not sglang and (tp > 1 or more):
        raise ValueError("generator_tp and engine_args are for SGLang, but the engine here would be transformers")
    check_settings(more)
    cfg.interrupt = cfg.interrupt and (not sglang or sglang_release() >= SESSIONS_SINCE)
    if generators % tp:
        raise ValueError(f"{generators} generator ranks cannot be split into servers of generator_tp={tp}")
    if any(rank % local + tp > local for rank in range(cfg.trainers, world, tp)):
        raise ValueError(f"generator_tp={tp}, {cfg.trainers} trainers, {local} ranks a host: a server would lie on two")


def make_engine(cfg, me, tokenizer):  # of a generator rank
    seed = (cfg.seed * 1_000_003 + me.rank * 1009 + (int(me.checkpoint.name[5:]) if me.checkpoint else 0)) % 2**31
    cache_bytes, names = int(cfg.cache_gb * 2**30), ("temperature", "max_new_tokens", "max_prompt_tokens")
    budget = {name: getattr(cfg, name) for name in names} | {"stop_ids": stop_ids(cfg.model, tokenizer)}
    if me.engine == "transformers":
        receive = functools.partial(receive_weights, group=me.weight_group, dtype=me.dtype, device=me.device,
                                    bucket_bytes=cfg.bucket_mb << 20)  # fmt: skip
        model = empty_model(cfg.model, me.dtype, cfg.seed).to(me.device)
        return TransformersEngine(model, tokenizer, **budget, batch_tokens=cfg.engine_batch or 96, seed=seed,
                                  cache_bytes=cache_bytes, timeout_s=cfg.update_timeout, receive=receive)  # fmt: skip
    with torch.device("meta"):
        model = empty_model(cfg.model, me.dtype, cfg.seed)
    folder = me.folder / "servers" / f"rank-{me.rank}"
    config = model.config.get_text_config()
    settings = {"model-path": cfg.model, "device": me.device.type, "dtype": str(me.dtype).removeprefix("torch."),
                "tp-size": cfg.generator_tp, "random-seed": seed}  # fmt: skip
    if cfg.model == "toy":
        model.config.save_pretrained(folder / "model")
        settings["model-path"] = str((folder / "model").resolve())
    if cfg.engine_batch:
        settings["max-running-requests"] = cfg.engine_batch
    if me.device.type == "cpu":
        settings["max-total-tokens"] = cache_bytes // cache_token_bytes(config, me.dtype)
    else:
        settings["base-gpu-id"] = me.device.index
    return SGLangEngine(
        list(model.named_parameters()), tokenizer, who=f"generator rank {me.rank}", folder=folder, settings=settings,
        more=yaml.safe_load(cfg.engine_args or "{}"), vocabulary=config.vocab_size, **budget,
        startup_timeout=cfg.startup_timeout, update_timeout=cfg.update_timeout, health_timeout=cfg.engine_timeout,
    )  # fmt: skip


def cache_token_bytes(config, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize


def load_config(model: str):
    return build_config() if model == "toy" else AutoConfig.from_pretrained(model)


def load_tokenizer(model: str):
    return build_tokenizer() if model == "toy" else AutoTokenizer.from_pretrained(model)


def empty_model(model: str, dtype: torch.dtype, seed: int):
    """The architecture alone: a generator's weights come as the first update, like any other."""
    if model == "toy":
        return build_model(seed, dtype)
    return AutoModelForCausalLM.from_config(load_config(model), dtype=dtype)


def stop_ids(model: str, tokenizer) -> list[int]:
    """Tokens that end an answer: the tokenizer's, and those of the model's folder (chat models have several)."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if model != "toy":
        try:
            more = GenerationConfig.from_pretrained(model).eos_token_id
        except OSError:  # the folder has no generation_config.json
            more = load_config(model).eos_token_id
        ids += more if isinstance(more, list) else [] if more is None else [more]
    if not ids:
        raise ValueError(f"{model}: neither model nor tokenizer names an end-of-sequence token, so no answer would end")
    return sorted(set(ids))


# -- The engine where SGLang does not run ------------------------------------------------------------------------------


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
                 stop_ids: list[int], batch_tokens: int, cache_bytes: int, seed: int, timeout_s: float,
                 receive: Callable[[list], int]):  # fmt: skip
        self.model, self.tokenizer, self.receive = model.eval(), tokenizer, receive
        self.max_new_tokens, self.stop_ids, self.timeout_s = max_new_tokens, set(stop_ids), timeout_s
        config, page = model.config.get_text_config(), 64
        self.vocabulary, self.longest = config.vocab_size, max_prompt_tokens + max_new_tokens
        self.version, self.checksum, self.seconds = -1, 0, {}  # no weights yet
        self.gate = Gate()
        block_bytes = page * cache_token_bytes(config, model.dtype)
        longest = -(-self.longest // page)
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
        self._loop = asyncio.get_running_loop()
        self._pause_asked: asyncio.Future | None = None
        self._resume = threading.Event()
        self._closing = False
        self._counter = 0

    async def start(self) -> None:
        self._broken = self._loop.create_future()
        self.manager.start()
        self._pump_thread = threading.Thread(target=self._pump, daemon=True, name="pump")
        self._pump_thread.start()

    async def watch(self) -> None:
        await asyncio.shield(self._broken)

    # -- generation

    async def generate(self, token_ids: list[int], max_new_tokens: int | None = None, **sampling) -> Generation:
        """Sample one answer."""
        budget = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_request(token_ids, budget, self.vocabulary, self.longest, sampling)
        async with self.gate:
            return await self._answer(token_ids, budget)

    async def _answer(self, token_ids: list[int], budget: int) -> Generation:
        """The only place where an answer grows: tokens, log-probabilities and versions together."""
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
        futures = [self._broken, *(piece.future for piece in self._pieces.values())]
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
            self._call(self.gate.open.set)

    # -- updates

    def connect(self, first: dict) -> None:
        """Nothing to do: `receive` has its process group already."""

    async def pause(self, interrupt: bool = True) -> None:
        """Returns once nothing is being decoded. Answers under way keep what they have, or, without `interrupt`, are
        complete."""
        if not interrupt:
            await self.gate.drain()
        self._pause_asked = future = self._loop.create_future()
        try:
            await asyncio.wait_for(asyncio.shield(future), self.timeout_s)
        except TimeoutError:
            raise TimeoutError(f"continuous batching did not pause within {self.timeout_s:.0f} s") from None

    async def load(self, version: int) -> None:
        """Run `receive(named parameters)`, which fills them in place, while paused; it returns their checksum."""
        start = time.monotonic()
        self.checksum = await asyncio.to_thread(self.receive, self.parameters())
        self.version, self.seconds = version, {"receive": time.monotonic() - start}

    async def resume(self) -> None:
        """Go on; interrupted answers are submitted again under the weights that are loaded now."""
        self._resume.set()

    async def proof(self) -> dict:
        return {"checksum": self.checksum}

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model.named_parameters())  # tied weights appear once

    async def close(self) -> None:
        self._closing = True
        self._resume.set()
        self._pump_thread.join(5)
        self.manager.stop(block=True, timeout=5, hard_stop=True)


def _resolve(future: asyncio.Future, result) -> None:
    if not future.done():
        future.set_result(result)


def main() -> None:
    tokenizer, model = build_tokenizer(), build_model(seed=0)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    for row in problems("train", 3, seed=0) + problems("test", 3, seed=0):
        print(row)
    for prompt, answer in demonstrations(8, seed=0):
        print(prompt, answer)


if __name__ == "__main__":
    main()
