"""What a configuration means for a number of ranks: what contradicts itself, who does what, what it costs in memory.

`check` fills in what follows from the number of ranks and refuses, before anything is loaded, what could not work or
would silently be something else. `describe` is what a run says at its start, `show` the plan that `--dry_run` prints:
it counts the parameters of an architecture without making one, and knows the published models and data by name
(`recipes/published/`), so that it needs neither a network nor a GPU.

Left out: activations and the KV cache in the memory (they depend on kernels; the first step shows them), and time.

    python train.py --config recipes/boba-1.5b.yaml --dry_run true
    pytest tests/test_recipes.py
"""

import dataclasses
import importlib.util
import math
import os

import torch
import transformers
import yaml

import toy
from packing import cache_token_bytes
from recipes.data import PUBLISHED, Refused, on_hub, template_text
from rollout import choose_workflow
from sandbox import load_function
from sync import StalenessQueue


def ranks_of_a_host(world: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", min(world, 8)))  # 8: what a plan assumes


def check(cfg, world: int):
    """Fill in what is derived from the number of ranks; refuse what contradicts itself, before anything is loaded."""
    cfg = dataclasses.replace(cfg)

    def need(condition: bool, sentence: str) -> None:
        if not condition:
            raise Refused(sentence)

    need(cfg.dry_run or cfg.device != "cuda" or torch.cuda.is_available(), "device is cuda, but torch sees no GPU here")
    cuda = cfg.device != "cpu" and torch.cuda.is_available()
    rl = cfg.objective == "rl"
    if rl:
        need(world >= 2, "one rank cannot both train and generate: type `torchrun --nproc_per_node 2 train.py`")
        local = ranks_of_a_host(world)
        cfg.trainers = cfg.trainers or (max(1, world // local // 2) * local if world > local else world // 2)
        need(1 <= cfg.trainers < world, f"trainers={cfg.trainers} of {world} ranks leaves nobody to generate")
    else:
        need(cfg.trainers in (0, world), f"objective sft makes all {world} ranks trainers, trainers={cfg.trainers} not")
        cfg.trainers = world
    for f in dataclasses.fields(cfg):
        value, low, high = getattr(cfg, f.name), f.metadata["help"].low, f.metadata["help"].high
        need(not isinstance(value, float) or math.isfinite(value), f"{f.name} must be a finite number, not {value}")
        need(low is None or value >= low, f"{f.name} must be at least {low}, not {value}")
        need(high is None or value <= high, f"{f.name} must be at most {high}, not {value}")
    need(cfg.trainers % (cfg.shard_ranks or cfg.trainers) == 0,
         f"{cfg.trainers} trainers cannot be split into copies of the model on shard_ranks={cfg.shard_ranks} each")
    need(cfg.filter_lower < cfg.filter_upper, f"no group passes a filter from {cfg.filter_lower} to {cfg.filter_upper}")
    longest = cfg.max_prompt_tokens + cfg.max_new_tokens
    need(cfg.microbatch_tokens >= longest,
         f"microbatch_tokens={cfg.microbatch_tokens} is less than the longest sequence, max_prompt_tokens + "
         f"max_new_tokens = {longest}: such a sequence could never be trained")  # fmt: skip
    need(cfg.minibatches <= cfg.groups * cfg.answers,
         f"{cfg.groups} x {cfg.answers} answers cannot be split into {cfg.minibatches} mini-batches")  # fmt: skip
    need(cfg.decoupled or cfg.max_staleness == 0,
         f"decoupled=false with max_staleness={cfg.max_staleness} would clip around a policy that many versions "
         f"old; only max_staleness=0 may go without")  # fmt: skip
    need(cfg.decoupled or cfg.proximal == "recompute",
         "proximal=interpolate with decoupled=false: plain PPO has no proximal policy that it would replace")
    need(cfg.dual_clip == 0 or cfg.dual_clip > 1,
         f"dual_clip={cfg.dual_clip} would cut the loss of tokens whose policy has not moved; it must be above 1, or 0")
    need(cfg.group_norm == "none" or cfg.answers > 1,
         f"group_norm={cfg.group_norm} with answers=1: a lone answer is its own mean, so every advantage would be 0")
    need(not cuda or cfg.attention not in ("sdpa", "eager") or cfg.microbatch_tokens <= 8192,
         f"attention={cfg.attention} would make a mask of {cfg.microbatch_tokens} x {cfg.microbatch_tokens} for each "
         f"micro-batch; packed, flex_attention and flash_attention_2 need none")  # fmt: skip
    need(rl or cfg.temperature == 1.0,
         f"temperature={cfg.temperature} with objective=sft would fit a distribution that nobody samples from")
    need(not cfg.tensorboard or importlib.util.find_spec("tensorboard"), "tensorboard=true: `pip install tensorboard`")
    need(cfg.data != "toy" or cfg.model == "toy", f"the toy's problems are in words that {cfg.model} does not know")
    need(cfg.data != "toy" or cfg.workflow != "multi_turn", "the toy has no second try; recipes/hints.py writes one")
    need(cfg.data != "toy" or not cfg.eval_data, "eval_data: the toy has held-out problems of its own")
    for path in (cfg.data, cfg.eval_data):
        need(path in ("", "toy") or os.path.isfile(path) or on_hub(path),
             f"data: there is no file {path}; one of a dataset on the hub is named owner/name/FILE.jsonl")
    need(cfg.workflow != "multi_turn" or cfg.template in ("", "chat"),
         f"workflow=multi_turn with template={cfg.template}: only chat knows what comes between two answers")
    try:
        template_text(cfg.template)
        if rl:
            StalenessQueue(cfg.groups, cfg.max_staleness, cfg.steps, cfg.window)
            check_engine(cfg, world, cuda)
            choose_workflow(cfg)
            _ = cfg.reward and load_function(cfg.reward)
    except ValueError as error:
        raise Refused(str(error)) from error
    if rl:
        cfg.slots = cfg.slots or -(-cfg.groups * cfg.generator_tp // (world - cfg.trainers))
    return cfg


def choose_engine(engine: str, cuda: bool) -> tuple[str, str]:
    """("sglang" or "transformers", why) for the setting `engine`. ValueError if SGLang is asked for and cannot run."""
    if engine == "transformers":
        return engine, "asked for"
    release, missing = toy.sglang_release(), ""
    version, tested = (".".join(map(str, numbers)) for numbers in (release, toy.SGLANG_TESTED[-1]))
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
    untested = "" if release in toy.SGLANG_TESTED else f"; warning: UNTESTED, the tests run {tested}"
    return "sglang", f"{version}{untested}; {'asked for' if engine == 'sglang' else 'auto: it is installed'}"


def check_engine(cfg, world: int, cuda: bool) -> None:
    """ValueError, in a sentence, for settings of the engine that cannot work; `interrupt` off where SGLang cannot."""
    tp, generators, local = cfg.generator_tp, world - cfg.trainers, ranks_of_a_host(world)
    try:
        more = yaml.safe_load(cfg.engine_args or "{}")
    except yaml.YAMLError:
        more = None
    if not isinstance(more, dict):
        raise ValueError(f"engine_args={cfg.engine_args!r} is no YAML mapping of names to values")
    sglang = (cfg.engine if cfg.dry_run else choose_engine(cfg.engine, cuda)[0]) == "sglang"
    if not sglang and (tp > 1 or more):
        raise ValueError("generator_tp and engine_args are for SGLang, but the engine here would be transformers")
    toy.check_settings(more)
    cfg.interrupt = cfg.interrupt and (cfg.dry_run or not sglang or toy.sglang_release() >= toy.SESSIONS_SINCE)
    if generators % tp:
        raise ValueError(f"{generators} generator ranks cannot be split into servers of generator_tp={tp}")
    if any(rank % local + tp > local for rank in range(cfg.trainers, world, tp)):
        raise ValueError(f"generator_tp={tp}, {cfg.trainers} trainers, {local} ranks a host: a server would lie on two")


# -- The plan ----------------------------------------------------------------------------------------------------------


def describe(cfg, me) -> dict:
    """What follows from the configuration: for config.yaml and the first lines on the terminal."""
    servers, helpers = me.servers(cfg.generator_tp)
    found = f"{torch.cuda.device_count()} GPU(s)" if torch.cuda.is_available() else "no GPU"
    hosts = me.world // ranks_of_a_host(me.world)
    copies = me.trainers // (cfg.shard_ranks or me.trainers)
    lines = {
        "ranks": f"{me.world}: trainers {spans(range(me.trainers))}{f' in {copies} copies' if copies > 1 else ''}, "
                 f"generators {spans(servers)}"
                 f"{', one host has both' if servers and me.trainers % ranks_of_a_host(me.world) and hosts > 1 else ''}"
                 f"{f', their tensor-parallel helpers {spans(helpers)}' if helpers else ''}",
        "device": f"{me.device.type} ({cfg.device}: {found}), compute in {me.dtype}, weights and Adam in float32",
    }  # fmt: skip
    if servers:
        sequences = cfg.groups * cfg.answers
        lines |= {
            "engine": f"{me.engine} ({me.why}), {cfg.slots} groups in flight a generator, which an update "
                      f"{'interrupts' if cfg.interrupt else 'waits for'}",
            "batch": f"{cfg.groups} groups x {cfg.answers} answers = {sequences} sequences, {cfg.minibatches} "
                     f"mini-batches of {sequences // cfg.minibatches}, micro-batches of {cfg.microbatch_tokens} tokens",
            "staleness": f"at most {cfg.max_staleness}: {cfg.groups} x ({cfg.max_staleness} + 1) groups are started "
                         f"before the first step is done",
        }  # fmt: skip
    else:
        size = f"{cfg.sft_examples} examples" if cfg.sft_examples else f"{cfg.sft_tokens} tokens"
        lines["batch"] = f"{size} a step, micro-batches of {cfg.microbatch_tokens} tokens"
        if 0 < cfg.sft_examples < me.trainers:
            lines["batch"] += f"; {me.trainers - cfg.sft_examples} of {me.trainers} trainers have none"
    return lines


def spans(ranks) -> str:
    """
    >>> spans([0, 1, 2, 5]), spans(range(0)), spans([4, 6, 8, 10])
    ('[0-2, 5]', '[]', '[4, 6, 8, 10]')
    """
    parts, ranks = [], list(ranks)
    while ranks:
        count = next((n for n in range(1, len(ranks)) if ranks[n] != ranks[0] + n), len(ranks))
        parts.append(f"{ranks[0]}-{ranks[count - 1]}" if count > 1 else str(ranks[0]))
        ranks = ranks[count:]
    return f"[{', '.join(parts)}]" if len(parts) < 5 else f"[{parts[0]}, {parts[1]} .. {parts[-1]}]"


def architecture(model: str):
    """The configuration of a model, without a network for the published ones. OSError if it is not to be had."""
    known = yaml.safe_load((PUBLISHED / "models.yaml").read_text())
    if model in known and not os.path.isdir(model):
        return transformers.AutoConfig.for_model(**known[model])
    return toy.load_config(model).get_text_config()


def count_parameters(config) -> int:
    """Of the model as transformers builds it, tied weights once. Nothing is allocated."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def count_rows(data: str) -> int | None:
    """Rows of a file or of published data, None if that is not known here."""
    if data == "toy":
        return 1024
    if os.path.isfile(data):
        with open(data, "rb") as file:
            return sum(bool(line.strip()) for line in file)
    return yaml.safe_load((PUBLISHED / "data.yaml").read_text()).get(data)


def memory(parameters: int, cfg, item: int) -> tuple[float, float]:
    """(GiB a trainer, GiB a generator): float32 weights and gradients and two float32 moments of Adam are 16 bytes a
    parameter, shared by `shard_ranks`; a generator has its weights alone, of `item` bytes, shared by `generator_tp`.

    >>> from types import SimpleNamespace as Cfg
    >>> memory(2**30, Cfg(trainers=8, shard_ranks=4, generator_tp=2), item=2)
    (4.0, 1.0)
    """
    return 16 * parameters / (cfg.shard_ranks or cfg.trainers) / 2**30, item * parameters / cfg.generator_tp / 2**30


def show(cfg, rank) -> str:
    """The plan of a run: roles, memory, steps an epoch. `rank` makes a `train.Rank` of device and dtype."""
    try:
        config = architecture(cfg.model)
    except (OSError, ValueError) as error:
        raise Refused(f"model={cfg.model}: its architecture is not to be had: {str(error).splitlines()[0]}") from error
    gpu = cfg.device == "cuda" or (cfg.device == "auto" and cfg.model != "toy")
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    me = rank(torch.device(device), dtype, engine=cfg.engine, why="a plan")
    parameters, item, rl = count_parameters(config), me.dtype.itemsize, cfg.objective == "rl"
    trainer, generator = memory(parameters, cfg, item)
    token = cache_token_bytes(config, me.dtype) / cfg.generator_tp
    longest = cfg.max_prompt_tokens + cfg.max_new_tokens
    lines = describe(cfg, me)
    size = f"{parameters / 1e9:.3f} B" if parameters > 1e8 else f"{parameters / 1e6:.3f} M"
    lines["model"] = f"{cfg.model}, {size} parameters"
    lines["memory, trainer"] = (f"16 bytes x {size} / {cfg.shard_ranks or cfg.trainers} ranks = "
                                f"{trainer:.2f} GiB of weights, gradients, Adam; activations come on top")  # fmt: skip
    if rl:
        lines["memory, generator"] = (f"{generator:.2f} GiB of weights, {token / 1024:.0f} KiB of cache a token: "
                                      f"{token * longest / 2**30:.2f} GiB for an answer of {longest}")  # fmt: skip
    rows, steps = count_rows(cfg.data), cfg.steps if rl else cfg.sft_steps
    batch = cfg.groups if rl else cfg.sft_examples
    if rows and batch:
        lines["steps an epoch"] = (f"{rows} rows / {batch} = {rows / batch:.1f}; {steps} steps are "
                                   f"{steps * batch / rows:.2f} epochs")  # fmt: skip
    else:
        lines["steps an epoch"] = f"{steps} steps; the number of rows in {cfg.data} is not known here"
    return "\n".join(["plan (nothing is started)", *(f"  {k:<20} {v}" for k, v in lines.items())])
