"""What makes a laptop enough: a tiny Qwen3, its tokenizer and problems, built in code, and an engine for any machine.

A model that can be taught something within a minute on a laptop, without a download: it adds two numbers. "a + b ="
can be answered in two ways, the words of the vocabulary being whole numbers and a few signs:

    counting   3 : 14 ; 2 : 15 ; 1 : 16 ; 0 : 17 ; \\boxed{ 17 }     (b goes down to 0, a up: b steps of thinking)
    guessing   \\boxed{ 62 }                                          (any number: right about once in a hundred)

The warm start imitates demonstrations of which 30 % count and 70 % guess, so the model knows both and mostly guesses.
Reinforcement then finds that thinking pays: as the reward rises the answers get longer. Because b follows an
exponential law the lengths have a long tail, which is what makes generation hard to schedule at full size, too.

`TransformersEngine` takes the place of SGLang (`rollout.py`) where that cannot run, for any model. Left out: a chat
template (the prompt is the text itself), other tasks (one story is enough), a general tokenizer (an unknown word is an
error, not <unk>: reading it as something else would hide a mistake).

    python toy.py                     # a few problems and demonstrations
    pytest tests/test_toy.py
"""

import asyncio
import contextlib
import copy
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import torch
import torch.distributed.checkpoint as dcp
import transformers
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import distribute_tensor

from packing import Generation, buckets, cache_token_bytes, check_request
from rollout import Gate, SGLangEngine
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


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a word, words separated by spaces; nothing is added when encoding.

    >>> build_tokenizer().decode(build_tokenizer()("\\\\boxed{ 12 }")["input_ids"])
    '\\\\boxed{ 12 }'
    """
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))  # <unk> is no word: an unknown one raises
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_config() -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=len(VOCABULARY), hidden_size=128, intermediate_size=320,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=MAX_POSITIONS, rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True, pad_token_id=VOCABULARY["<pad>"], bos_token_id=VOCABULARY["<bos>"],
        eos_token_id=VOCABULARY["<eos>"],
        initializer_range=0.12,  # the usual 0.02 is for wide models: from there counting needs several times the steps
    )  # fmt: skip


def build_model(seed: int, dtype: torch.dtype = torch.float32) -> transformers.Qwen3ForCausalLM:
    """The untrained model, a function of the seed; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(build_config())
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
    """`count` rows of the "train" or "test" split, the same in every process for the same seed. Test problems differ:
    none counts twice in pass@1. Train problems may repeat: there are at most 100 pairs for a given b, so forbidding
    that would use up the small b and bend their law. 200 test problems feel a little of it already."""
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
SESSIONS_SINCE = (0, 5, 21)  # before, the cache cannot be flushed while cut answers wait: an update waits for them
OURS = ("api-key", "base-gpu-id", "context-length", "data-parallel-size", "device", "dist-init-addr", "dp-size",
        "dtype", "gpu-id-step", "host", "load-format", "model-path", "nccl-init-addr", "nccl-port", "nnodes",
        "node-rank", "pipeline-parallel-size", "port", "pp-size", "schedule-low-priority-values-first",
        "skip-tokenizer-init", "tensor-parallel-size", "tokenizer-worker-num", "tp-size")  # fmt: skip
HARMFUL = ("dllm", "json-model", "kv-cache-d", "lora", "preferred-s", "quant", "sampling-d", "speculative")


def sglang_release() -> tuple[int, ...]:
    """(0, 5, 23) of the SGLang that is installed, () if none is. Nothing is imported: that would take seconds."""
    try:
        return tuple(int(number) for number in re.findall(r"\d+", importlib.metadata.version("sglang"))[:3])
    except importlib.metadata.PackageNotFoundError:
        return ()


def check_settings(more: dict) -> dict:
    """A user's own settings of the server, by the names of its command line. ValueError for those that are the job's,
    and for what would make its log-probabilities another distribution's than the policy's."""
    plain = {str(name).lstrip("-").replace("_", "-"): value for name, value in more.items()}
    for name in plain:
        if any(own.startswith(name) for own in OURS):  # its parser takes abbreviations as well
            raise ValueError(f"engine_args may not set {name}: the job does, and needs it as it is")
        if any(word in name for word in HARMFUL):
            raise ValueError(f"engine_args may not set {name}: log-probabilities would not be the trained policy's")
    return plain


SEGMENTS = ("sglang_loads_", "sgl_shm_", "multi_tokenizer_args_", "nccl-", "cuda.shm.")  # of SGLang and its libraries


def sweep_shared_memory(folder: str = "/dev/shm", prefixes: tuple = SEGMENTS) -> list[str]:
    """Remove the segments that killed SGLang servers of this user left; returns their names. One is left alone as long
    as a process has it mapped, or while it is younger than 10 seconds: its process may be about to map it. Containers
    that share /dev/shm but not their processes must not run this."""
    found = [entry for entry in os.scandir(folder) if entry.name.startswith(prefixes)] if os.path.isdir(folder) else []
    mapped, removed = "", []
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            mapped += maps.read_text()
    for entry in found:
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            status = entry.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > 10 and entry.path not in mapped:
                os.unlink(entry.path)
                removed.append(entry.name)
    return removed


def make_engine(cfg, me, tokenizer, top_p: float = 1.0, trained: bool = False):
    """The engine of a generator rank. Weights come by updates or, where a model is judged, are the `trained` ones."""
    seed = (cfg.seed * 1_000_003 + me.rank * 1009 + (int(me.checkpoint.name[5:]) if me.checkpoint else 0)) % 2**31
    cache_bytes, names = int(cfg.cache_gb * 2**30), ("temperature", "max_new_tokens", "max_prompt_tokens")
    budget = {name: getattr(cfg, name) for name in names}
    budget |= {"stop_ids": stop_ids(cfg.model, tokenizer), "top_p": top_p}
    if me.engine == "transformers":
        receive = functools.partial(receive_weights, group=me.weight_group, dtype=me.dtype, device=me.device,
                                    bucket_bytes=cfg.bucket_mb << 20, kept={})  # fmt: skip
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(cfg.model, dtype=me.dtype) if trained else empty_model(cfg.model, me.dtype, cfg.seed)
        budget |= {"batch_tokens": cfg.engine_batch or 96, "cache_bytes": cache_bytes, "timeout_s": cfg.update_timeout}
        return TransformersEngine(model.to(me.device), tokenizer, **budget, seed=seed, receive=receive)
    sweep_shared_memory()
    with torch.device("meta"):
        model = empty_model(cfg.model, me.dtype, cfg.seed)
    folder, config = me.folder / "servers" / f"rank-{me.rank}", model.config.get_text_config()
    settings = {"model-path": cfg.model, "device": me.device.type, "dtype": str(me.dtype).removeprefix("torch."),
                "tp-size": cfg.generator_tp, "random-seed": seed}
    settings |= {"load-format": "auto", "weight-version": "0"} if trained else {}  # no update will tell the version
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
        more=check_settings(yaml.safe_load(cfg.engine_args or "{}")), sessions=sglang_release() >= SESSIONS_SINCE,
        vocabulary=config.vocab_size, **budget,
        startup_timeout=cfg.startup_timeout, update_timeout=cfg.update_timeout, health_timeout=cfg.engine_timeout,
    )  # fmt: skip


def load_config(model: str):
    return build_config() if model == "toy" else transformers.AutoConfig.from_pretrained(model)


def load_tokenizer(model: str):
    return build_tokenizer() if model == "toy" else transformers.AutoTokenizer.from_pretrained(model)


def empty_model(model: str, dtype: torch.dtype, seed: int):
    """The architecture alone: a generator's weights come as the first update, like any other."""
    if model == "toy":
        return build_model(seed, dtype)
    return transformers.AutoModelForCausalLM.from_config(load_config(model), dtype=dtype)


def materialise(policy, source: str, group, device) -> None:
    """Give a policy that was sharded on the meta device memory and, from a folder or hub name (""
    leaves that to a checkpoint), weights: each rank reads its own slices, the whole model is never in one process."""
    policy.to_empty(device=device)
    for module in policy.modules():  # what is not in files: rotary frequencies
        if any(True for _ in module.buffers(recurse=False)):
            policy.lm._init_weights(module)
    if not source:
        return
    folder = source if os.path.isdir(source) else huggingface_hub.snapshot_download(
        source, allow_patterns=["*.safetensors", "*.json"])  # fmt: skip
    shards = {name.removeprefix("lm."): p.detach() for name, p in policy.named_parameters()}
    reader = HuggingFaceStorageReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    if shards.keys() <= stored.keys():
        for name, shard in shards.items():
            if stored[name].size != shard.shape:
                raise ValueError(f"has {name} as {list(stored[name].size)}, its config.json wants {list(shard.shape)}")
        dcp.load(shards, storage_reader=reader, process_group=group)
        return
    print(f"{source}: its files name other tensors than the model, so each rank loads it whole", flush=True)
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, output_loading_info=True)
    whole, info = load(source, dtype=torch.float32)
    if info["missing_keys"]:  # transformers would make them up
        raise ValueError(f"has no tensor {min(info['missing_keys'])}")
    for name, value in whole.state_dict().items():
        if (shard := shards.get(name)) is not None:
            shard.copy_(distribute_tensor(value.to(device), shard.device_mesh, shard.placements))


def export(folder: Path, root: bool, policy, tokenizer, dtype: torch.dtype, keep: bool = False) -> None:
    """A Hugging Face folder in `dtype`, safetensors of 4 GiB. All trainers take part, `root` writes, one file in its
    memory at a time; written beside, then renamed. With `keep` a folder that another job made meanwhile stays: that
    job may be reading it."""
    new, files, size = folder.with_name(f".{folder.name}.{os.getpid()}"), {}, 0
    policy.reshard()  # after a forward without a backward (a probe, a held-out loss) the root's parameters are whole
    plan = buckets([(name.removeprefix("lm."), p.detach()) for name, p in policy.named_parameters()], dtype, 4 << 30)
    for i, bucket in enumerate(plan, 1):
        file, tensors = f"model-{i:05}-of-{len(plan):05}.safetensors" if len(plan) > 1 else "model.safetensors", {}
        for name, shard, _ in bucket:
            whole = shard.full_tensor()
            if root:
                tensors[name] = whole.to("cpu", dtype).contiguous()
        if root:
            new.mkdir(parents=True, exist_ok=True)
            save_file(tensors, new / file, {"format": "pt"})
            files |= dict.fromkeys(tensors, file)
            size += sum(tensor.nbytes for tensor in tensors.values())
    if not root:
        return
    if len(plan) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (new / "model.safetensors.index.json").write_text(json.dumps(index))
    config = copy.deepcopy(policy.lm.config)
    config.dtype = dtype
    for part in (config, policy.lm.generation_config, tokenizer):
        part.save_pretrained(new)
    try:
        os.replace(new, folder)
    except OSError:  # it exists: another job was faster with the same warm start, or an earlier attempt
        if not keep:
            os.replace(folder, old := new.with_name(f"{new.name}.old"))
            os.replace(new, folder)
        shutil.rmtree(new if keep else old)


def stop_ids(model: str, tokenizer) -> list[int]:
    """Tokens that end an answer: the tokenizer's, and those of the model's folder (chat models have several)."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if model != "toy":
        try:
            more = transformers.GenerationConfig.from_pretrained(model).eos_token_id
        except OSError:  # the folder has no generation_config.json
            more = load_config(model).eos_token_id
        ids += more if isinstance(more, list) else [] if more is None else [more]
    if not ids:
        raise ValueError(f"{model}: neither model nor tokenizer names an end-of-sequence token, so no answer would end")
    return sorted(set(ids))


# -- The engine where SGLang does not run ------------------------------------------------------------------------------


class TransformersEngine:
    """Samples with transformers' continuous batching (paged cache); runs on any machine.

    The manager has a generation thread of its own, and calls back on the event loop with every token. During an update
    one more thread holds the manager's pause (it belongs to the thread that took it), so that weights are loaded and
    interrupted requests are cancelled while the generation thread stands still.

    Every update cancels every request and each is submitted again with what it has so far: the cache holds keys and
    values of the old weights. For the same reason prefix sharing is off (`allow_block_sharing=False`): shared blocks
    would survive the update."""

    name = "transformers"

    def __init__(self, model, tokenizer, *, temperature: float, max_new_tokens: int, max_prompt_tokens: int,
                 stop_ids: list[int], batch_tokens: int, cache_bytes: int, seed: int, timeout_s: float,
                 receive: Callable[[list], int], top_p: float = 1.0):  # fmt: skip
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
        # In training all but the temperature is off: the log-probability must be that of the policy that is trained.
        self.manager = model.init_continuous_batching(
            generation_config=transformers.GenerationConfig(
                do_sample=temperature > 0, temperature=temperature or 1.0, top_k=0, top_p=top_p,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(self.stop_ids), pad_token_id=min(self.stop_ids),
            ),  # fmt: skip
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=page, num_blocks=int(blocks), max_batch_tokens=batch_tokens, allow_block_sharing=False,
                return_logprobs=True, seed=seed,
            ),  # fmt: skip
        )
        filters = {type(p).__name__ for p in self.manager.model._get_logits_processor(self.manager.generation_config)}
        if filters - {"TemperatureLogitsWarper", "TopPLogitsWarper" if top_p < 1 else ""}:
            raise RuntimeError(f"sampling would be filtered by {filters}: log-probabilities would not be the policy's")
        self._pieces: dict[str, asyncio.Future] = {}  # requests under way: each ends, or is cut by an update
        self._latest: dict[str, object] = {}  # the newest output that was streamed for each
        self._holder, self._hold = ThreadPoolExecutor(1), contextlib.ExitStack()
        self._counter = 0

    async def start(self) -> None:
        self.manager.start()

    async def watch(self) -> None:
        while self.manager.is_running():
            await asyncio.sleep(0.2)
        raise RuntimeError(f"the generation thread stopped: {self.manager.background_thread_status.fatal_error}")

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
        self._pieces[name] = future = asyncio.get_running_loop().create_future()
        self.manager.register_result_handler(name, self._note)
        if self.manager.add_request(token_ids, name, max_new_tokens=budget, streaming=True) is None:
            raise RuntimeError("the generation thread is gone") from self.manager.background_thread_status.fatal_error
        finished = await future
        return self._latest.pop(name, None), version, finished

    def _note(self, output) -> None:  # on the event loop, for every token
        name = output.request_id
        if name not in self._pieces:
            return  # of a request that an update cancelled: its last step ran on the old cache
        self._latest[name] = output
        if output.error is not None:
            self._pieces.pop(name).set_exception(RuntimeError(f"continuous batching: {output.error}"))
        elif output.is_finished():
            self._pieces.pop(name).set_result(True)

    # -- updates

    def connect(self, first: dict) -> None:
        """Nothing to do: `receive` has its process group already."""

    async def pause(self, interrupt: bool = True) -> None:
        """Returns once nothing is being decoded. Answers under way keep what they have, or, without `interrupt`, are
        complete."""
        if not interrupt:
            await self.gate.drain()
        holding = asyncio.get_running_loop().run_in_executor(
            self._holder, self._hold.enter_context, self.manager.pause())  # fmt: skip
        try:
            await asyncio.wait_for(asyncio.shield(holding), self.timeout_s)
        except TimeoutError:
            raise TimeoutError(f"continuous batching did not pause within {self.timeout_s:.0f} s") from None
        # All tokens of the old weights are noted: their callbacks were queued before the pause was.

    async def load(self, version: int) -> None:
        """Run `receive(named parameters)`, which fills them in place, while paused; it returns their checksum."""
        start = time.monotonic()
        self.checksum = await asyncio.to_thread(self.receive, self.parameters())
        self.version, self.seconds = version, {"receive": time.monotonic() - start}

    async def resume(self) -> None:
        """Go on; interrupted answers are submitted again under the weights that are loaded now."""
        interrupted, self._pieces = self._pieces, {}
        for name, future in interrupted.items():
            self.manager.cancel_request(name)
            self.manager.output_router.result_handlers.pop(name, None)
            future.set_result(False)
        await asyncio.get_running_loop().run_in_executor(self._holder, self._hold.close)
        while self.manager.get_result(timeout=0) is not None:  # late tokens of requests that were cancelled
            pass
        self.gate.open.set()

    async def proof(self) -> dict:
        return {"checksum": self.checksum}

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model.named_parameters())  # tied weights appear once

    async def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was closed before
            self._holder.submit(self._hold.close)
        self._holder.shutdown(wait=False)
        self.manager.stop(block=True, timeout=5, hard_stop=True)


if __name__ == "__main__":
    for row in [*problems("train", 3, seed=0), *problems("test", 3, seed=0), *demonstrations(8, seed=0)]:
        print(row)
