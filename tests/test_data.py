r"""Data as published, from a file or the hub, prompts in templates, the supervised objective, and TensorBoard.

    pytest tests/test_data.py                # under a minute: one small job, and a hub of our own on a free port
    pytest tests/test_data.py -m slow        # one rank = two ranks, killed = straight
"""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, rows, soon
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import ppo
import toy
from packing import Problem, Trajectory, sft_batches
from recipes import data, ledger, sft
from recipes.data import Refused, encode_problems, load_data, template_text
from recipes.ledger import Records
from train import Config, Rank, check, parse

torch.set_num_threads(1)

# -- rows as they are published

BEGIN, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
MATH = {"prompt": f"{USER}What is 1 + 1?\n{BOXED}{ASSISTANT}<think>\n", "task": "math", "query_id": "boba-17",
        "solutions": ["\\boxed{2}", "2.0"]}  # fmt: skip
STEM = {"prompt": "Which one?", "query_id": 18, "task": "stem", "solutions": ["B"]}
IO = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"], "fn_name": "", "remote": False}
CALLS = {"inputs": ['1\n[2, "a"]', "0\n[]"], "outputs": ["[3]", "null"], "fn_name": "add", "remote": False}
CODE = {"task": "code", "query_id": "deep-1", "prompt": "Add them.", "input_output": json.dumps(IO), "solutions": [],
        "language": "PYTHON", "timeout": 6, "memory": 1024, "problem_id": "p1"}  # fmt: skip
CALL = CODE | {"query_id": "deep-2", "input_output": json.dumps(CALLS)}
SFT = {"prompt": MATH["prompt"], "answer": "One and one is two.\n</think>\n\\boxed{2}", "id": "sft-0"}


def write(path: Path, *content) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in content))
    return str(path)


def letters(bos: bool = False, template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte, and the marks of two families of models. With `bos` the first token is put in front, as the
    tokenizers of DeepSeek's models do."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    marks = [BEGIN, "<｜end▁of▁sentence｜>", USER, ASSISTANT, "<think>", "</think>", "<|im_start|>", "<|im_end|>"]
    words = Tokenizer(models.BPE({word: i for i, word in enumerate(marks + sorted(alphabet.alphabet()))}, []))
    words.pre_tokenizer, words.decoder = alphabet, decoders.ByteLevel()
    words.add_special_tokens(marks)
    if bos:
        words.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token=BEGIN, eos_token=marks[1], chat_template=template,
                                   clean_up_tokenization_spaces=False)  # fmt: skip


def long(**settings) -> Config:
    return Config(**{"max_prompt_tokens": 999, "microbatch_tokens": 2000, "eval_problems": 0, **settings})


def load(monkeypatch, cfg):
    monkeypatch.setattr(data, "need_sandbox", lambda unsafe: None)  # nothing is run here
    return load_data(cfg, letters())


def test_published_rows_are_loaded_by_their_field_names(tmp_path, monkeypatch):
    untasked = {name: value for name, value in MATH.items() if name != "task"} | {"query_id": "boba-19"}
    file = write(tmp_path / "mixed.jsonl", MATH, STEM, untasked, "", CODE, CALL)
    problems, held, _, dropped = load(monkeypatch, long(data=file))
    assert (held, dropped) == ([], 0) and [p.id for p in problems] == ["boba-17", "18", "boba-19", "deep-1", "deep-2"]
    assert [p.task for p in problems] == ["math", "stem", "math", "code", "code"]
    assert [p.solutions for p in problems] == [("\\boxed{2}", "2.0"), ("B",), ("\\boxed{2}", "2.0"), (), ()]
    assert [p.tests for p in problems] == [
        None, None, None, {"function": "", "inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]},
        {"function": "add", "inputs": ['[1, [2, "a"]]', "[0, []]"], "outputs": ["[3]", "null"]}]  # fmt: skip
    for problem, row in zip(problems, [MATH, STEM, untasked, CODE, CALL], strict=True):  # the rest, for a workflow
        assert problem.row == {name: value for name, value in row.items() if name != "input_output"}
        assert letters().decode(problem.prompt_ids) == row["prompt"]  # verbatim, marks included
    assert problems[0].prompt_ids[0] == letters().convert_tokens_to_ids(USER)  # which are tokens, not spelled out


def test_supervised_rows_train_the_answer_and_its_end(tmp_path):
    tokenizer = letters(bos=True)
    file = write(tmp_path / "sft.jsonl", SFT, {"prompt": "a", "answer": "b"})  # an id is optional
    examples, held, _, dropped = data.demonstrations(long(data=file, objective="sft"), tokenizer)
    assert len(examples) == 2 and held == [] and dropped == 0
    for example, row in zip(examples, [SFT, {"prompt": "a", "answer": "b"}], strict=True):
        asked, answered = example.tokens[~example.loss_mask], example.tokens[example.loss_mask]
        assert example.loss_mask.tolist() == [False] * len(asked) + [True] * len(answered)
        assert tokenizer.decode(asked) == BEGIN + row["prompt"]
        assert tokenizer.decode(answered) == row["answer"] + tokenizer.eos_token  # and no second first token


@pytest.mark.parametrize("row, reason", [
    ('{"prompt": "a"', "not JSON"), (["a"], "a JSON object is needed"), ({"query_id": "x"}, "'prompt' must be text"),
    ({**MATH, "prompt": ["a"]}, "'prompt' must be text"), ({**MATH, "solutions": "2"}, "no answer key"),
    ({**MATH, "solutions": []}, "no answer key"), ({**MATH, "task": "logic"}, "task 'logic' is not supported"),
    ({**MATH, "query_id": "boba-1"}, "was already used on line 1"), ({**MATH, "query_id": None}, "'query_id' must be"),
    ({**CODE, "input_output": "{"}, "the tests of a program cannot be read"),
    ({**CODE, "input_output": None}, "the tests of a program cannot be read"),
    ({**CODE, "input_output": json.dumps(IO | {"outputs": ["3\n"]})}, "as many inputs as outputs"),
    ({**CODE, "input_output": json.dumps({"inputs": [], "outputs": []})}, "without tests could not be judged"),
    ({**CALL, "input_output": json.dumps(CALLS | {"inputs": ["x", "y"]})}, "the tests of a program cannot be read"),
])  # fmt: skip
def test_a_malformed_row_is_reported_by_file_and_line(tmp_path, monkeypatch, row, reason):
    file = write(tmp_path / "bad.jsonl", MATH | {"query_id": "boba-1"}, "", row, MATH | {"query_id": "boba-4"})
    with pytest.raises(Refused) as refusal:
        load(monkeypatch, long(data=file))
    assert str(refusal.value).startswith(f"{file}:3: ") and reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("row, reason", [
    ('{"prompt": "a"', "not JSON"), ({"prompt": "a", "id": 1}, "'answer' must be text that is not empty"),
    ({"prompt": "a", "answer": "  "}, "'answer' must be text"), ({"prompt": "a", "answer": 3}, "'answer' must be text"),
    ({"answer": "b"}, "'prompt' must be text"), (MATH, "'answer' must be text"),
])  # fmt: skip
def test_a_malformed_demonstration_is_reported_by_file_and_line(tmp_path, row, reason):
    good, bad = write(tmp_path / "good.jsonl", SFT), write(tmp_path / "bad.jsonl", SFT, "", row)
    for files in ({"data": bad}, {"data": good, "eval_data": bad}):
        with pytest.raises(Refused) as refusal:
            data.demonstrations(long(objective="sft", **files), letters())
        assert str(refusal.value).startswith(f"{bad}:3: ") and reason in str(refusal.value)


def test_what_a_tokenizer_cannot_say_is_refused_in_a_sentence(tmp_path):
    file = write(tmp_path / "sft.jsonl", {"prompt": "1 + 1 =", "answer": "two"})  # the toy knows numbers only
    with pytest.raises(Refused, match="sft.jsonl: toy cannot tokenise an answer: "):
        data.demonstrations(long(data=file, objective="sft"), toy.build_tokenizer())
    endless = letters()
    endless.eos_token = None
    with pytest.raises(Refused, match="end-of-sequence"):
        data.demonstrations(long(data=file, objective="sft"), endless)


def test_too_long_ones_are_counted_and_dropped(tmp_path):
    asked = [{"prompt": "x" * n, "answer": str(n)} for n in range(1, 11)]
    file = write(tmp_path / "rows.jsonl", *asked)
    problems, _, _, dropped = load_data(long(data=file, max_prompt_tokens=7), letters())
    assert [len(p.prompt_ids) for p in problems] == [1, 2, 3, 4, 5, 6, 7] and dropped == 3
    _, _, _, dropped = load_data(long(data=file, max_prompt_tokens=7), letters(bos=True))
    assert dropped == 4  # what the tokenizer adds counts
    with pytest.raises(Refused, match="rows.jsonl: all 10 prompts exceed max_prompt_tokens=1$"):
        load_data(long(data=file, max_prompt_tokens=1, template="qwen3"), letters())
    examples, _, _, dropped = data.demonstrations(long(data=file, objective="sft", microbatch_tokens=9), letters())
    assert [len(e.tokens) for e in examples] == [3, 4, 5, 6, 7, 8, 9] and dropped == 3  # with the answer and its end
    with pytest.raises(Refused, match="rows.jsonl: every example is longer than microbatch_tokens=2$"):
        data.demonstrations(long(data=file, objective="sft", microbatch_tokens=2), letters())


def test_held_out_examples_are_at_most_as_many_as_asked_for(tmp_path):
    file = write(tmp_path / "sft.jsonl", *({"prompt": f"p{i // 4}", "answer": f"{i}"} for i in range(400)))
    more = write(tmp_path / "more.jsonl", *({"prompt": f"q{i}", "answer": "b"} for i in range(9)))

    def split(**settings):
        examples, held, _, dropped = data.demonstrations(long(data=file, objective="sft", **settings), letters())
        assert dropped == 0
        return [[letters().decode(e.tokens[~e.loss_mask]) for e in part] for part in (examples, held)]

    train, held = split(eval_problems=10)
    assert len(held) == 10 and len(train) <= 390 and not {*train} & {*held}  # prompts repeat, but on one side only
    assert [len(part) for part in split(eval_problems=6, eval_data=more)] == [400, 6]
    assert [len(part) for part in split(eval_problems=0, eval_data=more)] == [400, 0]
    assert [len(part) for part in split(eval_problems=0)] == [400, 0]


# -- templates

ASK = "{input}\n" + BOXED
DISTILLED = f"{USER}{ASK}{ASSISTANT}<think>\n"
NAMED = {
    "AReaL-boba": DISTILLED, "r1-distilled-qwen": DISTILLED, "deepscaler-fix": DISTILLED, "AReaL-boba-SFT": DISTILLED,
    "r1-distilled-qwen-gpqa": DISTILLED.replace(BOXED, "Please reason step-by-step and put your choice letter without "
                                                "any other text with \\boxed{} in the end."),
    "qwen3-think": f"<|im_start|>user\n{ASK}/think<|im_end|>\n<|im_start|>assistant\n<think>",
    "qwen3-think-pure": "<|im_start|>user\n{input}\n/think<|im_end|>\n<|im_start|>assistant\n<think>",
    "qwen3": f"<|im_start|>user\n{ASK}/no_think<|im_end|>\n<|im_start|>assistant\n<think></think>",
}  # fmt: skip
CHAT = ("{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")  # fmt: skip


def said(prompt: str, tokenizer, template: str) -> str:
    (problem,) = encode_problems([Problem("p", prompt)], tokenizer, 999, template_text(template))
    return tokenizer.decode(problem.prompt_ids)


@pytest.mark.parametrize("name", NAMED)
def test_named_templates_are_the_published_ones(name):
    prompt = " What is {x} in {input}?\n"  # braces of the problem's own stay
    want = NAMED[name].replace("{input}", prompt, 1)
    assert said(prompt, letters(bos=True), name) == BEGIN + want  # one first token, also where the template has it
    assert said(prompt, letters(), name) == (BEGIN if name == "AReaL-boba-SFT" else "") + want


def test_a_first_token_that_came_twice_is_dropped_once_and_only_then():
    plain, adding = letters(), letters(bos=True)
    assert said("a", plain, "") == "a" and said("a", adding, "") == BEGIN + "a"
    assert said(BEGIN + "a", plain, "") == said(BEGIN + "a", adding, "") == BEGIN + "a"
    assert said("a" + BEGIN + BEGIN, adding, "") == BEGIN + "a" + BEGIN + BEGIN  # not in front: the prompt's own
    chat = f"{BEGIN}<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert said("a", letters(bos=True, template=CHAT), "chat") == said("a", letters(template=CHAT), "chat") == chat
    assert said("a", letters(bos=True, template=CHAT[15:]), "chat") == chat.removeprefix(BEGIN)  # its own wish
    nameless = letters()
    nameless.bos_token = None
    assert said("aa", nameless, "") == "aa"


@pytest.mark.parametrize("more", [[], ["--objective", "sft"]])
def test_templates_that_cannot_be_are_refused(tmp_path, more):
    file = write(tmp_path / "rows.jsonl", SFT)
    with pytest.raises(Refused) as refusal:
        check(parse(["--template", "qwen4", "--data", file, *more]), 2)
    assert str(refusal.value) == f"template=qwen4 is neither chat nor one of {', '.join(NAMED)}"
    for name in NAMED:
        check(parse(["--template", name, "--data", file, *more]), 2)
    with pytest.raises(Refused, match="template=chat, but its tokenizer has no chat template"):
        data.open_tokenizer(check(parse(["--template", "chat", "--data", file, *more]), 2))
    with pytest.raises(Refused, match="multi_turn with template=qwen3: only chat knows what comes between"):
        check(parse(["--template", "qwen3", "--data", file, "--workflow", "multi_turn", *more]), 2)


# -- the hub


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download of files asks for; they are in `files`, by "owner/name/FILE"."""

    files: dict[str, bytes] = {}
    asked: list[str] = []

    def do_HEAD(self, body: bool = False):
        self.asked.append(f"{self.command} {self.path}")
        match = re.fullmatch(r"/datasets/(\w+/\w+)/resolve/\w+/([\w./-]+)", self.path)
        known = match and any(name.startswith(match[1] + "/") for name in self.files)
        content = self.files.get("/".join(match.groups())) if match else None
        self.send_response(404 if content is None else 200)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
        self.send_header("X-Repo-Commit", "c0ffee" + "0" * 34)
        self.send_header("ETag", f'"{abs(hash(content)):040x}"')
        cut = content is not None and self.path.endswith("/cut.jsonl")  # the connection breaks before its end
        self.send_header("Content-Length", str(len(content or b"") + cut))
        self.end_headers()
        if body and content:
            self.wfile.write(content)
        self.close_connection = True

    def do_GET(self):
        self.do_HEAD(body=True)

    def log_message(self, *args):
        pass


ASKING = """
import os, sys, time
import train
from recipes import data
from types import SimpleNamespace as Tokenizer
time.sleep = lambda seconds: None  # a hub that is away is asked again, a little later each time
for line in map(str.strip, sys.stdin):
    try:
        cfg = train.check(train.parse(["--data", line, "--model", "m", "--eval_problems", "0"]), 2)
        data.encode_problems = lambda problems, *more: problems
        print("LOADED", ",".join(problem.id for problem in data.load_data(cfg, None)[0]), flush=True)
    except data.Refused as refusal:
        print("REFUSED", refusal, flush=True)
    print("OTHERS", "datasets" in sys.modules, flush=True)
"""


@pytest.fixture
def hub(monkeypatch):
    """A running hub with one dataset, as (server, what a process needs in its environment to find it)."""
    lines = [json.dumps(MATH | {"query_id": f"boba-{i}"}) for i in range(3)]
    monkeypatch.setattr(Hub, "files", {"owner/name/rows.jsonl": "\n".join(lines).encode(),
                                       "owner/name/data/bad.jsonl": (lines[0] + "\n{}").encode(),
                                       "owner/name/cut.jsonl": lines[0].encode()})  # fmt: skip
    monkeypatch.setattr(Hub, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    yield server, env | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "PYTHONPATH": str(ROOT)}
    server.shutdown()
    server.server_close()


@contextmanager
def asker(folder: Path, env: dict[str, str]):
    """A process that loads what it is told to; its cache is in `folder`. It must never show a traceback."""
    process = subprocess.Popen([sys.executable, "-c", ASKING], cwd=folder, env=env | {"HF_HOME": str(folder / "hf")},
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               stderr=open(folder / "stderr", "w"))  # fmt: skip

    def ask(data: str) -> str:
        process.stdin.write(data + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert process.stdout.readline() == "OTHERS False\n", (folder / "stderr").read_text()
        return answer.strip()

    try:
        yield ask
    finally:
        process.stdin.close()
        process.wait(10)
        assert "Traceback" not in (folder / "stderr").read_text()


def test_a_dataset_of_the_hub_is_named_by_its_file(tmp_path, hub):
    server, env = hub
    with asker(tmp_path, env) as ask:
        assert ask("owner/name/rows.jsonl") == "LOADED boba-0,boba-1,boba-2"
        assert "GET /datasets/owner/name/resolve/" in " ".join(Hub.asked)
        asked = len(Hub.asked)
        answer = ask("owner/name/data/bad.jsonl")  # in a folder; the file in the cache has the line
        assert re.match(r"REFUSED .*/data/bad\.jsonl:2: 'prompt' must be text", answer), answer
        assert len(Hub.asked) > asked
        for missing in ("owner/name/none.jsonl", "owner/none/rows.jsonl"):
            answer = ask(missing)
            assert answer.startswith(f"REFUSED {missing}: ") and "404" in answer, answer
            assert f"dataset {missing.rpartition('/')[0]}" in answer
        answer = ask("owner/name/cut.jsonl")
        assert answer.startswith("REFUSED owner/name/cut.jsonl: ") and "closed connection" in answer, answer
        asked = len(Hub.asked)
        for named in ("owner/name", "owner/name/../name/rows.jsonl", "./owner/name/rows.jsonl", "/owner/name/x.jsonl"):
            answer = ask(named)
            assert answer.startswith("REFUSED") and named in answer, answer
        assert "owner/name/FILE.jsonl" in ask("owner/name")  # how a file of a dataset is named
        write(tmp_path / "here.jsonl", MATH | {"query_id": "here"})
        (tmp_path / "owner/name").mkdir(parents=True)
        assert ask("here.jsonl") == ask(f"{tmp_path}/here.jsonl") == ask("owner/../here.jsonl") == "LOADED here"
        write(tmp_path / "owner/name/rows.jsonl", MATH | {"query_id": "local"})
        assert ask("owner/name/rows.jsonl") == "LOADED local"  # a file wins over the hub
        (tmp_path / "owner/name/rows.jsonl").unlink()
        answer = ask("owner/name/rows.jsonl")  # and a folder, in which a name may be mistyped
        assert answer.startswith("REFUSED data: there is no file owner/name/rows.jsonl"), answer
        assert len(Hub.asked) == asked
        (tmp_path / "owner/name").rmdir()
        server.shutdown()
        server.server_close()
        assert ask("owner/name/rows.jsonl") == "LOADED boba-0,boba-1,boba-2"  # the hub is away: what was fetched
        answer = ask("owner/name/other.jsonl")
        assert answer.startswith("REFUSED owner/name/other.jsonl: ") and "dataset owner/name: " in answer, answer


@pytest.mark.slow
def test_offline_the_hub_is_not_asked(tmp_path, hub):
    with asker(tmp_path, hub[1] | {"HF_HUB_OFFLINE": "1"}) as ask:
        answer = ask("owner/name/rows.jsonl")
    assert answer.startswith("REFUSED owner/name/rows.jsonl: ") and "dataset owner/name: " in answer, answer
    assert not Hub.asked


def test_a_command_that_names_no_dataset_is_answered_in_one_line(tmp_path, hub):
    env = hub[1] | {"HF_HOME": str(tmp_path / "hf"), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, ROOT / "train.py", "--objective", "sft", "--data", "owner/name/no.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("train.py: owner/name/no.jsonl: there is no such file, and the hub does not give")
    assert not (tmp_path / "runs").exists()


def test_a_file_needs_no_network(tmp_path, monkeypatch):
    def never(*args, **more):
        raise AssertionError("somebody asked for it")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", never)
    monkeypatch.setattr(socket.socket, "connect", never)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name").mkdir(parents=True)
    for file in ("rows.jsonl", "owner/rows.jsonl", "owner/name/rows.jsonl"):
        write(tmp_path / file, MATH)
        assert len(load_data(check(long(data=file, eval_data=file, eval_problems=1), 2), letters())[0]) == 1
        write(tmp_path / file, SFT)
        assert len(data.demonstrations(check(long(data=file, objective="sft"), 1), letters())[0]) == 1


# -- supervised: the arithmetic

TINY = Qwen3Config(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                   num_key_value_heads=1, head_dim=8, max_position_embeddings=64, attn_implementation="packed")


def tiny() -> ppo.Policy:
    torch.manual_seed(5)
    return ppo.Policy(Qwen3ForCausalLM(TINY).double().eval(), temperature=1.0)


def example(index: int, asked: int, answered: int) -> Trajectory:
    generator = torch.Generator().manual_seed(index)
    one = Trajectory(0, index)
    one.append(torch.randint(1, 40, (asked,), generator=generator).tolist())
    one.append(torch.randint(1, 40, (answered,), generator=generator).tolist(), [0.0] * answered, [0] * answered)
    return one


EXAMPLES = [example(i, 1 + i % 4, 1 + i * 5 % 13) for i in range(11)]


def plain_loss(policy: ppo.Policy, chosen: list[Trajectory]) -> torch.Tensor:
    """Each example alone through the model as anybody would call it, prompts ignored; the mean over all tokens."""
    policy.lm.set_attn_implementation("eager")
    losses = []
    for one in chosen:
        ids, asked = torch.tensor(one.tokens, dtype=torch.long), int((~one.loss_mask).sum())
        labels = torch.where(torch.arange(len(ids)) < asked, -100, ids)
        losses.append(F.cross_entropy(policy.lm(ids[None]).logits[0, :-1], labels[1:], reduction="none")[asked - 1 :])
    policy.lm.set_attn_implementation("packed")
    return torch.cat(losses).mean()


def settings(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{"sft_steps": 1, "sft_tokens": 50, "sft_examples": 0, "sft_lr": 1e-2, "sft_warmup": 0,
                              "sft_decay": False, "microbatch_tokens": 30, "grad_clip": 0, "seed": 3} | changes)


def on_ranks(count: int, body) -> list:
    """[body(rank, all_reduce) for each rank], run at once, each in a thread."""
    barrier, slots, results = threading.Barrier(count, timeout=30), [None] * count, [None] * count

    def run(rank):
        def all_reduce(tensor):
            slots[rank] = tensor.clone()
            barrier.wait()
            total = sum(slots)
            barrier.wait()
            tensor.copy_(total)

        results[rank] = body(rank, all_reduce)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return results


@pytest.mark.parametrize("ranks, capacity", [(1, 1000), (1, 20), (2, 30), (3, 18)])
def test_a_supervised_step_is_plain_cross_entropy(ranks, capacity):
    policies = [tiny() for _ in range(ranks)]

    def step(rank, all_reduce):
        policy, told = policies[rank], []
        optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
        sft.supervised(policy, optimizer, EXAMPLES, settings(microbatch_tokens=capacity, sft_examples=9), start=0,
                       rank=rank, ranks=ranks, all_reduce=all_reduce, device="cpu",
                       each=lambda done, row: told.append((done, row)))  # fmt: skip
        return told, [p.grad for p in policy.parameters()]

    results = on_ranks(ranks, step)
    chosen = [EXAMPLES[i] for i in next(sft_batches([1] * 11, 0, seed=3, examples=9))]
    policy = tiny()
    loss = plain_loss(policy, chosen)
    loss.backward()
    tokens = sum(int(one.loss_mask.sum()) for one in chosen)
    for told, _ in results:
        ((done, row),) = told
        assert done == 1 and row["step"] == 0 and row["tokens"] == tokens and row["lr"] == 1e-2
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-6)  # the head's log-softmax is float32 or better
    for parameter, *grads in zip(policy.parameters(), *(grads for _, grads in results), strict=True):
        mean = sum(grads) / ranks  # what FSDP makes of them
        assert (mean - parameter.grad).norm() <= 1e-6 * parameter.grad.norm()


@pytest.mark.parametrize("ranks, capacity", [(1, 1000), (1, 17), (2, 40), (2, 17), (5, 20), (13, 17)])
def test_the_held_out_loss_depends_on_neither_ranks_nor_packing(ranks, capacity):
    policies = [tiny() for _ in range(ranks)]
    cfg = settings(microbatch_tokens=capacity)
    losses = on_ranks(ranks, lambda rank, all_reduce: sft.held_out_loss(
        policies[rank], EXAMPLES, cfg, rank=rank, ranks=ranks, all_reduce=all_reduce, device="cpu"))  # fmt: skip
    assert losses == pytest.approx([plain_loss(policies[0], EXAMPLES).item()] * ranks, rel=1e-6)
    assert not any(p.grad is not None for policy in policies for p in policy.parameters())


@pytest.mark.parametrize("changes, rates", [
    ({"sft_warmup": 4, "sft_decay": True}, [0.25, 0.5, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
    ({"sft_warmup": 0, "sft_decay": True}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
    ({"sft_warmup": 4, "sft_decay": False}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
    ({"sft_warmup": 1, "sft_decay": False}, [1] * 10), ({"sft_warmup": 0, "sft_decay": False}, [1] * 10),
    ({"sft_warmup": 40, "sft_decay": False}, [step / 40 for step in range(1, 11)]),
])  # fmt: skip
def test_learning_rates(changes, rates):
    policy, told = tiny(), []
    optimizer = torch.optim.SGD(policy.parameters(), lr=9.0)
    each = lambda done, row: told.append((row["lr"], optimizer.param_groups[0]["lr"]))  # noqa: E731
    sft.supervised(policy, optimizer, EXAMPLES[:2], settings(sft_steps=10, sft_lr=1e-3, **changes), start=0, rank=0,
                   ranks=1, all_reduce=lambda tensor: None, device="cpu", each=each)  # fmt: skip
    assert [rate for rate, _ in told] == pytest.approx([1e-3 * rate for rate in rates]) and all(a == b for a, b in told)


@pytest.mark.parametrize("count, examples", [(200, 64), (7, 3), (5, 8), (4, 4), (3, 1), (1, 2)])
def test_a_step_has_exactly_its_examples_and_an_epoch_each_of_them_once(count, examples):
    batches, seen = sft_batches([10**6] * count, 1, seed=7, examples=examples), []
    for _ in range(3 * count):
        batch = next(batches)
        assert len(batch) == examples
        seen += batch
    epochs = [seen[at : at + count] for at in range(0, len(seen), count)]
    assert all(sorted(epoch) == [*range(count)] for epoch in epochs[: len(seen) // count])
    assert count < 5 or epochs[0] != epochs[1]  # another order


def test_a_run_that_goes_on_trains_what_a_straight_one_does():
    def run(*parts):
        policy, told = tiny(), []
        optimizer = torch.optim.AdamW(policy.parameters())
        for start, end in parts:  # a schedule is that of the whole run: the first part is stopped from outside
            def each(done, row, end=end):
                told.append(row)
                if done == end:
                    raise InterruptedError

            cfg = settings(sft_steps=8, sft_examples=4, sft_warmup=3, sft_decay=True)
            with pytest.raises(InterruptedError):
                sft.supervised(policy, optimizer, EXAMPLES, cfg, start=start, rank=0, ranks=1, each=each,
                               all_reduce=lambda tensor: None, device="cpu")  # fmt: skip
        return told, torch.cat([p.detach().flatten() for p in policy.parameters()])

    (straight, weights), (resumed, same) = run((0, 8)), run((0, 5), (5, 8))
    assert straight == resumed and torch.equal(weights, same)
    assert straight[-1]["loss"] < straight[0]["loss"]


def test_a_warm_start_is_kept_under_everything_that_it_depends_on():
    changes = {}, {"sft_examples": 8}, {"sft_warmup": 21}, {"sft_decay": False}, {"sft_steps": 9}, {"sft_lr": 1e-3}
    assert len({ledger.warm_folder(Config(**changed)) for changed in changes}) == len(changes)
    assert ledger.warm_folder(Config(lr=1.0)) == ledger.warm_folder(Config())


# -- supervised: whole jobs

WORDS = [{"prompt": f"{i // 10} + {i % 10} =", "answer": toy.counting_answer(i // 10, i % 10), "id": f"sft-{i}"}
         for i in range(200)]  # fmt: skip


def supervise(job, tmp_path, name: str, *more, ranks: int = 2):
    file = write(tmp_path / "AReaL-boba-SFT-200.jsonl", *WORDS)
    return job("--objective", "sft", "--data", file, "--sft_steps", 24, "--sft_examples", 32, "--sft_warmup", 2,
               "--checkpoint_every", 8, "--run_name", name, *more, ranks=ranks)  # fmt: skip


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def as_scalars(table: list[dict]) -> dict[str, list]:
    """What TensorBoard should show of the rows of metrics.jsonl: numbers, as float32."""
    names = dict.fromkeys(name for row in table for name in row if name != "step")
    number = (int, float)
    series = {name: [(row["step"], row[name]) for row in table if type(row.get(name)) in number] for name in names}
    return {name: [(step, torch.tensor(value, dtype=torch.float32).item()) for step, value in points]
            for name, points in series.items() if points}  # fmt: skip


@pytest.mark.slow
def test_two_ranks_learn_the_published_examples(job, tmp_path):
    one = supervise(job, tmp_path, "sft", "--tensorboard", "true")
    assert one.wait() == 0, one.text()
    folder = tmp_path / "runs/sft"
    table, summary = rows(folder), json.loads((folder / "summary.json").read_text())
    assert [row["step"] for row in table] == [*range(24)] and table[-1]["loss"] < 0.5 * table[0]["loss"]
    assert [row["step"] for row in table if "held_out_loss" in row] == [7, 15, 23]
    assert summary["steps"] == 24 and summary["held_out_loss"] == pytest.approx(table[-1]["held_out_loss"], rel=1e-6)
    assert summary["held_out_loss"] < 0.6 * summary["held_out_loss_before"]
    assert "  held out             20\n" in one.text() and "  examples             180\n" in one.text()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000008", "step-000016"]
    # What was exported is what was measured: the held-out loss again, plainly, from the folder of the model.
    policy = ppo.Policy(Qwen3ForCausalLM.from_pretrained(folder / "model"), 1.0)
    cfg = Config(objective="sft", data=str(tmp_path / "AReaL-boba-SFT-200.jsonl"))
    held = data.demonstrations(cfg, toy.build_tokenizer())[1]
    assert plain_loss(policy, held).item() == pytest.approx(summary["held_out_loss"], rel=1e-4)
    assert scalars(folder) == as_scalars(table)
    assert not one.members()


@pytest.mark.slow
def test_one_rank_and_a_killed_run_end_where_two_straight_ranks_do(job, tmp_path):
    straight = supervise(job, tmp_path, "straight")
    assert straight.wait() == 0, straight.text()
    single = supervise(job, tmp_path, "single", "--checkpoint_every", 0, ranks=1)
    assert single.wait() == 0, single.text()
    killed = supervise(job, tmp_path, "killed", "--tensorboard", "true")
    folder = tmp_path / "runs/killed"
    killed.until(lambda: (folder / "metrics.jsonl").exists() and len(rows(folder)) >= 11)
    killed.kill()
    reached = len(rows(folder))
    resumed = supervise(job, tmp_path, "killed", "--tensorboard", "true", "--resume", "true")
    assert resumed.wait() == 0 and reached < 24, resumed.text()
    want, summary = rows(tmp_path / "runs/straight"), json.loads((tmp_path / "runs/straight/summary.json").read_text())
    for name in ("single", "killed"):
        table = rows(tmp_path / "runs" / name)
        assert [row["step"] for row in table] == [*range(24)]
        assert [row["loss"] for row in table] == pytest.approx([row["loss"] for row in want], rel=1e-3), name
        assert [row["tokens"] for row in table] == [row["tokens"] for row in want]
        ended = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        for key in ("held_out_loss", "held_out_loss_before"):
            assert ended[key] == pytest.approx(summary[key], rel=1e-3), (name, key)
    assert scalars(folder) == as_scalars(rows(folder))  # each step once, with nothing lost


# -- TensorBoard

ME = Rank(0, 1, 1, torch.device("cpu"), torch.float32)


def attempt(folder: Path, start: int, end: int, **more) -> Records:
    records = Records(folder, 0, True, 9, start, {})
    records.open(Config(tensorboard=True, objective="sft"), ME, {})
    for step in range(start, end):
        records.supervised({"step": step, "loss": 1 / (3 + step + start), "tokens": 10**6 + step, "lr": 1e-5,
                            "held_out_loss": 0.5 if step % 3 == 2 else None, **more})  # fmt: skip
    return records


def test_tensorboard_shows_the_numbers_of_the_rows(tmp_path):
    pytest.importorskip("tensorboard")
    odd = {"names": {"a": 1.0}, "ids": [1, 2], "text": "x", "flag": True, "none": None, "gap": float("inf")}
    attempt(tmp_path, 0, 6, **odd).finish_supervised(None)
    table, shown = rows(tmp_path), scalars(tmp_path)
    assert shown == as_scalars(table) and len(table) == 6
    assert {*shown} == {"loss", "tokens", "lr", "seconds", "held_out_loss", "gap"}
    assert [step for step, _ in shown["held_out_loss"]] == [2, 5]


def test_a_resumed_run_shows_each_step_once(tmp_path):
    pytest.importorskip("tensorboard")
    killed = attempt(tmp_path, 0, 6)  # and no end: what was told is there without
    soon(lambda: scalars(tmp_path) == as_scalars(rows(tmp_path)))
    time.sleep(1.1)  # the files are ordered by the second of their start
    attempt(tmp_path, 4, 9).finish_supervised(None)
    table = rows(tmp_path)
    assert [row["step"] for row in table] == [*range(9)] and table[4]["loss"] == 1 / 11  # of the second attempt
    assert scalars(tmp_path) == as_scalars(table)
    killed.board.close()


def test_tensorboard_is_asked_for_and_refused_where_it_is_missing(tmp_path, monkeypatch):
    records = Records(tmp_path, 0, True, 9, 0, {})
    records.open(Config(objective="sft"), ME, {})
    records.supervised({"step": 0, "loss": 1.0})
    records.finish_supervised(None)
    assert not (tmp_path / "tensorboard").exists()
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: name != "tensorboard" and real(name, *a) or None)
    check(Config(objective="sft"), 1)
    for objective in ("rl", "sft"):
        with pytest.raises(Refused, match="^tensorboard=true: `pip install tensorboard`$"):
            check(Config(objective=objective, tensorboard=True), 2)
