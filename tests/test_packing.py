"""Trajectories keep their arrays in step, a plan uses each exactly once, and neither packing, ranks nor micro-batches
change the log-probabilities or the gradient of a real (tiny) model.

    python -m pytest tests/test_packing.py -m "not slow"      # CPU, offline, a few seconds
    python -m pytest tests/test_packing.py -m slow            # attention that must be compiled, half a minute
"""

import doctest
import itertools
import json
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

import packing
from packing import (
    MiniBatch,
    Trajectory,
    allocate,
    batch_stats,
    bucket_numel,
    buckets,
    check_manifest,
    manifest,
    pack,
    plan_step,
    problem_of_ticket,
    sft_batches,
    unpack,
)
from ppo import gae, normalise, policy_loss, scale_loss, token_logprobs

torch.set_num_threads(1)


def multi_turn(ticket: int = 7, index: int = 2) -> Trajectory:
    """Prompt, answer cut by a weight update, environment, second answer."""
    one = Trajectory(ticket, index)
    one.append([11, 12, 13])
    one.append([21, 22], logprobs=[-0.5, -0.25], versions=[3, 3])
    one.append([23], logprobs=[-2.0], versions=[4])
    one.append([31, 32])
    one.append([41], logprobs=[-1e-7], versions=[4])
    one.reward, one.finish_reason = -5.0, "stop"
    return one


def test_examples_in_docstrings():
    assert doctest.testmod(packing).failed == 0


def test_append_grows_all_arrays_together_and_the_header_counts_versions():
    one = multi_turn()
    assert one.tokens.tolist() == [11, 12, 13, 21, 22, 23, 31, 32, 41]
    assert one.loss_mask.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True]
    assert one.versions.tolist() == [-1, -1, -1, 3, 3, 4, -1, -1, 4]
    assert one.logprobs.tolist() == pytest.approx([0, 0, 0, -0.5, -0.25, -2.0, 0, 0, -1e-7])
    assert [getattr(one, name).dtype for name in packing.ARRAYS] == [np.int32, np.float32, np.int32, np.bool_]
    head = one.header()
    assert head == {"ticket": 7, "index": 2, "length": 9, "loss_tokens": 4, "spans": [[3, 2], [4, 2]],
                    "head_version": 3, "tail_version": 4, "reward": -5.0, "score": -5.0, "finish_reason": "stop",
                    "bytes": len(multi_turn().to_bytes())}
    assert json.loads(json.dumps(head, allow_nan=False)) == head
    fresh = Trajectory(0, 0).header()
    assert (fresh["reward"], fresh["head_version"], fresh["spans"]) == (None, None, [])


@pytest.mark.parametrize("piece, message", [
    (dict(tokens=[1], logprobs=[-1.0]), "both log-probabilities and versions"),
    (dict(tokens=[1, 2], logprobs=[-1.0], versions=[0, 0]), "logprobs has 10 entries for 11 tokens"),
    (dict(tokens=[1, 2], logprobs=[-1.0, -1.0], versions=[0]), "versions has 10 entries for 11 tokens"),
    (dict(tokens=[1.5]), "tokens must be integers"),
    (dict(tokens=[2**40]), "tokens must be integers"),
    (dict(tokens=[-1]), "token 9 has a negative id"),
    (dict(tokens=[1], logprobs=[None], versions=[0]), "log-probability of token 9 is nan"),
    (dict(tokens=[1], logprobs=[-math.inf], versions=[0]), "must be finite"),
    (dict(tokens=[1], logprobs=[0.01], versions=[0]), "not above 0"),
    (dict(tokens=[1], logprobs=[-1.0], versions=[-1]), "version of token 9 is -1; it must be 0 or more"),
])
def test_bad_piece_is_refused_with_its_owner_and_changes_nothing(piece, message):
    one = multi_turn()
    with pytest.raises(ValueError, match=message) as caught:
        one.append(**piece)
    assert "trajectory 2 of ticket 7: " in str(caught.value)
    assert one.to_bytes() == multi_turn().to_bytes()


@pytest.mark.parametrize("change, message", [
    (dict(tokens=np.zeros(9, np.int64)), "tokens must be a one-dimensional array of int32"),
    (dict(loss_mask=np.zeros(8, bool)), "loss_mask has 8 entries for 9 tokens"),
    (dict(loss_mask=np.ones(9, bool)), "first token is marked as generated"),
    (dict(loss_mask=np.zeros(9, bool)), "must be 0, the token was not generated"),
    (dict(versions=np.full(9, 3, np.int32)), "version of token 0 is 3; it must be -1"),
    (dict(reward=math.inf), "reward inf"),
    (dict(finish_reason="abort"), "'abort'"),
])
def test_broken_rule_is_refused_at_construction(change, message):
    good = multi_turn()
    fields = {**{name: getattr(good, name) for name in packing.ARRAYS}, "reward": 1.0, "finish_reason": "stop"}
    Trajectory(0, 0, **fields)
    with pytest.raises(ValueError, match=message):
        Trajectory(0, 0, **{**fields, **change})


def test_bytes_round_trip_and_can_still_grow():
    for one in (multi_turn(), Trajectory(0, 0)):
        again = Trajectory.from_bytes(memoryview(one.to_bytes()))
        assert again.to_bytes() == one.to_bytes() and repr(again.reward) == repr(one.reward)
        again.append([5], logprobs=[-1.0], versions=[9]) if len(one.tokens) else again.append([5])
        assert len(again.tokens) == len(one.tokens) + 1


def test_cut_or_changed_bytes_are_refused():
    whole = multi_turn().to_bytes()
    assert b"pickle" not in whole and whole[:4] == b"boba"
    for cut in range(len(whole)):
        with pytest.raises(ValueError):
            Trajectory.from_bytes(whole[:cut])
        with pytest.raises(ValueError):
            Trajectory.from_bytes(whole[:cut] + bytes([whole[cut] ^ 4]) + whole[cut + 1 :])
    with pytest.raises(ValueError):
        Trajectory.from_bytes(whole + b"\0")


@pytest.mark.parametrize("head", [b"[]", b"{}", b"{", b'{"length": 1e9}', b'{"length": -1, "reward": 0}',
                                  b'{"length": 999999999, "reward": 0}', b'{"length": 0, "reward": 0, "evil": 1}'])
def test_intact_bytes_of_another_format_are_refused(head):
    body = len(head).to_bytes(4, "little") + head
    with pytest.raises(ValueError):
        Trajectory.from_bytes(b"boba" + packing.zlib.crc32(body).to_bytes(4, "little") + body)


@pytest.mark.parametrize("lengths, capacity, min_groups, groups", [
    ([9, 8, 7, 6, 5, 4], math.inf, 2, [[0, 3, 4], [1, 2, 5]]),
    ([9, 8, 7, 6, 5, 4], 16, 2, [[0, 3], [1, 2], [4, 5]]),
    ([30, 10, 10, 10, 5, 5], 32, 1, [[0], [1, 2, 3], [4, 5]]),
    ([12, 1, 1, 1, 1, 1], 12, 2, [[0], [1, 2, 3, 4, 5]]),
    ([5, 5, 5, 5], 10, 3, [[0, 3], [1], [2]]),
    ([5, 5, 3], math.inf, 2, [[0, 2], [1]]),  # equal ones in their order
    ([], 10, 0, []),
])
def test_allocate_golden_values(lengths, capacity, min_groups, groups):
    assert allocate(lengths, capacity, min_groups) == groups
    assert allocate(np.array(lengths, np.int32), capacity, min_groups) == groups


LENGTHS = st.lists(st.integers(1, 30), max_size=24)


@given(LENGTHS, st.integers(30, 60), st.integers(0, 24))
@settings(deadline=None, max_examples=100)
def test_allocate_is_a_partition_within_capacity(lengths, capacity, min_groups):
    min_groups = min(min_groups, len(lengths))
    groups = allocate(lengths, capacity, min_groups)
    assert sorted(sum(groups, [])) == list(range(len(lengths)))
    assert groups == sorted(map(sorted, groups)) and all(groups) and len(groups) >= min_groups
    assert all(sum(lengths[i] for i in group) <= capacity for group in groups)
    sizes = [len(group) for group in allocate(lengths, math.inf, min_groups)]
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(LENGTHS, st.integers(1, 5), st.integers(1, 5), st.integers(30, 70), st.integers(0, 3), st.data())
@settings(deadline=None, max_examples=200)
def test_plan_uses_all_once_with_equal_counts(lengths, ranks, minibatches, capacity, step, data):
    loss_tokens = [data.draw(st.integers(0, length - 1)) for length in lengths]
    ask = dict(seed=5, step=step, ranks=ranks, minibatches=minibatches, capacity=capacity)
    plan = plan_step(lengths, loss_tokens, **ask)
    assert plan == plan_step(np.array(lengths, int), np.array(loss_tokens, int), **ask), "not a pure function"
    assert len(plan) == minibatches
    sizes, seen = [], []
    for mini in plan:
        assert len(mini.micro) == ranks
        assert len({len(micro) for micro in mini.micro}) == 1, "ranks would wait for each other's collectives"
        shares = [sum(micro, []) for micro in mini.micro]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all(sum(lengths[i] for i in batch) <= capacity for micro in mini.micro for batch in micro)
        items = sum(shares, [])
        assert mini.denominator == sum(loss_tokens[i] for i in items) and mini.skip == (mini.denominator == 0)
        sizes.append(len(items))
        seen += items
    assert sorted(seen) == list(range(len(lengths)))
    assert max(sizes) - min(sizes) <= 1


def test_plan_shuffles_by_seed_and_step_over_the_whole_batch():
    ask = dict(ranks=2, minibatches=4, capacity=16)
    plans = [plan_step([4] * 64, [2] * 64, seed=seed, step=step, **ask) for seed in (1, 2) for step in (0, 1)]
    first = [sorted(sum(sum(plan[0].micro, []), [])) for plan in plans]
    assert len(set(map(tuple, first))) == 4 and all(items[0] < 16 and items[-1] > 47 for items in first)


def test_plan_of_filtered_tiny_and_empty_batches():
    ask = dict(seed=0, step=0, capacity=10)
    assert plan_step([], [], ranks=2, minibatches=2, **ask) == [MiniBatch(0, [[], []])] * 2
    assert plan_step([9], [4], ranks=3, minibatches=1, **ask) == [MiniBatch(4, [[[0]], [[]], [[]]])]
    one, two = plan_step([9], [4], ranks=1, minibatches=2, **ask)
    assert not one.skip and two.skip
    # 9 fills a micro-batch, so rank 0 needs two; rank 1 could do with one and is asked for two as well.
    (mini,) = plan_step([9, 5, 5, 4], [1] * 4, ranks=2, minibatches=1, **ask)
    assert mini.micro == [[[0], [3]], [[1], [2]]] and mini.denominator == 4


@pytest.mark.parametrize("call, message", [
    (lambda: allocate([5, 33], 32), "item 1 has 33 tokens, which does not fit a capacity of 32 tokens"),
    (lambda: allocate([5, 5], 32, min_groups=3), "2 items cannot fill 3 groups"),
    (lambda: plan_step([9, 11], [4, 4], seed=0, step=0, ranks=1, minibatches=1, capacity=10), "item 1 has 11 tokens"),
    (lambda: plan_step([9], [4, 4], seed=0, step=0, ranks=1, minibatches=1, capacity=10), "1 lengths but 2 counts"),
    (lambda: plan_step([9], [4], seed=0, step=0, ranks=0, minibatches=1, capacity=10), "at least one rank"),
    (lambda: pack([multi_turn(), Trajectory(9, 1)]), "trajectory 1 of ticket 9: it has no tokens"),
    (lambda: unpack(pack([multi_turn()]), [0] * 8), "8 values cannot be spread over a row of 9 tokens"),
])
def test_refusals_are_sentences(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_plan_of_a_full_batch_is_quick():
    lengths = np.random.default_rng(0).geometric(1 / 6000, 8192).clip(100, 28672)
    start = time.perf_counter()
    plan = plan_step(lengths, lengths - 100, seed=0, step=0, ranks=32, minibatches=4, capacity=30720)
    assert time.perf_counter() - start < 5  # 8,192 trajectories, 49 million tokens
    assert lengths.sum() / sum(30720 * len(rank) for mini in plan for rank in mini.micro) > 0.8


def test_pack_and_unpack():
    a, b = multi_turn(), Trajectory(8, 0)
    b.append([1])
    packed = pack([a, b, a])
    assert packed.starts.tolist() == [0, 9, 10, 19]
    assert packed.positions.tolist() == [*range(9), 0, *range(9)]
    kinds = [array.dtype for array in vars(packed).values()]
    assert kinds == [np.int64, np.int64, np.bool_, np.float32, np.int32, np.int64]
    for values, name in ((packed.tokens, "tokens"), (packed.behaviour, "logprobs"), (packed.loss_mask, "loss_mask"),
                         (packed.versions, "versions")):
        for part, whole in zip(unpack(packed, values), (a, b, a), strict=True):
            assert part.tolist() == getattr(whole, name).tolist()
    empty = pack([])  # a dummy of two tokens without loss
    assert kinds == [array.dtype for array in vars(empty).values()]
    assert [len(array) for array in vars(empty).values()] == [2, 2, 2, 2, 2, 1]
    assert not empty.loss_mask.any() and unpack(empty, empty.tokens) == []


def tiny_model(attention="sdpa", dtype=torch.float32):
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16,
                         num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
                         initializer_range=0.3, attn_implementation=attention)
    return Qwen3ForCausalLM(config).to(dtype)


def run(model, packed):
    """Hidden states [T, H] and log-probabilities [T] of a packed row."""
    row = [torch.from_numpy(array) for array in (packed.tokens, packed.positions, packed.loss_mask)]
    # A mask or a cache would hide from the model that the positions restart, and rows would see their neighbours.
    hidden = model.model(input_ids=row[0][None], position_ids=row[1][None], attention_mask=None,
                         use_cache=False).last_hidden_state[0]
    return hidden, token_logprobs(hidden, model.lm_head.weight, *row)[0]


def sampled(count=7):
    rng = np.random.default_rng(0)
    batch = []
    for index in range(count):
        one = Trajectory(0, index, reward=float(rng.choice([5, -5])))
        for _ in range(2):  # two turns
            one.append(rng.integers(0, 50, rng.integers(1, 5)))
            answer = rng.integers(0, 50, rng.integers(1, 9))
            one.append(answer, -rng.random(len(answer)) * 4, np.zeros(len(answer), int))
        batch.append(one)
    return batch


@pytest.mark.parametrize("attention", [
    "sdpa", "eager", pytest.param("flex_attention", marks=pytest.mark.slow), "flash_attention_2"])
def test_packed_rows_equal_rows_alone_and_neighbours_do_not_leak(attention):
    if attention.startswith("flash"):
        pytest.skip("needs a GPU and the flash-attn package")
    model, batch = tiny_model(attention).requires_grad_(False), sampled(4)  # flex has no backward on a CPU
    packed = pack(batch)
    for one, got in zip(batch, unpack(packed, run(model, packed)[1]), strict=True):
        assert torch.allclose(got, run(model, pack([one]))[1], atol=1e-5)
    before = run(model, packed)[0]
    packed.tokens[packed.starts[1] : packed.starts[2]] += 1
    packed.tokens %= 50
    after = run(model, packed)[0]
    changed = [not torch.equal(a, b) for a, b in zip(unpack(packed, before), unpack(packed, after), strict=True)]
    assert changed == [False, True, False, False]


def gradient(model, batch, ranks, capacity, minibatches=1):
    """Gradient of one train step as FSDP would leave it (the mean over ranks), and micro-batches a rank."""
    rng = np.random.default_rng(1)
    whole = pack(batch)
    mask, dtype = torch.from_numpy(whole.loss_mask), model.lm_head.weight.dtype
    advantages = normalise(gae([one.reward for one in batch], mask, whole.starts), mask)
    noise = torch.from_numpy(rng.normal(0, 0.3, len(mask)))
    proximal = (run(model, whole)[1].detach() + noise).to(dtype)
    whole_rows = [unpack(whole, values) for values in (advantages, proximal)]
    plan = plan_step([len(one.tokens) for one in batch], [int(one.loss_mask.sum()) for one in batch], seed=0, step=0,
                     ranks=ranks, minibatches=minibatches, capacity=capacity)
    model.zero_grad()
    for mini in plan:
        for micro in mini.micro:  # rank after rank here, at the same time in the job
            for items in micro:
                packed = pack([batch[i] for i in items])
                a, p = (torch.cat([rows[i] for i in items]) if items else torch.zeros(2) for rows in whole_rows)
                loss, _ = policy_loss(run(model, packed)[1], p, torch.from_numpy(packed.behaviour), a,
                                      torch.from_numpy(packed.loss_mask))
                scale_loss(loss, mini.denominator, ranks).backward()
    grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) / ranks
    return grads, [len(mini.micro[0]) for mini in plan]


@pytest.mark.parametrize("dtype, digits", [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_gradient_depends_on_neither_micro_batches_nor_ranks(dtype, digits):
    model, batch = tiny_model(dtype=dtype), sampled(7)
    want, _ = gradient(model, batch, ranks=1, capacity=1000)
    for ranks, capacity, count in ((1, 70, 2), (1, 33, 4), (2, 99, 1), (2, 40, 2), (2, 20, 4), (9, 99, 1)):
        got, counts = gradient(model, batch, ranks, capacity)
        assert counts == [count]
        assert (got - want).norm() < digits * want.norm(), f"{ranks} ranks, {counts} micro-batches"
    two, _ = gradient(model, batch, ranks=1, capacity=1000, minibatches=2)
    again, counts = gradient(model, batch, ranks=2, capacity=22, minibatches=2)
    assert (two - again).norm() < digits * two.norm() and counts != [1, 1]


def test_the_end_of_an_answer_is_learned_even_if_it_is_the_padding_token():
    one = Trajectory(0, 0)
    one.append([0, 5, 0])  # a prompt may hold it too
    one.append([7, 0], logprobs=[-1.0, -1.0], versions=[0, 0])
    packed = pack([one, one])
    logprobs = run(tiny_model(), packed)[1]
    loss, stats = policy_loss(logprobs, logprobs, logprobs, torch.ones(10), torch.from_numpy(packed.loss_mask))
    assert loss.tolist() == pytest.approx([0, 0, 0, -1, -1] * 2) and stats["tokens"] == 4


def test_tickets_start_every_problem_once_an_epoch_in_an_order_of_the_seed():
    order = [problem_of_ticket(ticket, 7, seed=3) for ticket in range(21)]
    for epoch in range(3):
        assert sorted(order[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert order[:7] != order[7:14]  # another permutation each epoch
    assert order == [problem_of_ticket(ticket, 7, seed=3) for ticket in range(21)]
    assert order != [problem_of_ticket(ticket, 7, seed=4) for ticket in range(21)]


def test_supervised_batches_fill_their_budget_and_visit_every_example_once_an_epoch():
    lengths = [5, 3, 9, 20, 1, 7, 7]  # one is longer than the budget
    batches = list(itertools.islice(sft_batches(lengths, 12, seed=1), 40))
    assert all(sum(lengths[i] for i in batch) <= 12 or batch == [3] for batch in batches)
    seen = [index for batch in batches for index in batch]
    assert sorted(seen[:7]) == sorted(seen[7:14]) == list(range(7)) and seen[:7] != seen[7:14]
    assert batches[5:20] == list(itertools.islice(sft_batches(lengths, 12, seed=1), 5, 20))


def test_the_statistics_of_a_batch_count_tokens_where_they_say_so():
    def one(index, versions, reward, finish="stop", **more):
        made = Trajectory(0, index, reward=reward, finish_reason=finish, **more)
        made.append([1, 2])
        made.append([3] * len(versions), [-1.0] * len(versions), versions)
        return made.header()

    groups = [
        {"trajectories": [one(0, [2, 2, 3], 1.0), one(1, [3], 0.0, "length")], "verdicts": {"right": 1}},
        {"trajectories": [one(0, [4, 4], 0.4, score=1.0), one(1, [3, 4], 0.4, score=1.0)], "verdicts": {"right": 2}},
    ]
    stats = batch_stats(groups, version=4)
    assert stats["staleness_histogram"] == {"0": 3, "1": 3, "2": 2} and stats["staleness_max"] == 2
    assert stats["staleness_mean"] == pytest.approx((3 * 1 + 2 * 2) / 8)
    assert stats["head_staleness"] == pytest.approx((2 + 1 + 0 + 1) / 4)
    assert stats["tail_staleness"] == pytest.approx((1 + 1 + 0 + 0) / 4)
    assert (stats["answers"], stats["tokens"], stats["loss_tokens"]) == (4, 16, 8)
    assert stats["reward"] == pytest.approx(0.45)  # discounted, where the pass rate is not
    assert stats["pass_rate"] == 0.75 and stats["zero_variance_fraction"] == 0.5
    assert stats["truncated_fraction"] == 0.25 and stats["length_mean"] == 2 and stats["length_max"] == 3
    assert stats["verdicts"] == {"right": 3}


# -- the layout of weights


def named_tensors(*shapes):
    return [(f"w{i}", torch.zeros(shape)) for i, shape in enumerate(shapes)]


def test_buckets_keep_order_alignment_and_size():
    named = named_tensors((1,), (3,), (7,), (64, 3), (5, 7, 3), (1, 1), (300, 11), (), (16,), (2, 2))
    for dtype, size in [(torch.float32, 4), (torch.bfloat16, 2)]:
        for limit in (1, 64, 1000, 1 << 20):
            plan = buckets(named, dtype, limit)
            assert [name for bucket in plan for name, _, _ in bucket] == [name for name, _ in named]
            for bucket in plan:
                ends = [offset + tensor.numel() for _, tensor, offset in bucket]
                assert all(offset >= end for (_, _, offset), end in zip(bucket[1:], ends, strict=False))
                assert all(offset * size % 16 == 0 for _, _, offset in bucket)
                assert ends[-1] * size <= limit or len(bucket) == 1
    assert len(buckets(named, torch.float32, 1 << 20)) == 1 and len(buckets(named, torch.float32, 1)) == len(named)


def test_buckets_aligned_to_their_dtype_have_no_gaps():
    """A server's workers cut a bucket by the sizes of its tensors alone."""
    named = named_tensors((1,), (3,), (7,), (64, 3), (), (5,))
    for dtype, limit in [(torch.float32, 128), (torch.bfloat16, 64)]:
        plan = buckets(named, dtype, limit, align=dtype.itemsize)
        layout = [[(name, offset) for name, _, offset in bucket] for bucket in plan]
        assert layout == [[("w0", 0), ("w1", 1), ("w2", 4)], [("w3", 0)], [("w4", 0), ("w5", 1)]]
        assert [bucket_numel(bucket) for bucket in plan] == [11, 192, 6]
    assert [bucket_numel(bucket) for bucket in buckets(named, torch.float32, 128)] == [15, 192, 9]  # boba's own: gaps


def test_other_manifests_are_refused_by_name():
    named = named_tensors((2, 3), (3, 2), (4,))
    ours = json.loads(json.dumps(manifest(named)))
    assert ours == [["w0", [2, 3]], ["w1", [3, 2]], ["w2", [4]]]
    check_manifest(ours, manifest(named), 1)
    for held, want in [
        (named[:2], r"only the trainer has \[\['w2', .*only the generator \[\],"),
        (named + [("w3", torch.ones(1))], r"only the trainer has \[\], only the generator \[\['w3', \[1\]\]\]"),
        (named[:2] + [("x", named[2][1])], r"only the trainer has \[\['w2', .*only the generator \[\['x', "),
        ([("w0", torch.ones(3, 2)), *named[1:]], r"only the generator \[\['w0', \[3, 2\]\]\]"),
        # The layout of a bucket follows the order, so the same names in another order would get each other's values.
        ([named[1], named[0], named[2]], "order"),
    ]:
        with pytest.raises(RuntimeError, match=f"generator rank 7 and the trainer hold different models.*{want}"):
            check_manifest(ours, manifest(held), 7)
