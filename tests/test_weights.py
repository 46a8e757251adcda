"""Weights between real processes: bit for bit, update after update in the same memory, to a receiver that is slow; and
what an update costs.

    pytest tests/test_weights.py            # -m "slow or not slow": also the measurement, half a minute if all is quiet
"""

import os
import re
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from test_sync import CPU, ODD_SHAPES, Wire, on_ranks, random_weights, same_bits, tiny_model

import sync
from packing import BUFFERS, bucket_numel, buckets
from sync import receive_weights, send_weights


def pointers(kept: dict) -> list[int]:
    return [flat.data_ptr() for flats in kept.values() for flat in flats]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1000, 1 << 20])
def test_updates_in_a_row_use_the_same_memory_and_arrive_bit_for_bit(bucket_bytes, dtype):
    kept, places, sums = ({}, {}), [], []
    for version in range(4):
        sent, held = random_weights(ODD_SHAPES, version), random_weights(ODD_SHAPES, 9, dtype)
        before, wire = [tensor.clone() for _, tensor in sent], Wire()
        options = {"dtype": dtype, "device": CPU, "bucket_bytes": bucket_bytes}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sync.dist, "broadcast", wire.broadcast)
            sums.append(send_weights(sent, "send", root=True, kept=kept[0], **options))
            assert receive_weights(held, "receive", kept=kept[1], **options) == sums[-1]
        assert all(same_bits(tensor.to(dtype), h) for (_, tensor), (_, h) in zip(sent, held, strict=True))
        assert all(same_bits(tensor, old) for (_, tensor), old in zip(sent, before, strict=True))
        places.append([pointers(one) for one in kept])
    assert len(set(sums)) == 4 and all(one == places[0] for one in places)
    assert len({*places[0][0]}) == min(BUFFERS, len(buckets(sent, dtype, bucket_bytes)))


def lone_trainer(rank):
    """Rank 0 has a tied model under FSDP2 for itself, rank 1 a copy. -> [(checksum, names, equal bits)] of updates."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    alone, report = dist.new_group([0]), []
    for dtype, bucket_bytes in [(torch.float32, 1000), (torch.float32, 1 << 20), (torch.bfloat16, 5000)]:
        model, kept = tiny_model(True, rank, dtype if rank else torch.float32), {}
        if rank == 0:
            fully_shard(model, mesh=DeviceMesh.from_group(alone, "cpu", mesh_dim_names=("trainers",)))
        named = list(model.named_parameters())
        for version in range(3):
            options = {"dtype": dtype, "device": CPU, "bucket_bytes": bucket_bytes, "kept": kept}
            if rank == 0:
                assert all(isinstance(parameter, DTensor) for _, parameter in named)
                with torch.no_grad():
                    for _, parameter in named:
                        parameter.mul_(1.0 + version)
                checksum = send_weights(named, None, root=True, **options)
            else:
                checksum = receive_weights(named, None, **options)
            equal = []
            for _, parameter in named:
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
                theirs = whole.detach().to(dtype).contiguous()
                dist.broadcast(theirs, src=0)
                equal.append(rank == 0 or same_bits(theirs, whole))
            report.append((checksum, [name for name, _ in named], all(equal)))
    return report


def test_a_lone_sharded_trainer_sends_its_tied_weights_once_and_bit_for_bit(tmp_path):
    trainer, generator = on_ranks(lone_trainer, 2, tmp_path / "rendezvous")
    assert trainer == generator and all(equal for _, _, equal in generator)
    assert len({checksum for checksum, _, _ in trainer}) == 6 and len(trainer) == 9  # buckets do not matter
    assert all("model.embed_tokens.weight" in names and "lm_head.weight" not in names for _, names, _ in trainer)


MIB = 1 << 20
SHAPES = [(5, MIB // 4)] + [(MIB // 4,)] * 40  # in float32 one tensor of 5 MiB, alone in its bucket, and forty of 1 MiB


def slow(rank, dtype):
    """The receiver comes late and loads slowly; the sender changes its weights as soon as it may. True: bits agree."""
    for version in range(2):
        named = random_weights(SHAPES, version)
        options = {"dtype": dtype, "device": CPU, "bucket_bytes": 4 * MIB}
        plan = buckets(named, dtype, 4 * MIB)
        assert len(plan) > 2 * BUFFERS or dtype != torch.float32 and len(plan) > BUFFERS
        assert bucket_numel(plan[1]) * dtype.itemsize > 3 * MIB  # more than sockets swallow unread
        if rank == 0:
            send_weights(named, None, root=True, **options)
            for _, tensor in named:
                tensor.fill_(float("nan"))
            dist.barrier()
            continue
        held, real = random_weights(SHAPES, 100, dtype), sync._word_sum
        time.sleep(0.5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sync, "_word_sum", lambda tensor, real=real: (time.sleep(0.02), real(tensor))[1])
            receive_weights(held, None, **options)
        wrong = [n for (n, s), (_, h) in zip(named, held, strict=True) if not same_bits(s.to(dtype), h)]
        dist.barrier()
        assert not wrong, f"version {version}: {wrong}"
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slow_receiver_gets_what_was_sent_and_not_what_came_later(tmp_path, dtype):
    assert on_ranks(slow, 2, tmp_path / "rendezvous", dtype) == [True, True]


@pytest.mark.slow
def test_an_update_costs_at_most_twice_a_raw_broadcast():
    """The whole update of 538 MB, proof of arrival included; two attempts, as other work on the machine falls on both
    kinds unequally."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ratios = []
    for _ in range(2):
        done = subprocess.run([sys.executable, ROOT / "benchmarks" / "weights.py"], env=env, capture_output=True,
                              text=True, timeout=300)  # fmt: skip
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        ratios.append(float(re.search(r"ratio (\d+\.\d+)", done.stdout)[1]))
        if ratios[-1] <= 2.0:
            break
    assert min(ratios) <= 2.0, f"an update costs {ratios} times a raw broadcast"
