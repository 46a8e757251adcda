"""A weight update beside a raw broadcast of as many bytes, in the same run: the ratio is what to look at.

Processes of its own on this machine over gloo, one thread each, as in a job on CPUs: trainers with the model under
FSDP2 and one generator with a copy. The two kinds alternate; each starts at a barrier and has trainer 0's clock.

    raw     one flat buffer, touched before, in one broadcast, until the generator says through the store that it has it
    update  `send_weights` and `receive_weights`, until the checksum of the generator's own tensors, which comes through
            the store as well, was found equal to that of what was sent; "sent": the trainer could go on, as it does

Weights differ in every round. Left out: the pause of the engine and what it decodes again, and SGLang (`engines.py` has
both); other work on the cores meanwhile; networks and GPUs.

    PYTHONPATH=. python benchmarks/weights.py                     # SmolLM2-135M's shapes in float32: 538 MB
    PYTHONPATH=. python benchmarks/weights.py --bucket_mb 4 32 64 256 --trainers 2
    PYTHONPATH=. python benchmarks/weights.py --model FOLDER --dtype bfloat16
"""

import argparse
import os
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import ppo
import train
from sync import receive_weights, send_weights

CPU = torch.device("cpu")


def build_model(name: str, dtype: torch.dtype):
    """The architecture with any finite weights; how they are made is quick rather than useful."""
    config = AutoConfig.from_pretrained(name) if name else LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True)  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device=CPU).eval()
    model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.1, 0.1)
    return model


def rank_main(rank: int, args, port: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=rank, world_size=args.trainers + 1,
                            timeout=limit)  # fmt: skip
    trainers, weight_group = dist.new_group(list(range(args.trainers))), dist.new_group([0, args.trainers])
    root, generator, dtype = rank == 0, rank == args.trainers, getattr(torch, args.dtype)
    model = build_model(args.model, dtype if generator else torch.float32)
    if generator:
        named = list(model.named_parameters())
    else:
        mesh = DeviceMesh.from_group(trainers, "cpu", mesh_dim_names=("shards",))
        policy = ppo.shard(model, 1.0, mesh, dtype)
        named = [(name.removeprefix("lm."), p) for name, p in policy.named_parameters()]
    size = sum(p.numel() for _, p in named) * dtype.itemsize
    flat, kept = torch.ones(size, dtype=torch.uint8), {}  # touched; memory of the updates

    def raw() -> tuple[float, float]:
        """Seconds until it was (sent, known to have arrived)."""
        dist.barrier()
        start = time.monotonic()
        if root or generator:
            dist.broadcast(flat, src=0, group=weight_group)
        sent = time.monotonic() - start
        if generator:
            store.queue_push("came", b"raw")
        elif root:
            store.queue_pop("came")
        return sent, time.monotonic() - start

    @torch.no_grad()
    def update(bucket_mb: int) -> tuple[float, float]:
        """The same of an update."""
        for _, parameter in () if generator else named:
            getattr(parameter, "_local_tensor", parameter).mul_(1.001)  # what an optimiser step does
        dist.barrier()
        options = {"dtype": dtype, "device": CPU, "bucket_bytes": bucket_mb << 20, "kept": kept}
        start = time.monotonic()
        if generator:
            store.queue_push("came", str(receive_weights(named, weight_group, **options)).encode())
            return 0.0, 0.0
        checksum = send_weights(named, weight_group, root=root, **options)
        sent = time.monotonic() - start
        if root:
            held = int(store.queue_pop("came"))
            assert held == checksum, f"the generator holds {held:016x}, sent was {checksum:016x}"
        return sent, time.monotonic() - start

    rounds = []
    for i in range(args.rounds + 1):
        row = [raw(), *(update(bucket_mb) for bucket_mb in args.bucket_mb)]
        rounds += [row] if i else []  # the first warms up
    if root:
        report(args, size, [list(zip(*kind, strict=True)) for kind in zip(*rounds, strict=True)])
    dist.barrier()
    dist.destroy_process_group()


def report(args, size: int, times: list[list[tuple[float, ...]]]) -> None:
    """times[kind]: (seconds until sent of every round, seconds until arrived), kind 0 being raw."""
    print(f"{size / 1e6:.0f} MB in {args.dtype}, {args.trainers} trainer(s), {args.rounds} rounds, "
          f"{os.cpu_count()} cores")  # fmt: skip
    median = [[statistics.median(seconds) for seconds in kind] for kind in times]
    for label, kind, (sent, whole) in zip(["raw", *args.bucket_mb], times, median, strict=True):
        spread = f"{whole:.3f} s (median; {min(kind[1]):.3f} to {max(kind[1]):.3f})"
        print(f"raw broadcast: {spread}" if label == "raw" else
              f"update in buckets of {label} MiB: {spread}, sent after {sent:.3f} s, "
              f"ratio {whole / median[0][1]:.2f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="folder with a config.json instead of SmolLM2-135M's shapes")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="the generator's")
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket_mb", type=int, nargs="+", default=[train.Config.bucket_mb], help="one or several")
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(rank_main, (args, store.port), nprocs=args.trainers + 1)


if __name__ == "__main__":
    main()
