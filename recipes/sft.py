"""The supervised objective: imitate answers, with the packing, sharding and optimiser of reinforcement.

It is `--objective sft` of `train.py` (the published 32B recipe: 200 chosen answers), and the toy's warm start. The
loss is the token-level cross-entropy of the answer and its end; prompts are masked. Left out: mixing with reinforcement
in one step, and truncation (an example that is too long is dropped and counted).

    torchrun --nproc_per_node 2 train.py --objective sft --sft_steps 50
    pytest tests/test_data.py
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from packing import Packed, Trajectory, pack, plan_step, sft_batches
from ppo import batch_inputs, optimise, scale_loss


def _plan(batch: list[Trajectory], cfg, step: int, rank: int, ranks: int) -> tuple[int, list[Packed]]:
    """(denominator, this rank's micro-batches) of a batch that is one mini-batch."""
    lengths, counts = [len(e.tokens) for e in batch], [int(e.loss_mask.sum()) for e in batch]
    (mini,) = plan_step(lengths, counts, seed=cfg.seed, step=step, ranks=ranks, minibatches=1,
                        capacity=cfg.microbatch_tokens)  # fmt: skip
    return mini.denominator, [pack([batch[i] for i in micro]) for micro in mini.micro[rank]]


def supervised(policy: nn.Module, optimizer, examples: list[Trajectory], cfg, *, start: int, rank: int, ranks: int,
               all_reduce: Callable[[Tensor], object], device, each: Callable[[int, dict], None] | None = None) -> None:
    """Token-level cross-entropy of the loss tokens of `examples`, packed and spread over ranks like reinforcement, by
    the sft_ settings of `cfg`. Begins with step `start` of the same sequence of batches. After each step
    `each(steps done, metrics)` is called."""
    batches = sft_batches([len(example.tokens) for example in examples], cfg.sft_tokens, cfg.seed, cfg.sft_examples)
    for step, chosen in enumerate(itertools.islice(batches, start, cfg.sft_steps), start):
        lr = cfg.sft_lr * min((step + 1) / max(1, cfg.sft_warmup), 1 - cfg.sft_decay * step / cfg.sft_steps, 1)
        for group in optimizer.param_groups:
            group["lr"] = lr
        denominator, rows = _plan([examples[i] for i in chosen], cfg, step, rank, ranks)
        total = torch.zeros((), dtype=torch.float64, device=device)
        optimizer.zero_grad()
        for packed in rows:
            losses = -policy(*batch_inputs(packed, device))[0]
            scale_loss(losses, denominator, ranks).backward()
            total += losses.detach().sum(dtype=torch.float64)
        all_reduce(total)
        norm = optimise(policy, optimizer, cfg.grad_clip)
        if each is not None:
            each(step + 1, {"step": step, "loss": total.item() / denominator, "grad_norm": norm, "lr": lr,
                            "tokens": denominator})


@torch.no_grad()
def held_out_loss(policy: nn.Module, examples: list[Trajectory], cfg, *, rank: int, ranks: int, all_reduce, device):
    """Mean cross-entropy of all loss tokens of `examples`, nats; the same for any ranks and packing."""
    denominator, rows = _plan(examples, cfg, 0, rank, ranks)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for packed in rows:
        total -= policy(*batch_inputs(packed, device))[0].sum(dtype=torch.float64)
    all_reduce(total)
    return total.item() / denominator
