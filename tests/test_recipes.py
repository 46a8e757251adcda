"""Every recipe loads, its arithmetic holds, it is what was published or says why not, and a dry run prints its plan.

    pytest tests/test_recipes.py -s     # also prints the table of docs/recipes.md
"""

import dataclasses
import doctest
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import ppo
import train
from recipes import plan
from recipes.plan import Refused, check

ROOT = Path(train.__file__).parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PAGE = (ROOT / "docs" / "recipes.md").read_text()
every = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)

MATH = "inclusionAI/AReaL-boba-Data/AReaL-boba-106k.jsonl"
CODE = "inclusionAI/AReaL-boba-2-RL-Code/deepcoder_0415_v3_verify_new_correct_dedup_lcb.jsonl"
OLD = "inclusionAI/AReaL-RL-Data/data/"
DISTILLED = "deepseek-ai/DeepSeek-R1-Distill-Qwen-"

# What was published, in the names and units of Config; 0 is "none" where it is for Config.
ALL = {"objective": "rl", "temperature": 1.0, "gamma": 1.0, "lam": 1.0, "reward_clip": 20.0, "dual_clip": 0.0,
       "clip_high": 0.0, "batch_norm": True, "group_norm": "none", "loss_average": "token", "proximal": "recompute",
       "early_stop": 5.0, "clip": 0.2, "beta1": 0.9, "beta2": 0.95, "adam_eps": 1e-5, "weight_decay": 0.05,
       "grad_clip": 1.0, "template": "", "workflow": "single_turn", "seed": 1, "shard_ranks": 0, "generator_tp": 1,
       "answers": 16, "minibatches": 4, "max_prompt_tokens": 1024, "max_new_tokens": 27648, "microbatch_tokens": 30720,
       "filter_lower": 0.0, "filter_upper": 1.0, "reward_bias": -0.5, "reward_scaling": 10.0, "lr": 2e-5,
       "activation_checkpointing": True, "engine_args": "{mem-fraction-static: 0.8}"}  # fmt: skip
V2 = ALL | {"ranks": 128, "trainers": 64, "groups": 512, "max_staleness": 0, "decoupled": False, "behaviour_cap": 0.0,
            "slots": 8, "lr_warmup": 1, "data": MATH, "steps": 1035}  # fmt: skip
V3 = ALL | {"max_staleness": 4, "decoupled": True, "model": "Qwen/Qwen3-1.7B", "ranks": 8, "trainers": 4,
            "behaviour_cap": 0.0, "data": OLD + "boba_106k_0319.jsonl"}  # fmt: skip
PROGRAMS = V3 | {"groups": 128, "minibatches": 1, "max_prompt_tokens": 2048, "max_staleness": 16, "behaviour_cap": 5.0,
                 "filter_lower": 0.05, "filter_upper": 0.95, "slots": 7, "steps": 590, "lr_warmup": 0, "data": CODE,
                 "engine_args": "{mem-fraction-static: 0.7}", "test_timeout": 6.0, "code_timeout": 200.0,
                 "checkpoint_every": 20}  # fmt: skip
PUBLISHED = {
    "boba-1.5b": V2 | {"model": DISTILLED + "1.5B"},
    "boba-7b": V2 | {"model": DISTILLED + "7B"},
    "boba-7b-zero": V2 | {"model": "Qwen/Qwen2.5-7B", "answers": 64, "max_prompt_tokens": 2048, "lr": 1e-5,
                          "max_new_tokens": 16384, "microbatch_tokens": 19456, "reward_bias": 0.0, "lr_warmup": 0,
                          "reward_scaling": 1.0, "data": OLD + "orz-zero_56k_0319.jsonl", "steps": 545,
                          "engine_batch": 128},
    "boba-32b-sft": {"objective": "sft", "model": DISTILLED + "32B", "ranks": 64, "sft_examples": 64, "sft_lr": 1e-5,
                     "sft_steps": 300, "sft_warmup": 18, "sft_decay": False, "weight_decay": 0.1, "beta1": 0.9,
                     "beta2": 0.95, "adam_eps": 1e-5, "grad_clip": 1.0, "microbatch_tokens": 32768,
                     "eval_problems": 0, "data": "inclusionAI/AReaL-boba-Data/AReaL-boba-SFT-200.jsonl"},
    "boba2-qwen3-1.7b": V3 | {"groups": 32, "answers": 8, "max_new_tokens": 4096, "microbatch_tokens": 32768,
                              "slots": 4, "steps": 16560, "lr_warmup": 16},
    "boba2-8b-code": PROGRAMS | {"model": "Qwen/Qwen3-8B", "ranks": 192, "trainers": 32, "generator_tp": 2},
    "boba2-14b-code": PROGRAMS | {"model": "Qwen/Qwen3-14B", "ranks": 384, "trainers": 64, "generator_tp": 4,
                                  "update_timeout": 600.0},
    "grpo": V3 | {"model": DISTILLED + "1.5B", "data": MATH, "groups": 32, "max_new_tokens": 8192,
                  "microbatch_tokens": 16384, "behaviour_cap": 5.0, "slots": 16, "steps": 33120, "lr_warmup": 33,
                  "clip": 0.4, "group_norm": "mean_std", "beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.01,
                  "lr": 1e-5, "engine_args": ""},
    "ppo-sync": V3 | {"groups": 512, "max_staleness": 0, "decoupled": False, "steps": 1035, "lr_warmup": 1,
                      "slots": 128},
}  # fmt: skip
# What we set otherwise: each such line has a comment.
ASYNCHRONOUS = {"max_staleness": 4, "decoupled": True, "behaviour_cap": 5.0, "lr": 5e-6, "lr_warmup": 0,
                "shard_ranks": 8}  # fmt: skip
OURS = {
    "boba-1.5b": ASYNCHRONOUS, "boba-7b": ASYNCHRONOUS, "boba-32b-sft": {},
    "boba2-qwen3-1.7b": {"lr": 5e-6, "behaviour_cap": 5.0}, "boba2-8b-code": {"lr": 5e-6, "shard_ranks": 8},
    "boba2-14b-code": {"lr": 5e-6, "shard_ranks": 8}, "grpo": {"lr": 5e-6},
    "ppo-sync": {"lr": 5e-6, "lr_warmup": 0},
    "boba-7b-zero": {name: value for name, value in ASYNCHRONOUS.items() if name != "lr_warmup"},
}  # fmt: skip
TOTALS = {DISTILLED + "1.5B": 1_777_088_000, DISTILLED + "7B": 7_615_616_512, DISTILLED + "32B": 32_763_876_352,
          "Qwen/Qwen2.5-7B": 7_615_616_512, "Qwen/Qwen3-1.7B": 1_720_574_976, "Qwen/Qwen3-8B": 8_190_735_360,
          "Qwen/Qwen3-14B": 14_768_307_200}  # fmt: skip


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def load(path: Path, *more: str) -> train.Config:
    """As a dry run has it: SGLang need not be installed."""
    cfg = train.parse(["--config", str(path), "--dry_run", "true", *more])
    return check(cfg, cfg.ranks)


@every
def test_the_arithmetic_of_a_recipe_holds(path):
    cfg = load(path)
    generators, rows = cfg.ranks - cfg.trainers, plan.count_rows(cfg.data)
    assert cfg.ranks <= 8 or (cfg.ranks % 8 == 0 and cfg.trainers % 8 == 0)  # whole hosts, each of one role
    assert cfg.trainers % (cfg.shard_ranks or cfg.trainers) == 0
    assert 8 % cfg.generator_tp == 0 and generators % cfg.generator_tp == 0
    assert cfg.model == "toy" or (cfg.model in TOTALS and cfg.data in PAGE)
    if cfg.objective == "sft":
        assert generators == 0 and cfg.sft_steps * cfg.sft_examples == 96 * rows and cfg.checkpoint_every
        return
    assert generators > 0 and cfg.groups * cfg.answers % cfg.minibatches == 0
    assert cfg.microbatch_tokens >= cfg.max_prompt_tokens + cfg.max_new_tokens
    assert cfg.slots * generators // cfg.generator_tp <= cfg.groups * (cfg.max_staleness + 1)  # more would not start
    assert cfg.checkpoint_every * (cfg.max_staleness + 1) < cfg.steps
    if path.stem != "toy":
        epochs = {"boba2-8b-code": 10, "boba2-14b-code": 10, "grpo": 10}.get(path.stem, 5)
        assert cfg.steps == epochs * (rows // cfg.groups)
        config = plan.architecture(cfg.model)
        assert cfg.max_prompt_tokens + cfg.max_new_tokens <= config.max_position_embeddings
        assert config.num_key_value_heads % cfg.generator_tp == 0
    plain = load(path, "--max_staleness", "0", "--decoupled", "false")  # the synchronous form of each
    assert plain.groups == cfg.groups


def test_every_recipe_is_in_the_table_of_published_ones():
    assert {path.stem for path in RECIPES} == {*PUBLISHED, "toy"} and PUBLISHED.keys() == OURS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_setting_is_the_published_one_or_ours_with_a_comment(name):
    path = ROOT / "recipes" / f"{name}.yaml"
    cfg, lines = load(path), path.read_text().splitlines()
    wanted = PUBLISHED[name] | OURS[name]
    assert {field: getattr(cfg, field) for field in wanted} == wanted
    for field in OURS[name]:
        assert PUBLISHED[name][field] != wanted[field]
        (at,) = (i for i, line in enumerate(lines) if line.startswith(f"{field}:"))
        assert "#" in lines[at] or lines[at - 1].startswith("#") or field in ("decoupled", "behaviour_cap"), field


@pytest.mark.parametrize("name", PUBLISHED)
def test_right_and_wrong_answers_earn_what_was_published(name):
    cfg = load(ROOT / "recipes" / f"{name}.yaml")
    earned = ppo.shaped_rewards(dataclasses.replace(cfg, group_norm="none"), [1.0, 0.0], [0, 0])
    assert earned == ([1.0, 0.0] if name == "boba-7b-zero" else [5.0, -5.0])


def test_the_group_baseline_centres_and_scales_each_group():
    cfg = load(ROOT / "recipes" / "grpo.yaml")
    rewards = ppo.shaped_rewards(cfg, [1.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 0, 0, 1, 1])
    assert rewards == pytest.approx([3**0.5, *[-(3**-0.5)] * 3, 0, 0], abs=1e-5)


def test_the_toy_recipe_is_the_defaults():
    path = ROOT / "recipes" / "toy.yaml"
    assert train.parse(["--config", str(path)]) == train.Config()
    assert load(path) == check(train.Config(dry_run=True), 2)


def commands(text: str) -> list[list[str]]:
    """Words of the torchrun commands, also of wrapped ones."""
    text = re.sub(r" \\\n#?\s*", " ", text)
    return [line.split() for line in re.findall(r"torchrun .*train\.py.*", text)]


@pytest.mark.parametrize("where", [*RECIPES, ROOT / "docs" / "recipes.md"], ids=lambda path: path.stem)
def test_printed_commands_plan_for_the_gpus_they_name(where):
    found = commands(where.read_text())
    assert found
    for words in found:
        at = words.index("train.py")
        size = dict(itertools.pairwise(words[:at]))
        ranks = int(size.get("--nnodes", 1)) * int(size["--nproc_per_node"])
        cfg = train.parse([*words[at + 1 :], "--dry_run", "true"])
        assert len(found) > 1 or cfg.ranks == ranks
        check(cfg, ranks)
    if where.suffix == ".yaml":
        assert found[0][-2:] == ["--config", f"recipes/{where.name}"]


@pytest.mark.parametrize("model", TOTALS)
def test_parameters_of_the_published_models(model):
    assert plan.count_parameters(plan.architecture(model)) == TOTALS[model]


def test_models_and_data_are_known_without_a_network():
    known = yaml.safe_load((plan.PUBLISHED / "models.yaml").read_text())
    assert set(known) == set(TOTALS)
    assert plan.count_rows(MATH) == 106_000 and plan.count_rows(CODE) == 7600 and plan.count_rows("other") is None


def row(path: Path) -> str:
    """A recipe as a row of the table in docs/recipes.md."""
    cfg = load(path)
    trainer, generator = plan.memory(plan.count_parameters(plan.architecture(cfg.model)), cfg, 2)
    sft, toy = cfg.objective == "sft", path.stem == "toy"
    cells = [path.stem, cfg.model.split("/")[-1].removeprefix("DeepSeek-"),
             f"{cfg.trainers} + {cfg.ranks - cfg.trainers}",
             f"{cfg.sft_examples}" if sft else f"{cfg.groups} x {cfg.answers}",
             f"{cfg.microbatch_tokens}" if sft else f"{cfg.max_prompt_tokens} / {cfg.max_new_tokens}",
             "1" if sft else cfg.minibatches, "-" if sft else cfg.max_staleness,
             "-" if sft else cfg.behaviour_cap or "-", f"{cfg.sft_lr if sft else cfg.lr:.0e}".replace("e-0", "e-"),
             cfg.sft_steps if sft else cfg.steps,
             "-" if toy else f"{trainer:.1f}", "-" if toy or sft else f"{generator:.1f}"]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def test_the_page_shows_the_table_of_all_recipes():
    rows = [row(path) for path in RECIPES]
    print("", *rows, sep="\n")
    assert "\n" + "\n".join(rows) + "\n" in PAGE


def test_what_the_page_calls_settings_are_settings():
    taken = re.findall(r"^\| [^|]+ \| ((?:`\w+`(?:, | and )?)+)", PAGE, re.MULTILINE)
    names = {name for cell in taken for name in re.findall(r"`(\w+)`", cell)}
    assert names <= {f.name for f in dataclasses.fields(train.Config)} and len(names) > 40
    assert PAGE.count("| refused:") > 20


# -- Templates ---------------------------------------------------------------------------------------------------------

TEMPLATES = yaml.safe_load((plan.PUBLISHED / "templates.yaml").read_text())


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_named_template_holds_the_problem_once(name):
    assert plan.template_text(name).count("{input}") == 1 and f"`{name}`" in PAGE


def test_the_published_templates_to_the_letter():
    boxed = "Please reason step by step, and put your final answer within \\boxed{}."
    distilled = "<｜User｜>{input}\n" + boxed + "<｜Assistant｜><think>\n"
    assert plan.template_text("AReaL-boba") == plan.template_text("deepscaler-fix") == distilled
    assert plan.template_text("AReaL-boba-SFT") == "<｜begin▁of▁sentence｜>" + distilled
    qwen = "<|im_start|>user\n{input}\n/think<|im_end|>\n<|im_start|>assistant\n<think>"
    assert plan.template_text("qwen3-think-pure") == qwen
    assert plan.template_text("qwen3-think") == qwen.replace("/think", boxed + "/think")


def test_a_template_of_no_name_is_refused():
    with pytest.raises(ValueError, match="template=chatml is neither chat nor one of AReaL-boba, "):
        plan.template_text("chatml")


# -- Dry runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def dry_run(monkeypatch):
    """As in a terminal, but in this process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(train.os, "_exit", sys.exit)
    return lambda name, *more: train.main(["--config", f"recipes/{name}.yaml", "--dry_run", "true", *more])


@every
def test_a_dry_run_prints_the_plan(path, capsys, dry_run):
    dry_run(path.stem)
    text, cfg = capsys.readouterr().out, load(path)
    assert f"{cfg.ranks}: trainers" in text and "memory, trainer" in text and "steps an epoch" in text
    assert cfg.objective == "sft" or f"= {cfg.groups * cfg.answers} sequences, {cfg.minibatches} mini" in text


def test_the_plan_of_the_8b_to_the_letter(capsys, dry_run):
    dry_run("boba2-8b-code")
    text = capsys.readouterr().out
    for line in ("192: trainers [0-31] in 4 copies, generators [32, 34 .. 190], their tensor-parallel helpers [33, 35 ",
                 "sglang (a plan), 7 groups in flight", "128 groups x 16 answers = 2048 sequences",
                 "at most 16: 128 x (16 + 1) groups", "8.191 B parameters", "16 bytes x 8.191 B / 8 ranks = 15.26 GiB",
                 "7.63 GiB of weights, 72 KiB of cache a token: 2.04 GiB for an answer of 29696",
                 "7600 rows / 128 = 59.4; 590 steps are 9.94 epochs"):  # fmt: skip
        assert line in text


def test_a_dry_run_in_a_terminal_needs_neither_torchrun_nor_a_gpu():
    words = [sys.executable, "train.py", "--config", "recipes/toy.yaml", "--dry_run", "true"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan (nothing is started)\n") and "1024 rows / 32 = 32.0" in done.stdout


def test_a_dry_run_that_contradicts_itself_is_refused_with_a_sentence(capsys, dry_run):
    with pytest.raises(SystemExit, match="2"):
        dry_run("boba-1.5b", "--microbatch_tokens", "16384")
    assert capsys.readouterr() == ("", "train.py: microbatch_tokens=16384 is less than the longest sequence, "
                                   "max_prompt_tokens + max_new_tokens = 28672: such a sequence could never be "
                                   "trained\n")  # fmt: skip


@pytest.mark.parametrize("name, more, sentence", [
    ("boba-1.5b", ["--ranks", "8"], "trainers=64 of 8 ranks leaves nobody to generate"),
    ("boba-7b", ["--shard_ranks", "7"], "64 trainers cannot be split into copies of the model on shard_ranks=7 each"),
    ("boba-1.5b", ["--decoupled", "false"], "decoupled=false with max_staleness=4 would clip around a policy"),
    ("boba2-14b-code", ["--ranks", "383"], "319 generator ranks cannot be split into servers of generator_tp=4"),
    ("boba2-8b-code", ["--engine_args", "{tp-size: 8}"], "engine_args may not set tp-size"),
    ("boba2-8b-code", ["--filter_lower", "0.99"], "no group passes a filter from 0.99 to 0.95"),
    ("boba-32b-sft", ["--trainers", "32"], "objective sft makes all 64 ranks trainers, trainers=32 not"),
    ("grpo", ["--answers", "1"], "group_norm=mean_std with answers=1"),
    ("toy", ["--top_p", "0.9"], "there is no setting --top_p: filters and penalties"),
])  # fmt: skip
def test_contradictions_in_a_recipe_are_refused(name, more, sentence):
    with pytest.raises(Refused, match=f"^{re.escape(sentence)}"):
        load(ROOT / "recipes" / f"{name}.yaml", *more)


def test_a_plan_for_a_model_that_nobody_has_is_refused(tmp_path):
    cfg = dataclasses.replace(load(RECIPES[0]), model=str(tmp_path))
    with pytest.raises(Refused, match="its architecture is not to be had"):
        plan.show(cfg, None)


def test_rows_of_a_file_are_counted(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}')
    assert plan.count_rows(str(tmp_path / "rows.jsonl")) == 2


def test_examples_in_the_plan_are_right():
    failed, tried = doctest.testmod(plan, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried >= 3 and failed == 0
