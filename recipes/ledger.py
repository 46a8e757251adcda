"""The ledger of a run: its folder, metrics, a timeline, a summary, checkpoints.

`Records` is used by trainer ranks. Files of a run folder:

    config.yaml      every setting, and what follows from them
    metrics.jsonl    one row a train step, names below
    trace.json       Chrome trace events, a track a rank; open it in https://ui.perfetto.dev
    summary.json     the numbers of the last table on the terminal
    checkpoints/     what `--resume` continues from, sharded
    tensorboard/     if asked for, the rows of metrics.jsonl

pass@1 itself is measured by the generators (`rollout.Generator`); its shares are added up in `packing.pass_at_1`.
Left out: averages over steps (`metrics.jsonl` has what happened; `benchmarks/report.py` draws it).

    pytest tests/test_train.py
"""

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
import yaml
from torch.distributed.checkpoint import state_dict as sd
from tqdm import tqdm

import toy
from packing import batch_stats
from recipes.data import Refused
from recipes.plan import choose_engine, describe


def write_json(path: Path, content) -> None:
    """Beside, then renamed: a reader never sees half a file."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, path)


def whole_lines(path: Path, keep=lambda line: True) -> Path:
    """Drop half a line that a killed process left at the end of its file, and lines that are not to be kept."""
    if path.exists():
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n") and keep(line)]
        path.with_suffix(".new").write_text("".join(lines))
        os.replace(path.with_suffix(".new"), path)
    return path


class Records:
    """The records of one attempt. Every trainer rank has one for its `phase`s; `root` writes the files."""

    def __init__(self, folder: Path, rank: int, root: bool, steps: int, start: int, kept: dict):
        self.folder, self.rank, self.root, self.steps = folder, rank, root, steps
        self.events: list[list] = []
        self.seconds: Counter = Counter()
        self.begun, self.rl_begun = time.time(), 0.0
        # A resumed run goes on where the checkpoint was written, with its clock and counts.
        self.kept = {"seconds": 0.0, "rl_seconds": 0.0, "answers": 0, "rejected": 0, "max_staleness": 0,
                     "dull_steps": 0, **kept}  # fmt: skip
        self.generator_seconds: Counter = Counter()
        self.bar = self.board = None
        self.start = start
        if root:
            self.metrics = folder / "metrics.jsonl"
            whole_lines(self.metrics, lambda line: json.loads(line)["step"] < start)
            self.trace = open(whole_lines(folder / "trace.json", lambda line: line.rstrip().endswith((",", "["))), "a")
            if not self.trace.tell():
                self.trace.write("[\n")

    # -- time

    @contextmanager
    def phase(self, name: str):
        """Time a part of a step, for the metrics and for the timeline."""
        start = time.time()
        yield
        self.seconds[name] += time.time() - start
        self.events.append([name, 0, start, time.time() - start, {}])

    def take_events(self) -> list[list]:
        events, self.events = self.events, []
        return events

    def write_events(self, rank: int, events: list[list]) -> None:
        """[name, lane, start s, duration s, arguments] -> complete events of the Chrome trace format (us)."""
        for name, lane, start, duration, arguments in events:
            event = {"name": name, "ph": "X", "pid": rank, "tid": lane, "ts": round(start * 1e6),
                     "dur": round(duration * 1e6), "args": arguments}  # fmt: skip
            self.trace.write(json.dumps(event) + ",\n")
        self.trace.flush()

    def collect_events(self, dispatcher) -> None:
        """What this rank and all others did since the last time."""
        for rank, events in [(self.rank, self.take_events()), *dispatcher.take_events()]:
            self.write_events(rank, events)

    def name_tracks(self, trainers: int, world: int) -> None:
        for rank in range(world):
            name = f"rank {rank}, {'trainer' if rank < trainers else 'generator'}"
            event = {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": name}}
            self.trace.write(json.dumps(event) + ",\n")

    # -- the run

    def _write_row(self, row: dict) -> None:
        with open(self.metrics, "a") as file:
            file.write(json.dumps(row) + "\n")
        for name, value in row.items() if self.board else ():
            if type(value) in (int, float) and name != "step":
                self.board.add_scalar(name, value, row["step"])

    def supervised(self, row: dict) -> None:
        """One optimiser step of objective sft."""
        row = {**row, "seconds": round(self.kept["seconds"] + time.time() - self.begun, 3)}
        if self.root:
            self._write_row(row)
            if row["step"] % 10 == 9 or row["step"] + 1 == self.steps:
                self.say(f"step {row['step'] + 1}/{self.steps}  loss {row['loss']:.4f}  {row['seconds']:.0f} s")

    def _close_trace(self) -> None:
        end = {"name": "end", "ph": "i", "pid": 0, "tid": 0, "ts": round(time.time() * 1e6), "s": "g"}
        self.trace.write(json.dumps(end) + "\n]\n")
        self.trace.close()
        if self.board:
            self.board.close()

    def finish_supervised(self, held_out_loss: float | None) -> None:
        if self.root:
            self._close_trace()
            summary = {"steps": self.steps, "seconds": self.state()["seconds"], "held_out_loss": held_out_loss,
                       "held_out_loss_before": self.kept.get("held_out_loss_before")}  # fmt: skip
            write_json(self.folder / "summary.json", summary)
            self.say(f"model in {self.folder / 'model'}" + ("" if held_out_loss is None else
                     f", held-out loss {summary['held_out_loss_before']:.4f} -> {held_out_loss:.4f}"))  # fmt: skip

    def open(self, cfg, me, sizes: dict) -> None:
        """config.yaml, the names of the tracks, and who is what on the terminal."""
        if self.root:
            versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
            derived = describe(cfg, me) | sizes | versions
            text = yaml.safe_dump({**dataclasses.asdict(cfg), "derived": derived}, sort_keys=False)
            (self.folder / "config.yaml").write_text(text)
            if cfg.tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # optional, `check` saw that it is there

                self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.start)
            self.name_tracks(me.trainers, me.world)
            self.say("\n".join([f"run in {self.folder}", *(f"  {k:<20} {v}" for k, v in derived.items())]))

    def say(self, text: str) -> None:
        if self.root:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    @staticmethod
    def _spent(dispatcher) -> Counter:
        return sum((Counter(seconds) for seconds in dispatcher.stats.values()), Counter())

    def begin(self, before: dict | None, start: int, dispatcher) -> None:
        """Reinforcement begins: from here on the clocks of steps and of `answers_per_second` run."""
        self.generator_seconds = self._spent(dispatcher)
        self.kept["before"] = before
        if before:
            self.say(f"before: pass@1 {before['pass@1']:.3f} over {before['problems']} problems, "
                     f"{before['length']:.1f} tokens an answer")  # fmt: skip
        if sys.stdout.isatty():
            self.bar = tqdm(total=self.steps, initial=start, unit="step", file=sys.stdout, dynamic_ncols=True)
        self.rl_begun = self.last = time.time()
        self.seconds.clear()

    def step(self, step: int, groups: list[dict], stats: dict, lr: float, depth: int, dispatcher) -> None:
        """One row of metrics.jsonl, the events of all ranks, the bar or a line."""
        now = time.time()
        elapsed, self.last = now - self.last, now
        batch = batch_stats(groups, step)
        generators = self._spent(dispatcher)
        spent = {name: generators[name] - self.generator_seconds[name] for name in generators}
        self.generator_seconds = generators
        row = {
            "step": step, "seconds": round(self.kept["seconds"] + now - self.begun, 3), **batch, **stats, "lr": lr,
            "tokens_per_second": batch["tokens"] / elapsed,
            "trained_tokens_per_second": batch["loss_tokens"] / elapsed, "step_seconds": elapsed,
            "trainer_seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "generator_seconds": {name: round(value, 4) for name, value in spent.items() if name != "tokens"},
            "generated_tokens": spent.get("tokens", 0), "queue_depth": depth,
            "rejected_groups": dispatcher.queue.rejected, "tickets": [groups[0]["ticket"], groups[-1]["ticket"]],
            "problems": hashlib.sha256(json.dumps([g["problem"] for g in groups]).encode()).hexdigest()[:12],
        }  # fmt: skip
        self.seconds.clear()
        self.kept["answers"] += batch["answers"]
        self.kept["max_staleness"] = max(self.kept["max_staleness"], batch["staleness_max"])
        self.kept["rejected"] = dispatcher.queue.rejected
        self._write_row(row)
        self.collect_events(dispatcher)
        self._warn(row)
        if self.bar is not None:
            self.bar.set_postfix(pass_rate=f"{row['pass_rate']:.2f}", staleness=f"{row['staleness_mean']:.1f}",
                                 tokens_s=f"{row['tokens_per_second']:.0f}")  # fmt: skip
            self.bar.update()
        else:
            left = (self.steps - step - 1) * elapsed
            self.say(f"step {step + 1}/{self.steps}  pass rate {row['pass_rate']:.3f}  length {row['length_mean']:.1f}"
                     f"  staleness {row['staleness_mean']:.2f} (max {row['staleness_max']})  "
                     f"{row['tokens_per_second']:.0f} tokens/s  {left:.0f} s left")  # fmt: skip

    def _warn(self, row: dict) -> None:
        if row["truncated_fraction"] > 0.05:
            self.say(f"warning: {row['truncated_fraction']:.0%} of the answers of step {row['step']} were cut off "
                     f"at the token budget and scored as they were: raise max_new_tokens")  # fmt: skip
        dull = row["zero_variance_fraction"] > 0.9
        self.kept["dull_steps"] = self.kept["dull_steps"] + 1 if dull else 0
        if self.kept["dull_steps"] == 3:
            self.say("warning: in more than 90 % of the groups of three steps running all answers have the same reward"
                     ": there is nothing to learn from them")  # fmt: skip
        if row.get("skipped_updates"):
            self.say(f"warning: {row['skipped_updates']} updates of step {row['step']} had no finite gradient and were "
                     f"skipped")  # fmt: skip
        if (row.get("logprob_gap") or 0.0) > 0.1:
            self.say(f"warning: generator and trainer disagree by {row['logprob_gap']:.3f} nats a token about tokens "
                     f"of the same version")  # fmt: skip

    def state(self) -> dict:
        """What a checkpoint keeps, so that a resumed run's summary covers the whole run."""
        now = time.time()
        return {**self.kept, "seconds": self.kept["seconds"] + now - self.begun,
                "rl_seconds": self.kept["rl_seconds"] + now - (self.rl_begun or now)}  # fmt: skip

    def trained(self) -> None:
        self.kept["rl_seconds"] += time.time() - self.rl_begun

    def finish(self, after: dict | None, bound: int, engine: str, dispatcher) -> None:
        """summary.json and the last table."""
        if self.bar is not None:
            self.bar.close()
        self.collect_events(dispatcher)
        self._close_trace()
        before, kept = self.kept["before"], self.kept
        summary = {
            "pass@1_before": before and before["pass@1"], "pass@1_after": after and after["pass@1"],
            "problems": after["problems"] if after else 0, "length_before": before and before["length"],
            "length_after": after and after["length"], "steps": self.steps,
            "seconds": kept["seconds"] + time.time() - self.begun, "rl_seconds": kept["rl_seconds"],
            "answers": kept["answers"], "answers_per_second": kept["answers"] / max(1e-9, kept["rl_seconds"]),
            "rejected_groups": kept["rejected"], "max_staleness_bound": bound,
            "max_staleness_seen": kept["max_staleness"], "engine": engine,
        }  # fmt: skip
        write_json(self.folder / "summary.json", summary)
        width = max(map(len, summary))
        rows = (f"  {k:<{width}}  {f'{v:.3f}' if isinstance(v, float) else v}" for k, v in summary.items())
        self.say("\n".join([f"\n{self.folder}", *rows]))


# -- The run's folder and its checkpoints ------------------------------------------------------------------------------


def warm_folder(cfg) -> Path:
    """Where the toy's warm start is kept: named by everything that it depends on."""
    names = ("dtype", "sft_steps", "sft_tokens", "sft_examples", "sft_lr", "sft_warmup", "sft_decay", "seed", "beta1",
             "beta2", "adam_eps", "weight_decay", "grad_clip")  # fmt: skip
    content = json.dumps([getattr(cfg, n) for n in names]) + Path(toy.__file__).read_text()
    return Path(cfg.runs_dir) / f"warm-{hashlib.sha256(content.encode()).hexdigest()[:10]}"


def choose_folder(cfg, previous: str = "") -> tuple[str, str]:
    """(folder, name of the checkpoint to continue from), or ("", why not). `previous`: the folder of the attempt that
    torchrun restarts; it is continued unasked."""
    base = cfg.run_name or (Path(cfg.data).stem if cfg.objective == "rl" else f"sft-{Path(cfg.data).stem}")
    parent = Path(cfg.runs_dir)
    taken = [parent / base, *(parent.glob(f"{base}-[0-9]*") if not cfg.run_name else [])]
    newest = max((path for path in taken if path.is_dir()), key=lambda path: path.stat().st_mtime, default=None)
    if cfg.resume or previous:
        folder = Path(previous) if previous else newest or parent / base
        checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
        if not checkpoints and not previous:
            return "", f"--resume: there is no checkpoint under {folder}"
        return str(folder), checkpoints[-1] if checkpoints else ""
    if newest is not None and cfg.run_name:
        resumable = any((newest / "checkpoints").glob("step-*"))
        advice = "add --resume to continue it" if resumable else "it has no checkpoint, so remove it"
        return "", f"{newest} exists: {advice}, or choose another --run_name"
    names = (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))
    folder = next(parent / name for name in names if not (parent / name).exists())
    folder.mkdir(parents=True)
    return str(folder), ""


def choose_run(cfg, channel, cuda: bool) -> tuple[str, str, bool, str, str]:
    """What one rank decides for all: `choose_folder`, after a look at what earlier attempts of this job chose; whether
    a warm start is kept; the engine, and why."""
    earlier = [f"boba/{attempt}/world/run" for attempt in reversed(range(channel.attempt))]  # newest first
    found = (json.loads(channel.store.get(key))[0] for key in earlier if channel.store.check([key]))
    previous = next((folder for folder in found if folder), "")  # an attempt may have died before it chose one
    engine = choose_engine(cfg.engine, cuda) if cfg.objective == "rl" else ("", "")
    return (*choose_folder(cfg, previous), (warm_folder(cfg) / "config.json").is_file(), *engine)


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


def save_checkpoint(me, policy, optimizer, version: int, cfg, state: dict) -> None:
    """Sharded weights and Adam state of all trainers, and `state` as JSON. Written beside, then renamed: a job killed
    while writing leaves the last good one. Groups in flight are not kept; they are generated again."""
    parent, root = me.folder / "checkpoints", me.rank == 0
    new, final = parent / f".step-{version:06d}", parent / f"step-{version:06d}"
    if root:
        shutil.rmtree(new, ignore_errors=True)  # of an attempt that was killed here
    dcp.save(training_state(policy, optimizer), checkpoint_id=new, process_group=me.trainer_group)
    if root:
        content = {"version": version, "config": dataclasses.asdict(cfg), **state}
        (new / "state.json").write_text(json.dumps(content, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(new, final)
        for old in sorted(parent.glob("step-*"))[: -cfg.keep_checkpoints]:
            shutil.rmtree(old)


def read_state(checkpoint: Path, cfg, fingerprint: str) -> dict:
    """What `save_checkpoint` was given. Raises Refused if the configuration or the data is another one, by name."""
    state = json.loads((checkpoint / "state.json").read_text())
    for f in dataclasses.fields(cfg):
        was, now = state["config"].get(f.name), getattr(cfg, f.name)
        if was != now and not f.metadata["help"].free:
            raise Refused(f"{checkpoint} was written with {f.name}={was!r}, now it is {now!r}: the run would not "
                          f"continue but become another one")  # fmt: skip
    if state["fingerprint"] != fingerprint:
        raise Refused(f"{cfg.data} has changed since {checkpoint} was written: tickets would start other problems")
    return state
