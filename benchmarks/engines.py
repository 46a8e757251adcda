"""Start-up, tokens a second and the parts of a weight update: SGLang's server beside the transformers engine.

Both engines sample the same prompts with the same weights on the same machine, one after the other, so the ratio is
what to look at. The model is the toy, untrained (every answer then fills its budget), or any folder or hub name.

    PYTHONPATH=. python benchmarks/engines.py                       # with tests/sglang_cpu/shim on a CPU as well
    PYTHONPATH=. python benchmarks/engines.py --model FOLDER --answers 16 --new_tokens 64
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

import sync
import toy
import train
from packing import manifest


def model_of(name: str):
    if name == "toy":
        return toy.build_model(seed=1)
    return train.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)


async def measure(engine_name: str, args, model, folder: Path) -> dict:
    given = {"engine": engine_name, "max_new_tokens": args.new_tokens, "max_prompt_tokens": 32,
             "microbatch_tokens": 32 + args.new_tokens, "cache_gb": args.cache_gb}  # fmt: skip
    if args.model != "toy":
        given |= {"model": args.model, "data": __file__}  # the data is not read
    cfg = train.check(train.parse([f"--{name}={value}" for name, value in given.items()]), world=2)
    device, named = torch.device("cpu"), list(model.named_parameters())
    me = train.Rank(1, 2, 1, device, torch.float32, folder, engine=engine_name)
    tokenizer = toy.load_tokenizer(args.model)
    start = time.monotonic()
    engine = toy.make_engine(cfg, me, tokenizer)
    await engine.start()
    ready = time.monotonic() - start

    store, invitations = sync.invite([1], 1, "gloo")
    engine.connect({"manifest": manifest(named), "probe": [5, 6, 7, 8], "dtype": "float32", "join": invitations[1],
                    "bucket_bytes": cfg.bucket_mb << 20})  # fmt: skip
    group = None

    def send() -> None:
        nonlocal group
        group = group or sync.join_servers(store, invitations, 60)
        sync.send_weights(named, group, dtype=torch.float32, device=device, bucket_bytes=cfg.bucket_mb << 20, root=True,
                          align=4)  # fmt: skip

    @torch.no_grad()
    def fill(held) -> int:
        source = dict(named)
        for name, tensor in held:
            tensor.copy_(source[name])
        return 0

    engine.receive = fill  # what the transformers engine runs while paused; SGLang's server receives by itself

    async def update(version: int) -> dict:
        begin = time.monotonic()
        await engine.pause()
        sending = asyncio.create_task(asyncio.to_thread(send)) if engine_name == "sglang" else None
        await engine.load(version)
        await engine.resume()
        await engine.proof()
        if sending:
            await sending
        return {"whole": time.monotonic() - begin, **engine.seconds}

    first = await update(0)
    prompts = [[5 + i % 50, 6, 7 + i % 40, 8] for i in range(args.answers)]
    rates = []
    for _ in range(args.rounds):
        begin = time.monotonic()
        answers = await asyncio.gather(*(engine.generate(prompt) for prompt in prompts))
        rates.append(sum(len(answer.tokens) for answer in answers) / (time.monotonic() - begin))
    running = [asyncio.create_task(engine.generate(prompt)) for prompt in prompts]  # updates while it decodes
    updates = []
    for version in range(1, args.rounds + 1):
        await asyncio.sleep(0.2)
        updates.append(await update(version))
    await asyncio.gather(*running)
    await engine.close()
    return {"start-up": ready, "rates": rates, "first": first, "updates": updates}


def show(parts: dict) -> str:
    return ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in parts.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="toy")
    parser.add_argument("--answers", type=int, default=256, help="in flight at once")
    parser.add_argument("--new_tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache_gb", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    model, rates = model_of(args.model).eval(), {}
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    print(f"{args.model}, {size:.1f} MB, {args.answers} answers of {args.new_tokens} tokens in flight, "
          f"{args.rounds} rounds, {os.cpu_count()} cores")  # fmt: skip
    for name in ("transformers", "sglang"):
        with tempfile.TemporaryDirectory(prefix="engines-") as folder:
            found = asyncio.run(measure(name, args, model, Path(folder)))
        rates[name] = statistics.median(found["rates"])
        print(f"{name}: up after {found['start-up']:.1f} s; {rates[name]:.0f} tokens/s (median; "
              f"{min(found['rates']):.0f} to {max(found['rates']):.0f})")  # fmt: skip
        print(f"  first update: {show(found['first'])}")
        middle = {part: statistics.median(u.get(part, 0.0) for u in found["updates"]) for part in found["updates"][0]}
        print(f"  later ones, while decoding (medians): {show(middle)}")
    print(f"sglang / transformers: {rates['sglang'] / rates['transformers']:.2f}")


if __name__ == "__main__":
    main()
