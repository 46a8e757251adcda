"""The whole job: one torchrun command, some ranks generate, the others train, a bounded queue between them.

    torchrun --nproc_per_node 2 train.py                                # the toy: a minute or two, no GPU, no download
    torchrun --nproc_per_node 2 train.py --resume                       # continue the newest run of that name
    torchrun --nproc_per_node 8 train.py --model MODEL --data FILE.jsonl --config my.yaml
    torchrun --nproc_per_node 2 train.py --objective sft                # supervised only, every rank trains
    python train.py --config recipes/boba-1.5b.yaml --dry_run true      # the plan: roles, memory, steps an epoch

Read it from the bottom: `train` is the life of trainer ranks and ends with the loop; `main` only hands out roles. Above
it: the configuration on one screen (what it refuses: `recipes/plan.py`), process groups, the model, the supervised
objective, the start of a generator rank. Left out: a Trainer class and callbacks (the loop is short enough to edit), a
gradient scaler (bfloat16 compute over float32 weights needs none).
"""

import asyncio
import contextlib
import functools
import json
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import transformers
import yaml
from torch.distributed.device_mesh import DeviceMesh
from transformers import GenerationConfig, HfArgumentParser

import ppo
import toy
from packing import ALIGN, PLANNED, Trajectory, manifest, pack, pass_at_1, plan_step
from recipes.data import Refused, demonstrations, load_data, open_tokenizer
from recipes.ledger import Records, choose_run, load_state, read_state, save_checkpoint, warm_folder
from recipes.plan import check, show
from recipes.sft import held_out_loss, supervised
from reward import Scorer
from rollout import Generator
from sandbox import die_with_parent
from sync import FOREVER, Channel, Dispatcher, StalenessError, StalenessQueue, die, invite, join_servers, send_weights


class Help(str):
    """A field's help: unit, meaning, off-value. It carries the bounds, and whether a resumed run may change the field,
    which is so where it alters neither what is trained nor on what."""

    low, high, free = None, None, False


def _(default, text: str, low: float | None = None, high: float | None = None, free: bool = False):
    text = Help(text)
    text.low, text.high, text.free = low, high, free
    return field(default=default, metadata={"help": text})


@dataclass
class Config:
    """Every setting, flat. The defaults are the toy job; `--config FILE.yaml` sets others, the command line wins."""

    # what and where
    run_name: str = _("", "folder under runs_dir; empty: named after the data, numbered if taken", free=True)
    runs_dir: str = _("runs", "parent folder of all runs", free=True)
    resume: bool = _(False, "continue the run from its newest checkpoint", free=True)
    objective: Literal["rl", "sft"] = _("rl", "rl, or sft: supervised on rows with prompt and answer, all ranks train")
    model: str = _("toy", "toy, or folder or hub name of a causal language model")
    data: str = _("toy", "toy, or a JSONL file, also owner/name/FILE.jsonl of the hub; its rows: README.md")
    eval_data: str = _("", "JSONL file of held-out problems; empty: set apart from data by a hash")
    template: str = _("", "chat: the tokenizer's, or a name in recipes/published/templates.yaml; empty: verbatim")
    seed: int = _(1, "of data order, mini-batches, sampling, toy", 0)
    steps: int = _(40, "train steps (weight versions)", 1, free=True)
    workflow: str = _("single_turn", "single_turn, multi_turn, or file.py:function of (problem, engine, score)")
    turns: int = _(3, "answers in a trajectory of multi_turn", 1)
    turn_discount: float = _(1.0, "factor of multi_turn's reward for every answer before the last; 1: none", 0, 1)
    # roles and engine
    dry_run: bool = _(False, "print the plan and load nothing", free=True)
    ranks: int = _(2, "that a dry run plans for; torchrun says how many there are", 1, free=True)
    trainers: int = _(0, "ranks that train, the others generate; 0: half of them, whole hosts", 0, free=True)
    engine: Literal["auto", "sglang", "transformers"] = _("auto", "auto: SGLang where it can run", free=True)
    engine_args: str = _("", "more settings of the SGLang server as YAML, '{mem-fraction-static: 0.8}'", free=True)
    generator_tp: int = _(1, "neighbouring generator ranks whose GPUs share one SGLang server; 1: none", 1, free=True)
    interrupt: bool = _(True, "an update interrupts answers under way; false: it waits until they are done", free=True)
    slots: int = _(0, "groups in flight per generator; 0: groups / generators, rounded up", 0, free=True)
    engine_batch: int = _(0, "answers decoded at once; 0: 96 by transformers, SGLang decides itself", 0, free=True)
    cache_gb: float = _(1.0, "GiB of KV cache on a CPU and of the transformers engine", 0.001, free=True)
    # batch
    groups: int = _(32, "B: problems per train step", 1)
    answers: int = _(8, "n: answers per problem", 1)
    max_staleness: int = _(2, "eta: versions between sampling and training at most; 0: synchronous", 0)
    window: int = _(1, "W: groups may pass the oldest open ticket by less than this; 1: strict order", 1)
    minibatches: int = _(4, "optimiser steps per train step", 1)
    microbatch_tokens: int = _(512, "tokens per forward and backward; at least the longest sequence", 2, free=True)
    max_prompt_tokens: int = _(32, "longer prompts are dropped and counted", 1)
    max_new_tokens: int = _(160, "budget of an answer, in several turns of all of them and what is between", 1)
    temperature: float = _(1.0, "of sampling, and of the log-probabilities that are trained", 0.01)
    filter_lower: float = _(0.0, "groups with a lower pass rate are rejected; 0: off", 0, 1)
    filter_upper: float = _(1.0, "groups with a higher pass rate are rejected; 1: off", 0, 1)
    # reward and loss
    reward: str = _("", "file.py:function of (row, response), a number; empty: the verifiers of reward.py")
    reward_bias: float = _(-0.5, "added to the verifier's 0 or 1, before scaling")
    reward_scaling: float = _(10.0, "so that right is +5 and wrong -5", 1e-6)
    reward_clip: float = _(20.0, "bound of the scaled reward", 1e-6)
    gamma: float = _(1.0, "discount per token; 1: none", 0, 1)
    lam: float = _(1.0, "lambda of GAE; 1: no bootstrap", 0, 1)
    group_norm: Literal["none", "mean", "mean_std"] = _("none", "of rewards: less the group's mean, over its deviation")
    batch_norm: bool = _(True, "normalise advantages over all tokens of the batch; false: as they are")
    loss_average: Literal["token", "sequence"] = _("token", "each token weighs the same, or each answer")
    clip: float = _(0.2, "epsilon of the PPO clip", 1e-6, 0.999)
    clip_high: float = _(0.0, "epsilon above 1; 0: the same", 0)
    dual_clip: float = _(0.0, "c above 1: a token's loss is at most c |A|; 0: off", 0)
    decoupled: bool = _(True, "clip around the proximal policy, weigh by proximal / behaviour; false: plain PPO")
    proximal: Literal["recompute", "interpolate"] = _("recompute", "by a forward, or between behaviour and current")
    behaviour_cap: float = _(5.0, "tokens with a larger proximal / behaviour weight are dropped; 0: none", 0)
    early_stop: float = _(5.0, "mini-batches with a larger mean importance weight are not stepped; 0: off", 0)
    # optimiser (AdamW on float32 weights)
    lr: float = _(2e-4, "learning rate, constant after the warm-up", 1e-12)
    lr_warmup: int = _(0, "train steps of linear warm-up; 0: none", 0)
    beta1: float = _(0.9, "of Adam", 0, 0.9999)
    beta2: float = _(0.95, "of Adam", 0, 0.9999)
    adam_eps: float = _(1e-5, "of Adam", 1e-16)
    weight_decay: float = _(0.05, "decoupled, on matrices only; 0: off", 0)
    grad_clip: float = _(1.0, "bound of the global gradient norm; 0: off", 0)
    # supervised: objective sft, and the warm start of the toy
    sft_steps: int = _(1000, "optimiser steps", 1)
    sft_tokens: int = _(256, "packed tokens per step, over all trainers", 1)
    sft_examples: int = _(0, "examples per step, whatever their length; 0: as sft_tokens says", 0)
    sft_lr: float = _(5e-3, "peak learning rate", 1e-12)
    sft_warmup: int = _(20, "steps of linear warm-up; 0: none", 0)
    sft_decay: bool = _(True, "less at each step, linearly towards 0; false: constant")
    # evaluation
    eval_problems: int = _(200, "held out for pass@1 (sft: for the loss) before and after; 0: none", 0)
    eval_answers: int = _(4, "answers to each", 1)
    # device
    device: Literal["auto", "cpu", "cuda"] = _("auto", "auto: a GPU if there is one", free=True)
    dtype: Literal["auto", "float32", "bfloat16"] = _("auto", "of compute; auto: bfloat16 on a GPU, else float32")
    attention: Literal["packed", "sdpa", "eager", "flex_attention", "flash_attention_2"] = _(
        "packed", "of the trainer; packed needs no mask", free=True)  # fmt: skip
    activation_checkpointing: bool = _(False, "compute activations again in the backward, layer by layer", free=True)
    shard_ranks: int = _(0, "trainers that share a copy of the model, the others hold replicas; 0: all", 0, free=True)
    bucket_mb: int = _(64, "MiB per broadcast of a weight update", 1, free=True)
    # records and checkpoints
    tensorboard: bool = _(False, "the rows of metrics.jsonl for TensorBoard, too", free=True)
    checkpoint_every: int = _(5, "train steps; 0: only the final model", 0, free=True)
    keep_checkpoints: int = _(2, "newest ones kept", 1, free=True)
    # scoring
    scorers: int = _(1, "worker processes per generator", 1, free=True)
    score_timeout: float = _(10.0, "seconds per answer, programs aside", 0.01, free=True)
    test_timeout: float = _(6.0, "seconds per test of a program", 0.01)
    code_timeout: float = _(200.0, "seconds for all tests of a program", 0.01)
    unsafe_code: bool = _(False, "run programs without a sandbox, as you", free=True)
    # deadlines, seconds
    startup_timeout: float = _(600.0, "for all ranks to join and all engines to be up", 1, free=True)
    batch_timeout: float = _(1800.0, "for a batch, a plan or a notice", 1, free=True)
    update_timeout: float = _(120.0, "for each stage of a weight update", 1, free=True)
    engine_timeout: float = _(60.0, "for one token of a server that is asked for a sign of life", 1, free=True)


def parse(argv: list[str]) -> Config:
    """Configuration from the command line over an optional `--config FILE.yaml`. Raises Refused."""
    argv = [word for arg in argv for word in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    parser = HfArgumentParser(Config, allow_abbrev=False)

    def refuse(message: str):
        raise Refused(message)

    parser.error = refuse  # argparse would print its usage once a rank
    if "--config" in argv:
        at = argv.index("--config")
        path = argv[at + 1] if at + 1 < len(argv) else ""
        del argv[at : at + 2]
        try:
            values = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise Refused(f"--config {path}: {error}") from error
        if not isinstance(values, dict):
            raise Refused(f"--config {path}: expected lines of `name: value`")
        values.pop("derived", None)  # of a run's own config.yaml
        argv = [f"--{name}={value}" for name, value in values.items()] + argv
    cfg, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        filters = unknown[0].lstrip("-").startswith(("top_", "min_p", "repetition_", "frequency_", "presence_"))
        raise Refused(f"there is no setting {unknown[0]}: " + (
            "filters and penalties would make log-probabilities another distribution's than the trained policy's"
            if filters else "type `python train.py --help` for all of them"))  # fmt: skip
    return cfg


# -- Who am I, which model ---------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """One process's place in the job."""

    rank: int
    world: int
    trainers: int
    device: torch.device
    dtype: torch.dtype  # of compute and generation
    folder: Path = None  # of the run
    checkpoint: Path | None = None  # to continue from
    warm: bool = False  # the toy's warm start is kept already
    engine: str = ""  # sglang or transformers,
    why: str = ""  # and why
    backend: str = "gloo"  # between trainers,
    weight_backend: str = "gloo"  # and between trainer 0 and generators
    trainer_group: dist.ProcessGroup = None
    mesh: DeviceMesh = None  # of the trainers: 1-D, or replicas x shards
    weight_group: dist.ProcessGroup = None

    @property
    def role(self) -> str:
        return "trainer" if self.rank < self.trainers else "generator"

    def servers(self, tp: int) -> tuple[list[int], list[int]]:
        """(generator ranks that have an engine, those that only lend it their GPU)."""
        generators = range(self.trainers, self.world)
        return list(generators[::tp]), [rank for i, rank in enumerate(generators) if i % tp]

    def share(self) -> dict:
        total = functools.partial(dist.all_reduce, group=self.trainer_group)
        return {"ranks": self.trainers, "all_reduce": total, "device": self.device}


def join(cfg: Config) -> Rank:
    """Process groups (the world is gloo, trainers and weights have NCCL where ranks have GPUs) and the run's folder."""
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
    gpus, here = torch.cuda.device_count() if cuda else 0, int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local % gpus) if cuda else torch.device("cpu")
    dtype = getattr(torch, cfg.dtype if cfg.dtype != "auto" else "bfloat16" if cuda else "float32")
    me = Rank(rank, world, cfg.trainers, device, dtype)
    # A store of this attempt's own: torch would use the names of the attempt before, and connect to dead ranks.
    channel = Channel(cfg.startup_timeout)
    store = dist.PrefixStore(f"{channel.prefix}world", channel.store)
    dist.init_process_group("gloo", timeout=timedelta(seconds=cfg.startup_timeout), store=store, rank=rank,
                            world_size=world)  # fmt: skip
    if rank == 0:  # one rank looks: another job may be writing under the same parent folder
        store.set("run", json.dumps(choose_run(cfg, channel, cuda)))
    folder, checkpoint, me.warm, me.engine, me.why = json.loads(store.get("run"))
    if not folder:
        raise Refused(checkpoint)
    me.folder, me.checkpoint = Path(folder), Path(folder, "checkpoints", checkpoint) if checkpoint else None
    if cuda and (me.role == "trainer" or me.engine == "transformers"):  # a server has its GPU for itself
        torch.cuda.set_device(device)
    if me.engine == "sglang":  # as its servers do: both sides of an NCCL group have to agree
        os.environ |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"} | os.environ
    me.backend = "nccl" if cuda and min(cfg.trainers, here) <= gpus else "gloo"  # NCCL wants a GPU for each rank
    me.weight_backend = "nccl" if cuda and here <= gpus else "gloo"
    if cuda and here > gpus:
        torch.cuda.set_per_process_memory_fraction(0.9 * gpus / here, device)
        me.why += f"; {here} ranks share {gpus} GPU(s), each at most {0.9 * gpus / here:.0%} of one, weights over gloo"
    longest = timedelta(seconds=max(cfg.startup_timeout, cfg.batch_timeout))  # rank 0 may wait for generators
    me.trainer_group = dist.new_group(list(range(cfg.trainers)), longest, me.backend)
    grid = torch.arange(cfg.trainers).view(-1, cfg.shard_ranks or cfg.trainers)  # [replicas, shards]
    groups = [[dist.new_group(ranks, longest, me.backend) for ranks in rows.tolist()]
              for rows in (grid.T, grid)] if len(grid) > 1 else []  # fmt: skip
    if me.role == "trainer" and groups:
        mine = [groups[0][rank % grid.shape[1]], groups[1][rank // grid.shape[1]]]
        me.mesh = DeviceMesh.from_group(mine, device.type, mesh=grid, mesh_dim_names=("replicas", "shards"))
    elif me.role == "trainer":
        me.mesh = DeviceMesh.from_group(me.trainer_group, device.type, mesh_dim_names=("shards",))
    if me.engine == "transformers":  # with SGLang its servers join: `push_weights`
        ranks, limit = [0, *range(cfg.trainers, world)], timedelta(seconds=cfg.update_timeout)
        me.weight_group = dist.new_group(ranks, limit, me.weight_backend)
    return me


def build_policy(cfg: Config, me: Rank, source: str) -> ppo.Policy:
    """The model under FSDP2: float32 weights, gradients and Adam state, compute in `dtype`. `source` is a folder or hub
    name, or "" for an untrained one (the toy before its warm start, or a checkpoint follows)."""
    real = cfg.model == "toy" and not source
    try:
        with torch.device(me.device if real else "meta"):
            model = toy.empty_model(cfg.model, torch.float32, cfg.seed).eval()
        ppo.set_attention(model, cfg.attention)
        policy = ppo.shard(model, cfg.temperature, me.mesh, me.dtype, cfg.activation_checkpointing)
        if not real:
            toy.materialise(policy, source, me.trainer_group, me.device)
    except (OSError, ValueError) as error:
        raise Refused(f"{cfg.model} {error}") from error
    if cfg.model != "toy":
        with contextlib.suppress(OSError):  # it has none; else it goes into the exported model
            model.generation_config = GenerationConfig.from_pretrained(cfg.model)
    return policy


# -- Supervised: an objective of its own, and the toy's warm start -----------------------------------------------------


def train_supervised(cfg: Config, me: Rank, tokenizer, examples: list[Trajectory], test: list[Trajectory],
                     fingerprint: str, dropped: int) -> None:  # fmt: skip
    """`--objective sft`: every rank trains; the model ends up where reinforcement would put it."""
    state = read_state(me.checkpoint, cfg, fingerprint) if me.checkpoint else {"version": 0, "records": {}}
    records = Records(me.folder, me.rank, me.rank == 0, cfg.sft_steps, state["version"], state["records"])
    records.open(cfg, me, {"examples": len(examples), "dropped (too long)": dropped, "held out": len(test),
                           "data": fingerprint})  # fmt: skip
    policy = build_policy(cfg, me, "" if cfg.model == "toy" or me.checkpoint else cfg.model)
    optimizer = ppo.build_optimizer(cfg, policy, cfg.sft_lr)
    load_state(me.checkpoint, me.trainer_group, policy, optimizer)

    def held_out() -> float | None:
        return held_out_loss(policy, test, cfg, rank=me.rank, **me.share()) if test else None

    def each(done: int, row: dict) -> None:
        keep = cfg.checkpoint_every and done % cfg.checkpoint_every == 0
        records.supervised(row | {"held_out_loss": held_out()} if keep or done == cfg.sft_steps else row)
        if keep and done < cfg.sft_steps:
            kept = {"fingerprint": fingerprint, "records": records.state()}
            save_checkpoint(me, policy, optimizer, done, cfg, kept)

    if not me.checkpoint:
        records.kept["held_out_loss_before"] = held_out()
    supervised(policy, optimizer, examples, cfg, start=state["version"], each=each, rank=me.rank, **me.share())
    toy.export(me.folder / "model", me.rank == 0, policy, tokenizer, me.dtype)
    records.finish_supervised(held_out())


# -- A generator rank --------------------------------------------------------------------------------------------------


async def generate(cfg: Config, me: Rank, tokenizer, problems, test, scorer: Scorer) -> None:
    try:
        engine = toy.make_engine(cfg, me, tokenizer)
        await engine.start()
        await Generator(cfg, me.rank, engine, scorer, problems, test).run()
        await engine.close()
    except BaseException as error:
        die(me.role, me.rank, error)  # from here: leaving the event loop would wait for threads that are blocked
    scorer.close()


# -- The trainer ranks -------------------------------------------------------------------------------------------------


def train(cfg: Config, me: Rank, tokenizer, has_test: bool, fingerprint: str, sizes: dict, probe: list[int]) -> None:
    """The life of a trainer rank. Rank 0 also plans, publishes and keeps the records. `probe`: tokens, see `sync`."""
    root = me.rank == 0
    state = read_state(me.checkpoint, cfg, fingerprint) if me.checkpoint else {"version": 0, "records": {}}
    if state["version"] > cfg.steps:
        raise Refused(f"steps={cfg.steps}, but {me.checkpoint} has done {state['version']} already")
    records = Records(me.folder, me.rank, root, cfg.steps, state["version"], state["records"])
    records.open(cfg, me, sizes)
    phase = records.phase

    # Start: weights from the checkpoint, from the toy's warm start, or from the model's folder.
    warm = warm_folder(cfg)
    source = cfg.model if cfg.model != "toy" else str(warm) if me.warm else ""
    policy = build_policy(cfg, me, "" if me.checkpoint else source)
    if cfg.model == "toy" and not me.checkpoint and not me.warm:
        with phase("warm start"):
            optimizer = ppo.build_optimizer(cfg, policy, cfg.sft_lr)
            examples = demonstrations(cfg, tokenizer)[0]
            supervised(policy, optimizer, examples, cfg, start=0, rank=me.rank, **me.share())
            toy.export(warm, root, policy, tokenizer, torch.float32, keep=True)
    optimizer = ppo.build_optimizer(cfg, policy, cfg.lr)
    load_state(me.checkpoint, me.trainer_group, policy, optimizer)

    queue, control = StalenessQueue(cfg.groups, cfg.max_staleness, cfg.steps, cfg.window), Channel()
    weights = [(name.removeprefix("lm."), p) for name, p in policy.named_parameters()]
    if root:
        if me.checkpoint:
            queue.load(state["queue"])
        control.sweep(["inbox", *(f"notices/{r}" for r in range(me.world)), *(f"plans/{r}" for r in range(me.world))])
        servers, helpers = me.servers(cfg.generator_tp)
        dispatcher = Dispatcher(queue, servers, cfg.batch_timeout, cfg.update_timeout, interrupt=cfg.interrupt,
                                max_rejections=cfg.groups * (cfg.max_staleness + 4), helpers=tuple(helpers),
                                fail=lambda error: die(me.role, me.rank, error))  # fmt: skip
        dispatcher.gather("ready", None, cfg.startup_timeout)

    sglang, dtype, buffers = me.engine == "sglang", str(me.dtype).removeprefix("torch."), {}
    store, invitations = invite(servers, cfg.generator_tp, me.weight_backend) if root and sglang else (None, {})
    first = {"manifest": manifest(weights), "probe": probe, "dtype": dtype, "bucket_bytes": cfg.bucket_mb << 20,
             "join": invitations}  # fmt: skip

    def push_weights(version: int) -> None:
        with phase("sync"):
            if root:
                dispatcher.begin_update(version, first)
                if sglang and me.weight_group is None:
                    me.weight_group = join_servers(store, invitations, cfg.update_timeout)
            checksum = send_weights(weights, me.weight_group, dtype=me.dtype, device=me.device, root=root, kept=buffers,
                                    bucket_bytes=cfg.bucket_mb << 20, align=me.dtype.itemsize if sglang else ALIGN)
            told = ppo.probe(policy, probe, me.device) if sglang else None
            if root:
                dispatcher.sent(version, checksum, told, dtype)

    push_weights(state["version"])
    if root:
        if has_test and not me.checkpoint:
            state["records"]["before"] = pass_at_1(dispatcher.evaluate(cfg.batch_timeout))
        records.begin(state["records"].get("before"), state["version"], dispatcher)
        dispatcher.publish()

    # The loop. A step: wait for a batch, plan, fetch, train, publish the new version, send the weights, write it down.
    for step in range(state["version"], cfg.steps):
        with phase("wait"):
            if root:
                groups, depth = dispatcher.next_batch()
                headers = [header for group in groups for header in group["trajectories"]]
                told = [[header[name] for name in PLANNED] for header in headers]
                for rank in range(1, me.trainers):
                    control.push(f"plans/{rank}", {"step": step, "headers": told})
            else:
                who = f"trainer rank {me.rank} waited for the plan of step {step} from trainer rank 0"
                told = control.pop(f"plans/{me.rank}", 2 * cfg.batch_timeout, who)["headers"]
                headers = [dict(zip(PLANNED, values, strict=True)) for values in told]
        for header in headers:
            if step - header["head_version"] > cfg.max_staleness:
                raise StalenessError(f"step {step}: trajectory {header['index']} of ticket {header['ticket']} began at "
                                     f"version {header['head_version']}, above max_staleness={cfg.max_staleness}")
        weights_of = [h["loss_tokens"] if cfg.loss_average == "token" else 1 for h in headers]
        plan = plan_step([h["length"] for h in headers], weights_of, seed=cfg.seed, step=step, ranks=me.trainers,
                         minibatches=cfg.minibatches, capacity=cfg.microbatch_tokens)  # fmt: skip
        with phase("fetch"):
            mine = {i for mini in plan for micro in mini.micro[me.rank] for i in micro}
            keys = {i: f"trajectory/{headers[i]['ticket']}/{headers[i]['index']}" for i in mine}
            held = {i: Trajectory.from_bytes(control.fetch(keys[i], headers[i]["bytes"])) for i in mine}
        lr = cfg.lr * min(1.0, (step + 1) / max(1, cfg.lr_warmup))
        for group in optimizer.param_groups:
            group["lr"] = lr
        rewards = ppo.shaped_rewards(cfg, [h["reward"] for h in headers], [h["ticket"] for h in headers])
        minibatches = [
            (mini.denominator, [pack([held[i] for i in micro]) for micro in mini.micro[me.rank]],
             [[rewards[i] for i in micro] for micro in mini.micro[me.rank]])
            for mini in plan
        ]  # fmt: skip
        stats = ppo.ppo_step(policy, optimizer, minibatches, cfg, version=step, phase=phase, **me.share())
        push_weights(step + 1)
        if root:
            dispatcher.trained()  # after the update's notice: no generator sees a version before it loads it
            records.step(step, groups, stats, lr, depth, dispatcher)
        else:
            control.push("inbox", {"kind": "trainer", "rank": me.rank, "events": records.take_events()})
        if cfg.checkpoint_every and (step + 1) % cfg.checkpoint_every == 0 and step + 1 < cfg.steps:
            with phase("checkpoint"):
                kept = {"queue": dispatcher.state(), "records": records.state()} if root else {}
                save_checkpoint(me, policy, optimizer, step + 1, cfg, kept | {"fingerprint": fingerprint})

    records.trained()
    toy.export(me.folder / "model", root, policy, tokenizer, me.dtype)
    if root:
        after = pass_at_1(dispatcher.evaluate(cfg.batch_timeout)) if has_test else None
        dispatcher.stop()
        records.finish(after, cfg.max_staleness, me.engine, dispatcher)


def main(argv: list[str] | None = None) -> None:
    rank, world, role = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), "trainer"
    try:
        cfg = parse(sys.argv[1:] if argv is None else argv)
        if cfg.dry_run:
            cfg.ranks = world if "RANK" in os.environ else cfg.ranks
            cfg = check(cfg, cfg.ranks)
            return rank or print(show(cfg, functools.partial(Rank, 0, cfg.ranks, cfg.trainers)))
        cfg = check(cfg, world)
        if "RANK" not in os.environ:
            raise Refused(f"the job is started by torchrun: type `torchrun --nproc_per_node {max(2, world)} train.py`")
        die_with_parent()  # torchrun does not end the ranks when it is killed itself
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        tokenizer = open_tokenizer(cfg)
        if cfg.objective == "sft":
            examples = demonstrations(cfg, tokenizer)  # before `join` makes a folder
            train_supervised(cfg, me := join(cfg), tokenizer, *examples)
        else:
            problems, test, fingerprint, dropped = load_data(cfg, tokenizer)
            role = "trainer" if rank < cfg.trainers else "generator"
            # Workers start before the process group: they must inherit nothing of it.
            helper = role == "generator" and (rank - cfg.trainers) % cfg.generator_tp > 0
            scorer = Scorer(cfg) if role == "generator" and not helper else None
            me = join(cfg)
            if helper:  # its GPU is its neighbour's; whether all is well is for the others to see
                Channel().pop(f"notices/{rank}", FOREVER, f"rank {rank} waited for the end")
            elif role == "generator":
                asyncio.run(generate(cfg, me, tokenizer, problems, test, scorer))
            else:
                sizes = {"problems": len(problems), "dropped (too long)": dropped, "held out": len(test)}
                probe = [token for problem in problems[:8] for token in problem.prompt_ids] * 2  # two at least
                train(cfg, me, tokenizer, bool(test), fingerprint, {**sizes, "data": fingerprint},
                      probe[: min(64, cfg.max_prompt_tokens + cfg.max_new_tokens)])  # fmt: skip
        if me.engine != "sglang" or me.weight_backend != "nccl":  # its end takes the whole group
            dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # a thread that still waits in the store would abort the interpreter's own end
    except Refused as error:
        if rank:
            time.sleep(10)  # rank 0 says it first, and torchrun then ends this rank; else this one has to say it
        print(f"train.py: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    except Exception as error:
        die(role, rank, error)


if __name__ == "__main__":
    main()
