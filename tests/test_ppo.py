"""Golden values, extreme inputs, and log-probabilities in chunks against the plain formula.

    python -m pytest tests/test_ppo.py -m "not slow"      # CPU, offline, some seconds
    python -m pytest tests/test_ppo.py -m slow            # peak memory at a vocabulary of 151,936, half a minute
"""

import doctest
import math
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ppo
import toy
import train
from packing import Trajectory, pack
from ppo import gae, normalise, policy_loss, scale_loss, token_logprobs

torch.set_num_threads(1)
NAN, INF = float("nan"), float("inf")


def on_ranks(inputs, body):
    """[body(input, all_reduce) for each input], run as that many ranks at once, each in a thread."""
    barrier, slots, results = threading.Barrier(len(inputs), timeout=20), [None] * len(inputs), [None] * len(inputs)

    def run(rank):
        def all_reduce(tensor):
            assert tensor.dtype == torch.float64
            slots[rank] = tensor.clone()
            barrier.wait()
            total = sum(slots)
            barrier.wait()
            tensor.copy_(total)

        results[rank] = body(inputs[rank], all_reduce)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(inputs))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return results


def test_examples_in_docstrings():
    assert doctest.testmod(ppo).failed == 0


def plain_gae(rewards, mask, starts, gamma, lam):
    result = [0.0] * len(mask)
    for reward, start, end in zip(rewards, starts[:-1], starts[1:], strict=True):
        carry = 0.0
        for i in reversed([i for i in range(start, end) if mask[i]]):
            carry = result[i] = reward + gamma * lam * carry  # delta is the reward: all values are 0
            reward = 0.0
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 1.0), (1.0, 0.8), (0.9, 0.5)])
def test_gae_equals_the_recursion(gamma, lam):
    rng = np.random.default_rng(0)
    starts = np.array([0, 7, 8, 8, 30, 41])  # one of a single token, one empty, one without generated tokens
    mask = torch.tensor(rng.random(44) < 0.6)
    mask[starts[:-1]] = mask[30:] = False
    mask[31:38:2] = True  # many turns
    rewards = rng.normal(size=5).tolist()
    got = gae(rewards, mask, starts, gamma, lam)
    assert got.dtype == torch.float64
    want = plain_gae(rewards, mask, starts, gamma, lam)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


def test_gae_without_critic_is_the_reward_and_quick():
    starts = torch.arange(0, 1_000_001, 10_000)
    mask = torch.ones(1_000_000, dtype=torch.bool)
    begin = time.perf_counter()
    advantages = gae(torch.arange(100.0), mask, starts)
    assert time.perf_counter() - begin < 1
    assert torch.equal(advantages, torch.arange(100.0).double().repeat_interleave(10_000))


def test_gae_of_nothing():
    empty = pack([])
    assert gae([], torch.from_numpy(empty.loss_mask), empty.starts).tolist() == [0.0, 0.0]
    assert gae([], torch.from_numpy(empty.loss_mask), empty.starts, gamma=0.5).tolist() == [0.0, 0.0]


GOLDEN_ADVANTAGES = torch.tensor([5.0] * 2 + [-5.0] * 8)


def test_normalise_golden_values_are_token_weighted_and_population():
    got = normalise(GOLDEN_ADVANTAGES, torch.ones(10, dtype=torch.bool))
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([1.999995] * 2 + [-0.49999875] * 8, abs=1e-7)


def test_normalise_ignores_padding_empty_rows_and_how_ranks_share():
    mask = torch.ones(10, dtype=torch.bool)
    want = normalise(GOLDEN_ADVANTAGES, mask)
    junk = torch.tensor([NAN, INF, -INF, 1e30])
    padded = normalise(torch.cat([junk, GOLDEN_ADVANTAGES, junk]), torch.cat([junk == 0, mask, junk == 0]))
    assert torch.equal(padded[4:14], want) and not padded[:4].any() and not padded[14:].any()
    rows = [(GOLDEN_ADVANTAGES[:3], mask[:3]), (GOLDEN_ADVANTAGES[3:], mask[3:]), (junk, junk == 0)]
    got = on_ranks(rows, lambda row, all_reduce: normalise(*row, all_reduce))
    assert torch.equal(torch.cat(got[:2]), want) and got[2].tolist() == [0.0] * 4


@pytest.mark.parametrize("value", [0.0, 5.0, -0.1, 1 / 3, 1e8 + 0.1])
def test_normalise_of_equal_rewards_is_exactly_zero(value):
    assert normalise(torch.full((1000,), value, dtype=torch.float64), torch.ones(1000) > 0).tolist() == [0.0] * 1000


def test_normalise_of_nothing_and_of_large_offsets():
    assert normalise(torch.full((3,), NAN), torch.zeros(3) > 0).tolist() == [0.0] * 3
    got = normalise(1e9 + GOLDEN_ADVANTAGES.double(), torch.ones(10) > 0)  # E[A^2] - E[A]^2 has no digit left here
    assert got.tolist() == pytest.approx([1.999995] * 2 + [-0.49999875] * 8, abs=1e-6)

NEW = torch.tensor([0.30, 0.50, 0.10, 0.42, 0.20], dtype=torch.float64).log()
PROXIMAL = torch.tensor([0.25, 0.30, 0.20, 0.40, 0.30], dtype=torch.float64).log()
OLD = torch.tensor([0.20, 0.30, 0.40, 0.05, 0.10], dtype=torch.float64).log()
ADVANTAGES = torch.tensor([2, 1, -1, 0.5, -0.5], dtype=torch.float64)
ALL = torch.ones(5, dtype=torch.bool)


@pytest.mark.parametrize("options, losses, mean", [
    (dict(behaviour_cap=5.0), [-3, -1.2, 0.4, 0, 1.2], -0.52),
    (dict(behaviour_cap=None), [-3, -1.2, 0.4, -4.2, 1.2], -1.36),
    (dict(decoupled=False), [-2.4, -1.2, 0.8, -0.6, 1.0], -0.48),
])
def test_policy_loss_golden_values(options, losses, mean):
    loss, stats = policy_loss(NEW, PROXIMAL, OLD, ADVANTAGES, ALL, **options)
    assert loss.tolist() == pytest.approx(losses, abs=1e-9)
    assert scale_loss(loss, denominator=5, ranks=1).item() == pytest.approx(mean, abs=1e-9)
    assert stats["tokens"] == 5


def test_policy_loss_statistics_are_sums_over_the_mask():
    mask = torch.tensor([False, True, True, True, True])
    _, stats = policy_loss(NEW, PROXIMAL, OLD, ADVANTAGES, mask)
    want = {"tokens": 4, "ratio": 5 / 3 + 0.5 + 1.05 + 2 / 3, "clipped": 3, "dropped": 1, "behaviour_weight": 4.5,
            "approx_kl": (NEW - PROXIMAL)[1:].sum().item(), "behaviour_kl": (PROXIMAL - OLD)[1:].sum().item()}
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(want)
    assert all(value.shape == () and value.dtype == torch.float64 for value in stats.values())
    _, stats = policy_loss(NEW, None, OLD, ADVANTAGES, mask, decoupled=False)
    assert sorted(stats) == ["approx_kl", "clipped", "ratio", "tokens"]
    assert stats["approx_kl"].item() == pytest.approx((NEW - OLD)[1:].sum().item())


def test_dual_clip_bounds_only_negative_advantages():
    new, zero = torch.tensor([4.0, 4.0, 2.0]).log(), torch.zeros(3)
    advantages, mask = torch.tensor([-1.0, 1.0, -1.0]), torch.ones(3) > 0
    loss, stats = policy_loss(new, zero, zero, advantages, mask, dual_clip=3.0)
    assert loss.tolist() == pytest.approx([3.0, -1.2, 2.0]) and stats["dual_clipped"] == 1
    assert policy_loss(new, zero, zero, advantages, mask)[0].tolist() == pytest.approx([4.0, -1.2, 2.0])
    weighted, _ = policy_loss(new, zero, zero - np.log(2.0), advantages, mask, dual_clip=3.0)  # bounded before w
    assert weighted.tolist() == pytest.approx([6.0, -2.4, 4.0])


def test_policy_loss_gradient_is_w_ratio_advantage_and_zero_where_clipped_or_dropped():
    new = NEW.clone().requires_grad_()
    policy_loss(new, PROXIMAL, OLD, ADVANTAGES, ALL, clip=0.25)[0].sum().backward()
    assert new.grad.tolist() == pytest.approx([-1.25 * 1.2 * 2, 0, 0, 0, 0], abs=1e-9)
    now, before = OLD.clone().requires_grad_(), OLD.clone().requires_grad_()
    policy_loss(now, before, before, ADVANTAGES, ALL)[0].sum().backward()
    assert now.grad.tolist() == pytest.approx((-ADVANTAGES).tolist())  # on policy: plain policy gradient
    assert before.grad is None


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_garbage_off_the_mask_changes_nothing(garbage, decoupled):
    mask = torch.tensor([True, False, True, False, True])

    def run(inputs):
        current = inputs[0].clone().requires_grad_()
        loss, stats = policy_loss(current, *inputs[1:], mask, decoupled=decoupled, dual_clip=3.0)
        scale_loss(loss, 3, 1).backward()
        return loss, current.grad, stats

    clean = [NEW, PROXIMAL, OLD, ADVANTAGES]
    want, got = run(clean), run([torch.where(mask, values, garbage) for values in clean])
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and got[2] == want[2]
    assert not got[0][~mask].any() and not got[1][~mask].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decoupled", [True, False])
def test_extreme_ratios_stay_finite(decoupled, dtype):
    extreme, zero, mask = torch.tensor([1e4, -1e4, 1e4, -1e4], dtype=dtype), torch.zeros(4, dtype=dtype), ALL[:4]
    advantages = torch.tensor([1, 1, -1, -1], dtype=dtype)
    current = extreme.clone().requires_grad_()
    loss, stats = policy_loss(current, zero, zero, advantages, mask, decoupled=decoupled)
    loss.sum().backward()
    e20 = float(np.exp(20))
    assert loss.tolist() == pytest.approx([-1.2, -1 / e20, e20, 0.8], rel=1e-5)
    assert current.grad.tolist() == [0.0] * 4 and all(value.isfinite() for value in stats.values())
    if decoupled:  # now w is extreme
        for cap, want in ((5.0, [0, -1 / e20, 0, 1 / e20]), (None, [-e20, -1 / e20, e20, 1 / e20])):
            current = zero.clone().requires_grad_()
            loss, stats = policy_loss(current, zero, -extreme, advantages, mask, behaviour_cap=cap)
            loss.sum().backward()
            assert loss.tolist() == pytest.approx(want, rel=1e-5)
            assert current.grad.tolist() == pytest.approx(want, rel=1e-5)
            assert stats["dropped"] == (2 if cap else 0)


def test_a_weight_at_the_cap_is_kept_and_nan_at_a_loss_token_is_not_hidden():
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1) > 0
    assert policy_loss(zero, zero, zero, torch.ones(1), one, behaviour_cap=1.0)[0].item() == -1.0
    assert policy_loss(zero, zero * NAN, zero, torch.ones(1), one)[0].isnan().all()


@pytest.mark.parametrize("call, message", [
    (lambda: gae([1.0, NAN], ALL[:3], [0, 2, 3]), "was it scored"),
    (lambda: gae([1.0], ALL[:3], [0, 2]), "do not fit"),
    (lambda: policy_loss(NEW, PROXIMAL, None, ADVANTAGES, ALL), "the loss needs log-probabilities of the generator"),
    (lambda: policy_loss(NEW, None, OLD, ADVANTAGES, ALL), "at the start of the step"),
    (lambda: policy_loss(NEW, PROXIMAL, OLD, ADVANTAGES, ALL, dual_clip=0.5), "dual clip above 1, got 5.0 and 0.5"),
    (lambda: scale_loss(torch.zeros(2), 0, 1), "all ranks must skip it"),
    (lambda: token_logprobs(torch.zeros(1, 3, 4), NEW, ALL, ALL, ALL), r"\(1, 3, 4\) must be \[T, H\]"),
    (lambda: token_logprobs(torch.zeros(5, 4), NEW, ALL, ALL, ALL, temperature=0.0), "temperature above 0"),
])
def test_refusals_are_sentences(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def plain_logprobs(hidden, head, tokens, positions, mask, temperature):
    """The formula with the whole [T, V] matrix."""
    logits = ((hidden @ head.T).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature).log_softmax(-1)
    rows = mask & (positions > 0)
    picked = logits.roll(1, 0).gather(1, tokens[:, None])[:, 0]
    entropy = -(logits.exp() * logits).sum(-1).roll(1)
    return torch.where(rows, picked, 0.0), torch.where(rows, entropy, 0.0).detach()


def row_of(count, vocabulary, width, dtype=torch.float64):
    torch.manual_seed(0)
    positions = torch.cat([torch.arange(5), torch.arange(count - 5)])
    mask = (torch.rand(count) < 0.7) | (positions == 0)  # there is nothing before position 0, whatever the mask says
    hidden, head = torch.randn(count, width).to(dtype), torch.randn(vocabulary, width).to(dtype)
    return hidden.requires_grad_(), head.requires_grad_(), torch.randint(vocabulary, (count,)), positions, mask


@pytest.mark.parametrize("dtype, digits", [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_token_logprobs_equal_the_plain_formula_with_gradients(dtype, digits, temperature, chunk):
    inputs = row_of(33, 50, 16, dtype)
    grad = torch.randn(33, dtype=torch.float64)
    results = []
    for logprobs, entropy in (token_logprobs(*inputs, temperature=temperature, chunk=chunk),
                              plain_logprobs(*inputs, temperature)):
        results.append([logprobs, entropy, *torch.autograd.grad(logprobs, inputs[:2], grad.to(logprobs.dtype))])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and torch.allclose(got, want, rtol=digits, atol=digits * want.abs().max().item())
    assert not results[0][1].requires_grad and results[0][2].abs().sum() > 0
    with torch.no_grad():
        got, entropy = token_logprobs(*inputs, temperature=temperature, chunk=chunk, with_entropy=False)
    assert torch.equal(got, results[0][0]) and entropy is None and not got.requires_grad


def test_token_logprobs_of_an_empty_mask_keep_the_graph():
    hidden, head, tokens, positions, mask = row_of(9, 11, 4)
    logprobs, _ = token_logprobs(hidden * NAN, head, tokens, positions, mask & False)
    scale_loss(policy_loss(logprobs, logprobs, logprobs, logprobs, mask & False)[0], 7, 2).backward()
    assert logprobs.tolist() == [0.0] * 9
    assert head.grad.tolist() == torch.zeros(11, 4).tolist() and hidden.grad.nan_to_num().tolist() == [[0.0] * 4] * 9


def test_gradient_of_the_head_adds_up_in_float32():
    hidden, head, *row = row_of(1500, 3, 2, torch.bfloat16)
    hidden = hidden.detach().abs() * 0 + 1  # all chunks push the same way, where a bfloat16 sum stops at 256 terms
    token_logprobs(hidden, head, *row, chunk=1)[0].sum().backward()
    wide = head.detach().double().requires_grad_()
    plain_logprobs(hidden.double(), wide, *row, 1.0)[0].sum().backward()
    assert torch.allclose(head.grad.double(), wide.grad, rtol=0.02, atol=0.01 * wide.grad.abs().max().item())


def test_token_logprobs_never_hold_the_whole_matrix():
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            largest = max([largest, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))])
            return result

    inputs = row_of(200, 300, 4)
    with Watch():
        token_logprobs(*inputs, chunk=8)[0].sum().backward()
    assert largest == 8 * 300


def test_rewards_are_scaled_and_clipped():
    cfg = SimpleNamespace(reward_bias=-0.5, reward_scaling=10.0, reward_clip=20.0, group_norm="none")
    assert ppo.shaped_rewards(cfg, [-9.0, 0.0, 0.5, 1.0, 9.0], [0, 0, 1, 1, 1]) == [-20, -5, 0, 5, 20]


@pytest.mark.parametrize("norm, want", [
    ("mean", [7.5, -2.5, -2.5, -2.5, 5.0, -5.0, 0.0, 0.0, 0.0]),
    # deviations: of (5, -5, -5, -5) 4.330127, of (5, -5) 5; a group of equal rewards is 0 and not rounding over 1e-5
    ("mean_std", [1.7320468, -0.5773489, -0.5773489, -0.5773489, 0.999998, -0.999998, 0.0, 0.0, 0.0]),
])
def test_rewards_less_the_mean_of_their_group_wherever_its_answers_stand(norm, want):
    cfg = SimpleNamespace(reward_bias=-0.5, reward_scaling=10.0, reward_clip=20.0, group_norm=norm)
    rewards, tickets = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.1, 0.1, 0.1], [4, 4, 4, 4, 9, 9, 2, 2, 2]
    assert ppo.shaped_rewards(cfg, rewards, tickets) == pytest.approx(want, abs=1e-6)
    order = [8, 4, 0, 3, 7, 1, 5, 6, 2]
    mixed = ppo.shaped_rewards(cfg, [rewards[i] for i in order], [tickets[i] for i in order])
    assert mixed == pytest.approx([want[i] for i in order], abs=1e-6)


def test_interpolated_golden_values():
    # alpha for (version trained + 1, version sampled) = (5, 4), (5, 3), (5, 1): 0, 0.5, 0.75
    current, behaviour = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True), torch.tensor([-2.0, -2.0, -2.0])
    proximal = ppo.interpolated(current, behaviour, torch.tensor([4, 3, 1]), version=4)
    assert proximal.tolist() == [-2.0, -1.5, -1.25] and not proximal.requires_grad


def test_the_clip_may_be_wider_above():
    options = dict(advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]), mask=ALL[:4], clip=0.2, behaviour_cap=None)
    ratio, flat = torch.tensor([1.25, 1.5, 0.7, 1.5]).log(), torch.zeros(4)
    loss, stats = policy_loss(ratio, flat, flat, clip_high=0.28, **options)
    assert loss.tolist() == pytest.approx([-1.25, -1.28, 0.8, 1.5]) and stats["clipped"] == 2
    assert policy_loss(ratio, flat, flat, **options)[0].tolist() == pytest.approx([-1.2, -1.2, 0.8, 1.5])


class Table(torch.nn.Module):
    """A policy whose log-probability of token i is entry i of a table: gradients can be worked out by hand."""

    def __init__(self, logprobs):
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(logprobs))

    def forward(self, tokens, positions, mask):
        return torch.where(mask, self.table[tokens], 0.0), torch.zeros(len(tokens))


def one_step(behaviour, lengths, rewards, denominator, version=0, versions=None, table=None, **settings):
    """ppo_step of one mini-batch on a Table: answers of these lengths, one prompt token each. Returns (stats, grad)."""
    count, batch = 0, []
    for index, length in enumerate(lengths):
        one, ids = Trajectory(0, index), list(range(count + 1, count + 1 + length))
        one.append([0])
        one.append(ids, [behaviour[i] for i in ids], [versions[i] if versions else version for i in ids])
        batch.append(one)
        count += length
    cfg = train.Config(batch_norm=False, grad_clip=0.0, **settings)
    policy = Table(table or behaviour)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    stats = ppo.ppo_step(policy, optimizer, [(denominator, [pack(batch)], [rewards])], cfg, version=version,
                         phase=lambda name: nullcontext(), ranks=1, all_reduce=lambda t: None, device="cpu")
    moved = torch.tensor(table or behaviour) - policy.table.detach()
    return stats, moved.tolist()


def test_each_token_or_each_answer_weighs_the_same():
    behaviour = [0.0, -1.0, -1.0, -1.0, -1.0]  # answers of 1 and 3 tokens, advantages 2 and -2, ratio 1
    _, token = one_step(behaviour, [1, 3], [2.0, -2.0], 4)
    assert token == pytest.approx([0.0, -0.5, 0.5, 0.5, 0.5])
    stats, sequence = one_step(behaviour, [1, 3], [2.0, -2.0], 2, loss_average="sequence")
    assert sequence == pytest.approx([0.0, -1.0, 1 / 3, 1 / 3, 1 / 3])
    assert stats["loss"] == pytest.approx((-2.0 + 2.0) / 2, abs=1e-6)


def test_the_interpolated_step_is_the_formula():
    behaviour, versions, table = [0.0, -1.0, -1.0], [0, 4, 3], [0.0, -0.9, -0.8]
    stats, grad = one_step(behaviour, [2], [2.0], 2, version=4, versions=versions, table=table, proximal="interpolate")
    # fresh token: proximal = behaviour, r = e^0.1, w = 1; the other: half way, r = e^0.1, w = e^0.1; both unclipped
    assert grad == pytest.approx([0.0, -math.exp(0.1), -math.exp(0.2)], rel=1e-5)
    assert stats["logprob_gap"] is None  # nothing was recomputed that could be compared


def test_a_minibatch_whose_policy_ran_away_is_not_stepped():
    behaviour, table = [0.0, -4.0, -4.0], [0.0, -1.0, -4.0]  # ratios e^3 = 20 and 1: 10.5 on average
    plain = {"decoupled": False, "max_staleness": 0}
    stats, grad = one_step(behaviour, [2], [-2.0], 2, table=table, **plain)
    assert stats["stopped_minibatches"] == 1 and grad == [0.0, 0.0, 0.0]
    stats, grad = one_step(behaviour, [2], [-2.0], 2, table=table, early_stop=0.0, **plain)
    assert stats["stopped_minibatches"] == 0 and grad == pytest.approx([0.0, math.exp(3), 1.0], rel=1e-5)
    stats, grad = one_step(behaviour, [2], [-2.0], 2, table=table, early_stop=0.0, dual_clip=3.0, **plain)
    assert stats["dual_clip_fraction"] == 0.5 and grad == pytest.approx([0.0, 0.0, 1.0], rel=1e-5)


def test_a_probe_is_at_temperature_one_whatever_the_policy_is_sampled_at():
    policy, ids = ppo.Policy(toy.build_model(1), 0.5), [12, 3, 20, 4, 5, 90]
    with torch.no_grad():
        logprobs = policy.lm(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    want = logprobs.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)
    assert ppo.probe(policy, ids, "cpu") == pytest.approx(want.tolist(), abs=1e-5)
    assert policy.temperature == 0.5 and logprobs.exp().amax() > 0.1  # far from uniform, which no temperature changes


PEAK = """
import resource, sys, torch
from ppo import token_logprobs
torch.set_num_threads(2)
count, row = int(sys.argv[1]), lambda n: (torch.arange(n), torch.arange(n), torch.ones(n) > 0)
hidden = torch.randn(count, 64, requires_grad=True)
head = torch.randn(151936, 64, requires_grad=True)
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
token_logprobs(hidden, head, *row(count))[0].sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)
"""


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_tokens():
    short, long = (int(subprocess.run([sys.executable, "-c", PEAK, count], check=True, capture_output=True).stdout)
                   for count in ("600", "2400"))
    assert long < 1.5 * short and long < 2**20 * 1.2, f"{short} and {long} KiB above the weights"
