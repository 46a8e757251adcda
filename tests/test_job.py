"""Whole jobs, started with torchrun as a user does: they learn, resume exactly, fail loudly, and leave nothing behind.

    pytest tests/test_job.py                 # a few minutes: some small jobs
    pytest tests/test_job.py -m slow         # the toy in full, three seeds
"""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, SMALL, rows

SUMMARY = {"pass@1_before", "pass@1_after", "problems", "steps", "seconds", "max_staleness_bound", "max_staleness_seen",
           "answers_per_second", "engine"}  # fmt: skip
ROW = {"reward", "pass_rate", "staleness_mean", "staleness_max", "staleness_histogram", "head_staleness",
       "tail_staleness", "clip_fraction", "kl_current_proximal", "kl_proximal_behaviour", "dropped_fraction", "entropy",
       "grad_norm", "lr", "length_mean", "length_max", "truncated_fraction", "tokens_per_second", "trainer_seconds",
       "generator_seconds", "queue_depth"}  # fmt: skip


def patched(folder: Path, body: str) -> Path:
    """A script that runs train.py after `body`, which may break something in one rank."""
    script = folder / "patched.py"
    script.write_text(f"import os, signal, sys, time\nimport train\nRANK = int(os.environ['RANK'])\n{body}\n"
                      f"if __name__ == '__main__':\n    train.main()\n")  # fmt: skip
    return script


def first_error(text: str) -> str:
    """The first line that reports a failure: a rank's own, or torchrun's report of a signal."""
    return next((line for line in text.splitlines() if re.search(r"^\[rank \d|exitcode", line)), "no error line")


# Every third ticket is rejected, whoever samples it: the batches are then a function of the seed alone.
THIRDS = """
import rollout
real = rollout.sample_and_score
async def by_ticket(ticket, *args, **more):
    group = await real(ticket, *args, **more)
    for one in group.trajectories if ticket >= 0 else ():
        one.reward = one.score = float(ticket % 3 == 0 or one.index % 2)
    return group
rollout.sample_and_score = by_ticket
"""


def test_three_ranks_leave_a_complete_run(job, tmp_path, warm_runs):
    # Two trainers and one generator: every kind of rank-to-rank traffic there is.
    one = job(*SMALL, "--trainers", 2, "--runs_dir", warm_runs, "--run_name", "three", ranks=3,
              script=patched(tmp_path, THIRDS))  # fmt: skip
    assert one.wait() == 0, one.text()
    folder = warm_runs / "three"
    summary = json.loads((folder / "summary.json").read_text())
    assert SUMMARY <= set(summary) and summary["steps"] == 4 and summary["problems"] == 8
    assert summary["max_staleness_seen"] <= summary["max_staleness_bound"] == 2
    for name, value in summary.items():  # the last table on the terminal has the same numbers
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        assert re.search(rf"^  {re.escape(name)} +{re.escape(shown)}$", one.text(), re.M), name
    table = rows(folder)
    assert [row["step"] for row in table] == [0, 1, 2, 3]
    for row in table:
        assert row.keys() >= ROW
        assert row["answers"] == 16 and row["staleness_max"] <= 2
        assert sum(row["staleness_histogram"].values()) == row["loss_tokens"]
        assert row["tickets"] == [4 * row["step"], 4 * row["step"] + 3]
    assert all(row["grad_norm"] > 0 for row in table)
    assert table[0]["logprob_gap"] < 1e-4  # same weights on both sides: generator and trainer agree
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings["groups"] == 4 and settings["trainers"] == 2 and settings["derived"]["held out"] == 8
    events = json.loads((folder / "trace.json").read_text())
    names = {(event["pid"], event["name"]) for event in events}
    assert {(0, "train"), (1, "train"), (0, "sync"), (0, "wait"), (0, "log-probabilities"), (2, "generate"),
            (2, "score"), (2, "interrupted")} <= names  # fmt: skip
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in events if event["ph"] == "X")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(folder / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model(**tokenizer("3 + 4 =", return_tensors="pt")).logits.shape[-1] == len(tokenizer)
    assert not one.members()


@pytest.mark.slow
def test_a_second_run_gets_a_folder_of_its_own_and_the_same_warm_start(job, warm_runs):
    warm = sorted(warm_runs.glob("warm-*"))
    stamps = [path.stat().st_mtime_ns for path in warm]
    before = set(warm_runs.glob("toy*"))
    for number in range(2):
        one = job(*SMALL, "--steps", 1, "--eval_problems", 0, "--runs_dir", warm_runs)
        assert one.wait() == 0, one.text()
        new = set(warm_runs.glob("toy*")) - before
        assert len(new) == number + 1 and all((folder / "summary.json").is_file() for folder in new)
    assert not warm or [path.stat().st_mtime_ns for path in warm] == stamps
    assert not [path for path in warm_runs.iterdir() if path.name.startswith(".")]  # nothing half-written


REJECTING = [*SMALL, "--checkpoint_every", 2, "--filter_upper", 0.9, "--max_staleness", 1]


def straight(job, runs: Path, script: Path) -> list[dict]:
    """The metrics of a run of six steps that was never interrupted; run once."""
    if not (runs / "straight" / "summary.json").exists():
        one = job(*REJECTING, "--steps", 6, "--runs_dir", runs, "--run_name", "straight", script=script)
        assert one.wait() == 0, one.text()
    return rows(runs / "straight")


@pytest.mark.slow
def test_a_job_killed_whole_resumes_on_the_same_problems(job, tmp_path, warm_runs):
    settings = [*REJECTING, "--steps", 6, "--runs_dir", warm_runs]
    script = patched(tmp_path, THIRDS)
    other = straight(job, warm_runs, script)
    killed = job(*settings, "--run_name", "killed", script=script)
    folder = warm_runs / "killed"
    killed.until(lambda: (folder / "metrics.jsonl").exists() and len(rows(folder)) >= 3)
    killed.kill()
    assert not killed.members()
    (folder / "metrics.jsonl").open("a").write('{"step": 99')  # killed in the middle of a line
    resumed = job(*settings, "--run_name", "killed", "--resume", "true", script=script)
    assert resumed.wait() == 0, resumed.text()
    table = rows(folder)
    assert [row["step"] for row in table] == list(range(6))  # no gap, no repeat
    assert [row["tickets"] for row in other][:2] == [[1, 5], [7, 11]]  # 1 2 4 5, then 7 8 10 11
    for name in ("tickets", "problems", "lr"):
        assert [row[name] for row in table] == [row[name] for row in other], name
    seconds = [row["seconds"] for row in table]
    assert seconds == sorted(seconds)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["answers"] == 6 * 16 and summary["pass@1_before"] is not None
    state = json.loads(max((folder / "checkpoints").glob("step-*")).joinpath("state.json").read_text())
    queue = state["queue"]
    assert queue["oldest"] + len(queue["passed"]) == queue["version"] * 4 + queue["rejected"]
    json.loads((folder / "trace.json").read_text())
    refused = job(*settings, "--lr", "1e-5", "--run_name", "killed", "--resume", "true")
    assert refused.wait() != 0 and "lr=0.0002, now it is 1e-05" in refused.text(), refused.text()


def test_a_killed_rank_comes_back_by_itself_under_max_restarts(job, tmp_path, warm_runs):
    settings = [*REJECTING, "--steps", 5, "--runs_dir", warm_runs]
    other = straight(job, warm_runs, patched(tmp_path, THIRDS))
    kill = """
if RANK == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    os._exit(3)  # the second attempt dies before it has chosen a folder
import ppo
real_step = ppo.ppo_step
def step(*args, version, **more):
    if RANK == 0 and version == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return real_step(*args, version=version, **more)
ppo.ppo_step = step
"""
    again = job(*settings, script=patched(tmp_path, THIRDS + kill), launcher=["--max-restarts", "2"])
    assert again.wait() == 0, again.text()
    table = rows(max((path for path in warm_runs.glob("toy*")), key=lambda path: path.stat().st_mtime))
    assert [row["step"] for row in table] == list(range(5))
    assert [row["problems"] for row in table] == [row["problems"] for row in other][:5]
    assert not again.members()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_the_job_with_its_name(job, warm_runs, victim):
    one = job(*SMALL, "--steps", 1000, "--runs_dir", warm_runs, "--run_name", f"victim{victim}")
    folder = warm_runs / f"victim{victim}"
    one.until(lambda: (folder / "metrics.jsonl").exists() and len(rows(folder)) >= 2)
    os.kill(one.ranks()[victim], signal.SIGKILL)
    start = time.monotonic()
    assert one.wait(15) != 0
    assert time.monotonic() - start < 15
    error = first_error(one.text())
    assert "-9" in error and f"local_rank: {victim}" in error, one.text()
    assert not one.members()  # scoring workers included


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_exception_in_a_rank_is_the_first_line_and_ends_the_job(job, warm_runs, victim):
    body = ["import ppo\ndef broken(*a, **k): raise ArithmeticError('a broken loss')\nppo.ppo_step = broken",
            "import rollout\nasync def broken(*a, **k): raise ArithmeticError('a broken loss')\n"
            "rollout.sample_and_score = broken"][victim]  # fmt: skip
    script = patched(warm_runs.parent, body)
    one = job(*SMALL, "--runs_dir", warm_runs, "--run_name", f"raises{victim}", script=script)
    one.until(lambda: "ArithmeticError" in one.text())
    assert one.wait(15) != 0
    role = ["trainer", "generator"][victim]
    assert first_error(one.text()) == f"[rank {victim}, {role}] ArithmeticError: a broken loss", one.text()
    assert not one.members()


def test_the_store_is_as_empty_after_a_step_as_before(job, warm_runs):
    script = patched(warm_runs.parent, """
from recipes import ledger
real = ledger.Records.step
def step(self, step, groups, stats, lr, depth, dispatcher):
    real(self, step, groups, stats, lr, depth, dispatcher)
    waiting = sum(len(group["trajectories"]) for group in dispatcher.queue.ready.values())
    keys = [k for k in dispatcher.out.store.list_keys() if "trajectory" in str(k)]
    print("KEYS", dispatcher.out.store.num_keys() - len(keys), len(keys) - waiting, flush=True)
ledger.Records.step = step
end = ledger.Records.finish
def finish(self, after, bound, engine, dispatcher):
    end(self, after, bound, engine, dispatcher)
    print("LEFT", sum("trajectory" in str(k) for k in dispatcher.out.store.list_keys()), flush=True)
ledger.Records.finish = finish
""")
    one = job(*SMALL, "--steps", 6, "--runs_dir", warm_runs, "--run_name", "keys", script=script)
    assert one.wait() == 0, one.text()
    counts = re.findall(r"^KEYS (\d+) (-?\d+)", one.text(), re.M)
    assert len({count for count, _ in counts}) == 1, counts  # everything but trajectories: constant
    # Trajectories: those of finished groups that wait, give or take groups that are arriving at this moment.
    assert all(-16 <= int(excess) <= 16 * 4 for _, excess in counts), counts
    assert "LEFT 0" in one.text()


@pytest.mark.slow
def test_a_lying_queue_is_caught_by_the_loop(job, warm_runs):
    # The rule is broken on purpose, on both sides: admission without a bound, and no alarm in the queue.
    script = patched(warm_runs.parent, """
import sync, rollout
sync.admission_limit = rollout.admission_limit = lambda *a, steps, groups, **k: steps * groups
def take(self):
    batch = sorted(self.ready)[: self.groups]
    if len(batch) < self.groups or batch[-1] >= self.oldest_unfinished() + 1:
        return None
    self.passed.update(batch)
    headers = [self.ready.pop(ticket) for ticket in batch]
    self._advance()
    return headers
sync.StalenessQueue.take = take
""")
    one = job(*SMALL, "--steps", 8, "--max_staleness", 0, "--slots", 32, "--runs_dir", warm_runs,
              "--run_name", "liar", script=script)  # fmt: skip
    assert one.wait() != 0
    assert re.match(r"\[rank 0, trainer\] StalenessError: step \d+: trajectory", first_error(one.text())), one.text()


@pytest.mark.parametrize("staleness, window, dtype, interrupt", [
    pytest.param(0, 1, "float32", "true", marks=pytest.mark.slow),
    pytest.param(4, 9, "bfloat16", "true", marks=pytest.mark.slow),
    pytest.param(2, 1, "float32", "false", marks=pytest.mark.slow),
])
def test_synchronous_windowed_bfloat16_and_patient_are_the_same_code(job, tmp_path, warm_runs, staleness, window,
                                                                     dtype, interrupt):  # fmt: skip
    name = f"eta{staleness}"
    one = job(*SMALL, "--dtype", dtype, "--max_staleness", staleness, "--window", window, "--interrupt", interrupt,
              "--eval_problems", 0, "--runs_dir", warm_runs,
              "--run_name", name, "--filter_upper", 0.9, script=patched(tmp_path, THIRDS))  # fmt: skip
    assert one.wait() == 0, one.text()
    table = rows(warm_runs / name)
    assert len(table) == 4 and max(row["staleness_max"] for row in table) <= staleness
    assert table[-1]["rejected_groups"] >= 4
    if interrupt == "false":  # every answer is of one version
        assert all(row["head_staleness"] == row["tail_staleness"] for row in table)
        assert max(row["staleness_max"] for row in table) > 0


# Tickets 5 to 15 are rejected: at eta = 0 the trainer waits with one group of its batch through eleven in a row.
DROUGHT = THIRDS.replace("ticket % 3 == 0 or one.index % 2", "5 <= ticket < 16 or one.index % 2")


def test_everything_rejected_for_a_while_neither_stalls_nor_trains_an_empty_batch(job, tmp_path, warm_runs):
    one = job(*SMALL, "--max_staleness", 0, "--filter_lower", 0.05, "--filter_upper", 0.95, "--eval_problems", 0,
              "--runs_dir", warm_runs, "--run_name", "drought", script=patched(tmp_path, DROUGHT))  # fmt: skip
    assert one.wait() == 0, one.text()
    table = rows(warm_runs / "drought")
    assert [row["answers"] for row in table] == [16] * 4 and all(row["loss_tokens"] > 0 for row in table)
    assert [row["tickets"] for row in table] == [[0, 3], [4, 18], [19, 22], [23, 26]]
    assert table[-1]["rejected_groups"] == 11 and {row["staleness_max"] for row in table} == {0}


def test_a_filter_that_nothing_passes_stops_the_run_with_the_pass_rate(job, tmp_path, warm_runs):
    one = job(*SMALL, "--filter_lower", 0.9, "--filter_upper", 0.95, "--eval_problems", 0, "--runs_dir", warm_runs,
              "--run_name", "nothing", script=patched(tmp_path, THIRDS))  # fmt: skip
    assert one.wait() != 0
    assert re.match(r"\[rank 0, trainer\] RuntimeError: 24 groups in a row were rejected \(the last pass rate was",
                    first_error(one.text())), one.text()  # fmt: skip


@pytest.mark.slow
def test_eight_ranks(job, warm_runs):
    one = job(*SMALL, "--runs_dir", warm_runs, "--run_name", "eight", ranks=8)
    assert one.wait(400) == 0, one.text()
    assert len(rows(warm_runs / "eight")) == 4


@pytest.mark.slow
def test_own_data_in_both_formats(job, warm_runs, tmp_path):
    # The toy model's words, from a file: the real path of a user's own data, with a folder as the model.
    source = job(*SMALL, "--steps", 1, "--eval_problems", 0, "--runs_dir", warm_runs, "--run_name", "source")
    assert source.wait() == 0, source.text()
    lines = [{"prompt": f"{a} + {b} =", "answer": a + b} for a in range(20) for b in range(3)]
    lines += [{"prompt": f"{a} + 3 =", "solutions": [f"\\boxed{{{a + 3}}}"], "query_id": f"q{a}", "task": "math"}
              for a in range(20)]  # fmt: skip
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one = job(*SMALL, "--model", warm_runs / "source" / "model", "--data", "sums.jsonl", "--runs_dir", warm_runs)
    assert one.wait() == 0, one.text()
    derived = yaml.safe_load((warm_runs / "sums" / "config.yaml").read_text())["derived"]
    assert derived["held out"] == 8 and derived["problems"] == 72


@pytest.mark.slow
def test_supervised_objective_trains_on_every_rank(job, warm_runs, tmp_path):
    settings = ["--objective", "sft", "--sft_steps", 30, "--runs_dir", warm_runs, "--checkpoint_every", 10]
    killed = job(*settings)
    killed.until(lambda: (warm_runs / "sft-toy/metrics.jsonl").exists() and len(rows(warm_runs / "sft-toy")) >= 12)
    killed.kill()
    one = job(*settings, "--resume", "true")
    assert one.wait() == 0, one.text()
    table = rows(warm_runs / "sft-toy")
    assert [row["step"] for row in table] == list(range(30))
    assert len(table) == 30 and table[-1]["loss"] < 0.7 * table[0]["loss"]
    assert (warm_runs / "sft-toy" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_toy_learns(job, tmp_path, seed):
    start = time.monotonic()
    one = job("--seed", seed)
    assert one.wait(400) == 0, one.text()
    seconds = time.monotonic() - start
    summary = json.loads((tmp_path / "runs" / "toy" / "summary.json").read_text())
    print(f"seed {seed}: {summary['pass@1_before']:.3f} -> {summary['pass@1_after']:.3f} in {seconds:.0f} s")
    assert summary["pass@1_before"] < 0.5
    assert summary["pass@1_after"] >= 0.9
    assert summary["length_after"] > 1.5 * summary["length_before"]  # it found that thinking pays
    assert seconds < 180


def test_weights_that_arrive_wrong_end_the_job(job, tmp_path, warm_runs):
    script = patched(tmp_path, """
import sync
real = sync._word_sum  # what a generator computes over the tensors that it has just loaded
def spoil(tensor):
    if RANK == 1 and tensor.shape == (64,):
        tensor[5] += 1e-6
    return real(tensor)
sync._word_sum = spoil
""")
    one = job(*SMALL, "--runs_dir", warm_runs, "--run_name", "wrong", script=script)
    assert one.wait() != 0
    error = first_error(one.text())
    assert error.startswith("[rank 0, trainer] RuntimeError: generator rank 1 holds other weights"), one.text()
    assert not one.members()


def test_a_refusal_is_one_sentence_said_once(job, tmp_path):
    one = job("--lr", "nan", "--runs_dir", tmp_path / "runs")
    assert one.wait(60) != 0
    assert one.text().count("train.py: lr must be a finite number, not nan") == 1
    assert "RuntimeError" not in one.text() and "in main\n    cfg" not in one.text()
    assert not (tmp_path / "runs").exists()


def test_one_rank_and_no_launcher_are_refused_with_what_to_type(job, tmp_path):
    one = job(ranks=1)
    assert one.wait(60) != 0
    assert "torchrun --nproc_per_node 2 train.py" in one.text()
    assert not list(tmp_path.glob("runs*"))
    assert ROOT.joinpath("train.py").is_file()
