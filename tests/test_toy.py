"""The toy: its tokenizer comes back from disk, its splits do not meet, its answers and lengths fit the story.

    pytest tests/test_toy.py
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import toy
from recipes.plan import choose_engine

ROOT = Path(__file__).resolve().parent.parent


def pair(prompt: str) -> tuple[int, int]:
    a, b = re.fullmatch(r"(\d+) \+ (\d+) =", prompt).groups()
    return int(a), int(b)


def test_tokenizer_and_model_come_back_from_disk(tmp_path):
    tokenizer, model = toy.build_tokenizer(), toy.build_model(seed=1)
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)  # same folder: the model's config must not make AutoTokenizer pick Qwen's own class
    again, model_again = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    text = "99 + 0 = 0 : 99 ; \\boxed{ 99 }"
    ids = tokenizer(text)["input_ids"]
    assert again(text)["input_ids"] == ids == [toy.VOCABULARY[word] for word in text.split()]
    for decoder in (tokenizer, again):
        assert decoder.decode(ids) == text
        assert decoder.decode([*ids, decoder.eos_token_id], skip_special_tokens=True) == text
        special = (decoder.pad_token_id, decoder.bos_token_id, decoder.eos_token_id)
        assert special == (0, 1, 2) and len(decoder) == model.config.vocab_size
    assert model_again.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    x = torch.tensor([ids])
    assert torch.equal(model_again.eval()(x).logits, model.eval()(x).logits)


@pytest.mark.parametrize("text", ["100", "1 + x =", "\\boxed{12}"])
def test_an_unknown_word_raises(text):
    with pytest.raises(Exception, match="UNK"):
        toy.build_tokenizer()(text)


def test_every_number_is_one_token():
    tokenizer = toy.build_tokenizer()
    ids = [tokenizer(str(n))["input_ids"] for n in range(100)]
    assert all(len(i) == 1 for i in ids) and len({i[0] for i in ids}) == 100


def test_model_size_and_seed():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same, other = toy.build_model(1), toy.build_model(1), toy.build_model(2)
    assert torch.equal(torch.rand(1), expected), "build_model disturbed the caller's random state"
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert 350_000 < sum(p.numel() for p in one.parameters()) < 450_000
    assert one.lm_head.weight is one.model.embed_tokens.weight
    assert toy.build_model(1, torch.bfloat16).dtype == torch.bfloat16


def test_problems_and_splits():
    train, test = toy.problems("train", 2000, seed=3), toy.problems("test", 200, seed=3)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in test}
    assert len({r["prompt"] for r in test}) == 200
    assert len({r["query_id"] for r in train + test}) == 2200
    for row in train + test:
        a, b = pair(row["prompt"])
        assert set(row) == {"query_id", "prompt", "solutions", "task"} and row["task"] == "math"
        assert row["solutions"] == [f"\\boxed{{ {a + b} }}"] and a + b <= 99
    everything = [f"{a} + {b} =" for b in range(toy.CUT_B + 1) for a in range(min(toy.LARGEST_A, 99 - b) + 1)]
    share = sum(toy.split_of(p) == "test" for p in everything) / len(everything)
    assert abs(share - 1 / toy.TEST_ONE_IN) < 0.05
    assert len(toy.problems("test", 400, seed=1)) == 400
    with pytest.raises(ValueError, match="distinct test problems"):
        toy.problems("test", 401, seed=1)
    with pytest.raises(ValueError, match="'train' or 'test'"):
        toy.problems("valid", 1, seed=1)


@pytest.mark.parametrize(("split", "count"), [("train", 5000), ("test", 200)])
def test_law_of_b_and_the_long_tail_of_lengths(split, count):
    tokenizer = toy.build_tokenizer()
    pairs = [pair(r["prompt"]) for r in toy.problems(split, count, seed=0)]
    bs = [b for _, b in pairs]
    assert 6 <= sum(bs) / count <= 8 and min(bs) == 0 and toy.CUT_B - 10 <= max(bs) <= toy.CUT_B
    assert 20 <= toy.CUT_B <= 40
    lengths = sorted(len(tokenizer(toy.counting_answer(a, b))["input_ids"]) + 1 for a, b in pairs)
    mean = sum(lengths) / count
    assert lengths[-1] > 2.5 * mean and lengths[count // 2] < mean  # a few long ones above many short ones
    assert lengths[-1] <= 4 * (toy.CUT_B + 1) + 4 and lengths[-1] + 4 < toy.MAX_POSITIONS


def test_demonstrations_mix_and_are_right():
    rows = toy.demonstrations(5000, seed=0)
    counting = [(p, a) for p, a in rows if ":" in a]
    assert abs(len(counting) / len(rows) - 0.3) < 0.03
    assert all(toy.split_of(p) == "train" for p, _ in rows)
    for prompt, answer in counting:
        *steps, last = answer.split(" ; ")
        a, b = pair(prompt)
        assert [tuple(map(int, s.split(" : "))) for s in steps] == [(b - i, a + i) for i in range(b + 1)]
        assert last == f"\\boxed{{ {a + b} }}"
    guesses = [(p, a) for p, a in rows if ":" not in a]
    numbers = [int(re.fullmatch(r"\\boxed\{ (\d+) \}", a)[1]) for _, a in guesses]
    assert set(numbers) == set(range(100))
    hits = sum(n == sum(pair(p)) for n, (p, _) in zip(numbers, guesses, strict=True))
    assert hits / len(guesses) < 0.03


def test_the_same_in_another_process():
    """Python's hash() differs between processes; nothing here may depend on it."""
    code = (
        "import json, toy; print(json.dumps([toy.problems('train', 50, 7), toy.problems('test', 50, 7),"
        " toy.demonstrations(50, 7), toy.build_model(7).lm_head.weight.double().sum().item()]))"
    )
    here = [toy.problems("train", 50, 7), toy.problems("test", 50, 7), toy.demonstrations(50, 7)]
    here.append(toy.build_model(7).lm_head.weight.double().sum().item())
    env = os.environ | {"PYTHONHASHSEED": "123"}
    there = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert json.loads(there.stdout) == json.loads(json.dumps(here))
    assert toy.problems("train", 50, 8) != here[0] and toy.demonstrations(50, 8) != here[2]


@pytest.mark.parametrize(("version", "kernels", "cuda", "missing", "why"), [
    ("", True, True, "SGLang is not installed, see requirements-sglang.txt", ""),
    ("0.5.23", False, False, "SGLang 0.5.23 is installed, but there is no GPU and it has no CPU kernels", ""),
    ("0.5.23", True, False, "", "0.5.23; "),
    ("0.5.23", False, True, "", "0.5.23; "),
    ("0.5.24", False, True, "", "0.5.24; warning: UNTESTED, the tests run 0.5.23; "),
])  # fmt: skip
def test_the_engine_is_the_one_that_can_run_and_says_why(monkeypatch, version, kernels, cuda, missing, why):
    def installed(name):
        if name != "sglang" or not version:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(toy, "SGLANG_TESTED", ((0, 5, 23),))
    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: kernels and name == "sgl_kernel" or None)
    assert choose_engine("transformers", cuda) == ("transformers", "asked for")
    auto = ("transformers", f"auto: {missing}") if missing else ("sglang", f"{why}auto: it is installed")
    assert choose_engine("auto", cuda) == auto
    if missing:
        with pytest.raises(ValueError, match=f"^engine=sglang cannot run here: {missing}$"):
            choose_engine("sglang", cuda)
    else:
        assert choose_engine("sglang", cuda) == ("sglang", f"{why}asked for")


def test_sglang_is_not_chosen_without_a_gpu_for_each_rank_or_with_kernels_for_cuda_only(monkeypatch):
    monkeypatch.setattr(toy, "sglang_release", lambda: (0, 5, 23))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(toy.torch.cuda, "device_count", lambda: 1)
    assert choose_engine("auto", cuda=True) == (
        "transformers", "auto: this host has fewer GPUs than ranks, and a server of SGLang needs one for itself")
    monkeypatch.setattr(toy.torch.cuda, "device_count", lambda: 2)
    assert choose_engine("auto", cuda=True)[0] == "sglang"
    monkeypatch.setattr(toy.torch.version, "cuda", "13.0")  # what PyPI's wheel of kernels is for
    assert choose_engine("auto", cuda=False)[0] == "transformers"
    monkeypatch.setattr(toy.torch.version, "cuda", None)
    assert choose_engine("auto", cuda=False)[0] == "sglang"


def test_the_script_prints_problems(capsys):
    runpy.run_path(toy.__file__, run_name="__main__")
    out = capsys.readouterr().out
    assert "\\boxed{" in out and "toy-test-0" in out


def test_docstring_examples():
    import doctest

    result = doctest.testmod(toy)
    assert result.attempted >= 2 and result.failed == 0
