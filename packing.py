"""Trajectories and what they are made of, packing into one row without padding, the plan of a train step (who trains
what), and the layout of weights in buckets.

Left out on purpose:
- padding: trajectories are laid end to end in one row of T tokens and told apart by `positions`, which restart at 0. No
  token id has a meaning here, so a pad id that equals the end-of-sequence id does no harm;
- pickle: what crosses ranks is a JSON header and raw arrays, which can be read without trusting the sender;
- optimal packing: first-fit-decreasing is close to it, fast, and a pure function that any rank can repeat;
- models and transport: nothing below knows who computes or how bytes travel.

One convention for all per-token arrays (length L, or T when packed): entry i belongs to token i. `logprobs[i]` is
log p(token i | tokens before i), `versions[i]` the weights that produced token i, `loss_mask[i]` whether the model did.

    python -m pytest tests/test_packing.py          # CPU, a few seconds
"""

import functools
import itertools
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

# Little-endian on purpose: the same bytes on every machine.
ARRAYS = {"tokens": np.dtype("<i4"), "logprobs": np.dtype("<f4"), "versions": np.dtype("<i4"),
          "loss_mask": np.dtype("?")}
MAGIC = b"boba"
LOGPROB_SLACK = 1e-4  # an engine's log-softmax may round a certain token to slightly above 0


def _empty(name: str):
    return field(default_factory=lambda: np.zeros(0, ARRAYS[name]))


@dataclass(frozen=True)
class Problem:
    """A prompt and how its answers are judged: by answer keys, any one of which is enough, or by tests."""

    id: str
    prompt: str
    solutions: tuple[str, ...] = ()
    task: str = "math"
    prompt_ids: tuple[int, ...] = ()
    tests: dict | None = None  # see `reward.read_tests`
    row: dict = field(default_factory=dict, compare=False)  # as it was read, without the tests


@dataclass(eq=False)
class Trajectory:
    """One sampled sequence: prompt, generated tokens and, between them, tokens of the environment.

    Example: a prompt of two tokens and an answer of two, the second after a weight update:

    >>> one = Trajectory(ticket=7, index=0)
    >>> one.append([11, 12])
    >>> one.append([21, 22], logprobs=[-0.5, -0.25], versions=[3, 4])
    >>> one.loss_mask.tolist(), one.versions.tolist()
    ([False, False, True, True], [-1, -1, 3, 4])
    >>> one.header()["spans"]
    [[3, 1], [4, 1]]

    Construction and `check` raise ValueError, naming ticket and index, if a rule of this file is broken.
    """

    ticket: int
    index: int  # position within the group, 0 <= index < n
    tokens: np.ndarray = _empty("tokens")  # [L]
    logprobs: np.ndarray = _empty("logprobs")  # [L] behaviour log-probabilities, 0 where not generated
    versions: np.ndarray = _empty("versions")  # [L] -1 where not generated
    loss_mask: np.ndarray = _empty("loss_mask")  # [L] True where the model generated the token
    reward: float = math.nan  # nan: not scored yet
    score: float = math.nan  # before a workflow's discount, what pass rates count; nan: the reward
    finish_reason: str = ""  # "stop", "length", or "" while it is being generated

    def __post_init__(self):
        self.check()

    def append(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None,
               versions: Sequence[int] | None = None) -> None:
        """Adds a piece; the only way that the four arrays grow, so they cannot fall out of step.

        Without `logprobs` and `versions` the piece is prompt or environment, with both (one a token) it was generated.
        Raises ValueError and leaves all as it was if the piece breaks a rule. Each call copies what is there.
        """
        if (logprobs is None) != (versions is None):
            self._refuse("a generated piece needs both log-probabilities and versions, any other piece neither")
        generated, count = logprobs is not None, len(tokens)
        piece = {
            "tokens": tokens,
            "logprobs": logprobs if generated else np.zeros(count),
            "versions": versions if generated else np.full(count, -1),
            "loss_mask": np.full(count, generated),
        }
        for name in ("tokens", "versions"):  # a silent cast would turn 1.5 into token 1
            given = np.asarray(piece[name])
            if not np.array_equal(given, given.astype(ARRAYS[name])):
                self._refuse(f"{name} must be integers of 32 bits")
        joined = {k: np.concatenate([getattr(self, k), np.asarray(piece[k]).astype(ARRAYS[k])]) for k in ARRAYS}
        replace(self, **joined)  # checks the longer trajectory before this one changes
        vars(self).update(joined)

    def check(self) -> None:
        """Raises ValueError if an array, the reward or the finish reason breaks a rule."""
        for name, dtype in ARRAYS.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
                self._refuse(f"{name} must be a one-dimensional array of {dtype.name}")
            if len(array) != len(self.tokens):
                self._refuse(f"{name} has {len(array)} entries for {len(self.tokens)} tokens")
        mask = self.loss_mask
        if len(mask) and mask[0]:
            self._refuse("the first token is marked as generated, but there is nothing before it to condition on")
        if (self.tokens < 0).any():
            self._refuse(f"token {int(np.argmax(self.tokens < 0))} has a negative id")
        bad = np.where(mask, ~(np.isfinite(self.logprobs) & (self.logprobs <= LOGPROB_SLACK)), self.logprobs != 0)
        if bad.any():
            where = int(np.argmax(bad))
            rule = "must be finite and not above 0" if mask[where] else "must be 0, the token was not generated"
            self._refuse(f"the log-probability of token {where} is {self.logprobs[where]}; it {rule}")
        bad = np.where(mask, self.versions < 0, self.versions != -1)
        if bad.any():
            where = int(np.argmax(bad))
            rule = "0 or more, the token was generated" if mask[where] else "-1, the token was not generated"
            self._refuse(f"the version of token {where} is {self.versions[where]}; it must be {rule}")
        if math.isinf(self.reward) or self.finish_reason not in ("", "stop", "length"):
            self._refuse(f"reward {self.reward} must not be infinite, and {self.finish_reason!r} be 'stop' or 'length'")

    def _refuse(self, sentence: str):
        raise ValueError(f"trajectory {self.index} of ticket {self.ticket}: {sentence}")

    def header(self) -> dict:
        """What a planner needs to know without the arrays; JSON-able, all counts in tokens except `bytes`.

        `spans` counts the generated tokens of each version; `head_version` is the oldest of them and `tail_version` the
        newest (None without generated tokens). `reward` is None while not scored; `bytes` is the size of `to_bytes()`.
        """
        versions, counts = np.unique(self.versions[self.loss_mask], return_counts=True)
        spans = [[int(v), int(c)] for v, c in zip(versions, counts, strict=True)]
        head, tail = (spans[0][0], spans[-1][0]) if spans else (None, None)
        return {**self._small(), "loss_tokens": int(self.loss_mask.sum()), "spans": spans, "head_version": head,
                "tail_version": tail, "bytes": len(self.to_bytes())}

    def _small(self) -> dict:
        score = self.reward if math.isnan(self.score) else self.score
        reward, score = (None if math.isnan(x) else float(x) for x in (self.reward, score))  # JSON has no nan
        return {"ticket": int(self.ticket), "index": int(self.index), "length": len(self.tokens), "reward": reward,
                "score": score, "finish_reason": self.finish_reason}

    def to_bytes(self) -> bytes:
        """Magic, CRC-32 of all that follows, size of the JSON header, JSON header, the four arrays end to end."""
        head = json.dumps(self._small(), allow_nan=False).encode()
        arrays = b"".join(getattr(self, name).tobytes() for name in ARRAYS)
        body = len(head).to_bytes(4, "little") + head + arrays
        return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body

    @classmethod
    def from_bytes(cls, buffer: bytes) -> "Trajectory":
        """The inverse of `to_bytes`. Raises ValueError if the buffer is cut, changed or not a trajectory."""
        buffer = bytes(buffer)
        body = buffer[8:]
        if len(buffer) < 12 or buffer[:4] != MAGIC or int.from_bytes(buffer[4:8], "little") != zlib.crc32(body):
            raise ValueError(f"a buffer of {len(buffer)} bytes is no trajectory, or it was cut or changed on its way")
        size = int.from_bytes(body[:4], "little")
        try:
            head = json.loads(body[4 : 4 + size])
            length = head.pop("length")
            head |= {name: math.nan for name in ("reward", "score") if head[name] is None}
            arrays, offset = {}, 4 + size
            for name, dtype in ARRAYS.items():
                arrays[name] = np.frombuffer(body, dtype, length, offset).copy()
                offset += dtype.itemsize * length
            if offset != len(body):
                raise ValueError(f"{len(body) - offset} bytes are left over after {length} tokens")
            return cls(**head, **arrays)
        except (AttributeError, KeyError, TypeError) as error:  # intact bytes, but of another format
            raise ValueError(f"the header of a trajectory cannot be read: {error!r}") from error


@dataclass
class Generation:
    """What was generated for one prompt. The three lists have equal lengths."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""  # "stop": ended by itself; "length": the budget was used up
    interruptions: int = 0  # weight updates that fell into it


def check_request(token_ids: list[int], budget: int, vocabulary: int, longest: int, sampling: dict) -> None:
    """ValueError for what an engine must never see: one id outside the vocabulary ends a whole SGLang server."""
    if sampling:
        raise ValueError(f"{min(sampling)}: a request sets max_new_tokens only; filters and penalties would make the "
                         f"log-probabilities another distribution's, temperature and stop tokens are the run's")
    outside = [i for i in token_ids if not 0 <= i < vocabulary]
    if outside or not token_ids:
        raise ValueError(f"the model has no token {outside[0]}: its vocabulary ends at {vocabulary - 1}" if outside
                         else "a prompt without tokens cannot be continued")  # fmt: skip
    if budget < 1 or len(token_ids) + budget > longest:
        raise ValueError(f"a prompt of {len(token_ids)} tokens and {budget} new ones do not fit into the {longest} "
                         f"that the engine was started for (max_prompt_tokens + max_new_tokens)")  # fmt: skip


def cache_token_bytes(config, dtype) -> int:
    """Bytes of keys and values of one token in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize


def _check_lengths(lengths: Sequence[int], capacity: float) -> None:
    for index, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(f"item {index} has {length} tokens, which does not fit a capacity of {capacity} tokens")


def allocate(lengths: Sequence[int], capacity: float, min_groups: int = 1) -> list[list[int]]:
    """Splits items into few groups of at most `capacity` tokens each, and at least `min_groups` groups.

    First-fit-decreasing, as in AReaL's dynamic batching: the longest item first (equal ones in their order); a new
    group is opened while there are fewer than `min_groups` or where no group has room; otherwise the item joins, of
    the groups with room, the one with the fewest items, then the fewest tokens, then the lowest number. With infinite
    capacity the group sizes differ by one at most. O(n log n + n k) for k groups; no promise of an optimum.

    lengths: tokens of each item, [n]. Returns sorted lists of indices, in the order of their first index.
    Raises ValueError if an item is longer than `capacity` or there are fewer than `min_groups` items.

    >>> allocate([9, 8, 7, 6, 5, 4], capacity=16, min_groups=2)     # 15, 15 and 9 tokens
    [[0, 3], [1, 2], [4, 5]]
    """
    if len(lengths) < min_groups:
        raise ValueError(f"{len(lengths)} items cannot fill {min_groups} groups")
    _check_lengths(lengths, capacity)
    groups: list[list[int]] = []
    sums: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):  # stable, also in reverse
        room = [(len(groups[g]), sums[g], g) for g in range(len(groups)) if sums[g] + lengths[index] <= capacity]
        if len(groups) < min_groups or not room:
            groups.append([index])
            sums.append(lengths[index])
        else:
            chosen = min(room)[2]
            groups[chosen].append(index)
            sums[chosen] += lengths[index]
    return sorted(sorted(group) for group in groups)


PLANNED = ("ticket", "index", "length", "loss_tokens", "reward", "head_version", "bytes")  # of headers


@dataclass(frozen=True)
class MiniBatch:
    """One optimiser step. `micro[rank][k]`: indices of the trajectories of micro-batch k of that trainer rank.

    Every rank has the same number of micro-batches, so that collectives match; an empty one has weight zero and is run
    on the dummy of `pack([])`. `denominator` counts the loss tokens of all ranks together.
    """

    denominator: int
    micro: list[list[list[int]]]

    @property
    def skip(self) -> bool:
        """Nothing to learn from, seen alike by all ranks: no forward, no backward, no optimiser step."""
        return self.denominator == 0


def plan_step(lengths: Sequence[int], loss_tokens: Sequence[int], *, seed: int, step: int, ranks: int,
              minibatches: int, capacity: float) -> list[MiniBatch]:
    """Who trains what in train step `step`: a pure function, so that each trainer rank could compute it alone.

    A shuffle by (seed, step) cuts the whole batch into `minibatches` of nearly equal counts; each is spread over the
    ranks by `allocate` and cut into micro-batches of at most `capacity` tokens. The gradient thus depends on neither
    ranks nor capacity. Every trajectory is used exactly once, for any batch, an empty one included.

    lengths, loss_tokens: of each trajectory of the batch, in tokens, [n].
    Raises ValueError if a trajectory is longer than `capacity`.

    >>> plan_step([4, 3, 2], [2, 2, 1], seed=0, step=0, ranks=2, minibatches=1, capacity=4)
    [MiniBatch(denominator=5, micro=[[[0], []], [[1], [2]]])]
    """
    if len(lengths) != len(loss_tokens):
        raise ValueError(f"{len(lengths)} lengths but {len(loss_tokens)} counts of loss tokens")
    if ranks < 1 or minibatches < 1:
        raise ValueError(f"a step needs at least one rank and one mini-batch, got {ranks} and {minibatches}")
    _check_lengths(lengths, capacity)
    order = np.random.default_rng([seed, step]).permutation(len(lengths))
    plan = []
    for part in np.array_split(order, minibatches):
        items = sorted(part.tolist())
        shares = _split(items, lengths, math.inf, min(ranks, len(items)))
        shares += [[] for _ in range(ranks - len(shares))]
        plan.append(MiniBatch(sum(int(loss_tokens[i]) for i in items), _equal_counts(shares, lengths, capacity)))
    return plan


def _split(items: list[int], lengths: Sequence[int], capacity: float, min_groups: int) -> list[list[int]]:
    return [[items[i] for i in group] for group in allocate([lengths[i] for i in items], capacity, min_groups)]


def _equal_counts(shares: list[list[int]], lengths: Sequence[int], capacity: float) -> list[list[list[int]]]:
    """Micro-batches of each rank's share, equally many. Asking for more groups may itself need one more, hence the
    loop; it ends because the count only rises and a share of m items never makes more than m groups."""
    count = 0
    while True:
        micro = [_split(share, lengths, capacity, min(count, len(share))) for share in shares]
        most = max(len(groups) for groups in micro)
        if most == count:
            return [groups + [[] for _ in range(count - len(groups))] for groups in micro]
        count = most


@dataclass
class Packed:
    """Trajectories end to end in one row; trajectory i is [starts[i], starts[i + 1])."""

    tokens: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], restart at 0 for each trajectory
    loss_mask: np.ndarray  # bool [T]
    behaviour: np.ndarray  # float32 [T] log-probabilities from the generator
    versions: np.ndarray  # int32 [T]
    starts: np.ndarray  # int64 [n + 1]


def pack(trajectories: Sequence[Trajectory]) -> Packed:
    """Lays trajectories end to end, without padding. Raises ValueError if one is empty or breaks a rule.

    No trajectories give a dummy of two tokens outside any trajectory (`starts` is [0]) and without loss, so that a rank
    that got nothing can still take part in the collectives of a forward and backward.
    """
    for trajectory in trajectories:
        trajectory.check()
        if not len(trajectory.tokens):
            trajectory._refuse("it has no tokens to pack")
    if not trajectories:
        return Packed(np.zeros(2, np.int64), np.arange(2), np.zeros(2, bool), np.zeros(2, np.float32),
                      np.full(2, -1, np.int32), np.zeros(1, np.int64))
    lengths = [len(trajectory.tokens) for trajectory in trajectories]
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    joined = {name: np.concatenate([getattr(trajectory, name) for trajectory in trajectories]) for name in ARRAYS}
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    return Packed(joined["tokens"].astype(np.int64), positions, joined["loss_mask"], joined["logprobs"],
                  joined["versions"], starts)


def unpack(packed: Packed, values) -> list:
    """Cuts `values` [T] (array or tensor) into one [L_i] view a trajectory, in the order given to `pack`."""
    if len(values) != len(packed.tokens):
        raise ValueError(f"{len(values)} values cannot be spread over a row of {len(packed.tokens)} tokens")
    return [values[start:end] for start, end in zip(packed.starts[:-1], packed.starts[1:], strict=True)]


@functools.lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def problem_of_ticket(ticket: int, count: int, seed: int) -> int:
    """Index of the problem that `ticket` starts: a permutation of all `count` problems per epoch, a function of the
    seed, so that generators need not agree on anything and a resumed run goes on where it was.

    >>> sorted(problem_of_ticket(ticket, 3, seed=1) for ticket in range(3, 6))
    [0, 1, 2]
    """
    return int(_epoch_order(count, seed, ticket // count)[ticket % count])


def sft_batches(lengths: Sequence[int], tokens: int, seed: int, examples: int = 0) -> Iterator[list[int]]:
    """Endless lists of `examples` indices, or (0) of as many as fit into `tokens` tokens, one at least; every example
    once an epoch. A function of the seed, so a resumed run skips what it has seen."""
    batch, size = [], 0
    for epoch in itertools.count():
        for index in _epoch_order(len(lengths), seed, epoch).tolist():
            if batch and (len(batch) == examples if examples else size + lengths[index] > tokens):
                yield batch
                batch, size = [], 0
            batch.append(index)
            size += lengths[index]


def batch_stats(groups: Sequence[dict], version: int) -> dict:
    """What the headers of a batch say about it; `version` is the one that trains it.

    groups: {"trajectories": [Trajectory.header(), ...], "verdicts": {name: count}} each. Staleness counts tokens.
    """
    headers = [header for group in groups for header in group["trajectories"]]
    staleness: Counter = Counter()
    for header in headers:
        for span_version, count in header["spans"]:
            staleness[version - span_version] += count
    tokens = sum(staleness.values())
    rewards, scores = (np.array([header[name] for header in headers]) for name in ("reward", "score"))
    lengths = np.array([header["loss_tokens"] for header in headers])
    same = [len({header["reward"] for header in group["trajectories"]}) == 1 for group in groups]
    return {
        "answers": len(headers),
        "reward": float(rewards.mean()),  # of the verifier, 0 to 1, before bias and scaling
        "pass_rate": float((scores > 0.5).mean()),
        "zero_variance_fraction": float(np.mean(same)),
        "length_mean": float(lengths.mean()),
        "length_max": int(lengths.max()),
        "truncated_fraction": float(np.mean([header["finish_reason"] == "length" for header in headers])),
        "staleness_mean": sum(age * count for age, count in staleness.items()) / tokens,
        "staleness_max": max(staleness),
        "staleness_histogram": {str(age): staleness[age] for age in sorted(staleness)},  # tokens of each staleness
        "head_staleness": float(np.mean([version - header["head_version"] for header in headers])),
        "tail_staleness": float(np.mean([version - header["tail_version"] for header in headers])),
        "tokens": sum(header["length"] for header in headers),
        "loss_tokens": int(lengths.sum()),
        "verdicts": dict(sum((Counter(group["verdicts"]) for group in groups), Counter())),
    }


def pass_at_1(shares: list[dict]) -> dict:
    """Adds up what each generator measured: {"pass@1", "problems", "answers", "length"}; mean over all answers.

    >>> pass_at_1([{"problems": 1, "answers": 4, "reward": 1.0, "tokens": 40},
    ...            {"problems": 1, "answers": 4, "reward": 3.0, "tokens": 40}])
    {'pass@1': 0.5, 'problems': 2, 'answers': 8, 'length': 10.0}
    """
    total = {name: sum(share[name] for share in shares) for name in ("problems", "answers", "reward", "tokens")}
    answers = max(1, total["answers"])
    return {"pass@1": total["reward"] / answers, "problems": total["problems"], "answers": total["answers"],
            "length": total["tokens"] / answers}  # fmt: skip


# -- Weights, which cross ranks in flat buckets ------------------------------------------------------------------------

ALIGN = 16  # bytes; keeps every tensor of a bucket viewable as 64-bit words
BUFFERS = 3  # buckets in memory on either side: two may be on their way while a third is filled or emptied


def manifest(named: Iterable[tuple]) -> list[list]:
    """[[name, shape], ...] of what an update carries; both sides must agree before the first one."""
    return [[name, list(tensor.shape)] for name, tensor in named]


def check_manifest(sent: list[list], held: list[list], rank: int) -> None:
    """Refuse to start if the generator's parameters are not the trainer's, order included: buckets are laid out in it,
    so tensors of equal shape would get each other's values."""
    if sent != held:
        ours, theirs = ([entry for entry in a if entry not in b][:3] for a, b in ((sent, held), (held, sent)))
        raise RuntimeError(f"generator rank {rank} and the trainer hold different models: only the trainer has "
                           f"{ours}, only the generator {theirs}, or the order differs")


def buckets(named: list[tuple], dtype, bucket_bytes: int, align: int = ALIGN) -> list[list[tuple]]:
    """Pure function of names, shapes and dtype, so no layout is sent: [[(name, tensor, offset), ...], ...], offsets in
    elements, each tensor aligned to `align` bytes (SGLang's layout has no gaps: the size of the dtype). A tensor larger
    than `bucket_bytes` has a bucket to itself."""
    size, align = dtype.itemsize, align // dtype.itemsize
    result, end = [[]], 0
    for name, tensor in named:
        if result[-1] and (end + tensor.numel()) * size > bucket_bytes:
            result.append([])
            end = 0
        result[-1].append((name, tensor, end))
        end += -(-tensor.numel() // align) * align
    return result


def bucket_numel(bucket: list[tuple]) -> int:
    return bucket[-1][2] + bucket[-1][1].numel()  # offset and size of its last tensor
