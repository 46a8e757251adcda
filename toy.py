"""The offline stand-in: a tiny Qwen3, its tokenizer and its problems, built in code.

The job needs a model that can be taught something within a minute on a laptop, without a download. This one adds two
numbers. "a + b =" can be answered in two ways, the words of the vocabulary being whole numbers and a few signs:

    counting   3 : 14 ; 2 : 15 ; 1 : 16 ; 0 : 17 ; \\boxed{ 17 }     (b goes down to 0, a up: b steps of thinking)
    guessing   \\boxed{ 62 }                                          (any number: right about once in a hundred)

The warm start imitates demonstrations of which 30 % count and 70 % guess, so the model knows both and mostly guesses.
Reinforcement then finds that thinking pays: as the reward rises the answers get longer. Because b follows an
exponential law the lengths have a long tail, which is what makes generation hard to schedule at full size, too.

Left out: a chat template (the prompt is the text itself), subtraction and other tasks (one story is enough), a general
tokenizer (an unknown word is an error, not <unk>, since silently reading it as something else would hide a mistake).
This file knows nothing of the others; whoever trains on it treats it like any other model, tokenizer and data set.

    python toy.py                     # a few problems and demonstrations, and the number of parameters
    pytest tests/test_toy.py
"""

import hashlib
import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LARGEST = 99  # every number from 0 to this one is one token, so a + b never exceeds it
LARGEST_A = 90  # 99 + 0 is the only way for a to be 99: seen in one split at most, so never learnt or never tested
MEAN_B = 7.0  # mean of the exponential law of b before rounding down and cutting
CUT_B = 30  # no b above this one: the longest counting answer has 4 * (CUT_B + 1) + 4 tokens
COUNTING = 0.3  # fraction of the demonstrations that count
TEST_ONE_IN = 3  # one prompt in so many belongs to the test split
MAX_POSITIONS = 512

SPECIAL = ["<pad>", "<bos>", "<eos>"]
SIGNS = ["+", "=", ":", ";", "\\boxed{", "}"]
VOCABULARY = {word: i for i, word in enumerate(SPECIAL + SIGNS + [str(n) for n in range(LARGEST + 1)])}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, words separated by spaces; nothing is added when encoding.

    >>> build_tokenizer().decode(build_tokenizer()("\\\\boxed{ 12 }")["input_ids"])
    '\\\\boxed{ 12 }'
    """
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))  # <unk> is no word: an unknown one raises
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def build_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        initializer_range=0.12,  # the usual 0.02 is for wide models: from there counting needs several times the steps
        pad_token_id=VOCABULARY["<pad>"],
        bos_token_id=VOCABULARY["<bos>"],
        eos_token_id=VOCABULARY["<eos>"],
    )


def build_model(seed: int, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """The untrained model. The same seed gives the same weights; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(build_config())
    return model.to(dtype)


def counting_answer(a: int, b: int) -> str:
    """
    >>> counting_answer(14, 1)
    '1 : 14 ; 0 : 15 ; \\\\boxed{ 15 }'
    """
    steps = [f"{b - i} : {a + i} ;" for i in range(b + 1)]
    return " ".join(steps + [boxed(a + b)])


def boxed(number: int) -> str:
    return f"\\boxed{{ {number} }}"


def problems(split: str, count: int, seed: int) -> list[dict]:
    """`count` rows of the "train" or "test" split, the same in every process for the same seed.

    Test problems differ from each other, so that none counts twice in pass@1. Train problems are drawn independently
    and may repeat (of 1,000 some 620 differ): there are at most 100 pairs for a given b, so forbidding repeats would
    use up the small b and bend their law towards the large ones. 200 test problems feel a little of that already.
    """
    rng = random.Random(f"problems {split} {seed}")  # a string seed is hashed by sha512, not by hash()
    rows, seen = [], set()
    while len(rows) < count:
        a, b = draw_pair(split, rng)
        if split == "test":
            if len(seen) >= 400:
                raise ValueError(f"the toy has too few distinct test problems for {count}; ask for 400 or fewer")
            if (a, b) in seen:
                continue
            seen.add((a, b))
        row = {"query_id": f"toy-{split}-{len(rows)}", "prompt": f"{a} + {b} =", "solutions": [boxed(a + b)]}
        rows.append(row | {"task": "math"})
    return rows


def demonstrations(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` pairs (prompt, answer) of the train split for the warm start, without the end-of-sequence token."""
    rng = random.Random(f"demonstrations {seed}")
    pairs = []
    for _ in range(count):
        a, b = draw_pair("train", rng)
        answer = counting_answer(a, b) if rng.random() < COUNTING else boxed(rng.randint(0, LARGEST))
        pairs.append((f"{a} + {b} =", answer))
    return pairs


def draw_pair(split: str, rng: random.Random) -> tuple[int, int]:
    """a uniform, b by the cut exponential law, from the prompts that belong to the split."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")
    while True:
        b = int(rng.expovariate(1 / MEAN_B))
        a = rng.randint(0, min(LARGEST_A, LARGEST - min(b, LARGEST)))
        if b <= CUT_B and split_of(f"{a} + {b} =") == split:
            return a, b


def split_of(prompt: str) -> str:
    """By a hash of the prompt: no list of test problems to keep, and no way for the same prompt to be in both."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % TEST_ONE_IN == 0 else "train"


def main() -> None:
    tokenizer, model = build_tokenizer(), build_model(seed=0)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    for row in problems("train", 3, seed=0) + problems("test", 3, seed=0):
        print(row)
    for prompt, answer in demonstrations(8, seed=0):
        print(prompt, answer)


if __name__ == "__main__":
    main()
