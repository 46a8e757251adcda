"""The trainer alone: tokens a second, model FLOPs beside the matrix rate of the same device in the same run, memory.

A random Qwen of a given shape under FSDP2 as in a job, and `ppo_step` over one packed micro-batch a rank: forward,
backward, step of Adam. T tokens, of which R are trained (the first eighth of each sequence is a prompt), l_i the length
of sequence i, B the elements of all matrices of the layers, V x H those of the head:

    forward   2 B T + 2 V H R + 2 layers heads head_dim sum(l_i^2)     (causal: half of 4 layers ... sum(l_i^2))
    model     3 forward: a backward is two. With R = T it is the usual 6 N T + 12 layers width sum(l_i^2) / 2
    hardware  model + 2 V H R (logits are computed again) + with checkpointing the layers' forward, + with
              `--proximal recompute` another forward; what attention kernels compute again themselves is not counted

MFU is model FLOPs a second over the rate of one large matrix product in the same dtype, measured between the steps, not
over a data sheet's. Rows differ in attention, which take turns, and in checkpointing.

Left out: generation and waiting for it, weight updates (`weights.py`), micro-batches of several sizes, learning.

    PYTHONPATH=. python benchmarks/trainer.py                                       # small, a CPU, packed beside sdpa
    PYTHONPATH=. torchrun --nproc_per_node 2 benchmarks/trainer.py --attention packed          # sharded
    PYTHONPATH=. python benchmarks/trainer.py --device cuda --shape 1.5b --tokens 32768
    PYTHONPATH=. python benchmarks/trainer.py --lengths 30000 1000 500 --tokens 32768 --device cuda
"""

import argparse
import contextlib
import gc
import itertools
import os
import resource
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

import ppo
import toy
import train
from packing import Trajectory, pack

SHAPES = {
    "small": {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192, "tie_word_embeddings": False},
    "1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
}  # fmt: skip


def build_config(name: str):
    """Of a name above, of one in recipes/published/models.yaml, or of a folder with a config.json."""
    shape = SHAPES.get(name, name)
    if isinstance(shape, str):
        published = Path(train.__file__).parent / "recipes" / "published" / "models.yaml"
        shape = yaml.safe_load(published.read_text()).get(shape)
    return AutoConfig.for_model(**shape) if shape else AutoConfig.from_pretrained(name)


def synchronise(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def matrix_rate(device, dtype: torch.dtype) -> float:
    """FLOPs a second of one large product, the best of several."""
    size, seconds = 8192 if device.type == "cuda" else 1024, []
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(6):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(4):
            a @ b
        synchronise(device)
        seconds.append((time.perf_counter() - start) / 4)
    return 2 * size**3 / min(seconds)


class Memory:
    """Bytes at most since `reset`: of the GPU's allocator, on a CPU of the process (where Linux says so)."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"

    def reset(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)  # fmt: skip


def trajectories(tokens: int, lengths: list[int], vocabulary: int) -> list[Trajectory]:
    """Sequences of these lengths over and over, the last one cut, `tokens` in all."""
    generator, batch, left = torch.Generator().manual_seed(1), [], tokens
    for length in itertools.cycle(lengths):
        length = min(length, left)
        prompt = min(max(1, length // 8), length - 1)
        if prompt < 1:
            break  # of one token nothing can be trained
        ids = torch.randint(vocabulary, (length,), generator=generator).tolist()
        one = Trajectory(0, len(batch), reward=float(len(batch) % 2))
        one.append(ids[:prompt])
        one.append(ids[prompt:], [-float(torch.tensor(vocabulary).log())] * (length - prompt), [0] * (length - prompt))
        batch.append(one)
        left -= length
    return batch


def count_flops(policy, batch: list[Trajectory], checkpointing: bool, proximal: bool) -> tuple[float, float]:
    """(model, hardware) FLOPs of a step of this rank; the formula is above."""
    config = policy.lm.config.get_text_config()
    tables = {id(policy.lm.get_input_embeddings().weight), id(policy.lm.get_output_embeddings().weight)}
    matrices = sum(p.numel() for p in policy.parameters() if p.ndim == 2 and id(p) not in tables)
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or
                                          config.hidden_size // config.num_attention_heads)
    lengths, trained = [len(one.tokens) for one in batch], sum(int(one.loss_mask.sum()) for one in batch)
    layers = 2 * matrices * sum(lengths) + 2 * config.num_hidden_layers * width * sum(n * n for n in lengths)
    head = 2 * policy.lm.get_output_embeddings().weight.numel() * trained
    model = 3 * (layers + head)
    return model, model + head + checkpointing * layers + proximal * (layers + head)


def build_policy(config, checkpointing: bool, mesh, device, dtype):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    policy = ppo.shard(model, 1.0, mesh, dtype, checkpointing)
    toy.materialise(policy, "", None, device)
    torch.manual_seed(dist.get_rank())
    for parameter in policy.parameters():
        local = parameter.detach().to_local()
        local.normal_(0.0, 0.02) if local.ndim > 1 else local.fill_(1.0)
    return policy


def measure(args, config, checkpointing: bool, mesh, device, dtype, rates: list[float]) -> list[dict]:
    """A row for every attention, by turns; the matrix rate is measured again before each round."""
    policy, memory = build_policy(config, checkpointing, mesh, device, dtype), Memory(device)
    cfg = train.Config(proximal=args.proximal, early_stop=0.0)
    optimizer = ppo.build_optimizer(cfg, policy, 1e-6)
    batch = trajectories(args.tokens, args.lengths, config.vocab_size)
    packed, ranks = pack(batch), dist.get_world_size()
    minibatch = (int(packed.loss_mask.sum()) * ranks, [packed], [[10 * one.reward - 5 for one in batch]])
    model, hardware = count_flops(policy, batch, checkpointing, args.proximal == "recompute")
    found = [{"attention": attention, "checkpointing": checkpointing, "seconds": [], "peak": 0, "model": model,
              "hardware": hardware, "tokens": len(packed.tokens) * ranks, "fits": True,
              "parameters": sum(p.numel() for p in policy.parameters())} for attention in args.attention]  # fmt: skip
    for i in range(args.steps + 1):
        rates += [matrix_rate(device, dtype)] if i else []
        for row in found:
            policy.lm.set_attn_implementation(row["attention"])
            dist.barrier()
            memory.reset()
            start = time.perf_counter()
            try:
                stats = row["fits"] and ppo.ppo_step(
                    policy, optimizer, [minibatch], cfg, version=0, phase=lambda name: nullcontext(), ranks=ranks,
                    all_reduce=dist.all_reduce, device=device)  # fmt: skip
            except torch.OutOfMemoryError:
                if ranks > 1:  # the others wait in a collective
                    raise
                row["fits"] = False
                optimizer.zero_grad()
            synchronise(device)
            if i and row["fits"]:  # the first round warms up
                assert not stats["skipped_updates"] and stats["grad_norm"] > 0, stats
                row["seconds"].append(time.perf_counter() - start)
                row["peak"] = max(row["peak"], memory.peak())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="", help="of compute; empty: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--shape", default="small", help="small, 1.5b, 7b, a name of models.yaml, or a folder")
    parser.add_argument("--tokens", type=int, default=0, help="of a rank's micro-batch; 0: 2,048, on a GPU 32,768")
    parser.add_argument("--lengths", type=int, nargs="+", default=[], help="of sequences; empty: tokens / 4, 8, 16, 32")
    parser.add_argument("--attention", nargs="+", default=[], help="empty: packed, on a CPU also sdpa")
    parser.add_argument("--checkpointing", nargs="+", default=["false"], choices=["false", "true"])
    parser.add_argument("--proximal", default="interpolate", choices=["interpolate", "recompute"])
    parser.add_argument("--steps", type=int, default=3, help="that are timed, after one that is not")
    parser.add_argument("--threads", type=int, default=1, help="of a rank on a CPU")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cuda = args.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()) if cuda else (
        torch.device("cpu"))  # fmt: skip
    dtype = getattr(torch, args.dtype or ("bfloat16" if cuda else "float32"))
    args.tokens = args.tokens or (32_768 if cuda else 2048)
    args.lengths = args.lengths or [max(2, args.tokens // part) for part in (4, 8, 16, 32)]
    args.attention = args.attention or (["packed"] if cuda else ["packed", "sdpa"])
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)) else "gloo"
    launched = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **launched)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=("shards",))
    config = build_config(args.shape)
    config.max_position_embeddings = max(config.max_position_embeddings, *args.lengths)

    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread(s) a rank"
    say = print if dist.get_rank() == 0 else lambda *text, **more: None
    say(f"{name}, {dist.get_world_size()} rank(s), {dtype}, torch {torch.__version__}, {args.tokens} tokens a rank of "
        f"sequences of {args.lengths}", flush=True)  # fmt: skip
    table, rates = [], []
    for checkpointing in args.checkpointing:
        table += measure(args, config, checkpointing == "true", mesh, device, dtype, rates)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    rate = statistics.median(rates)
    say(f"{table[0]['parameters'] / 1e6:.1f} M parameters; one large matrix product: {rate / 1e12:.3f} TFLOP/s (median "
        f"of {len(rates)}, {min(rates) / 1e12:.3f} to {max(rates) / 1e12:.3f})")  # fmt: skip
    for row in table:
        label = f"{row['attention']}{', checkpointing' if row['checkpointing'] else ''}:"
        if not row["fits"]:
            say(f"{label} does not fit into memory")
            continue
        seconds = statistics.median(row["seconds"])
        ratio = [a / b for a, b in zip(row["seconds"], table[0]["seconds"], strict=False)]
        beside = f", {statistics.median(ratio):.2f} of the first row's" if ratio and row is not table[0] else ""
        say(f"{label} {row['tokens'] / seconds:.0f} tokens/s, {seconds:.3f} s ({min(row['seconds']):.3f} to "
            f"{max(row['seconds']):.3f}){beside}; MFU {row['model'] / seconds / rate:.1%} of the matrix rate "
            f"({row['model'] / 1e12:.3f} TFLOP a rank; hardware {row['hardware'] / seconds / rate:.1%}); "
            f"{row['peak'] / 2**30:.2f} GiB at most")  # fmt: skip
    dist.destroy_process_group()
    if not any(row["fits"] for row in table):
        raise SystemExit("nothing fits into memory")


if __name__ == "__main__":
    main()
