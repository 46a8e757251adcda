"""All the arithmetic of decoupled PPO on packed rows: advantages, their normalisation, the loss, log-probabilities.

Left out on purpose:
- a critic (at gamma = lambda = 1 each token gets its sequence's reward; a fork subtracts values in `gae`), a reference
  model, KL penalty and entropy bonus (their coefficient is zero in this recipe; a fork adds a term in `policy_loss`);
- a mean anywhere: per-token terms are summed, and the caller divides once, by the count of the whole mini-batch over
  all ranks. A mean per micro-batch would make the gradient depend on the packing;
- ranks: FSDP2 has its mesh (`shard`), and what else must be summed over trainers goes through `all_reduce`, a function
  that sums a float64 tensor in place (None: a single rank).

Rows are packed as in `packing.py`: T tokens, entry i belongs to token i, trajectory i is [starts[i], starts[i + 1]),
`mask` marks the loss tokens. Whatever stands at other positions, nan included, changes neither results nor gradients.

    pytest tests/test_ppo.py tests/test_model.py -m "slow or not slow"      # CPU, with peak memory at 151,936 words
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from packing import Packed

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far beyond any useful ratio, and its square is still finite in float32
LOGITS_BUDGET = 2**26  # elements of one chunk of logits: 256 MiB in float32, 441 rows at a vocabulary of 151,936


def shaped_rewards(cfg, rewards: Sequence[float], tickets: Sequence[int]) -> list[float]:
    """(reward + bias) x scaling, clipped: +5 / -5 by default. With `group_norm` "mean" less the mean of all answers to
    the same ticket, with "mean_std" also divided by their population deviation + 1e-5 (GRPO: arXiv 2402.03300, 4.1)."""
    shaped, tickets = (np.array(rewards, np.float64) + cfg.reward_bias) * cfg.reward_scaling, np.array(tickets)
    shaped = shaped.clip(-cfg.reward_clip, cfg.reward_clip)
    for ticket in np.unique(tickets) if cfg.group_norm != "none" else ():
        group = shaped[tickets == ticket]
        centred = group - group.mean() if np.ptp(group) else np.zeros(len(group))  # not what rounding leaves
        shaped[tickets == ticket] = centred / (group.std() + 1e-5 if cfg.group_norm == "mean_std" else 1.0)
    return shaped.tolist()


def gae(rewards, mask, starts, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    """Generalised advantage estimation over the generated tokens of each trajectory (arXiv 1506.02438, eq. 16).

    The steps of a trajectory are its generated tokens; tokens of the prompt or of the environment in between are
    skipped, neither discounting nor ending anything. The reward is paid at the last step, and without a critic V = 0:
        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lambda A_{t+1} = (gamma lambda)^(last - t) reward.

    rewards: of each trajectory [n]; mask: bool [T]; starts: int [n + 1]. Tokens beyond starts[-1] belong to no
    trajectory. Returns float64 [T], 0 where `mask` is False.
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
    ends = owner.bincount(minlength=len(rewards)).cumsum(0)  # [n]
    left = ends[owner] - 1 - torch.arange(len(steps), device=mask.device)  # [G] steps of its trajectory after each
    advantages = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    return advantages.index_copy(0, steps, paid * (gamma * lam) ** left.double())


def normalise(advantages: Tensor, mask: Tensor, all_reduce: Callable[[Tensor], object] | None = None,
              eps: float = 1e-5) -> Tensor:
    """(A - mean) / (population deviation + eps) over the loss tokens of all ranks; every token weighs the same.

    Once per train step, before it is cut into mini-batches, in float64. All ranks must call it, also without tokens.
    The deviation is taken from the mean in a second pass: E[A^2] - E[A]^2 would cancel.

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
                clip: float = 0.2, clip_high: float | None = None, behaviour_cap: float | None = 5.0,
                dual_clip: float | None = None, decoupled: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss of each token, around the proximal policy and corrected for the behaviour policy.

    Decoupled (arXiv 2110.00641, 2505.24298): r = exp(current - proximal), w = exp(proximal - behaviour) without
    gradient, loss = w max(-A r, -A clip(r, 1 - clip, 1 + clip_high)); `clip_high` None is `clip` (arXiv 2503.14476,
    eq. 10). A token with w above `behaviour_cap` (None: no cap) is dropped, not clamped: zero loss and gradient, but it
    counts in the denominator. Not decoupled (arXiv 1707.06347, eq. 7): r = exp(current - behaviour), no w, no cap.
    `dual_clip` c > 1 (arXiv 1912.09729, None: off) bounds the max by c |A|, before the product with w. Log-ratios are
    clamped to +-20, and have no gradient beyond.

    current, proximal, behaviour: log-probabilities [T]; advantages, mask: [T]. Returns the loss of each token [T], 0
    off the mask, and float64 sums over the mask, which add up over micro-batches and ranks: `tokens`, `ratio`,
    `clipped` (the clipped term was the larger), `approx_kl` (log r: k1 with the sign new - old); if decoupled
    `behaviour_kl` (log w), `dropped` and `behaviour_weight` (of tokens not dropped); with dual clip `dual_clipped`.
    Raises ValueError if a needed log-probability is None.

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
    clipped = -advantages * ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
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


def interpolated(current: Tensor, behaviour: Tensor, versions: Tensor, version: int) -> Tensor:
    """Proximal log-probabilities without a forward: between behaviour and current ones, as far as the weights of
    `version`, those at the start of the step, lie between the token's own and the next (what AReaL calls loglinear).

    >>> behaviour, current = torch.zeros(3), torch.ones(3)
    >>> interpolated(current, behaviour, torch.tensor([4, 3, 1]), version=4)
    tensor([0.0000, 0.5000, 0.7500])
    """
    return behaviour + (version - versions) / (version + 1 - versions) * (current.detach() - behaviour)


def scale_loss(token_losses: Tensor, denominator: int, ranks: int) -> Tensor:
    """The scalar to call backward on, of one micro-batch: sum / denominator, times ranks. token_losses: [T];
    denominator: of the whole mini-batch (`MiniBatch.denominator`). FSDP averages gradients over `ranks`; the factor
    turns that into the sum. Raises ValueError if the denominator is 0."""
    if denominator < 1:
        raise ValueError("a mini-batch without loss tokens has no gradient: all ranks must skip it")
    return token_losses.sum() * (ranks / denominator)


class _ChunkedLogprobs(torch.autograd.Function):
    """log softmax(hidden head^T / temperature) at the targets, and its entropy, some rows at a time.

    The backward computes each chunk's logits again instead of keeping them; checkpointing the same formula would need
    two chunks of logits more and one gradient of the head a chunk."""

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
    sampling temperature, as the generator's are. Rows under the mask alone are computed, `chunk` at a time (default: as
    LOGITS_BUDGET allows), so a [T, V] matrix exists neither forward nor backward. An empty mask gives zeros that still
    depend on `hidden` and `head`, with zero gradient: a rank without tokens joins every collective.

    hidden: [T, H] of one packed row; head: [V, H]; tokens, positions: int [T]; mask: bool [T]. Returns (logprobs [T],
    entropy [T] in nats, without gradient, or None), float32 (float64 from float64), 0 off the mask and at position 0.
    Raises ValueError if shapes disagree or the temperature is not above 0."""
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


# -- The model ---------------------------------------------------------------------------------------------------------


class Borders:
    """Where the sequences of a packed row begin, and its end; counts the layers that kept to them. No list and no
    dataclass: FSDP2 would hand each layer a copy."""

    def __init__(self, positions: Tensor):
        self.places, self.layers = [*(positions == 0).nonzero().squeeze(1).tolist(), len(positions)], 0


def packed_attention(module, query, key, value, attention_mask, *, scaling, borders: Borders, sliding_window=None,
                     dropout=0.0, **more) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention of each sequence of a packed row, one after the other: on any device no [T, T] mask exists, and
    the work is the sum of the lengths' squares. query: [1, heads, T, D]; key and value: [1, KV heads, T, D]; sequence i
    is [places[i], places[i + 1]). Returns [1, T, heads, D]. ValueError for a model whose attention is another."""
    borders.layers += 1
    rows = [slice(start, end) for start, end in itertools.pairwise(borders.places)]
    longest = max(row.stop - row.start for row in rows)
    if dropout or more.get("softcap") or more.get("s_aux") is not None or longest > (sliding_window or math.inf):
        raise ValueError("attention=packed knows plain causal attention; this model's has a window, a cap or sinks")
    if query.is_cuda and query.dtype == torch.float32:  # its one kernel without a matrix knows no groups of heads
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    grouped = key.shape[1] != query.shape[1]
    return torch.cat([F.scaled_dot_product_attention(query[:, :, row], key[:, :, row], value[:, :, row], is_causal=True,
                                                     scale=scaling, enable_gqa=grouped) for row in rows],
                     dim=2).transpose(1, 2), None  # fmt: skip


AttentionInterface.register("packed", packed_attention)


def set_attention(lm: nn.Module, attention: str) -> None:
    """ValueError if the model cannot; transformers stays silent about that."""
    lm.set_attn_implementation(attention)
    if lm.config.get_text_config()._attn_implementation != attention:
        raise ValueError(f"cannot have attention={attention}")


class Policy(nn.Module):
    """A causal language model, called so that the [T, V] matrix of logits never exists.

    The head is applied here and not by the model, in chunks of rows; under FSDP2 this module is the root, so the head's
    weight is whole while `forward` and its backward run."""

    def __init__(self, lm: nn.Module, temperature: float):
        super().__init__()
        self.lm, self.temperature = lm, temperature

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """tokens, positions: int64 [T] of a packed row; mask: bool [T]. Returns (logprobs [T], entropy [T])."""
        # Without a mask and without a cache the model reads the borders of the row from the positions; with either,
        # later sequences would attend to earlier ones.
        config = self.lm.config.get_text_config()
        borders = {"borders": Borders(positions)} if config._attn_implementation == "packed" else {}
        hidden = self.lm.base_model(input_ids=tokens[None], position_ids=positions[None], attention_mask=None,
                                    use_cache=False, **borders).last_hidden_state[0]  # [T, H]
        if borders and borders["borders"].layers < config.num_hidden_layers:
            raise ValueError(f"{borders['borders'].layers} of {config.num_hidden_layers} layers of this model have "
                             f"attention=packed, the others would mix the sequences of a row")
        head = self.lm.get_output_embeddings().weight
        return token_logprobs(hidden, head, tokens, positions, mask, temperature=self.temperature)


def shard(lm: nn.Module, temperature: float, mesh, dtype: torch.dtype, checkpointing: bool = False) -> Policy:
    """`lm`, which may be on the meta device, as a Policy under FSDP2 over `mesh` (1-D, or replicas x shards), compute
    in `dtype`, reductions in float32. With `checkpointing` the activations of a layer are computed again in the
    backward. ValueError if the logits are not simply head times hidden state, as `token_logprobs` computes them."""
    config = lm.config.get_text_config()
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, name, None):
            raise ValueError(f"scales its logits by {name}, which log-probabilities from hidden states ignore")
    if getattr(lm.get_output_embeddings(), "bias", None) is not None:
        raise ValueError("adds a bias to its logits, which log-probabilities from hidden states ignore")
    stored = lm.state_dict()
    for name, _ in lm.named_buffers():
        if name in stored:
            raise ValueError(f"has {name} among its weights, a buffer, which would be neither loaded nor sent")
    policy = Policy(lm, temperature)
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in list(lm.modules()):
        if type(module).__name__ in (lm._no_split_modules or ()):
            if checkpointing:  # transformers' own would need training mode, in which layers have dropout
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
            fully_shard(module, mesh=mesh, mp_policy=mixed)
    fully_shard(policy, mesh=mesh, mp_policy=mixed)
    return policy


def build_optimizer(cfg, policy: nn.Module, lr: float) -> torch.optim.AdamW:
    matrices = [p for p in policy.parameters() if p.ndim >= 2]
    vectors = [p for p in policy.parameters() if p.ndim < 2]  # norms and biases are not decayed
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps)


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


# -- Steps of an optimiser ---------------------------------------------------------------------------------------------


@dataclass
class _Row:
    """A packed micro-batch on the device, and what is known about it before the first optimiser step."""

    inputs: tuple[Tensor, Tensor, Tensor]  # tokens, positions, mask, [T] each
    behaviour: Tensor  # [T]
    versions: Tensor  # [T]
    advantages: Tensor  # [T]
    share: Tensor | float  # [T] what a token's loss is divided by: 1, or the loss tokens of its trajectory
    proximal: Tensor | None = None  # [T]


def batch_inputs(packed: Packed, device) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.as_tensor(a, device=device) for a in (packed.tokens, packed.positions, packed.loss_mask))


def optimise(policy: nn.Module, optimizer, grad_clip: float) -> float:
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

    minibatches: (denominator, packed micro-batches, `shaped_rewards` of their trajectories) each, see `plan_step`; the
    denominator counts loss tokens or, with `loss_average` "sequence", trajectories. `cfg`: a `train.Config`.
    `version`: of the weights at the start. `phase(name)` is a context manager that times. The metrics are means over
    the loss tokens of all ranks."""
    batch = []
    for denominator, packs, rewards in minibatches:
        rows = []
        for packed, reward in zip(packs, rewards, strict=True):
            inputs = batch_inputs(packed, device)
            behaviour, versions = (torch.as_tensor(a, device=device) for a in (packed.behaviour, packed.versions))
            advantages, share = gae(reward, inputs[2], packed.starts, cfg.gamma, cfg.lam), 1.0
            if cfg.loss_average == "sequence" and reward:
                counts = np.add.reduceat(packed.loss_mask, packed.starts[:-1], dtype=np.float32)
                share = torch.as_tensor(counts.clip(1).repeat(np.diff(packed.starts)), device=device)
            rows.append(_Row(inputs, behaviour, versions, advantages, share))
        batch.append((denominator, rows))
    every = [row for _, rows in batch for row in rows]
    sums: Counter = Counter()

    with phase("advantages"):
        flat, mask = torch.cat([row.advantages for row in every]), torch.cat([row.inputs[2] for row in every])
        flat = normalise(flat, mask, all_reduce) if cfg.batch_norm else flat.float()
        for row, advantages in zip(every, flat.split([len(row.advantages) for row in every]), strict=True):
            row.advantages = advantages
    with phase("log-probabilities"), torch.no_grad():
        for row in every if cfg.decoupled and cfg.proximal == "recompute" else ():
            row.proximal = policy(*row.inputs)[0]
            fresh = row.inputs[2] & (row.versions == version)  # same weights on both sides: only rounding is between
            sums["gap"] += (row.proximal - row.behaviour)[fresh].abs().sum(dtype=torch.float64)
            sums["fresh"] += fresh.sum(dtype=torch.float64)

    norms, skipped, stopped = [], 0, 0
    with phase("train"):
        for denominator, rows in batch:
            if not denominator:
                continue
            optimizer.zero_grad()
            mini: Counter = Counter()
            for row in rows:
                current, entropy = policy(*row.inputs)
                proximal = row.proximal
                if cfg.decoupled and cfg.proximal == "interpolate":
                    proximal = interpolated(current, row.behaviour, row.versions, version)
                losses, stats = policy_loss(
                    current, proximal, row.behaviour, row.advantages, row.inputs[2], clip=cfg.clip,
                    clip_high=cfg.clip_high or None, dual_clip=cfg.dual_clip or None, decoupled=cfg.decoupled,
                    behaviour_cap=cfg.behaviour_cap or None)  # fmt: skip
                losses = losses / row.share
                scale_loss(losses, denominator, ranks).backward()
                mini.update({**stats, "entropy": entropy.sum(dtype=torch.float64),
                             "loss": losses.detach().sum(dtype=torch.float64) / denominator})
            sums.update(mini)
            if cfg.early_stop:  # the policy has run away from the proximal one: no step from this mini-batch
                total = torch.stack([torch.as_tensor(mini[name], device=device) for name in ("ratio", "tokens")])
                all_reduce(total)
                if total[0] > cfg.early_stop * total[1]:
                    stopped += 1
                    continue
            norm = optimise(policy, optimizer, cfg.grad_clip)
            norms += [norm] if math.isfinite(norm) else []
            skipped += not math.isfinite(norm)
    names = ["tokens", "loss", "entropy", "ratio", "clipped", "dual_clipped", "approx_kl", "behaviour_kl",
             "behaviour_weight", "dropped", "gap", "fresh"]
    totals = torch.stack([torch.as_tensor(sums[name], dtype=torch.float64, device=device) for name in names])
    all_reduce(totals)
    total = dict(zip(names, totals.tolist(), strict=True))
    tokens, kept = max(1.0, total["tokens"]), max(1.0, total["tokens"] - total["dropped"])
    return {
        "loss": total["loss"] / max(1, len(batch)), "entropy": total["entropy"] / tokens,
        "importance_weight": total["ratio"] / tokens, "clip_fraction": total["clipped"] / tokens,
        "dual_clip_fraction": total["dual_clipped"] / tokens, "kl_current_proximal": total["approx_kl"] / tokens,
        "kl_proximal_behaviour": total["behaviour_kl"] / tokens, "behaviour_weight": total["behaviour_weight"] / kept,
        "dropped_fraction": total["dropped"] / tokens,
        "logprob_gap": total["gap"] / total["fresh"] if total["fresh"] else None,  # None: nothing to compare
        "grad_norm": sum(norms) / max(1, len(norms)), "skipped_updates": skipped, "stopped_minibatches": stopped,
    }
