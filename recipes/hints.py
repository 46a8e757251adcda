"""Toy problems that need a second try: for `--workflow multi_turn`, in the toy's own words.

"41 + 3 =" is asked and 50 is wanted. Nobody can know that 6 more are meant, so the first answer is wrong, but for a
lucky guess; the hint, which multi_turn then says, is "44 + 6 =". Both are ordinary problems of the toy's split, so
nothing that is tested was a prompt or a hint in training.

The toy's warm start has taught the model to answer where nothing stands before the prompt. After an answer of its own
it mostly guesses, too, and where it counts it begins with a wrong number. It has to find out that counting pays in the
second turn, and where the hint's two numbers are. What it does in the first turn is not paid for by itself; yet it
learns to count there as well, since it makes fewer mistakes after an answer that counted.

    python recipes/hints.py --seed 2            # writes hints.jsonl and hints-test.jsonl into this folder
    torchrun --nproc_per_node 2 train.py --data hints.jsonl --eval_data hints-test.jsonl --seed 2 \\
        --workflow multi_turn --turns 2 --turn_discount 0.9 --max_new_tokens 96 \\
        --groups 16 --steps 70 --lr 3e-4 --filter_lower 0.1

At first 2 to 20 % of the answers are right, depending on the seed, so groups without a right one are not trained
(`--filter_lower`). pass@1 ends at 0.5 to 0.98, depending on the seed as well: what is never right is never trained. Two
minutes on two cores. Left out: hints for a third try, and problems whose first answer could be right.
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for toy.py

import toy

CUT_B, CUT_C = 4, 6  # no b or c above, so that two answers take no longer than one of the toy's


def hints(split: str, count: int, seed: int) -> list[dict]:
    """`count` rows of the "train" or "test" split, the same for the same seed; those of "test" all differ."""
    rng = random.Random(f"hints {split} {seed}")
    rows, seen = [], set()
    while len(rows) < count:
        (a, b), c = toy.draw_pair(split, rng), int(rng.expovariate(1 / toy.MEAN_B))
        s = a + b
        prompt, hint = f"{a} + {b} =", f"{s} + {c} ="
        if b > CUT_B or not 1 <= c <= CUT_C or s > toy.LARGEST_A or toy.split_of(hint) != split:
            continue
        if split == "train" or (prompt, hint) not in seen:
            seen.add((prompt, hint))
            rows.append({"query_id": f"hints-{split}-{len(rows)}", "prompt": prompt, "solutions": [toy.boxed(s + c)],
                         "hints": [hint]})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="write hints.jsonl and hints-test.jsonl")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path())
    args = parser.parse_args()
    for name, split, count in (("hints.jsonl", "train", 1024), ("hints-test.jsonl", "test", 200)):
        lines = [json.dumps(row) + "\n" for row in hints(split, count, args.seed)]
        (args.folder / name).write_text("".join(lines))


if __name__ == "__main__":
    main()
