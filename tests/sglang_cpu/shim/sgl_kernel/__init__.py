"""Stands in for SGLang's kernel wheel, so that its tests run on a CPU without AMX.

FAKED: the import. The published wheel is a CUDA build that needs libcuda.so.1. On such a CPU, with
SGLANG_USE_CPU_ENGINE=1, SGLang computes everything in PyTorch (attention backend torch_native, forward_native of every
layer), but still imports a few `*_cpu` names of the wheel when it starts. One of them can be called outside speculative
decoding and is written in PyTorch below; the others raise.
NOT FAKED: server, scheduler, cache, model code, sampler, log-probabilities, weight updates, pause and continue.
"""

__version__ = "0.0.0+cpu.stand.in"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, _stride):
    done = 0
    for request, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[request, first:last] = out_cache_loc[done : done + count].to(req_to_token.dtype)
        done += count


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(f"the stand-in for sgl_kernel has no {name!r}")

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a compiled kernel; the tests' stand-in does not have it")

    return missing
