"""The trainer's model: packed attention, activation checkpointing, sharding in two dimensions, loading and export.

What needs several trainer ranks runs under torchrun: this file is then its own script, see the end.

    pytest tests/test_model.py                               # CPU, offline, about a minute and a half
    pytest tests/test_model.py -m slow -s                    # memory, a job that resumes on fewer ranks; prints figures
    pytest tests/test_model.py -m gpu -s                     # on a machine with a GPU; skipped elsewhere
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import SMALL, rows
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Glm4MoeConfig,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

import packing
import ppo
import toy
import train
from packing import Trajectory, pack, plan_step
from recipes import ledger
from recipes.data import Refused

torch.set_num_threads(1)
FAMILIES = [Qwen2Config, Qwen3Config, LlamaConfig]
LENGTHS = [5, 1, 40, 17]


def tiny(kind=Qwen2Config, **more):
    """Two query heads to a head of keys; a vocabulary that is no multiple of the ranks."""
    head = {"head_dim": 32} if kind is Qwen3Config else {}  # heads x head_dim is not the hidden size, as in Qwen3
    shape = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False)  # fmt: skip
    return kind(**shape | head | more)


def model(config, dtype=torch.float32, attention="packed", seed=0):
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in lm.parameters():  # biases and norms as well: what starts at 0 or 1 would hide a mistake
            parameter.add_(0.1 * torch.randn_like(parameter))
    lm.set_attn_implementation(attention)
    return lm


def row_of(lengths, vocabulary=97, seed=1, device="cpu"):
    """(tokens, positions, mask) of a packed row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return tokens.to(device), positions.to(device), torch.ones(len(tokens), dtype=torch.bool, device=device)


def split(row, lengths):
    return list(zip(*(part.split(lengths) for part in row), strict=True))


def outcome(policy, batches):
    """Log-probabilities of all rows, and the gradient of a weighted sum of them."""
    for parameter in policy.parameters():
        parameter.grad = None
    logprobs = torch.cat([policy(*row)[0] for row in batches])
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=logprobs.device)).sum().backward()
    return logprobs.detach(), {name: parameter.grad for name, parameter in policy.named_parameters()}


def close(one, two, digits):
    """Relative to the size of the whole gradient tensor."""
    return all((one[name] - two[name]).norm() <= digits * two[name].norm() for name in one.keys() | two.keys())


@pytest.fixture(scope="module")
def me(tmp_path_factory):
    """A single trainer rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    me = train.Rank(0, 1, 1, torch.device("cpu"), torch.float32, folder=tmp_path_factory.mktemp("alone") / "run")
    me.trainer_group = dist.group.WORLD
    me.mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("shards",))
    yield me
    dist.destroy_process_group()


# -- Packed attention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("dtype, digits, gradient", [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 0.05, 0.05)])
def test_a_packed_row_is_each_sequence_alone(kind, dtype, digits, gradient):
    lm, row = model(tiny(kind), dtype), row_of(LENGTHS)
    packed, alone = outcome(ppo.Policy(lm, 0.7), [row]), outcome(ppo.Policy(lm, 0.7), split(row, LENGTHS))
    assert torch.allclose(packed[0], alone[0], atol=digits) and close(packed[1], alone[1], gradient)
    assert packed[0].std() > 0.3 and all(grad.norm() > 0 for grad in packed[1].values())
    lm.float().set_attn_implementation("eager")  # another formula altogether, in float32
    other = outcome(ppo.Policy(lm, 0.7), split(row, LENGTHS))
    assert torch.allclose(packed[0], other[0], atol=5 * digits)
    assert close({name: grad.float() for name, grad in packed[1].items()}, other[1], 2 * gradient)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_other_attention_says_the_same(kind, attention):
    lm, row = model(tiny(kind)), row_of(LENGTHS)
    packed = outcome(ppo.Policy(lm, 1.0), [row])
    lm.set_attn_implementation(attention)
    if attention == "flex_attention":  # has no backward on a CPU
        with torch.no_grad():
            assert torch.allclose(ppo.Policy(lm, 1.0)(*row)[0], packed[0], atol=1e-5)
        return
    other = outcome(ppo.Policy(lm, 1.0), [row])
    assert torch.allclose(other[0], packed[0], atol=1e-5) and close(packed[1], other[1], 1e-5)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_another_sequence_does_not_change_a_bit(kind, dtype):
    policy, (tokens, *rest) = ppo.Policy(model(tiny(kind), dtype), 1.0), row_of(LENGTHS)
    before = policy(tokens, *rest)[0].split(LENGTHS)
    for changed in range(len(LENGTHS)):
        other = [*tokens.split(LENGTHS)]
        other[changed] = (other[changed] + 1) % 97
        after = policy(torch.cat(other), *rest)[0].split(LENGTHS)
        same = [torch.equal(one, two) for one, two in zip(before, after, strict=True)]
        assert same == [i != changed or LENGTHS[i] == 1 for i in range(len(LENGTHS))]  # one token predicts nothing


@torch.no_grad()
def test_a_rank_without_sequences_gets_a_row_of_no_sequence():
    empty = pack([])
    row = [torch.as_tensor(part) for part in (empty.tokens, empty.positions, empty.loss_mask)]
    assert not ppo.Policy(model(tiny()), 1.0)(*row)[0].any()


def test_a_window_shorter_than_a_sequence_is_refused():
    config = tiny(use_sliding_window=True, sliding_window=16, max_window_layers=0)
    policy = ppo.Policy(model(config), 1.0)
    with pytest.raises(ValueError, match="attention=packed knows plain causal attention; this model's has a window"):
        policy(*row_of([8, 17]))
    inside = policy(*row_of([8, 16, 3]))[0]  # no token looks back further than the window
    policy.lm.set_attn_implementation("sdpa")
    assert torch.allclose(inside, policy(*row_of([8, 16, 3]))[0], atol=1e-5)


@pytest.mark.parametrize("config", [
    BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4),  # its attention is no plug-in
    Qwen3NextConfig(vocab_size=97, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),  # some layers this, some that
], ids=lambda config: config.model_type)  # fmt: skip
def test_a_model_with_other_layers_is_refused_not_mixed_up(me, tmp_path, config):
    config.save_pretrained(tmp_path)
    with pytest.raises((Refused, ValueError), match="have attention=packed"):
        train.build_policy(settings(tmp_path), me, "")(*row_of(LENGTHS))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def largest(attention, count, length=64):
    policy, watch = ppo.Policy(model(tiny(), attention=attention), 1.0), Largest()
    with watch:
        policy(*row_of([length] * (count // length)))[0].sum().backward()
    return watch.elements


def test_no_matrix_of_tokens_by_tokens_exists():
    assert largest("packed", 2048) == 2 * largest("packed", 1024) == 2048 * 96  # inside the MLP
    assert largest("packed", 2048, 2048) < 2048 * 98  # nor inside a long sequence
    assert largest("sdpa", 2048) == 4 * largest("sdpa", 1024) == 2048**2  # the control: a mask


def test_packed_attention_is_quicker_than_a_mask():
    row, seconds = row_of([64] * 32), {}
    for attention in ("packed", "sdpa"):
        policy = ppo.Policy(model(tiny(), attention=attention), 1.0)
        for _ in range(4):  # the first warms up
            start = time.perf_counter()
            outcome(policy, [row])
            seconds[attention] = min(seconds.get(attention, 99), time.perf_counter() - start)
    print(f"2048 tokens of 64 each: packed {seconds['packed']:.3f} s, sdpa with its mask {seconds['sdpa']:.3f} s, "
          f"ratio {seconds['packed'] / seconds['sdpa']:.2f}")  # fmt: skip
    assert seconds["packed"] < seconds["sdpa"]


# -- Activation checkpointing ------------------------------------------------------------------------------------------


def saved(policy, row):
    """(bytes that the forward keeps for the backward, log-probabilities, gradients)."""
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logprobs = policy(*row)[0]
    size = sum(storage.nbytes() for storage in kept.values())  # weights that were gathered for a layer have gone again
    kept.clear()
    logprobs.sum().backward()
    return size, logprobs.detach(), whole((name, p.grad) for name, p in policy.named_parameters())


@pytest.mark.parametrize("kind", FAMILIES)
def test_activation_checkpointing_changes_memory_alone(me, kind):
    config, row = tiny(kind, num_hidden_layers=6, attention_dropout=0.5), row_of([64] * 8)
    plain, again, twice = (saved(ppo.shard(model(config), 1.0, me.mesh, me.dtype, on), row) for on in (0, 1, 1))
    print(f"{kind.__name__}: kept for the backward {plain[0] >> 10} KiB, with checkpointing {again[0] >> 10} KiB")
    assert again[0] < plain[0] / 3
    for other in (again, twice):  # bit for bit, so dropout is off, too
        assert torch.equal(plain[1], other[1])
        assert all(torch.equal(grad, other[2][name]) for name, grad in plain[2].items())


def test_dropout_of_a_layer_itself_stays_off(me):
    """OPT's layers call dropout themselves instead of having a module for it."""
    config = OPTConfig(vocab_size=97, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
                       dropout=0.5, word_embed_proj_dim=64, max_position_embeddings=512)  # fmt: skip
    row = row_of([64])
    plain, again = (saved(ppo.shard(model(config), 1.0, me.mesh, me.dtype, on), row) for on in (False, True))
    assert torch.equal(plain[1], again[1])


# -- Any number of trainers --------------------------------------------------------------------------------------------


def settings(folder, world=1, **more):
    """`lr` such that a step is much larger than rounding."""
    return train.Config(objective="sft", model=str(folder), data="none.jsonl", trainers=world, microbatch_tokens=100,
                        lr=1e-3, run_name="run", **more)  # fmt: skip


def batch_of(count=13):
    generator, batch = torch.Generator().manual_seed(3), []
    for i in range(count):
        n = int(torch.randint(1, 40, (), generator=generator))
        one = Trajectory(0, i, reward=float(i % 3 == 0))
        one.append(torch.randint(3, 97, (4,), generator=generator).tolist())
        one.append(torch.randint(3, 97, (n,), generator=generator).tolist(),
                   (-4 - torch.rand(n, generator=generator)).tolist(), [0] * n)  # fmt: skip
        batch.append(one)
    return batch


def step(cfg, me, policy, optimizer, batch):
    plan = plan_step([len(t.tokens) for t in batch], [int(t.loss_mask.sum()) for t in batch], seed=1, step=0,
                     ranks=me.trainers, minibatches=1, capacity=cfg.microbatch_tokens)  # fmt: skip
    minibatches = [(m.denominator, [pack([batch[i] for i in micro]) for micro in m.micro[me.rank]],
                    [[10 * batch[i].reward - 5 for i in micro] for micro in m.micro[me.rank]]) for m in plan]
    return ppo.ppo_step(policy, optimizer, minibatches, cfg, version=0, phase=lambda name: nullcontext(), **me.share())


def whole(tensors):
    return {name: tensor.detach().full_tensor().clone() for name, tensor in tensors}


def moments(policy, optimizer):
    return {f"{name} {key}": optimizer.state[p][key].full_tensor().clone()
            for name, p in policy.named_parameters() for key in ("exp_avg", "exp_avg_sq")}  # fmt: skip


def resumed(cfg, me, checkpoint):
    """As a resumed job has it: an empty model on the meta device, and the checkpoint."""
    policy = train.build_policy(cfg, me, "")
    optimizer = ppo.build_optimizer(cfg, policy, cfg.lr)
    ledger.load_state(Path(checkpoint), me.trainer_group, policy, optimizer)
    return {"weights": whole(policy.named_parameters()), "moments": moments(policy, optimizer)}


def a_step(cfg, me, other=None):
    """Load, step twice (the second time with moments), save; then resume from `other`, if there is one."""
    policy = train.build_policy(cfg, me, cfg.model)
    optimizer = ppo.build_optimizer(cfg, policy, cfg.lr)
    result = {"loaded": whole(policy.named_parameters())}
    result["stats"] = step(cfg, me, policy, optimizer, batch_of())
    result["grads"] = whole((name, p.grad) for name, p in policy.named_parameters())
    result["stepped"] = whole(policy.named_parameters())
    step(cfg, me, policy, optimizer, batch_of(5))
    result |= {"weights": whole(policy.named_parameters()), "moments": moments(policy, optimizer)}
    ledger.save_checkpoint(me, policy, optimizer, 2, cfg, {})
    result["kept"] = sum(p.to_local().numel() for p in policy.parameters())
    if other:
        result["resumed"] = resumed(cfg, me, other)
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in result["weights"].values())).hexdigest()
    digests = [None] * me.trainers
    dist.all_gather_object(digests, digest, group=me.trainer_group)
    return result | {"digests": digests}


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untied tiny Qwen2."""
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    model(tiny(num_hidden_layers=3)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one_trainer(me, folder):
    result = a_step(settings(folder), me)
    return result | {"checkpoint": me.folder / "checkpoints" / "step-000002"}


def test_one_trainer_resumes_its_own_checkpoint(me, folder, one_trainer):
    again = resumed(settings(folder), me, one_trainer["checkpoint"])
    assert equal(again["weights"], one_trainer["weights"]) and equal(again["moments"], one_trainer["moments"])
    assert not equal(one_trainer["loaded"], one_trainer["weights"])


@pytest.mark.parametrize("ranks, more", [
    pytest.param(2, {"activation_checkpointing": True}, marks=pytest.mark.slow),
    (2, {"shard_ranks": 1}),  # replicas
    pytest.param(4, {"shard_ranks": 2}, marks=pytest.mark.slow),  # 2 x 2
], ids=["sharded", "replicas", "2x2"])  # fmt: skip
def test_any_layout_of_trainers_is_one_trainer(job, tmp_path, me, folder, one_trainer, ranks, more):
    one = job("a_step", json.dumps({"folder": str(folder), "more": more, "other": str(one_trainer["checkpoint"])}),
              ranks=ranks, script=Path(__file__))  # fmt: skip
    assert one.wait() == 0, one.text()
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    shards = more.get("shard_ranks", ranks)
    assert result["kept"] < 1.1 * sum(t.numel() for t in result["weights"].values()) / shards
    assert equal(result["loaded"], one_trainer["loaded"])
    assert close(result["grads"], one_trainer["grads"], 1e-5)
    for name, value in one_trainer["stepped"].items():  # the step is 1e-3, of which a bit more than rounding may differ
        assert torch.allclose(result["stepped"][name], value, atol=2e-5), name
    for name, value in one_trainer["stats"].items():
        assert value == pytest.approx(result["stats"][name], rel=1e-4, abs=1e-6), name
    assert len(set(result["digests"])) == 1  # what any of them would send is the same, to the last bit
    # Checkpoints, in both directions, bit for bit.
    assert equal(result["resumed"]["weights"], one_trainer["weights"])
    assert equal(result["resumed"]["moments"], one_trainer["moments"])
    here = resumed(settings(folder), me, tmp_path / "runs" / "run" / "checkpoints" / "step-000002")
    assert equal(here["weights"], result["weights"]) and equal(here["moments"], result["moments"])


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_checkpoints_are_kept(me, folder, tmp_path, keep):
    cfg, alone = settings(folder, keep_checkpoints=keep), dataclasses.replace(me, folder=tmp_path)
    policy = train.build_policy(cfg, me, cfg.model)
    optimizer = ppo.build_optimizer(cfg, policy, cfg.lr)
    for version in (8, 9, 10, 11):
        ledger.save_checkpoint(alone, policy, optimizer, version, cfg, {})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{version:06d}" for version in (8, 9, 10, 11)][-keep:]


@pytest.mark.slow
def test_a_job_of_two_trainers_goes_on_with_one(job, tmp_path, warm_runs):
    common = [*SMALL, "--steps", 4, "--checkpoint_every", 2, "--runs_dir", warm_runs, "--run_name", "fewer"]
    first = job(*common, "--trainers", 2, ranks=3)
    run = warm_runs / "fewer"
    first.until(lambda: (run / "checkpoints" / "step-000002").is_dir() and len(rows(run)) > 2)
    first.kill()
    assert [row["step"] for row in rows(run)][:3] == [0, 1, 2]
    second = job(*common, "--trainers", 1, "--resume", ranks=2)
    assert second.wait() == 0, second.text()
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3]
    assert rows(run)[2]["logprob_gap"] < 1e-4
    assert json.loads((run / "summary.json").read_text())["answers"] == 4 * 16


# -- Loading -----------------------------------------------------------------------------------------------------------


def rewrite(folder, change):
    """Apply `change` to the tensors of a folder of one file."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> folder of a model; the last ones are not as they should be."""
    parent, made = tmp_path_factory.mktemp("folders"), {}
    scaled = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    for name, config, dtype, size in [
        ("untied", tiny(), torch.float32, "5GB"),
        ("tied", tiny(Qwen3Config, tie_word_embeddings=True), torch.float32, "5GB"),
        ("shards", tiny(LlamaConfig), torch.bfloat16, "40KB"),
        ("scaled", tiny(LlamaConfig, rope_parameters=scaled), torch.float32, "5GB"),
        ("tied-shards", tiny(tie_word_embeddings=True), torch.bfloat16, "40KB"),
    ]:
        made[name] = parent / name
        model(config, dtype).save_pretrained(made[name], max_shard_size=size)
    for name in ("other-names", "missing", "empty", "shape"):
        made[name] = parent / name
        shutil.copytree(made["untied"], made[name])
    assert len(list(made["shards"].glob("*.safetensors"))) > 2
    rewrite(made["other-names"], lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()})
    rewrite(made["missing"], lambda tensors: {n: t for n, t in tensors.items() if n != BAD["missing"]})
    rewrite(made["shape"], lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"][:50].clone()})
    (made["empty"] / "model.safetensors").unlink()
    return made


GOOD = ["untied", "tied", "shards", "scaled", "tied-shards"]
BAD = {"missing": "model.layers.1.mlp.up_proj.weight", "empty": "safetensors", "shape": "lm_head.weight"}


@torch.no_grad()
def loaded(cfg, me):
    """What came out of a folder, or the sentence that refused it."""
    try:
        policy = train.build_policy(cfg, me, cfg.model)
    except Refused as error:
        return str(error)
    return {"weights": whole((name.removeprefix("lm."), p) for name, p in policy.named_parameters()),
            "buffers": {name.removeprefix("lm."): b.clone() for name, b in policy.named_buffers()},
            "logprobs": policy(*row_of(LENGTHS))[0]}  # fmt: skip


def check_loaded(got, folder):
    assert isinstance(got, dict), got
    want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert equal(got["weights"], {name: p.detach() for name, p in want.named_parameters()})
    assert equal(got["buffers"], dict(want.named_buffers())) and got["buffers"]
    with torch.no_grad():
        logprobs = ppo.Policy(want, 1.0)(*row_of(LENGTHS))[0]
    assert torch.allclose(got["logprobs"], logprobs, atol=1e-6)


@pytest.mark.parametrize("name", GOOD)
def test_a_folder_is_loaded_as_from_pretrained_would(me, folders, name, capsys):
    check_loaded(loaded(settings(folders[name]), me), folders[name])
    assert "loads it whole" not in capsys.readouterr().out


def test_a_folder_with_other_names_is_loaded_whole_and_that_is_said(me, folders, capsys):
    check_loaded(loaded(settings(folders["other-names"]), me), folders["untied"])
    assert "its files name other tensors than the model, so each rank loads it whole" in capsys.readouterr().out


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_lacks_something_is_refused_by_name(me, folders, name):
    sentence = loaded(settings(folders[name]), me)
    assert isinstance(sentence, str) and BAD[name] in sentence and str(folders[name]) in sentence


def test_weights_that_are_no_parameters_are_refused(me, tmp_path):
    """Nothing would load, send or export them."""
    config = Glm4MoeConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
                           num_attention_heads=4, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2,
                           moe_intermediate_size=32, first_k_dense_replace=1, pad_token_id=0)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(Refused, match="has model.layers.1.mlp.gate.e_score_correction_bias among its weights"):
        train.build_policy(settings(tmp_path), me, str(tmp_path))


def test_bfloat16_computes_over_float32_weights(me, folder):
    half, batch = dataclasses.replace(me, dtype=torch.bfloat16), [row_of(LENGTHS)]
    policies = [train.build_policy(settings(folder), one, str(folder)) for one in (me, half)]
    (want, exact), (got, grads) = (outcome(policy, batch) for policy in policies)
    assert 1e-4 < (got - want).abs().max() < 0.2  # it is another number, but near
    assert close(whole(grads.items()), whole(exact.items()), 0.05)
    optimizer = ppo.build_optimizer(settings(folder), policies[1], 1e-6)
    before = whole(policies[1].named_parameters())
    optimizer.step()
    after = whole(policies[1].named_parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert {t.dtype for t in [*grads.values(), *after.values(), *states]} == {torch.float32}
    moved = torch.cat([(after[name] != before[name]).flatten() for name in before])
    assert moved.float().mean() > 0.7  # of which bfloat16 weights would round nearly all away; some grads are 0


@pytest.mark.slow
def test_two_ranks_load_and_export_the_same(job, tmp_path, folders):
    good, bad = ["tied-shards", "scaled"], ["missing", "shape"]
    one = job("load", json.dumps({name: str(folders[name]) for name in [*good, "other-names", *bad]}), ranks=2,
              script=Path(__file__))  # fmt: skip
    assert one.wait() == 0, one.text()
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    for name in good:
        check_loaded(result[name], folders[name])
        check_exported(tmp_path / "exported" / name, folders[name], torch.bfloat16)
    check_loaded(result["other-names"], folders["untied"])
    assert all(BAD[name] in result[name] for name in bad)


class Anonymous(threading.Thread):
    """The largest memory of this process that no file backs, above that at the start, in bytes: what a loader maps from
    its files the kernel takes back when it likes."""

    def __init__(self):
        super().__init__(daemon=True)
        self.begin, self.peak, self.going = self.now(), 0, True
        self.start()

    @staticmethod
    def now():
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10

    def run(self):
        while self.going:
            self.peak = max(self.peak, self.now() - self.begin)
            time.sleep(0.002)

    def end(self):
        self.going = False
        self.join()
        return self.peak


LARGE = dict(vocab_size=20000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
             num_key_value_heads=4)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_model_is_never_in_one_process(job, tmp_path, dtype):
    lm = AutoModelForCausalLM.from_config(tiny(**LARGE), dtype=dtype)
    lm.save_pretrained(tmp_path / "large", max_shard_size="60MB")
    size = sum(p.numel() * 4 for p in lm.parameters())
    largest = max(p.numel() * 4 for p in lm.parameters())
    del lm
    one = job("memory", json.dumps({"folder": str(tmp_path / "large")}), ranks=2, script=Path(__file__))
    assert one.wait() == 0, one.text()
    peaks = json.loads((tmp_path / "peaks.json").read_text())
    print(f"{dtype}: model {size / 1e6:.0f} MB in float32, largest tensor {largest / 1e6:.0f} MB; above the start: " +
          ", ".join(f"rank {i} loading {a / 1e6:.0f} MB (with mapped files {b / 1e6:.0f}), exporting {c / 1e6:.0f} MB"
                    for i, (a, b, c) in enumerate(peaks)))  # fmt: skip
    for loading, _, exporting in peaks:
        assert loading < 0.5 * size + largest and exporting < 0.5 * size + 3 * largest + 2**26


# -- Export ------------------------------------------------------------------------------------------------------------


def small_files(monkeypatch, size=40_000):
    monkeypatch.setattr(toy, "buckets", lambda named, dtype, _: packing.buckets(named, dtype, size))


def check_exported(exported, source, dtype):
    got, info = AutoModelForCausalLM.from_pretrained(exported, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    want = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(dtype)
    assert got.dtype == dtype and equal(dict(got.named_parameters()), dict(want.named_parameters()))
    assert got.config._attn_implementation == "sdpa"  # "packed" is ours, and nobody else knows it
    files = sorted(exported.glob("*.safetensors"))
    stored = [name for file in files for name in load_file(file)]
    assert sorted(stored) == sorted(name for name, _ in want.named_parameters())  # a tied head once
    index = exported / "model.safetensors.index.json"
    if len(files) > 1:
        content = json.loads(index.read_text())
        assert sorted(content["weight_map"]) == sorted(stored)
        assert content["metadata"]["total_size"] == sum(p.numel() * dtype.itemsize for p in want.parameters())
        assert all(re.fullmatch(rf"model-\d{{5}}-of-{len(files):05}.safetensors", file.name) for file in files)
    else:
        assert not index.exists() and files[0].name == "model.safetensors"


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [40_000, 4 << 30])
def test_an_exported_model_loads_and_is_equal(me, folders, tmp_path, monkeypatch, name, dtype, size):
    small_files(monkeypatch, size)
    policy = train.build_policy(settings(folders[name]), me, str(folders[name]))
    toy.export(tmp_path / "model", True, policy, toy.build_tokenizer(), dtype)
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 1) == (size < 1 << 20)
    check_exported(tmp_path / "model", folders[name], dtype)
    check_loaded(loaded(settings(tmp_path / "model"), me), tmp_path / "model")  # and the next run starts from it
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_one_file_of_an_export_is_held_at_a_time(me, folder, tmp_path, monkeypatch):
    small_files(monkeypatch)
    held, sizes, real = [], [], toy.save_file

    def watch(tensors, *args):
        assert not [1 for reference in held if reference() is not None]
        held[:] = [weakref.ref(tensor) for tensor in tensors.values()]
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        real(tensors, *args)

    monkeypatch.setattr(toy, "save_file", watch)
    policy = train.build_policy(settings(folder), me, str(folder))
    toy.export(tmp_path / "model", True, policy, toy.build_tokenizer(), torch.bfloat16)
    assert len(sizes) > 2 and max(sizes) <= 40_000
    assert not [1 for reference in held if reference() is not None]


def test_an_export_replaces_a_folder_or_keeps_it(me, folder, tmp_path, monkeypatch):
    policy, target = train.build_policy(settings(folder), me, str(folder)), tmp_path / "deep" / "model"
    export = functools.partial(toy.export, target, True, policy, toy.build_tokenizer(), torch.float32)

    def names():
        return sorted(path.name for path in target.iterdir())

    export()
    fresh = names()
    (target / "old.safetensors").write_text("another job's")
    export(keep=True)
    assert "old.safetensors" in names()
    with monkeypatch.context() as patch:
        patch.setattr(toy, "save_file", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export()
    assert "old.safetensors" in names()  # nothing is touched before all is written
    for path in target.parent.glob(".model.*"):
        shutil.rmtree(path)
    export()
    assert names() == fresh and [path.name for path in target.parent.iterdir()] == ["model"]
    toy.export(tmp_path / "none", False, policy, toy.build_tokenizer(), torch.float32)
    assert not (tmp_path / "none").exists()  # another rank than the first writes nothing


# -- Memory of a step --------------------------------------------------------------------------------------------------

WIDE = dict(vocab_size=151_936, hidden_size=64, intermediate_size=96, tie_word_embeddings=True)


@pytest.mark.slow
def test_peak_memory_of_the_whole_policy_does_not_grow_with_tokens():
    short, long = (int(subprocess.run([sys.executable, __file__, "peak", count], check=True, capture_output=True,
                                      env=os.environ | {"PYTHONPATH": str(Path(ppo.__file__).parent)}).stdout)
                   for count in ("600", "2400"))  # fmt: skip
    print(f"600 tokens: {short >> 10} MiB above the weights, 2400 tokens: {long >> 10} MiB, ratio {long / short:.2f}")
    assert long < 1.5 * short and long < 2**20 * 1.2  # of KiB; two chunks of logits are half a GiB


# -- On a GPU ----------------------------------------------------------------------------------------------------------

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


def marked(test):
    return functools.reduce(lambda test, mark: mark(test), gpu, test)


@marked
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("dtype, digits", [(torch.bfloat16, 0.1), (torch.float32, 1e-3)])
def test_gpu_packed_attention_is_the_cpu_in_float32(kind, dtype, digits):
    lm, lengths = model(tiny(kind)), [300, 1, 64, 17, 500]
    want = outcome(ppo.Policy(lm, 1.0), [row_of(lengths)])
    lm.to("cuda", dtype)
    got = outcome(ppo.Policy(lm, 1.0), [row_of(lengths, device="cuda")])
    assert torch.allclose(got[0].cpu(), want[0], atol=2 * digits)
    assert (got[0].cpu() - want[0]).abs().mean() < digits / 4
    assert close({name: grad.cpu().float() for name, grad in got[1].items()}, want[1], 2 * digits)


@marked
def test_gpu_a_step_is_the_cpus(tmp_path, folder, me):
    want = a_step(settings(folder), dataclasses.replace(me, folder=tmp_path / "cpu"))
    mesh = DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda", mesh_dim_names=("shards",))
    there = dataclasses.replace(me, device=torch.device("cuda", 0), folder=tmp_path / "cuda", mesh=mesh,
                                trainer_group=mesh.get_group(), dtype=torch.float32)  # fmt: skip
    cfg = settings(folder)
    policy = train.build_policy(cfg, there, cfg.model)
    optimizer = ppo.build_optimizer(cfg, policy, cfg.lr)
    stats = step(cfg, there, policy, optimizer, batch_of())
    grads = {name: grad.cpu() for name, grad in whole((name, p.grad) for name, p in policy.named_parameters()).items()}
    assert close(grads, want["grads"], 1e-3)
    for name, value in want["stepped"].items():
        assert torch.allclose(dict(policy.named_parameters())[name].full_tensor().cpu(), value, atol=1e-4), name
    for name, value in want["stats"].items():
        assert value == pytest.approx(stats[name], rel=1e-2, abs=1e-4), name


@marked
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_no_matrix_of_tokens_by_tokens_exists(dtype):
    """One sequence of 30,000 tokens, as long as the published recipes allow; float32 has no flash attention."""
    lm = model(tiny(), dtype).to("cuda")
    peaks = []
    for count in (7_500, 30_000):
        outcome(ppo.Policy(lm, 1.0), [row_of([count], device="cuda")])
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        outcome(ppo.Policy(lm, 1.0), [row_of([count], device="cuda")])
        peaks.append(torch.cuda.max_memory_allocated() - base)
    print(f"{dtype}: 7,500 tokens {peaks[0] >> 20} MiB, 30,000 tokens {peaks[1] >> 20} MiB")
    assert peaks[1] < 5 * peaks[0] and peaks[1] < 30_000**2


@marked
def test_gpu_peak_memory_of_the_whole_policy_does_not_grow_with_tokens():
    policy, peaks = ppo.Policy(model(tiny(**WIDE), torch.bfloat16).to("cuda"), 1.0), []
    for count in (600, 600, 2400):  # the first warms up
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        outcome(policy, [row_of([count // 4] * 4, WIDE["vocab_size"], device="cuda")])
        peaks.append(torch.cuda.max_memory_allocated() - base)
    print(f"600 tokens: {peaks[1] >> 20} MiB above the weights, 2400: {peaks[2] >> 20} MiB")
    assert peaks[2] < 1.5 * peaks[1]


# -- This file under torchrun ------------------------------------------------------------------------------------------


def on_ranks(task, given):
    world = int(os.environ["WORLD_SIZE"])
    if task == "a_step":
        me = train.join(cfg := settings(given["folder"], world, **given["more"]))
        result = a_step(cfg, me, given["other"])
    elif task == "load":
        me = train.join(settings("", world))
        result = {}
        toy.buckets = lambda named, dtype, _: packing.buckets(named, dtype, 40_000)
        for name, folder in given.items():
            result[name] = loaded(cfg := settings(folder, world), me)
            if name in GOOD:
                policy = train.build_policy(cfg, me, folder)
                toy.export(Path("exported") / name, me.rank == 0, policy, toy.build_tokenizer(), torch.bfloat16)
    elif task == "memory":
        me = train.join(cfg := settings(given["folder"], world))
        high, memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, Anonymous()
        policy = train.build_policy(cfg, me, cfg.model)
        peak, high = memory.end(), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - high) << 10
        peaks, memory, real = [None] * world, Anonymous(), packing.buckets
        toy.buckets = lambda named, dtype, _: real(named, dtype, 32 << 20)
        toy.export(Path("exported"), me.rank == 0, policy, toy.build_tokenizer(), torch.float32)
        dist.all_gather_object(peaks, (peak, high, memory.end()), group=me.trainer_group)
        Path("peaks.json").write_text(json.dumps(peaks))
        result = {}
    if me.rank == 0:
        torch.save(result, "result.pt")
    dist.barrier()
    dist.destroy_process_group()  # its threads abort a process that ends without


def peak(count):
    """KiB of a forward and backward of `count` tokens above the weights."""
    torch.set_num_threads(2)
    policy, row = ppo.Policy(model(tiny(**WIDE)), 1.0), row_of([count // 4] * 4, WIDE["vocab_size"])
    Path("/proc/self/clear_refs").write_text("5")  # what importing and building took does not count
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome(policy, [row])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)


if __name__ == "__main__":
    if sys.argv[1] == "peak":
        peak(int(sys.argv[2]))
    else:
        on_ranks(sys.argv[1], json.loads(sys.argv[2]))
