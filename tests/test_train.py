"""Configuration, data, checkpoints and records, and the gradient over real trainer ranks.

    pytest tests/test_train.py
"""

import dataclasses
import importlib.metadata
import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from conftest import ROOT
from torch.distributed.device_mesh import DeviceMesh

import ppo
import toy
import train
from packing import Trajectory
from recipes import data, ledger, plan
from recipes.data import Refused
from recipes.ledger import Records
from train import Config, check, parse

torch.set_num_threads(1)

# -- settings


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ("--trainers 2", "leaves nobody to generate"),
        ("--objective dpo", "objective: invalid choice: 'dpo' (choose from"),
        ("--engine vllm", "invalid choice: 'vllm'"),
        ("--dtype int8", "invalid choice: 'int8'"),
        ("--device cuda", "torch sees no GPU"),
        ("--steps 0", "steps must be at least 1"),
        ("--lr nan", "lr must be a finite number"),
        ("--lr 0", "lr must be at least"),
        ("--temperature 0", "temperature must be at least"),
        ("--clip 1.5", "clip must be at most"),
        ("--filter_lower 1.0", "no group passes"),
        ("--max_staleness -1", "max_staleness must be at least 0"),
        ("--microbatch_tokens 100", "less than the longest sequence"),
        ("--minibatches 999", "cannot be split into 999 mini-batches"),
        ("--window 66", "would wait for ever"),
        ("--decoupled false", "clip around a policy"),
        ("--decoupled false --max_staleness 0 --proximal interpolate", "no proximal policy that it would replace"),
        ("--dual_clip 0.5", "must be above 1, or 0"),
        ("--group_norm mean --answers 1", "a lone answer is its own mean"),
        ("--group_norm median", "invalid choice: 'median'"),
        ("--shard_ranks 2", "1 trainers cannot be split into copies of the model on shard_ranks=2 each"),
        ("--template qwen4", "template=qwen4 is neither chat nor one of AReaL-boba, r1-distilled-qwen,"),
        ("--data x/y/z.jsonl --model m --workflow multi_turn --template qwen3", "what comes between two answers"),
        ("--model some/model", "in words that some/model does not know"),
        ("--data file.jsonl", "there is no file file.jsonl"),
        ("--workflow multi_turn", "the toy has no second try"),
        ("--workflow turns", "file.py:function is needed"),
        ("--workflow train.py:check", "must be an `async def`"),
        ("--reward nowhere.py:f", "there is no file 'nowhere.py'"),
        ("--turn_discount 1.1", "turn_discount must be at most"),
        ("--model m --data missing.jsonl", "there is no file missing.jsonl"),
        ("--eval_data x.jsonl", "the toy has held-out problems of its own"),
        ("--attention sdpaa", "invalid choice: 'sdpaa'"),
        ("--config=missing.yaml", "missing.yaml"),
        ("--stepz 3", "there is no setting --stepz"),
        ("--steps three", "invalid int value"),
        ("--top_p 0.9", "no setting --top_p: filters and penalties would make log-probabilities another"),
        ("--top_k=5", "no setting --top_k"),
        ("--min_p 0.1", "filters and penalties"),
        ("--repetition_penalty 1.1", "filters and penalties"),
        ("--generator_tp 0", "generator_tp must be at least 1"),
        ("--engine_timeout 0", "engine_timeout must be at least 1"),
        ("--config missing.yaml", "missing.yaml"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(settings, sentence):
    if "cuda" in settings and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Refused) as refusal:
        check(parse(settings.split()), world=2)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("world, sentence", [(1, "torchrun --nproc_per_node 2 train.py")])
def test_one_rank_is_told_what_to_type(world, sentence):
    with pytest.raises(Refused, match=re.escape(sentence)):
        check(Config(), world)


@pytest.fixture(params=["sglang", "transformers"])
def engine(request, monkeypatch):
    """The engine that this machine is said to have."""
    monkeypatch.setattr(plan, "choose_engine", lambda engine, cuda: (request.param, "said so"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    return request.param


@pytest.mark.parametrize("engine, settings, world, sentence", [
    ("transformers", {"generator_tp": 2}, 4, "are for SGLang, but the engine here would be transformers"),
    ("transformers", {"engine_args": "{stream-interval: 4}"}, 2, "are for SGLang, but the engine here would be"),
    ("sglang", {"engine_args": "[1]"}, 2, "engine_args='[1]' is no YAML mapping of names to values"),
    ("sglang", {"engine_args": "stream-interval"}, 2, "is no YAML mapping"),
    ("sglang", {"engine_args": "{a: ["}, 2, "is no YAML mapping"),
    ("sglang", {"engine_args": "{tp_size: 2}"}, 2, "engine_args may not set tp-size: the job does"),
    ("sglang", {"engine_args": "{quantization: fp8}"}, 2, "engine_args may not set quantization: log-probabilities"),
    ("sglang", {"generator_tp": 2, "trainers": 1}, 4, "3 generator ranks cannot be split into servers of"),
    ("sglang", {"generator_tp": 3, "trainers": 6}, 12, "8 ranks a host: a server would lie on two"),
], indirect=["engine"])  # fmt: skip
def test_an_engine_that_could_not_be_started_so_is_refused(engine, settings, world, sentence):
    with pytest.raises(Refused) as refusal:
        check(Config(**settings), world)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
def test_slots_are_those_of_a_server_which_stays_on_its_host_and_is_not_interrupted_if_old(engine, monkeypatch):
    for world, trainers, tp, slots in [(8, 4, 2, 16), (8, 2, 3, 16), (16, 8, 8, 32), (12, 8, 4, 32), (8, 4, 1, 8)]:
        assert check(Config(trainers=trainers, generator_tp=tp), world).slots == slots
    for release, interrupt in [((0, 5, 23), True), ((0, 5, 20), False)]:
        monkeypatch.setattr(toy, "sglang_release", lambda release=release: release)
        assert check(Config(), 2).interrupt == interrupt and not check(Config(interrupt=False), 2).interrupt


def test_sglang_is_refused_where_it_is_missing(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(Refused, match="^engine=sglang cannot run here: SGLang is not installed"):
        check(Config(engine="sglang"), 2)
    check(Config(engine="sglang", objective="sft"), 2)  # nobody generates


def test_the_first_rank_of_a_server_has_it_and_the_others_lend_their_gpu():
    me = dataclasses.replace(ME, world=8, trainers=2)
    assert me.servers(1) == ([2, 3, 4, 5, 6, 7], []) and me.servers(3) == ([2, 5], [3, 4, 6, 7])
    ranks = plan.describe(Config(generator_tp=3), me)["ranks"]
    assert ranks == "8: trainers [0-1], generators [2, 5], their tensor-parallel helpers [3-4, 6-7]"


@pytest.mark.parametrize("world, trainers, slots, local", [
    (2, 1, 32, 2), (3, 1, 16, 3), (8, 4, 8, 8), (16, 8, 4, 8), (24, 8, 2, 8), (40, 16, 2, 8), (2, 1, 32, 1),
    (3, 1, 16, 1),
])  # fmt: skip
def test_half_of_the_ranks_train_by_default_and_hosts_stay_whole(monkeypatch, world, trainers, slots, local):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    cfg = check(Config(), world)
    assert (cfg.trainers, cfg.slots) == (trainers, slots)
    assert check(Config(objective="sft"), world).trainers == world


@pytest.mark.parametrize(
    "content, sentence",
    [("stepz: 3", "there is no setting --stepz"), ("steps: three", "invalid int value"), ("- 1", "expected lines"),
     ("steps: true", "invalid int value"), ("a: [", "while parsing")],
)  # fmt: skip
def test_a_configuration_file_is_checked_by_name_and_type(tmp_path, content, sentence):
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(Refused) as refusal:
        parse(["--config", str(tmp_path / "c.yaml")])
    assert sentence in str(refusal.value)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path):
    # 1e-6 is text to YAML, which wants a dot in it
    (tmp_path / "c.yaml").write_text("steps: 7\nlr: 1e-6\ngroups: 3\ntemplate: chat\nderived: {ranks: many}")
    cfg = parse(["--groups", "5", "--config", str(tmp_path / "c.yaml")])
    assert (cfg.steps, cfg.lr, cfg.groups, cfg.template, cfg.answers) == (7, 1e-6, 5, "chat", Config().answers)


def test_every_field_has_a_help_text_and_a_default_in_its_bounds():
    for f in dataclasses.fields(Config):
        assert f.metadata["help"], f.name
    check(Config(), 2)


# -- data


def test_data_that_cannot_be_read_is_refused_with_file_and_line(tmp_path):
    bad = {
        "": "", "{": ":1", '{"prompt": 1, "answer": 2}': ":1", '{"prompt": "1 + 1 ="}': ":1",
        '{"prompt": "1 + 1 =", "answer": 2}\n{"prompt": "1 + 2 ="}': ":2",
        '{"prompt": "1 + 1 + 1 + 1 + 1 + 1 =", "answer": 6}': "exceed max_prompt_tokens=6",
        '{"prompt": "one + 1 =", "answer": 2}': "cannot tokenise a prompt",
    }  # fmt: skip
    for number, (content, place) in enumerate(bad.items()):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(content)
        with pytest.raises(Refused) as refusal:
            data.load_data(Config(data=str(path), max_prompt_tokens=6), toy.build_tokenizer())
        assert path.name in str(refusal.value) and place in str(refusal.value), refusal.value


def test_the_fingerprint_changes_with_the_data_and_only_with_it(tmp_path):
    def load(lines):
        path = tmp_path / "d.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return data.load_data(Config(data=str(path), eval_problems=0), toy.build_tokenizer())[2]

    lines = [{"prompt": f"{i} + 1 =", "answer": i + 1} for i in range(9)]
    assert load(lines) == load(lines) != load(lines[:-1] + [{"prompt": "8 + 1 =", "answer": 10}])


def test_a_model_that_is_not_there_and_a_missing_template_are_refused():
    with pytest.raises(Refused, match="model=no/such/folder: "):
        data.open_tokenizer(Config(model="no/such/folder", data="x"))
    with pytest.raises(Refused, match="no chat template"):
        data.open_tokenizer(Config(template="chat"))


def test_supervised_examples_train_the_answer_and_its_end():
    tokenizer = toy.build_tokenizer()
    examples, _, fingerprint, dropped = data.demonstrations(Config(microbatch_tokens=60), tokenizer)
    assert dropped > 0 and max(len(example.tokens) for example in examples) <= 60
    for example in examples[:50]:
        text = tokenizer.decode(example.tokens[example.loss_mask])
        assert text.endswith("} <eos>") and example.loss_mask[4:].all() and not example.loss_mask[:4].any()
    assert fingerprint != data.demonstrations(Config(microbatch_tokens=60, seed=2), tokenizer)[2]


def test_toy_problems_are_held_out():
    problems, test, _, dropped = data.load_data(Config(), toy.build_tokenizer())
    assert len(test) == 200 and dropped == 0 and len(problems) > 1000
    assert not {p.prompt for p in problems} & {p.prompt for p in test}


# -- the gradient, over ranks and micro-batches

GRADIENT = """
import os, sys, torch
import ppo, train
from packing import Trajectory, pack, plan_step
torch.set_num_threads(1)
cfg = train.check(train.parse(sys.argv[2:] + ["--objective", "sft"]), int(os.environ["WORLD_SIZE"]))
me = train.join(cfg)
policy = train.build_policy(cfg, me, "")
optimizer = ppo.build_optimizer(cfg, policy, 1e-6)
before = [p.full_tensor().clone() for p in policy.parameters()]
generator = torch.Generator().manual_seed(3)
batch = []
for i in range(13):
    n = int(torch.randint(1, 40, (), generator=generator))
    one = Trajectory(0, i, reward=float(i % 3 == 0))
    one.append(torch.randint(3, 100, (4,), generator=generator).tolist())
    one.append(torch.randint(3, 100, (n,), generator=generator).tolist(),
               (-4 - torch.rand(n, generator=generator)).tolist(), [0] * n)
    batch.append(one)
plan = plan_step([len(t.tokens) for t in batch], [int(t.loss_mask.sum()) for t in batch], seed=1, step=0,
                 ranks=me.trainers, minibatches=1, capacity=cfg.microbatch_tokens)
minibatches = [(m.denominator, [pack([batch[i] for i in micro]) for micro in m.micro[me.rank]],
                [[10 * batch[i].reward - 5 for i in micro] for micro in m.micro[me.rank]]) for m in plan]
from contextlib import nullcontext
stats = ppo.ppo_step(policy, optimizer, minibatches, cfg, version=0, phase=lambda name: nullcontext(),
                           **me.share())
grads = [p.grad.full_tensor() for p in policy.parameters()]
after = [p.full_tensor() for p in policy.parameters()]
if me.rank == 0:
    torch.save({"grads": grads, "delta": [b - a for a, b in zip(before, after)], "stats": stats,
                "micro": len(minibatches[0][1])}, sys.argv[1])
torch.distributed.destroy_process_group()  # its threads abort a process that ends without
"""


@pytest.mark.slow
def test_the_gradient_is_the_same_for_any_ranks_and_micro_batches(job, tmp_path):
    script = tmp_path / "gradient.py"
    script.write_text(GRADIENT)
    results = []
    for ranks, capacity in ((1, 4096), (1, 100), (2, 100)):
        out = tmp_path / f"{ranks}-{capacity}.pt"
        one = job(out, "--microbatch_tokens", capacity, "--max_new_tokens", 60, "--grad_clip", 0, "--run_name",
                  out.stem, ranks=ranks, script=script)  # fmt: skip
        assert one.wait() == 0, one.text()
        results.append(torch.load(out, weights_only=True))
    assert results[0]["micro"] == 1 and results[1]["micro"] >= 3
    for result in results[1:]:
        for one, two in zip(results[0]["grads"], result["grads"], strict=True):
            assert (one - two).norm() <= 1e-5 * one.norm()
        for one, two in zip(results[0]["delta"], result["delta"], strict=True):
            assert torch.allclose(one, two, atol=2e-8)  # the step itself, too
        for name, value in results[0]["stats"].items():
            assert value == pytest.approx(result["stats"][name], rel=1e-4, abs=1e-6), name
    # float32 weights: a learning rate of 1e-6 still moves them.
    moved = torch.cat([delta.flatten() for delta in results[0]["delta"]])
    assert (moved != 0).float().mean() > 0.9 and moved.abs().max() < 3e-6


# -- checkpoints, without processes


@pytest.fixture
def alone(tmp_path):
    """A single trainer rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    me = train.Rank(0, 1, 1, torch.device("cpu"), torch.float32, folder=tmp_path / "run")
    me.trainer_group = dist.group.WORLD
    me.mesh = DeviceMesh.from_group(me.trainer_group, "cpu", mesh_dim_names=("shards",))
    yield me
    dist.destroy_process_group()


def test_a_checkpoint_restores_weights_adam_and_random_state(alone, tmp_path):
    cfg = Config()
    policy = train.build_policy(cfg, alone, "")
    optimizer = ppo.build_optimizer(cfg, policy, 1e-3)

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad()
            tokens = torch.randint(3, 100, (20,))  # from the global random state
            policy(tokens, torch.arange(20), torch.arange(20) > 3)[0].sum().backward()
            optimizer.step()

    def weights():
        return torch.cat([p.full_tensor().flatten() for p in policy.parameters()]).clone()

    steps(2)
    ledger.save_checkpoint(alone, policy, optimizer, 2, cfg, {"fingerprint": "f"})
    steps(3)
    straight = weights()
    checkpoint = alone.checkpoint = alone.folder / "checkpoints" / "step-000002"
    ledger.load_state(checkpoint, alone.trainer_group, policy, optimizer)
    assert not torch.equal(weights(), straight)
    steps(3)
    assert torch.equal(weights(), straight)  # bit for bit: Adam's moments and the draws are the same
    assert ledger.read_state(checkpoint, cfg, "f")["version"] == 2
    with pytest.raises(Refused, match="has changed"):
        ledger.read_state(checkpoint, cfg, "g")
    with pytest.raises(Refused, match="clip=0.2, now it is 0.3"):
        ledger.read_state(checkpoint, dataclasses.replace(cfg, clip=0.3), "f")
    ledger.read_state(checkpoint, dataclasses.replace(cfg, steps=99, batch_timeout=5.0), "f")


def test_a_checkpoint_cut_off_while_writing_leaves_the_last_good_one(alone, monkeypatch):
    cfg = Config(keep_checkpoints=2)
    policy = train.build_policy(cfg, alone, "")
    optimizer = ppo.build_optimizer(cfg, policy, 1e-3)
    parent = alone.folder / "checkpoints"

    def save(version):
        ledger.save_checkpoint(alone, policy, optimizer, version, cfg, {})

    for version in (1, 2, 3):
        save(version)
    assert sorted(p.name for p in parent.iterdir()) == ["step-000002", "step-000003"]

    def cut(*args, **kwargs):
        (parent / ".step-000004").mkdir()
        (parent / ".step-000004" / "half").write_text("x")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ledger.dcp, "save", cut)
        with pytest.raises(KeyboardInterrupt):
            save(4)
    cfg = Config(runs_dir=str(alone.folder.parent), run_name="run", resume=True)
    assert ledger.choose_folder(cfg) == (str(alone.folder), "step-000003")
    save(4)
    assert sorted(p.name for p in parent.iterdir()) == ["step-000003", "step-000004"]


def test_the_exported_model_is_the_trained_one(alone, tmp_path):
    from transformers import AutoModelForCausalLM

    policy = train.build_policy(Config(), alone, "")
    toy.export(tmp_path / "model", True, policy, toy.build_tokenizer(), torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.arange(3, 30)
    with torch.no_grad():
        logits = loaded(tokens[None]).logits[0, :-1].log_softmax(-1)
        want = logits.gather(-1, tokens[1:, None]).squeeze(-1)
        have = policy(tokens, torch.arange(27), torch.ones(27, dtype=bool))[0][1:]
    assert torch.allclose(want, have, atol=1e-5)
    assert loaded.config.architectures == ["Qwen3ForCausalLM"]


def test_run_folders(tmp_path):
    cfg = Config(runs_dir=str(tmp_path))

    def choose(**changes):
        return ledger.choose_folder(dataclasses.replace(cfg, **changes))

    assert choose() == (str(tmp_path / "toy"), "")
    assert choose() == (str(tmp_path / "toy-2"), "")
    assert choose(run_name="mine") == (str(tmp_path / "mine"), "")
    assert "it has no checkpoint, so remove it" in choose(run_name="mine")[1]
    assert "no checkpoint" in choose(run_name="mine", resume=True)[1]
    (tmp_path / "mine" / "checkpoints" / "step-000001").mkdir(parents=True)
    assert "exists: add --resume" in choose(run_name="mine")[1]
    (tmp_path / "toy-2" / "checkpoints" / "step-000005").mkdir(parents=True)
    assert choose(resume=True) == (str(tmp_path / "toy-2"), "step-000005")
    mine = str(tmp_path / "mine")
    assert ledger.choose_folder(cfg, previous=mine) == (mine, "step-000001")
    assert ledger.choose_folder(cfg, previous=str(tmp_path / "toy")) == (str(tmp_path / "toy"), "")  # none written


# -- records


def group(rewards, length=4, version=0, finish="stop"):
    trajectories = []
    for index, reward in enumerate(rewards):
        one = Trajectory(0, index, reward=reward, finish_reason=finish)
        one.append([1, 2])
        one.append([3] * length, [-1.0] * length, [version] * length)
        trajectories.append(one.header())
    return {"ticket": 0, "problem": "p", "trajectories": trajectories, "verdicts": {"right": sum(rewards)}}


class Silence:
    """As much of a dispatcher as the records look at."""

    class queue:
        rejected = 0

    stats = {1: {"generate": 1.0, "tokens": 10}}

    def take_events(self):
        return [(1, [["generate", 1, 1.0, 0.5, {}]])]


STATS = {"logprob_gap": None}
ME = train.Rank(0, 2, 1, torch.device("cpu"), torch.float32)


def test_a_resumed_run_continues_its_files_without_a_gap_or_a_repeat(tmp_path):
    one = Records(tmp_path, 0, True, 6, 0, {})
    one.open(Config(), ME, {})
    one.begin(None, 0, Silence())
    for step in range(4):
        one.step(step, [group([1.0, 0.0])], STATS, 0.1, 0, Silence())
        if step == 1:
            kept = one.state()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')  # killed here, behind a checkpoint of step 2
    one.trace.write('{"name": "ha')
    one.trace.flush()
    two = Records(tmp_path, 0, True, 6, 2, kept)
    two.open(Config(), ME, {})
    two.begin(None, 2, Silence())
    for step in range(2, 6):
        two.step(step, [group([1.0, 0.0])], STATS, 0.1, 0, Silence())
    two.trained()
    two.finish(None, 2, "transformers", Silence())
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(6))
    assert json.loads((tmp_path / "summary.json").read_text())["answers"] == 12  # 2 + 4 steps of 2
    events = json.loads((tmp_path / "trace.json").read_text())
    assert sum(event["name"] == "generate" for event in events) == 9  # what the killed attempt did did happen
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["groups"] == 32
    # A finished run that is given more steps: its closing lines go, its events stay.
    three = Records(tmp_path, 0, True, 7, 6, two.state())
    three.open(Config(), ME, {})
    three.begin(None, 6, Silence())
    three.step(6, [group([1.0, 0.0])], STATS, 0.1, 0, Silence())
    three.trained()
    three.finish(None, 2, "transformers", Silence())
    events = json.loads((tmp_path / "trace.json").read_text())
    assert sum(event["name"] == "generate" for event in events) == 11


def test_warnings_for_what_silently_spoils_a_run(tmp_path, capsys):
    records = Records(tmp_path, 0, True, 9, 0, {})
    records.open(Config(), ME, {})
    records.begin(None, 0, Silence())
    records.step(0, [group([1.0, 0.0])], STATS, 0.1, 0, Silence())
    assert "warning:" not in capsys.readouterr().out
    records.step(1, [group([1.0, 0.0], finish="length")], STATS, 0.1, 0, Silence())
    assert "100% of the answers of step 1 were cut off" in capsys.readouterr().out
    for step in (2, 3):
        records.step(step, [group([1.0, 1.0])], STATS, 0.1, 0, Silence())
    assert "nothing to learn" not in capsys.readouterr().out
    records.step(4, [group([1.0, 1.0])], {"logprob_gap": 0.5, "skipped_updates": 2}, 0.1, 0, Silence())
    out = capsys.readouterr().out
    assert "nothing to learn" in out and "disagree by 0.500" in out and "2 updates of step 4 had no finite" in out


def test_importing_train_starts_nothing():
    assert ROOT == Path(train.__file__).parent and not dist.is_initialized()
    assert math.isfinite(ppo.MAX_LOG_RATIO)
