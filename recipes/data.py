"""What a run is fed: problems and demonstrations from files, the hub or the toy; prompts, tokens, what is held out.

Rows are JSON lines, by the field names of the published data (`docs/recipes.md` has them all). A prompt goes to the
model verbatim, through the tokenizer's chat template, or through a published one (`recipes/published/templates.yaml`).
Prompts that are too long are dropped and counted; any other fault of a row is an error with file, line and reason.

Left out: streaming (the published files fit into memory), mixing of files with weights (concatenate them), and skipping
of faulty rows (a silent one less is how benchmarks and runs come to differ).

    pytest tests/test_data.py
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import huggingface_hub
import yaml

import toy
from packing import Problem, Trajectory
from reward import Verdict, examine, need_sandbox, needs_parser, read_rows, read_tests

PUBLISHED = Path(__file__).parent / "published"


class Refused(ValueError):
    """Settings, data or a run folder that cannot work; the message is one sentence for whoever typed the command."""


def on_hub(data: str) -> bool:
    """Whether it may be owner/name/FILE of a dataset on the hub, and is no file here."""
    return data.count("/") >= 2 and data[0] not in "./~" and not os.path.isdir(os.path.dirname(data))


def local_file(data: str) -> str:
    """The path of `data`: a file, or owner/name/FILE.jsonl of a dataset on the hub, which goes to the hub's cache.
    FileNotFoundError in a sentence."""
    if not on_hub(data):
        return data
    owner, name, inside = data.split("/", 2)
    try:
        return huggingface_hub.hf_hub_download(f"{owner}/{name}", inside, repo_type="dataset")
    except Exception as error:  # the hub's, or its HTTP client's, which are no OSError
        raise FileNotFoundError(f"{data}: there is no such file, and the hub does not give dataset {owner}/{name}: "
                                f"{' '.join(str(error).split())}") from error


def template_text(name: str) -> str:
    """Of `Config.template`; ValueError if there is none of that name."""
    if name in ("", "chat"):
        return name
    known = yaml.safe_load((PUBLISHED / "templates.yaml").read_text())
    if name not in known:
        raise ValueError(f"template={name} is neither chat nor one of {', '.join(known)}")
    return known[name]


def encode_problems(problems: list[Problem], tokenizer, max_prompt_tokens: int, template: str = "") -> list[Problem]:
    """Fill in `prompt_ids`; drop prompts longer than `max_prompt_tokens`. A prompt is taken verbatim (as the published
    data wants it), put in the place of {input} of a template or, with "chat", into the tokenizer's own as a user's."""
    if not problems:
        return []
    texts, chat = [problem.prompt for problem in problems], template == "chat"
    if chat:
        texts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False,
                                               add_generation_prompt=True) for text in texts]  # fmt: skip
    elif template:
        texts = [template.replace("{input}", text) for text in texts]
    encoded, bos = tokenizer(texts, add_special_tokens=not chat)["input_ids"], tokenizer.bos_token_id
    encoded = [ids[1:] if ids[:2] == [bos, bos] else ids for ids in encoded]  # the text had one, and got another
    pairs = zip(problems, encoded, strict=True)
    return [dataclasses.replace(p, prompt_ids=tuple(ids)) for p, ids in pairs if 0 < len(ids) <= max_prompt_tokens]


def hold_out(problems: list[Problem], count: int) -> tuple[list[Problem], list[Problem]]:
    """(train, test): about `count` problems, at most a tenth, set apart by a hash of the prompt, so that equal prompts
    fall on one side and the split does not depend on the order of the file."""
    marks = {problem.prompt: hashlib.sha256(problem.prompt.encode()).digest() for problem in problems}
    chosen = set(sorted(marks.values())[: min(count, len(marks) // 10)])
    return ([p for p in problems if marks[p.prompt] not in chosen], [p for p in problems if marks[p.prompt] in chosen])


def open_tokenizer(cfg):
    try:
        tokenizer, config = toy.load_tokenizer(cfg.model), toy.load_config(cfg.model).get_text_config()
        longest, most = cfg.max_prompt_tokens + cfg.max_new_tokens, getattr(config, "max_position_embeddings", None)
        if most and longest > most and cfg.objective == "rl":
            raise ValueError(f"max_prompt_tokens + max_new_tokens = {longest}, but it was made for {most} positions")
        if cfg.template == "chat" and not tokenizer.chat_template:
            raise ValueError("template=chat, but its tokenizer has no chat template")
        return tokenizer
    except (OSError, ValueError) as error:
        raise Refused(f"model={cfg.model}: {str(error).splitlines()[0]}") from error


def load_problems(path: str, own_reward: bool = False) -> list[Problem]:
    """Read JSON lines of `prompt` with `solutions` (list of text), `answer` (text or number) or tests (`read_tests`),
    and optionally `query_id` (default: the line number) and `task` (math, the default, stem, judged alike, or code).
    With `own_reward` a prompt is enough. FileNotFoundError, or a ValueError that names file, line and reason."""
    problems: list[Problem] = []
    lines: dict[str, int] = {}  # id -> line
    doubtful: dict[str, str] = {}  # key that needs the parser -> where it was met first
    for number, row in read_rows(path):
        where, name = f"{path}:{number}", row.get("query_id", number)
        prompt, solutions, tests = _text(row, "prompt", where), [], None
        if type(name) not in (str, int):
            raise ValueError(f"{where}: 'query_id' must be text or an integer, not {type(name).__name__}")
        if lines.setdefault(str(name), number) != number:
            raise ValueError(f"{where}: query_id {name!r} was already used on line {lines[str(name)]}")
        task = row.get("task", "code" if "input_output" in row or "tests" in row else "math")
        if own_reward:
            task = "own"
        elif task == "code":
            tests = tests_of(row, where)
        elif task in ("math", "stem"):
            solutions = _solutions(row, where, doubtful)
        else:
            raise ValueError(f"{where}: task {task!r} is not supported, only math, stem and code are")
        kept = {key: row[key] for key in row if own_reward or key not in ("tests", "input_output")}
        problems.append(Problem(str(name), prompt, tuple(solutions), task, tests=tests, row=kept))
    parse_keys(doubtful)
    return problems


def tests_of(row: dict, where: str) -> dict:
    """`read_tests` of a row whose programs can be judged; ValueError that begins with `where`."""
    tests = read_tests(row, where)
    if str(row.get("language") or "python").lower() not in ("python", "python3"):
        raise ValueError(f"{where}: programs are judged in Python, not in language {row['language']!r}")
    if not tests["inputs"]:
        raise ValueError(f"{where}: a program without tests could not be judged")
    return tests


def parse_keys(doubtful: dict[str, str]) -> None:
    """{answer key that needs the parser: where it was met}: ValueError for those that cannot be parsed."""
    faults = examine([{"solutions": [key], "keys": True} for key in doubtful], 2, 10.0) if doubtful else []
    pairs = zip(doubtful.values(), faults, strict=True)
    bad = [f"{where}: {fault}" for where, fault in pairs if fault != Verdict.NO_ANSWER]  # to no response
    if bad:
        raise ValueError("; ".join(bad[:5]) + (f"; and {len(bad) - 5} keys more" if len(bad) > 5 else ""))


def _solutions(row: dict, where: str, doubtful: dict[str, str]) -> list[str]:
    solutions, answer = row.get("solutions"), row.get("answer")
    if solutions is None and answer is not None:
        is_number = type(answer) in (int, float) and answer - answer == 0  # neither true nor NaN
        solutions = [str(answer) if is_number else _text(row, "answer", where)]
    if not isinstance(solutions, list) or not solutions or not all(isinstance(s, str) for s in solutions):
        raise ValueError(f"{where}: no answer key: give 'solutions', a non-empty list of text, or 'answer'")
    try:
        for solution in filter(needs_parser, solutions):
            doubtful.setdefault(solution, where)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return solutions


def load_demonstrations(path: str) -> list[tuple[str, str]]:
    """Read (prompt, full text of the answer) from JSON lines for supervised training; errors as in load_problems."""
    return [(_text(row, "prompt", f"{path}:{n}"), _text(row, "answer", f"{path}:{n}")) for n, row in read_rows(path)]


def _text(row: dict, field: str, where: str) -> str:
    if not isinstance(row.get(field), str) or not row[field].strip():
        raise ValueError(f"{where}: {field!r} must be text that is not empty")
    return row[field]


def _encode(cfg, tokenizer, problems: list[Problem], longest: int) -> list[Problem]:
    try:
        return encode_problems(problems, tokenizer, longest, template_text(cfg.template))
    except Exception as error:  # what tokenizers raise for text they have no tokens for is a bare Exception
        raise Refused(f"{cfg.data}: {cfg.model} cannot tokenise a prompt: {error}") from error


def load_data(cfg, tokenizer) -> tuple[list[Problem], list[Problem], str, int]:
    """(training problems, held-out problems, fingerprint, prompts dropped as too long). Raises Refused."""
    try:
        if cfg.data == "toy":
            problems, test = ([Problem(row["query_id"], row["prompt"], tuple(row["solutions"]), row=row)
                               for row in toy.problems(*args)]
                              for args in (("train", 1024, cfg.seed), ("test", cfg.eval_problems, 0)))  # fmt: skip
        else:
            own = bool(cfg.reward)
            problems = load_problems(local_file(cfg.data), own)
            test = load_problems(local_file(cfg.eval_data), own) if cfg.eval_data else []
            if not test and cfg.eval_problems:
                problems, test = hold_out(problems, cfg.eval_problems)
            if any(problem.tests for problem in problems + test):
                need_sandbox(cfg.unsafe_code)
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from error
    kept = _encode(cfg, tokenizer, problems, cfg.max_prompt_tokens)
    test = _encode(cfg, tokenizer, test[: cfg.eval_problems], cfg.max_prompt_tokens)
    if not kept:
        raise Refused(f"{cfg.data}: all {len(problems)} prompts exceed max_prompt_tokens={cfg.max_prompt_tokens}")
    content = json.dumps([[p.prompt_ids, p.solutions, p.tests, p.row] for p in kept + test]).encode()
    return kept, test, hashlib.sha256(content).hexdigest()[:16], len(problems) - len(kept)


def demonstrations(cfg, tokenizer) -> tuple[list[Trajectory], list[Trajectory], str, int]:
    """(supervised examples, of which the answer and its end are trained; held-out ones; fingerprint; examples dropped
    as too long)."""
    warm_start = cfg.data == "toy" or cfg.objective == "rl"
    try:
        rows = toy.demonstrations(16384, cfg.seed) if warm_start else load_demonstrations(local_file(cfg.data))
        more = load_demonstrations(local_file(cfg.eval_data)) if cfg.eval_data and not warm_start else []
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from error
    problems, test = ([Problem(str(number), prompt, (answer,)) for number, (prompt, answer) in enumerate(pairs)]
                      for pairs in (rows, more))  # fmt: skip
    if cfg.objective == "sft" and not test and cfg.eval_problems:
        problems, test = hold_out(problems, cfg.eval_problems)
    examples, held = (_examples(cfg, tokenizer, part) for part in (problems, test[: cfg.eval_problems]))
    if not examples:
        raise Refused(f"{cfg.data}: every example is longer than microbatch_tokens={cfg.microbatch_tokens}")
    content = json.dumps([example.tokens.tolist() for example in examples + held]).encode()
    return examples, held, hashlib.sha256(content).hexdigest()[:16], len(problems) - len(examples)


def _examples(cfg, tokenizer, problems: list[Problem]) -> list[Trajectory]:
    examples = []
    if tokenizer.eos_token_id is None:
        raise Refused(f"model={cfg.model}: its tokenizer has no end-of-sequence token, so no answer would learn to end")
    for problem in _encode(cfg, tokenizer, problems, cfg.microbatch_tokens):
        try:
            ids = tokenizer(problem.solutions[0], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        except Exception as error:  # as in _encode
            raise Refused(f"{cfg.data}: {cfg.model} cannot tokenise an answer: {error}") from error
        example = Trajectory(ticket=0, index=len(examples))
        example.append(problem.prompt_ids)
        example.append(ids, [0.0] * len(ids), [0] * len(ids))
        if len(example.tokens) <= cfg.microbatch_tokens:
            examples.append(example)
    return examples
