"""All the arithmetic of decoupled PPO on packed rows: advantages, their normalisation, the loss, log-probabilities.

Left out on purpose:
- a critic: `gae` takes values, but boba trains none; at gamma = lambda = 1 each token then gets its sequence's reward;
- a reference model, KL penalty and entropy bonus: their coefficient is zero in this recipe;
- a mean anywhere: every function returns or sums per-token terms, and the caller divides once by the number of loss
  tokens of the whole mini-batch over all ranks. A mean per micro-batch would make the gradient depend on the packing;
- ranks: FSDP2 has its group (`shard`), and whatever else must be summed over trainer ranks goes through one argument,
  `all_reduce`, a function that sums a float64 tensor in place over them (None: a single rank).

Rows are packed as in `packing.py`: T tokens, entry i belongs to token i, trajectory i is [starts[i], starts[i + 1]),
`mask` marks the loss tokens. Whatever stands at other positions, nan included, changes neither results nor gradients.

    python -m pytest tests/test_ppo.py -m "not slow"      # CPU, under a minute
    python -m pytest tests/test_ppo.py -m slow            # peak memory at a vocabulary of 151,936
"""

import itertools
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from packing import Packed, Trajectory, pack, plan_step, sft_batches

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far beyond any useful ratio, and its square is still finite in float32
LOGITS_BUDGET = 2**26  # elements of one chunk of logits: 256 MiB in float32, 441 rows at a vocabulary of 151,936


def scaled_reward(cfg, reward: float) -> float:
    """(reward + bias) x scaling, clipped: +5 / -5 by default."""
    return max(-cfg.reward_clip, min(cfg.reward_clip, (reward + cfg.reward_bias) * cfg.reward_scaling))


def gae(rewards, mask, starts, values=None, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    """Generalised advantage estimation over the generated tokens of each trajectory (arXiv 1506.02438, eq. 16).

    The steps of a trajectory are its generated tokens; tokens of the prompt or of the environment in between are
    skipped, neither discounting nor ending anything. With V = 0 after the last step, where the reward is paid:
        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lambda A_{t+1}.

    rewards: of each trajectory [n]; mask: bool [T]; starts: int [n + 1]; values: [T], None without a critic. Tokens
    beyond starts[-1] belong to no trajectory. Returns float64 [T], 0 where `mask` is False.
    Raises ValueError if a trajectory with generated tokens has no finite reward, or if lengths disagree.

    >>> mask = torch.tensor([False, True, True, False, True, False, True])
    >>> gae([5.0, -5.0], mask, [0, 5, 7], gamma=0.5).tolist()
    [0.0, 1.25, 2.5, 0.0, 5.0, 0.0, -5.0]
    """
    mask = torch.as_tensor(mask)
    rewards = torch.as_tensor(rewards, dtype=torch.float64, device=mask.device)  # [n]
    starts = torch.as_tensor(starts, device=mask.device)  # [n + 1]
    if len(starts) != len(rewards) + 1 or mask[int(starts[-1]):].any():
        raise ValueError(f"{len(rewards)} rewards, {len(starts)} starts and a mask of {len(mask)} do not fit together")
    steps = mask.nonzero().squeeze(1)  # [G] positions of the generated tokens
    owner = torch.searchsorted(starts[1:].contiguous(), steps, right=True)  # [G] trajectory of each
    paid = rewards[owner]  # [G]
    if not paid.isfinite().all():
        raise ValueError("a trajectory without a finite reward cannot be trained: was it scored?")
    value = torch.zeros_like(paid)  # [G]
    if values is not None:
        value = torch.as_tensor(values, dtype=torch.float64, device=mask.device)[steps]
    if gamma == lam == 1.0:
        step_advantages = paid - value  # all deltas from t to the end, where everything but V_t and the reward cancels
    else:
        counts = owner.bincount(minlength=len(rewards))  # [n] steps of each trajectory
        last = torch.ones_like(steps, dtype=torch.bool)
        last[:-1] = owner[1:] != owner[:-1]
        step_advantages = torch.where(last, paid, gamma * value.roll(-1)) - value  # the deltas, [G]
        ends = counts.cumsum(0)
        for back in range(1, max(counts.tolist(), default=0)):
            at = ends[counts > back] - 1 - back  # all trajectories at once, from their last step backwards
            step_advantages[at] += gamma * lam * step_advantages[at + 1]
    return torch.zeros(len(mask), dtype=torch.float64, device=mask.device).index_copy(0, steps, step_advantages)


def normalise(advantages: Tensor, mask: Tensor, all_reduce: Callable[[Tensor], object] | None = None,
              eps: float = 1e-5) -> Tensor:
    """(A - mean) / (population deviation + eps) over the loss tokens of all ranks; every token weighs the same.

    Once per train step, before the batch is cut into mini-batches, and in float64. All ranks must call it, a rank
    without tokens too. The deviation is taken from the mean in a second pass: E[A^2] - E[A]^2 would cancel.

    advantages, mask: [T]. Returns float32 [T], exactly 0 where `mask` is False or all advantages are equal.

    >>> normalise(torch.tensor([5.0, -5.0, -5.0, -5.0, 99.0]), torch.tensor([True, True, True, True, False]))
    tensor([ 1.7320, -0.5773, -0.5773, -0.5773,  0.0000])
    """
    def total(*terms: Tensor) -> Tensor:
        sums = torch.stack([term.sum(dtype=torch.float64) for term in terms])
        if all_reduce is not None:
            all_reduce(sums)
        return sums

    kept = advantages[mask].double()  # [N] sums over these alone: padding cannot even change the rounding
    count, summed = total(mask, kept)
    mean = summed / count.clamp(min=1)
    centred = kept - mean
    # What is left of equal numbers is the rounding of their mean; divided by eps, then by Adam, it could come to life.
    centred = torch.where(centred.abs() <= 1e-13 * mean.abs(), 0.0, centred)
    deviation = (total(centred.square())[0] / count.clamp(min=1)).sqrt()
    result = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    result[mask] = (centred / (deviation + eps)).float()
    return result


def policy_loss(current: Tensor, proximal: Tensor | None, behaviour: Tensor | None, advantages: Tensor, mask: Tensor, *,
                clip: float = 0.2, behaviour_cap: float | None = 5.0, dual_clip: float | None = None,
                decoupled: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss of each token, around the proximal policy and corrected for the behaviour policy.

    Decoupled (arXiv 2110.00641, 2505.24298): r = exp(current - proximal), w = exp(proximal - behaviour) without
    gradient, loss = w max(-A r, -A clip(r, 1 - clip, 1 + clip)). A token with w above `behaviour_cap` (None: no cap) is
    dropped, not clamped: it has zero loss and gradient, but still counts in the caller's denominator.
    Not decoupled (arXiv 1707.06347, eq. 7): r = exp(current - behaviour), no w; `proximal` and the cap are not used.
    `dual_clip` c > 1 (arXiv 1912.09729, None: off) bounds the max by c |A|, before the product with w.
    Log-ratios are clamped to +-20, and have no gradient beyond.

    current, proximal, behaviour: log-probabilities [T]; advantages, mask: [T]. Returns the loss of each token [T], 0
    off the mask, and sums over the mask as float64 scalars without gradient (they add up over micro-batches and ranks;
    divide by `tokens`): `tokens`, `ratio`, `clipped` (tokens where the clipped term was the larger), `approx_kl` (sum
    of log r, the estimator k1 with the sign new - old: on average minus KL(old || new)); if decoupled also
    `behaviour_kl` (the same of log w), `dropped` and `behaviour_weight` (of tokens not dropped: divide by `tokens -
    dropped`); with dual clip also `dual_clipped`. Raises ValueError if a needed log-probability is None.

    >>> loss, stats = policy_loss(torch.tensor([0.42, 0.2]).log(), torch.tensor([0.4, 0.3]).log(),
    ...     torch.tensor([0.05, 0.1]).log(), torch.tensor([0.5, -0.5]), torch.tensor([True, True]))
    >>> loss.tolist(), stats["dropped"].item()     # w = 8 and 3, r = 1.05 and 0.67
    ([0.0, 1.2000000476837158], 1.0)
    """
    if behaviour is None or (decoupled and proximal is None):
        raise ValueError("the loss needs log-probabilities of the generator and, if decoupled, also of the weights at "
                         "the start of the step: without them off-policy tokens would be trained as if on-policy")
    if not (behaviour_cap is None or behaviour_cap > 0) or not (dual_clip is None or dual_clip > 1):
        raise ValueError(f"the cap must be above 0 and the dual clip above 1, got {behaviour_cap} and {dual_clip}")

    def on_mask(values: Tensor) -> Tensor:  # before any arithmetic: in a backward 0 * nan would be nan
        return torch.where(mask, values, 0.0)

    advantages, behaviour = on_mask(advantages.detach()), on_mask(behaviour.detach())
    reference = on_mask(proximal.detach()) if decoupled else behaviour
    log_ratio = on_mask(current) - reference  # [T]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip, 1 + clip)
    loss = torch.maximum(unclipped, clipped)
    sums = {"tokens": mask, "ratio": on_mask(ratio), "clipped": clipped > unclipped, "approx_kl": log_ratio}
    if dual_clip is not None:
        bound = dual_clip * advantages.abs()
        sums["dual_clipped"] = loss > bound
        loss = torch.minimum(loss, bound)
    if decoupled:
        log_weight = reference - behaviour
        weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        # "above the cap" and not "unless below": a nan among the loss tokens must come out, not be dropped in silence.
        dropped = mask & (weight > (torch.inf if behaviour_cap is None else behaviour_cap))
        loss = torch.where(dropped, 0.0, loss * weight)
        sums |= {"dropped": dropped, "behaviour_weight": on_mask(torch.where(dropped, 0.0, weight)),
                 "behaviour_kl": log_weight}
    return loss, {name: terms.detach().sum(dtype=torch.float64) for name, terms in sums.items()}


def scale_loss(token_losses: Tensor, denominator: int, ranks: int) -> Tensor:
    """The scalar to call backward on, of one micro-batch: sum / denominator, times ranks.

    token_losses: [T]; denominator: loss tokens of the whole mini-batch over all ranks (`MiniBatch.denominator`). FSDP
    averages gradients over `ranks`; the factor turns that into the sum. Raises ValueError if the denominator is 0.

    >>> scale_loss(torch.tensor([1.0, 2.0]), denominator=6, ranks=2)
    tensor(1.)
    """
    if denominator < 1:
        raise ValueError("a mini-batch without loss tokens has no gradient: all ranks must skip it")
    return token_losses.sum() * (ranks / denominator)


class _ChunkedLogprobs(torch.autograd.Function):
    """log softmax(hidden head^T / temperature) at the targets, and its entropy, some rows at a time.

    The backward computes each chunk's logits again instead of keeping them; compared with checkpointing the same
    formula it needs two chunks of logits less and one gradient of the head instead of one a chunk.
    """

    @staticmethod
    def logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:  # [R, H], [V, H] -> [R, V]
        wide = torch.promote_types(hidden.dtype, torch.float32)  # the product is in the model's dtype, what follows not
        return (hidden @ head.T).to(wide).div_(temperature)

    @staticmethod
    def forward(ctx, hidden, head, targets, temperature, chunk, with_entropy):  # [N, H], [V, H], [N]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        normaliser, logprobs, entropy = hidden.new_zeros((3, len(targets)), dtype=wide)  # [N] each
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            logits = _ChunkedLogprobs.logits(hidden[rows], head, temperature)  # [R, V]
            top = logits.amax(-1, keepdim=True)
            logits.sub_(top)  # large logits would lose the digits of both results
            scratch = logits.exp()
            total = scratch.sum(-1)
            log_total = total.log()
            logprobs[rows] = logits.gather(-1, targets[rows, None]).squeeze(-1) - log_total
            normaliser[rows] = top.squeeze(-1) + log_total
            if with_entropy:  # - sum p log p = log total - sum p (logit - top)
                entropy[rows] = log_total - scratch.mul_(logits).sum(-1) / total
            del logits, scratch  # before the next chunk is made, or two of them exist
        ctx.save_for_backward(hidden, head, targets, normaliser)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):  # [N]
        hidden, head, targets, normaliser = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # Many chunks add up: in bfloat16 the later ones would be rounded away.
        grad_head = torch.zeros_like(head, dtype=normaliser.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            slope = _ChunkedLogprobs.logits(hidden[rows], head, ctx.temperature)  # [R, V]
            slope.sub_(normaliser[rows, None]).exp_().neg_()  # d logprob / d logit = (1 at the target) - p
            slope.scatter_add_(-1, targets[rows, None], torch.ones_like(slope[:, :1]))
            slope = slope.mul_(grad[rows, None] / ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = slope @ head
            if grad_head is not None:
                grad_head += slope.T @ hidden[rows]
            del slope
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None, None, None


def token_logprobs(hidden: Tensor, head: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, *,
                   temperature: float = 1.0, chunk: int | None = None,
                   with_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
    """log p(token i | tokens before i) from the last hidden states: the one place of the shift by one.

    The model's output at token i - 1 predicts token i, so entry i reads hidden[i - 1]. The logits are divided by the
    sampling temperature, as the generator's are. Only rows under the mask are computed, `chunk` at a time (default:
    as many as LOGITS_BUDGET allows), so that a [T, V] matrix exists neither forward nor backward. An empty mask gives
    zeros that still depend on `hidden` and `head`, with zero gradient: a rank without tokens joins every collective.

    hidden: [T, H] of one packed row; head: [V, H]; tokens, positions: int [T]; mask: bool [T].
    Returns (logprobs [T], entropy [T] in nats or None), float32 (float64 from float64), 0 off the mask and at position
    0. The entropy has no gradient. Raises ValueError if shapes disagree or the temperature is not above 0.

    >>> row = torch.tensor([0, 1, 0]), torch.arange(3), torch.tensor([False, True, True])
    >>> token_logprobs(torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([[0.0], [1.0]]), *row)[0]
    tensor([ 0.0000, -0.6931, -1.3133])
    """
    if hidden.ndim != 2 or not len(hidden) == len(tokens) == len(positions) == len(mask):
        raise ValueError(f"hidden states {tuple(hidden.shape)} must be [T, H] with T tokens, positions and mask "
                         f"entries, got {len(tokens)}, {len(positions)} and {len(mask)}")
    if not temperature > 0:
        raise ValueError(f"log-probabilities need a temperature above 0, got {temperature}")
    chunk = chunk or max(1, LOGITS_BUDGET // len(head))
    rows = (mask & (positions > 0)).nonzero().squeeze(1)  # [N]
    before = hidden.index_select(0, rows - 1)  # [N, H]
    picked, entropy = _ChunkedLogprobs.apply(before, head, tokens[rows], temperature, chunk, with_entropy)
    blank = picked.new_zeros(len(tokens))  # [T]
    return blank.index_copy(0, rows, picked), blank.index_copy(0, rows, entropy) if with_entropy else None


# -- Steps of an optimiser ---------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """A causal language model, called so that the [T, V] matrix of logits never exists.

    The head is applied here and not by the model, in chunks of rows; under FSDP2 this module is the root, so the head's
    weight is whole while `forward` and its backward run.
    """

    def __init__(self, lm: nn.Module, temperature: float):
        super().__init__()
        self.lm, self.temperature = lm, temperature

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """tokens, positions: int64 [T] of a packed row; mask: bool [T]. Returns (logprobs [T], entropy [T])."""
        # Without a mask and without a cache the model reads the borders of the row from the positions; with either,
        # later sequences would attend to earlier ones.
        hidden = self.lm.base_model(input_ids=tokens[None], position_ids=positions[None], attention_mask=None,
                                    use_cache=False).last_hidden_state[0]  # [T, H]
        head = self.lm.get_output_embeddings().weight
        return token_logprobs(hidden, head, tokens, positions, mask, temperature=self.temperature)


def shard(lm: nn.Module, temperature: float, group, device, dtype: torch.dtype) -> Policy:
    """`lm` as a Policy under FSDP2 over `group`, compute in `dtype`. ValueError if its logits are not simply head times
    hidden state, as `token_logprobs` computes them."""
    config = lm.config.get_text_config()
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, name, None):
            raise ValueError(f"scales its logits by {name}, which log-probabilities from hidden states ignore")
    if getattr(lm.get_output_embeddings(), "bias", None) is not None:
        raise ValueError("adds a bias to its logits, which log-probabilities from hidden states ignore")
    policy = Policy(lm, temperature)
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("trainers",))
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in lm.modules():
        if type(module).__name__ in (lm._no_split_modules or ()):
            fully_shard(module, mesh=mesh, mp_policy=mixed)
    fully_shard(policy, mesh=mesh, mp_policy=mixed)
    return policy


def build_optimizer(cfg, policy: nn.Module, lr: float) -> torch.optim.AdamW:
    matrices = [p for p in policy.parameters() if p.ndim >= 2]
    vectors = [p for p in policy.parameters() if p.ndim < 2]  # norms and biases are not decayed
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps)


def training_state(policy, optimizer) -> dict:
    model, optim = sd.get_state_dict(policy, optimizer)
    return {"model": model, "optim": optim, "random": torch.get_rng_state()}


def load_state(checkpoint: Path | None, group, policy, optimizer) -> None:
    """Weights, Adam state and random state of a checkpoint, sharded over `group` as they are now; None leaves all."""
    if checkpoint is None:
        return
    state = training_state(policy, optimizer)
    dcp.load(state, checkpoint_id=checkpoint, process_group=group)
    sd.set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    torch.set_rng_state(state["random"])


def export(folder: Path, root: bool, policy, tokenizer, keep: bool = False) -> None:
    """A Hugging Face folder. All trainers take part, `root` writes; written beside, then renamed. With `keep` a folder
    that another job made meanwhile stays: that job may be reading it."""
    options = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = {k.removeprefix("lm."): v for k, v in sd.get_model_state_dict(policy, options=options).items()}
    if root:
        new = folder.with_name(f".{folder.name}.{os.getpid()}")
        policy.lm.save_pretrained(new, state_dict=weights)
        tokenizer.save_pretrained(new)
        try:
            os.replace(new, folder)
        except OSError:  # it exists: another job was faster with the same warm start, or an earlier attempt
            shutil.rmtree(new if keep else folder)
            if not keep:
                os.replace(new, folder)


@torch.no_grad()
def probe(policy: Policy, ids: list[int], device) -> list[float]:
    """log p(token | tokens before it) of `ids` without the first, at temperature 1: what any engine says about a
    prompt. All ranks call it, for under FSDP2 a forward is a collective."""
    tokens, mask = torch.tensor(ids, device=device), torch.ones(len(ids), dtype=torch.bool, device=device)
    mask[0] = False
    kept, policy.temperature = policy.temperature, 1.0
    logprobs, _ = policy(tokens, torch.arange(len(ids), device=device), mask)
    policy.temperature = kept
    return logprobs[1:].tolist()


@dataclass
class _Row:
    """A packed micro-batch on the device, and what is known about it before the first optimiser step."""

    inputs: tuple[Tensor, Tensor, Tensor]  # tokens, positions, mask, [T] each
    behaviour: Tensor  # [T]
    versions: Tensor  # [T]
    advantages: Tensor  # [T]
    proximal: Tensor | None = None  # [T]


def _inputs(packed: Packed, device) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.as_tensor(a, device=device) for a in (packed.tokens, packed.positions, packed.loss_mask))


def _optimise(policy: nn.Module, optimizer, grad_clip: float) -> float:
    """Clip the global gradient norm (0: only measure it) and step; returns the norm. A norm that is not finite skips
    the step on all ranks alike, and shows in the metrics."""
    norm = nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or float("inf"))
    norm = norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()
    if math.isfinite(norm):
        optimizer.step()
    return norm


def ppo_step(policy: nn.Module, optimizer, minibatches: list[tuple[int, list[Packed], list[list[float]]]], cfg, *,
             version: int, phase, ranks: int, all_reduce: Callable[[Tensor], object], device) -> dict:
    """One train step of this rank: log-probabilities, advantages, an optimiser step a mini-batch; returns metrics.

    minibatches: (denominator, packed micro-batches, rewards of their trajectories) each, see `plan_step`. `cfg` has
    gamma, lam, clip, behaviour_cap (0: none), decoupled, grad_clip. `version`: of the weights at the start.
    `phase(name)` is a context manager that times. The metrics are means over the loss tokens of all ranks.
    """
    batch = []
    for denominator, packs, rewards in minibatches:
        rows = []
        for packed, reward in zip(packs, rewards, strict=True):
            inputs = _inputs(packed, device)
            behaviour, versions = (torch.as_tensor(a, device=device) for a in (packed.behaviour, packed.versions))
            advantages = gae(reward, inputs[2], packed.starts, None, cfg.gamma, cfg.lam)
            rows.append(_Row(inputs, behaviour, versions, advantages))
        batch.append((denominator, rows))
    every = [row for _, rows in batch for row in rows]
    sums: Counter = Counter()

    with phase("advantages"):
        lengths = [len(row.advantages) for row in every]
        flat = normalise(torch.cat([row.advantages for row in every]), torch.cat([row.inputs[2] for row in every]),
                         all_reduce)
        for row, advantages in zip(every, flat.split(lengths), strict=True):
            row.advantages = advantages
    with phase("log-probabilities"), torch.no_grad():
        for row in every if cfg.decoupled else ():
            row.proximal = policy(*row.inputs)[0]
            fresh = row.inputs[2] & (row.versions == version)  # same weights on both sides: only rounding is between
            sums["gap"] += (row.proximal - row.behaviour)[fresh].abs().sum(dtype=torch.float64)
            sums["fresh"] += fresh.sum(dtype=torch.float64)

    norms, skipped = [], 0
    with phase("train"):
        for denominator, rows in batch:
            if not denominator:
                continue
            optimizer.zero_grad()
            for row in rows:
                current, entropy = policy(*row.inputs)
                losses, stats = policy_loss(current, row.proximal, row.behaviour, row.advantages, row.inputs[2],
                                            clip=cfg.clip, behaviour_cap=cfg.behaviour_cap or None,
                                            decoupled=cfg.decoupled)
                scale_loss(losses, denominator, ranks).backward()
                sums.update({**stats, "entropy": entropy.sum(dtype=torch.float64),
                             "loss": losses.detach().sum(dtype=torch.float64)})
            norm = _optimise(policy, optimizer, cfg.grad_clip)
            norms += [norm] if math.isfinite(norm) else []
            skipped += not math.isfinite(norm)
    names = ["tokens", "loss", "entropy", "ratio", "clipped", "approx_kl", "behaviour_kl", "behaviour_weight",
             "dropped", "gap", "fresh"]
    totals = torch.stack([torch.as_tensor(sums[name], dtype=torch.float64, device=device) for name in names])
    all_reduce(totals)
    total = dict(zip(names, totals.tolist(), strict=True))
    tokens, kept = max(1.0, total["tokens"]), max(1.0, total["tokens"] - total["dropped"])
    return {
        "loss": total["loss"] / tokens, "entropy": total["entropy"] / tokens,
        "importance_weight": total["ratio"] / tokens, "clip_fraction": total["clipped"] / tokens,
        "kl_current_proximal": total["approx_kl"] / tokens, "kl_proximal_behaviour": total["behaviour_kl"] / tokens,
        "behaviour_weight": total["behaviour_weight"] / kept, "dropped_fraction": total["dropped"] / tokens,
        "logprob_gap": total["gap"] / total["fresh"] if total["fresh"] else None,  # None: nothing to compare
        "grad_norm": sum(norms) / max(1, len(norms)), "skipped_updates": skipped,
    }


def supervised(policy: nn.Module, optimizer, examples: list[Trajectory], cfg, *, start: int, rank: int, ranks: int,
               all_reduce: Callable[[Tensor], object], device, each: Callable[[int, dict], None] | None = None) -> None:
    """Token-level cross-entropy of the loss tokens of `examples`, packed and spread over ranks like reinforcement.

    `cfg` has sft_steps, sft_tokens (per step, over all ranks), sft_lr, microbatch_tokens, grad_clip, seed. Begins with
    step `start` of the same sequence of batches. After each step `each(steps done, metrics)` is called.
    """
    batches = sft_batches([len(example.tokens) for example in examples], cfg.sft_tokens, cfg.seed)
    for step, chosen in enumerate(itertools.islice(batches, start, cfg.sft_steps), start):
        for group in optimizer.param_groups:  # a short warm-up, then linear to 0
            group["lr"] = lr = cfg.sft_lr * min((step + 1) / 20, 1 - step / cfg.sft_steps)
        batch = [examples[i] for i in chosen]
        (mini,) = plan_step([len(e.tokens) for e in batch], [int(e.loss_mask.sum()) for e in batch], seed=cfg.seed,
                            step=step, ranks=ranks, minibatches=1, capacity=cfg.microbatch_tokens)
        total = torch.zeros((), dtype=torch.float64, device=device)
        optimizer.zero_grad()
        for micro in mini.micro[rank]:
            losses = -policy(*_inputs(pack([batch[i] for i in micro]), device))[0]
            scale_loss(losses, mini.denominator, ranks).backward()
            total += losses.detach().sum(dtype=torch.float64)
        all_reduce(total)
        norm = _optimise(policy, optimizer, cfg.grad_clip)
        if each is not None:
            each(step + 1, {"step": step, "loss": total.item() / mini.denominator, "grad_norm": norm, "lr": lr,
                            "tokens": mini.denominator})
