"""Everything that crosses ranks: tickets and the staleness-bounded queue one way, weights the other way.

1. `StalenessQueue`, the rule that bounds staleness: no store, no thread, no clock; job and simulation drive this class.
2. `Channel`, `Dispatcher`: the control plane on the job's own key-value store (torch's TCPStore, the one torchrun
   already runs). Small JSON messages go through its queues, arrays through a key per trajectory. Nothing polls.
3. `send_weights`, `receive_weights`: flat buckets, broadcast from trainer rank 0 to every generator, or to the workers
   of every SGLang server (`join_servers`), and what is compared as the proof of arrival.

Who waits for whom, and until when; the errors name both sides, except that of a broadcast, which only gloo can word.

    who                  waits for                     unblocked by                                   deadline
    generator, slot      admission of its ticket       `admit`: a step or a rejection moved the limit batch_timeout
    generator, notices   the next notice               trainer 0: admit, update, evaluate or stop   2 batch_timeout
    trainer 0            B groups in ticket order      `group` messages of generators                 batch_timeout
    trainer 0            pass@1 shares                 `evaluated` of every generator                 batch_timeout
    trainer 1..          its plan of the step          trainer 0, once the batch is full            2 batch_timeout
    trainer 0, update    `paused` of every generator   its engine; without interruption its answers  update / batch
    trainer 0, first     all workers of all servers    their `join`, which each generator asks for    update_timeout
    generator            its server                    the reply, or its end; asked for a token else   update / engine
    generators, update   buckets of weights            trainer 0's broadcasts                         update_timeout
    trainer 0            `loaded` and its checksum     each generator, after loading                  update_timeout
    trainer 0, start     `ready` of every generator    each generator's engine is up                  startup_timeout

No cycle: generators wait for the trainer only at the admission limit, where (eta + 1) * B groups are finished or
under way, so the trainer has its batch; the trainer waits for generators only below it, where they may all work.

    pytest tests/test_sync.py
"""

import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from packing import ALIGN, BUFFERS, bucket_numel, buckets

# -- 1. The rule -------------------------------------------------------------------------------------------------------


class StalenessError(RuntimeError):
    """Something older than the bound was about to be trained: the guarantee of this file is broken."""


def admission_limit(version: int, rejected: int, *, groups: int, max_staleness: int, window: int, steps: int) -> int:
    """First ticket that may not be started yet, by a generator that has `version` loaded. `version` and `rejected` must
    come from one record: reading them one after the other breaks the bound."""
    paced = (version + max_staleness + 1) * groups + rejected - (window - 1)
    return min(paced, steps * groups + rejected)  # the last batch fills, nothing is started beyond it


class StalenessQueue:
    """Groups in, batches out; no batch ever holds a group more than `max_staleness` versions old.

    Guarantee: a batch consumed at version v has v - head version <= max_staleness for each of its groups. Proof: let
    ticket k start at version h, R rejections being known, and no younger ticket have started before. Then R counts
    only rejections below k, so k < (h + eta + 1) B + R - (W - 1) says that at most (h + eta + 1) B - W accepted groups
    are older than k. At most W - 1 younger ones pass it in the window. So at most (h + eta + 1) B - 1 groups are
    consumed before k, and k is trained at step h + eta or earlier. If a younger ticket did start before, the same
    holds with that earlier, smaller version. `take` checks the bound all the same: that is the alarm, pacing is the
    guarantee.

    Tickets are consumed in order; with `window` W > 1 a younger finished group may pass the oldest unfinished one as
    long as its ticket is less than W above it. W = 1 makes the content of every batch a function of the seed and of
    what was rejected, whatever the timing.
    """

    def __init__(self, groups: int, max_staleness: int, steps: int, window: int = 1):
        if groups < 1 or max_staleness < 0 or steps < 1 or window < 1:
            raise ValueError(f"groups={groups}, steps={steps}, window={window} must be >= 1, eta={max_staleness} >= 0")
        if window > max_staleness * groups + 1:
            raise ValueError(f"window={window} is more than max_staleness * groups + 1 = {max_staleness * groups + 1}: "
                             f"admission would stop before a batch is complete, and the job would wait for ever")
        self.groups, self.max_staleness, self.steps, self.window = groups, max_staleness, steps, window
        self.version = 0
        self.rejected = 0  # R: all rejections so far
        self.rejected_in_a_row = 0
        self.oldest = 0  # oldest ticket neither consumed nor rejected
        self.ready: dict[int, dict] = {}  # ticket -> header of an accepted group that waits for its batch
        self.passed: set[int] = set()  # tickets above `oldest` that are done: consumed ...
        self.dropped: set[int] = set()  # ... or rejected
        self.skip: frozenset[int] = frozenset()  # `passed` at the start of the attempt: no slot starts these again

    @property
    def limit(self) -> int:
        rule = {"groups": self.groups, "max_staleness": self.max_staleness, "window": self.window, "steps": self.steps}
        return admission_limit(self.version, self.rejected, **rule)

    def finish(self, ticket: int, header: dict, accepted: bool) -> None:
        """A generator finished `ticket`. `header["head"]` is the version of its oldest generated token."""
        if ticket < self.oldest or ticket in self.ready or ticket in self.passed or ticket in self.dropped:
            raise RuntimeError(f"ticket {ticket} was finished twice")
        if ticket >= self.limit:
            raise RuntimeError(f"ticket {ticket} was started although only tickets below {self.limit} were admitted")
        if accepted:
            self.ready[ticket] = header
            self.rejected_in_a_row = 0
        else:
            self.dropped.add(ticket)
            self.rejected += 1
            self.rejected_in_a_row += 1
            self._advance()

    def oldest_unfinished(self) -> int:
        """The ticket everybody waits for: neither consumed nor rejected nor finished."""
        ticket = self.oldest
        while ticket in self.ready or ticket in self.passed or ticket in self.dropped:
            ticket += 1
        return ticket

    def take(self) -> list[dict] | None:
        """The next batch (headers, in ticket order), or None while it is not complete."""
        end = self.oldest_unfinished() + self.window
        batch = sorted(ticket for ticket in self.ready if ticket < end)[: self.groups]
        if len(batch) < self.groups:
            return None
        for ticket in batch:
            if self.version - self.ready[ticket]["head"] > self.max_staleness:
                raise StalenessError(f"ticket {ticket} began at version {self.ready[ticket]['head']} and would be "
                                     f"trained at version {self.version}: above the bound {self.max_staleness}")
        self.passed.update(batch)
        headers = [self.ready.pop(ticket) for ticket in batch]
        self._advance()
        return headers

    def trained(self) -> None:
        self.version += 1

    def _advance(self) -> None:
        while self.oldest in self.passed or self.oldest in self.dropped:
            self.passed.discard(self.oldest)
            self.dropped.discard(self.oldest)
            self.oldest += 1

    def state(self) -> dict:
        """What a checkpoint keeps. Call it between `trained` and the next `take`. Groups that are finished but not
        consumed, and rejections above the oldest open ticket, are left out: they are generated again."""
        return {"version": self.version, "oldest": self.oldest, "passed": sorted(self.passed),
                "rejected": self.rejected - len(self.dropped)}  # fmt: skip

    def load(self, state: dict) -> None:
        """Continue from `state`: tickets from `oldest` on are started again, except those in `passed`."""
        done = state["oldest"] + len(state["passed"])
        if done != state["version"] * self.groups + state["rejected"]:
            raise ValueError(f"queue state {state} does not fit batches of {self.groups} groups")
        self.version, self.oldest, self.rejected = state["version"], state["oldest"], state["rejected"]
        self.passed, self.dropped, self.ready = set(state["passed"]), set(), {}
        self.skip = frozenset(state["passed"])


# -- 2. The control plane ----------------------------------------------------------------------------------------------

PART_BYTES = 4 << 20  # a value of the store may hold 8 MiB at most
FOREVER = 400 * 24 * 3600.0  # for threads whose wait is watched by another deadline


class Channel:
    """One connection to the job's store, with the keys of this attempt under a prefix of their own: a restarted attempt
    meets those of the old one (torchrun's store outlives it), which `sweep` deletes. A blocking `pop` holds the
    connection, so every thread that waits has its own. Empty queues vanish, so messages leave no key behind."""

    def __init__(self, timeout_s: float = 60.0):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            self._choose_card(host, port, timeout_s)
        self.store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        self.prefix = f"boba/{self.attempt}/"

    @staticmethod
    def _choose_card(host: str, port: int, timeout_s: float) -> None:
        """Tell gloo the card that reaches the store; by itself it takes that of the host's name, often 127.0.1.1."""
        with socket.create_connection((host, port), timeout_s) as link, socket.socket(type=socket.SOCK_DGRAM) as probe:
            own = link.getsockname()[0].removeprefix("::ffff:")
            for _, card in socket.if_nameindex() if not own.startswith("127.") else ():
                with contextlib.suppress(OSError):  # of a card without an address; the number is SIOCGIFADDR
                    if socket.inet_ntoa(fcntl.ioctl(probe, 0x8915, struct.pack("256s", card.encode()))[20:24]) == own:
                        os.environ["GLOO_SOCKET_IFNAME"] = card

    def push(self, queue: str, message: dict) -> None:
        self.store.queue_push(self.prefix + queue, json.dumps(message).encode())

    def pop(self, queue: str, timeout_s: float, who: str) -> dict:
        """Next message of `queue`. After `timeout_s` seconds TimeoutError("<who> for <timeout_s> s")."""
        self.store.set_timeout(timedelta(seconds=timeout_s))
        try:
            return json.loads(self.store.queue_pop(self.prefix + queue))
        except dist.DistStoreError as error:
            if "timeout" in str(error):
                raise TimeoutError(f"{who} for {timeout_s:.0f} s") from error
            raise

    def put(self, key: str, data: bytes) -> None:
        for part, start in enumerate(range(0, len(data), PART_BYTES)):
            self.store.set(f"{self.prefix}{key}/{part}", data[start : start + PART_BYTES])

    def fetch(self, key: str, size: int, timeout_s: float = 60.0) -> bytes:
        """The `size` bytes that were `put` under `key`; they are deleted from the store."""
        self.store.set_timeout(timedelta(seconds=timeout_s))
        keys = [f"{self.prefix}{key}/{part}" for part in range(-(-size // PART_BYTES))]
        data = b"".join(self.store.get(k) for k in keys)
        for k in keys:
            self.store.delete_key(k)
        if len(data) != size:
            raise RuntimeError(f"{key}: {len(data)} bytes in the store, {size} announced")
        return data

    def next_ticket(self) -> int:
        return self.store.add(self.prefix + "ticket", 1) - 1

    def sweep(self, queues: Iterable[str]) -> None:
        """Delete what earlier attempts left."""
        for key in self.store.list_keys():
            path = key.lstrip("/").split("/")
            if path[0] == "boba" and int(path[1]) < self.attempt:
                self.store.delete_key(key)
        for attempt in range(self.attempt):
            for queue in queues:
                while self.store.queue_len(f"boba/{attempt}/{queue}"):
                    self.store.queue_pop(f"boba/{attempt}/{queue}", False)


def die(role: str, rank: int, error: BaseException) -> None:
    """Print the error, rank first, and end this process at once, whatever its threads wait for; torchrun then ends the
    others. An error that only says that a peer is gone is held back: the peer's own, or torchrun's, comes first."""
    text = f"{type(error).__name__}: {error}"
    what = text.partition("\n")[0]  # the log of a server that follows may say anything
    gone = any(words in what for words in ("Connection closed", "Connection reset", "gloo"))
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and gone):
        time.sleep(5)
    try:
        with contextlib.suppress(OSError):  # whoever read our output may be gone, too
            sys.stdout.flush()
        trace = "".join(traceback.format_exception(error))
        print(f"[rank {rank}, {role}] {text}\n{trace}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


class Dispatcher:
    """Trainer rank 0's side of the control plane: it alone publishes, so every generator sees one order of events.

    A thread receives what generators send, also while a step is being trained, so a rejection moves the admission
    limit at once. Notices to generators: {"do": "admit", "version", "rejected", "skip"} (one record: the two numbers
    are never read apart), {"do": "update", "version"}, {"do": "evaluate", "ranks"}, {"do": "stop"}. Messages from them:
    "ready", "group", "paused", "loaded", "evaluated", with "events" (for the trace) and "stats" (seconds, tokens)."""

    def __init__(self, queue: StalenessQueue, generators: list[int], batch_timeout: float, update_timeout: float,
                 max_rejections: int, fail: Callable[[BaseException], None], interrupt: bool = True,
                 helpers: tuple[int, ...] = ()):  # fmt: skip
        self.queue, self.generators, self.helpers = queue, generators, helpers  # helpers: their GPUs are another's
        self.batch_timeout, self.update_timeout, self.max_rejections = batch_timeout, update_timeout, max_rejections
        self.pause_timeout = update_timeout if interrupt else max(batch_timeout, update_timeout)
        self.changed = threading.Condition()
        self.replies: dict[tuple, dict[int, dict]] = {}  # (kind, version) -> rank -> message
        self.sums: dict[int, dict] = {}  # the newest version -> what was sent: checksum, and for servers the probe
        self.events: list[tuple[int, list]] = []  # (rank, its events)
        self.stats, self.heard = {rank: {} for rank in generators}, {rank: time.monotonic() for rank in generators}
        self.out = Channel()
        self.out.store.set(self.out.prefix + "ticket", str(queue.oldest))
        self.fail = fail
        threading.Thread(target=self._receive, args=(Channel(),), daemon=True, name="inbox").start()

    def _receive(self, channel: Channel) -> None:
        try:
            while True:
                message = channel.pop("inbox", FOREVER, "inbox")
                with self.changed:
                    self._handle(message)
                    self.changed.notify_all()
        except BaseException as error:
            self.fail(error)

    def _handle(self, message: dict) -> None:
        kind, rank = message["kind"], message["rank"]
        self.events.append((rank, message.get("events", [])))
        if rank in self.heard:
            self.heard[rank] = time.monotonic()
            self.stats[rank] = message.get("stats", self.stats[rank])
        if kind == "group":
            self.queue.finish(message["ticket"], message, message["accepted"])
            if not message["accepted"]:
                if self.queue.rejected_in_a_row >= self.max_rejections:
                    raise RuntimeError(f"{self.queue.rejected_in_a_row} groups in a row were rejected (the last pass "
                                       f"rate was {message['pass_rate']:.2f}): the problems do not fit the filter")
                self.publish()
        elif kind != "trainer":  # a trainer rank's message brings nothing but events
            self.replies.setdefault((kind, message.get("version")), {})[rank] = message
            if kind == "loaded":
                self._check_loaded(message["version"])

    def _check_loaded(self, version: int) -> None:
        """Compare what arrived with what was sent: the checksum of an engine of ours. A server's tensors are fused and
        sliced: its sum must have changed if and only if the trainer's did and be the other servers', and the probe must
        be as likely as under the trainer's weights."""
        sent, replies = self.sums.get(version), self.replies.get(("loaded", version), {})
        for rank, reply in replies.items() if sent else ():
            wrong = f"generator rank {rank} holds other weights than the trainer at version {version}: "
            if "probe" not in reply:
                if reply["checksum"] != sent["checksum"]:
                    raise RuntimeError(f"{wrong}checksum {reply['checksum']:016x}, sent {sent['checksum']:016x}")
                continue
            if reply["changed"] != sent["changed"]:
                raise RuntimeError(f"{wrong}tensors changed there: {reply['changed']}, here: {sent['changed']}")
            for other, theirs in replies.items():
                if theirs["checksum"] != reply["checksum"]:
                    raise RuntimeError(f"{wrong}generator rank {other}'s server has other sums of its tensors")
            gaps = [abs(a - b) for a, b in zip(reply["probe"], sent["probe"], strict=True)]
            if not sum(gaps) / len(gaps) <= PROBE_GAP[sent["dtype"]]:  # also if it is not a number
                raise RuntimeError(f"{wrong}they disagree by {sum(gaps) / len(gaps):.4f} nats a token about the probe")

    # -- waiting

    def next_batch(self) -> tuple[list[dict], int]:
        """(headers of the next batch's groups in ticket order, groups left that are finished already)."""
        deadline = time.monotonic() + self.batch_timeout
        with self.changed:
            while (batch := self.queue.take()) is None:
                if not self.changed.wait(deadline - time.monotonic()):
                    silent = {rank: f"{time.monotonic() - t:.0f} s" for rank, t in self.heard.items()}
                    raise TimeoutError(
                        f"trainer rank 0 waited {self.batch_timeout:.0f} s for batch {self.queue.version}: "
                        f"{len(self.queue.ready)} of {self.queue.groups} groups are finished, ticket "
                        f"{self.queue.oldest_unfinished()} is not; generator ranks were last heard of {silent} ago")
            return batch, len(self.queue.ready)

    def gather(self, kind: str, version: int | None, timeout_s: float) -> dict[int, dict]:
        """The `kind` message of every generator; TimeoutError names those that are missing."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            replies = self.replies.setdefault((kind, version), {})
            while missing := sorted(set(self.generators) - set(replies)):
                if not self.changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"trainer rank 0 waited {timeout_s:.0f} s for {kind!r} (version {version}) from "
                                       f"generator rank(s) {missing}")
            return self.replies.pop((kind, version))

    # -- to generators

    def notify(self, notice: dict) -> None:
        with self.changed:  # re-entrant; one connection under one lock: all generators see one order
            for rank in self.generators:
                self.out.push(f"notices/{rank}", notice)

    def publish(self) -> None:
        """Announce (version, rejected), read together: the lock is what makes it one record."""
        with self.changed:
            self.notify({"do": "admit", "version": self.queue.version, "rejected": self.queue.rejected,
                         "skip": sorted(self.queue.skip)})  # fmt: skip

    def begin_update(self, version: int, first: dict) -> None:
        """Have every generator interrupt what it decodes; returns once all of them wait for weights. `first`, with the
        manifest, goes along with the first update. The update before must have arrived everywhere by now."""
        self._arrived()
        self.notify({"do": "update", "version": version, "first": None if self.sums else first})
        self.gather("paused", version, self.pause_timeout)

    def sent(self, version: int, checksum: int, probe: list[float] | None = None, dtype: str = "float32") -> None:
        """The last bucket is out. The trainer goes on; arrival is checked as the `loaded` messages come in."""
        with self.changed:
            changed = all(before["checksum"] != checksum for before in self.sums.values())
            self.sums = {version: {"checksum": checksum, "changed": changed, "probe": probe, "dtype": dtype}}
            self._check_loaded(version)

    def trained(self) -> None:
        """The batch is trained and its weights are on their way: admit more. Not before `begin_update`, or a generator
        could see the new version and admit by it while it still has the old weights loaded."""
        with self.changed:
            self.queue.trained()
            self.publish()

    def state(self) -> dict:
        with self.changed:
            return self.queue.state()

    def _arrived(self) -> None:  # everywhere; that they are the right weights `_check_loaded` sees
        for version in self.sums:
            self.gather("loaded", version, self.update_timeout)

    def stop(self) -> None:
        self._arrived()
        for rank in (*self.generators, *self.helpers):
            self.out.push(f"notices/{rank}", {"do": "stop"})

    def evaluate(self, timeout_s: float) -> list[dict]:
        """pass@1 shares of all generators. Nothing is admitted and no update runs meanwhile."""
        self.notify({"do": "evaluate", "ranks": self.generators})
        return list(self.gather("evaluated", None, timeout_s).values())

    def take_events(self) -> list[tuple[int, list]]:
        with self.changed:
            events, self.events = self.events, []
        return events


# -- 3. Weights --------------------------------------------------------------------------------------------------------

PROBE_GAP = {"float32": 1e-3, "bfloat16": 0.3}  # nats a token on average: beyond rounding, a server has other weights


def invite(servers: list[int], tp: int, backend: str) -> tuple[dist.Store, dict[int, dict]]:
    """Trainer 0 opens a store for a process group with the `tp` workers of every server: (store, what the server of
    each generator rank must be told to join). The port is bound here; torchrun's variables have no say in it."""
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    place = {"master_address": os.environ["MASTER_ADDR"], "master_port": store.port, "backend": backend,
             "world_size": 1 + tp * len(servers), "group_name": f"boba-weights-{store.port}"}  # fmt: skip
    return store, {rank: place | {"rank_offset": 1 + tp * i} for i, rank in enumerate(servers)}


def join_servers(store: dist.Store, invitations: dict[int, dict], timeout_s: float) -> dist.ProcessGroup:
    """Rank 0 of that process group, once all have joined. torch has no public way to make one beside its world."""
    place = next(iter(invitations.values()))
    group, _ = distributed_c10d._new_process_group_helper(
        place["world_size"], 0, [], dist.Backend(place["backend"]), dist.PrefixStore(place["group_name"], store),
        group_name=place["group_name"], timeout=timedelta(seconds=timeout_s))  # fmt: skip
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(place["world_size"])}
    return group


def _word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the tensor's bits as the widest integers that fit, never rounded; blind to their order, which is fixed."""
    flat = tensor.detach().reshape(-1)
    aligned = flat.nbytes | (flat.storage_offset() * flat.itemsize)
    word = next(w for w in (torch.int64, torch.int32, torch.int16) if aligned % w.itemsize == 0)
    return flat.view(word).sum(dtype=torch.int64)


def combine(sums: list[torch.Tensor]) -> int:
    """One number for a list of word sums; exchanging two tensors changes it."""
    total = 0
    for value in torch.stack(sums).tolist():
        total = (total * 1_000_003 + value) % ((1 << 61) - 1)  # a prime: every bit of every sum counts
    return total


def _flats(plan: list, dtype: torch.dtype, device: torch.device, kept: dict | None) -> list[torch.Tensor]:
    """A flat tensor for each bucket; those BUFFERS apart share memory. On a CPU `kept` has it for the next update: new
    memory costs more than copying. A GPU's goes back to its allocator, which lends it to training."""
    kept, sizes = {} if kept is None or device.type != "cpu" else kept, tuple(map(bucket_numel, plan))
    if (dtype, sizes) not in kept:
        memory = [torch.zeros(max(sizes[k::BUFFERS]), dtype=dtype, device=device) for k in range(BUFFERS) if sizes[k:]]
        kept[dtype, sizes] = [memory[i % BUFFERS][:size] for i, size in enumerate(sizes)]
    return kept[dtype, sizes]


@torch.no_grad()
def send_weights(named: list[tuple[str, torch.Tensor]], group, *, dtype: torch.dtype, device: torch.device,
                 bucket_bytes: int, root: bool, align: int = ALIGN, kept: dict | None = None):  # fmt: skip
    """Gather every parameter over the trainers, which all call this; rank 0 (`root`) packs buckets in the generators'
    dtype and broadcasts them to `group` while the next is gathered; no memory is touched before its broadcast is over.
    Returns the checksum of what was sent (root) or None, once all is sent. `kept`: the caller's dict, see `_flats`."""
    plan, pending, sums = buckets(named, dtype, bucket_bytes, align), [], []
    for bucket, flat in zip(plan, _flats(plan, dtype, device, kept) if root else plan, strict=True):
        if len(pending) == BUFFERS:
            pending.pop(0).wait()  # of the bucket that had this memory
        for _, tensor, offset in bucket:
            if isinstance(tensor, DTensor):  # a lone trainer has all of it: no copy
                tensor = tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()
            if not root:
                continue  # it helped to gather
            if len(bucket) == 1 and tensor.is_contiguous() and (tensor.dtype, tensor.device) == (dtype, device):
                flat = part = tensor.view(-1)  # sent from where it is
            else:
                part = flat[offset : offset + tensor.numel()].copy_(tensor.reshape(-1))
            sums.append(_word_sum(part))  # at once, while the cache has it
        if root:  # bytes, as SGLang's workers receive them
            pending.append(dist.broadcast(flat.view(torch.uint8), src=0, group=group, async_op=True))
    for work in pending:
        work.wait()
    return combine(sums) if root else None


@torch.no_grad()
def receive_weights(named: list[tuple[str, torch.Tensor]], group, *, dtype: torch.dtype, device: torch.device,
                    bucket_bytes: int, kept: dict | None = None) -> int:  # fmt: skip
    """The other end: load every bucket into the generator's own tensors while the next ones arrive; returns the
    checksum of these tensors as they are afterwards, not of the bytes that came in."""
    plan, pending, sums = buckets(named, dtype, bucket_bytes), [], []
    flats = _flats(plan, dtype, device, kept)
    for i in range(len(plan) + BUFFERS):
        if i >= BUFFERS:
            pending.pop(0).wait()
            for _, tensor, offset in plan[i - BUFFERS]:
                tensor.copy_(flats[i - BUFFERS][offset : offset + tensor.numel()].view(tensor.shape))
                sums.append(_word_sum(tensor))
        if i < len(plan):  # its memory is free now
            pending.append(dist.broadcast(flats[i].view(torch.uint8), src=0, group=group, async_op=True))
    return combine(sums)
