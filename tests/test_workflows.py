"""Workflows: several turns are one trajectory of the very tokens that the engine saw and made, whatever lies between.

    pytest tests/test_workflows.py           # seconds; with -m slow the toy learns from hints, two minutes
"""

import asyncio
import copy
import json
import re
import subprocess
import sys
from functools import partial
from unittest.mock import AsyncMock

import pytest
from conftest import ROOT
from test_rollout import clean, decoding, make, no_engine_survives, tiny, update  # noqa: F401
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import toy
import train
from packing import Generation, Problem, Trajectory, check_request
from recipes.data import Refused, encode_problems, load_problems
from rollout import RETRY, choose_workflow, multi_turn, sample_and_score, single_turn, user_turn
from sandbox import load_function, sandbox_fault

TOOL, HINTS = ROOT / "recipes" / "tool_use.py", ROOT / "recipes" / "hints.py"
needs = pytest.mark.skipif(bool(sandbox_fault()), reason=f"{sandbox_fault()}; apt install bubblewrap")
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")  # fmt: skip
TEMPLATES = {"chatml": CHATML, "system": "<|im_start|>system\nBe kind.<|im_end|>\n" + CHATML,
             "thinking": CHATML.replace("m.content", "m.content.split('</think>')[-1]")}  # fmt: skip
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def letters(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte, but for "ab"."""
    words = ["<|im_start|>", "<|im_end|>", *sorted(BYTES.alphabet()), "ab"]
    tokens = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("a", "b")]))
    tokens.pre_tokenizer, tokens.decoder = BYTES, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=words[1], chat_template=template)


IDS, END = letters().get_vocab(), letters().eos_token_id


def spelled(text: str, end: bool = True) -> list[int]:
    """`text` letter by letter: "ab", tokenised again, would be another sequence."""
    return [IDS[letter] for letter in BYTES.pre_tokenize_str(text)[0][0]] + [END] * end


class Scripted:
    """An engine that gives the answers it was told to, within its budget."""

    def __init__(self, answers: list[list[int]], max_new_tokens: int = 10_000, template: str | None = None):
        self.tokenizer, self.answers, self.version = letters(template), list(answers), 0
        self.max_new_tokens, self.longest = max_new_tokens, max_new_tokens + 99

    async def generate(self, token_ids: list[int], max_new_tokens: int) -> Generation:
        check_request(token_ids, max_new_tokens, len(IDS), self.longest, {})
        tokens, self.version = self.answers.pop(0)[:max_new_tokens], self.version + 1
        logprobs, versions = zip(*((-i / 64, self.version + i) for i in range(len(tokens))), strict=True)
        return Generation(tokens, [*logprobs], [*versions], "stop" if tokens[-1] == END else "length")


class Watched:
    """An engine that keeps in `seen` what it was asked and answered."""

    def __init__(self, engine):
        vars(self).update(vars(engine), engine=engine, seen=[])

    async def generate(self, *request) -> Generation:
        self.seen.append((*request, await self.engine.generate(*request)))
        return self.seen[-1][-1]


def between(one: Trajectory, prompt: tuple[int, ...], spy) -> list[list[int]]:
    """What stands between the answers to `prompt`, after a look at every token of their trajectory."""
    given, want, mine = [], [], [entry for entry in spy.seen if entry[0][: len(prompt)] == list(prompt)]
    for context, budget, answer in mine:
        given.append(context[len(want) :])
        want += [(token, False, 0.0, -1) for token in given[-1]]
        assert [token for token, *_ in want] == context and budget == spy.max_new_tokens - len(context) + len(prompt)
        want += zip(answer.tokens, [True] * len(answer.tokens), answer.logprobs, answer.versions, strict=True)
    arrays = (one.tokens, one.loss_mask, one.logprobs, one.versions)
    assert [*zip(*(array.tolist() for array in arrays), strict=True)] == want and given[0] == list(prompt)
    assert one.finish_reason == answer.finish_reason
    return given[1:]


def play(workflow, engine, *scores: float, chat: bool = False, **row):
    """(trajectory, responses that were scored, what was put between the answers: lists of token ids)"""
    (problem,) = encode_problems([Problem("p", "ab?", row=row)], engine.tokenizer, 99, "chat" if chat else "")
    spy, score = Watched(engine), AsyncMock(side_effect=[*scores, *[0.0] * 9])
    (one,) = asyncio.run(workflow(problem, spy, score))
    said = [call.args[1] for call in score.await_args_list]
    assert said[-1] == engine.tokenizer.decode(spy.seen[-1][-1].tokens, skip_special_tokens=True)
    return one, said, between(one, problem.prompt_ids, spy)


def tool(**constants):
    """The recipe's workflow, with other constants of its file."""
    workflow, _ = load_function(f"{TOOL}:tool_use")
    workflow.__globals__.update(constants)
    return workflow


def test_several_turns_are_one_trajectory_of_the_engines_own_tokens():
    engine = Scripted([spelled(text) for text in ("ab", "abba", "b", "ab")])
    workflow, hints = partial(multi_turn, turns=4, discount=0.9), ["ab", "c"]
    one, said, replies = play(workflow, engine, 0.0, 0.5, 0.0, 0.25, hints=hints)
    assert said == ["ab", "abba", "b", "ab"] and one.score == 0.25 and one.reward == pytest.approx(0.25 * 0.9**3)
    assert replies == [engine.tokenizer(text)["input_ids"] for text in (*hints, RETRY)]


@pytest.mark.parametrize("turns, scores, asked, reward", [
    (3, [1.0], 1, 1.0), (3, [0.0, 1.0], 2, 0.5), (3, [0.9, 0.0, 1.0], 3, 0.25), (3, [0.0, 0.0, 0.4], 3, 0.1),
    (1, [0.4], 1, 0.4), (9, [0.0, 0.0, 0.0, 0.8], 4, 0.1),  # the fourth answer is cut off
])  # fmt: skip
def test_it_ends_with_an_answer_that_is_right_or_cut_off_or_after_all_turns(turns, scores, asked, reward):
    workflow = single_turn if turns == 1 else partial(multi_turn, turns=turns, discount=0.5)
    one, said, _ = play(workflow, Scripted([spelled("ab")] * 3 + [spelled("ab", end=False)] * 2), *scores)
    assert len(said) == asked and one.reward == pytest.approx(reward) and one.score == scores[-1]


@pytest.mark.parametrize("room, asked", [(-1, 1), (0, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["multi_turn", pytest.param("tool_use", marks=needs)])
def test_it_goes_on_if_the_budget_has_room_for_a_token_more_and_not_otherwise(name, room, asked):
    workflow, says = (tool(), "\n```output\nab\n```\n") if name == "tool_use" else (partial(multi_turn, turns=3), "c")
    first, reply = spelled("```python\nprint('ab')\n```"), letters()(says)["input_ids"]
    engine = Scripted([first, spelled("ab")], max_new_tokens=len(first) + len(reply) + room)
    one, said, replies = play(workflow, engine, hints=["c", "c"])
    assert replies == [reply] * (asked - 1)
    assert (one.finish_reason, said[-1]) == (("length", "ab"[:room]) if asked == 2 else ("stop", said[0]))


def test_every_token_of_a_later_turn_has_the_version_that_made_it():
    weights, prompts = [tiny(1), tiny(2)], [(1, 2, i) for i in range(24)]

    async def run():
        engine = await make(copy.deepcopy(weights[0]), max_new_tokens=200, stop_ids=[59, 60])
        engine.tokenizer, first_turn_over = toy.build_tokenizer(), asyncio.Barrier(len(prompts) + 1)
        spy = Watched(engine)

        async def score(problem, response):
            if len(spy.seen) <= len(prompts):
                await first_turn_over.wait()
            return 0.0

        await update(engine, 0, weights[0])
        problems = [Problem("p", "", prompt_ids=prompt, row={"hints": ["5 6"]}) for prompt in prompts]
        runs = asyncio.gather(*(multi_turn(problem, spy, score, turns=2) for problem in problems))
        await first_turn_over.wait()
        await asyncio.wait_for(decoding(engine, 4), 30)
        await update(engine, 1, weights[1])
        return [one for (one,) in await runs], spy

    trajectories, spy = asyncio.run(run())
    for one, prompt in zip(trajectories, prompts, strict=True):
        assert between(one, prompt, spy) in ([], [[14, 15]])
        by_version = [[0.0, *clean(model, one.tokens.tolist()).tolist()] for model in weights] + [[0.0] * 999]
        assert one.logprobs.tolist() == pytest.approx([by_version[v][i] for i, v in enumerate(one.versions)], abs=1e-4)
    assert sum(len(context) > 3 and set(answer.versions) == {0, 1} for context, _, answer in spy.seen) >= 4


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_users_turn_is_what_the_template_puts_between_two_answers(name):
    thought, says = "<think>ab</think>ab", "<|im_start|>user\nNo, ab.<|im_end|>\n<|im_start|>assistant\n"
    engine = Scripted([spelled(thought), spelled("ab")], template=TEMPLATES[name])
    one, tokenizer = play(partial(multi_turn, turns=2, chat=True), engine, chat=True)[0], engine.tokenizer
    for last, closing in ((END, "\n"), (IDS["b"], "<|im_end|>\n")):  # the answer has its stop token already, or not
        assert user_turn(tokenizer, "No, ab.", True, last) == tokenizer(closing + says)["input_ids"]
    turns = [("user", "ab?"), ("assistant", thought), ("user", RETRY), ("assistant", "ab")]
    whole = tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in turns], tokenize=False)
    if name == "thinking":  # it would forget the first thought, but the second answer was made in its presence
        whole = whole.replace("\nab<", f"\n{thought}<", 1)
    assert tokenizer.decode(one.tokens) + "\n" == whole and whole.count("Be kind.") == (name == "system")


def test_a_workflow_is_chosen_by_name_or_from_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("async def own(problem, engine, score): ...\ndef plain(*request): ...\n")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1 =", "answer": 2}\n')

    def chosen(*args):
        argv = ["--engine", "transformers", "--data", "data.jsonl", "--workflow", *args]
        return choose_workflow(train.check(train.parse(argv), 2))

    assert {chosen(spec).__name__ for spec in ("single_turn", "own.py:own")} == {"single_turn", "own"}
    several = chosen("multi_turn", "--turns", "5", "--turn_discount", "0.75", "--template", "chat")
    assert several.func is multi_turn and several.keywords == {"turns": 5, "discount": 0.75, "chat": True}
    for name, sentence in [("own.py:plain", "workflow=own.py:plain must be an `async def` of (problem, engine, score)"),
                           ("own.py:missing", "own.py:missing: own.py has no function 'missing'"),
                           ("gone.py:f", "gone.py:f: file.py:function is needed, and there is no file 'gone.py'"),
                           ("many_turns", "many_turns: file.py:function is needed, and there is no file ''")]:
        with pytest.raises(Refused, match=f"^{re.escape(sentence)}$"):
            chosen(name)


def sampled(spoil=lambda pair: None):
    """The group of two runs of a workflow that returns two trajectories, in a list that `spoil` may change."""
    async def twice(problem, engine, score):
        pair = [*await single_turn(problem, engine, score), *await single_turn(problem, engine, score)]
        spoil(pair)
        return pair

    scorer = AsyncMock(**{"score.side_effect": lambda _, text: (1.0, "right") if text == "ab" else (0.0, "wrong")})
    engine = Scripted([spelled(text) for text in ("ab", "ab", "b", "ab")], max_new_tokens=10)
    problem = Problem("p", "?", prompt_ids=(3,) * 99)
    return asyncio.run(sample_and_score(7, problem, 2, engine, scorer, twice))


def test_several_trajectories_of_one_run_are_all_trained_and_counted():
    group = sampled(lambda pair: (setattr(pair[0], "score", float("nan")), setattr(pair[1], "score", 0.25)))
    assert [(one.ticket, one.index) for one in group.trajectories] == [(7, 0), (7, 1), (7, 2), (7, 3)]
    assert [(one.reward, one.score) for one in group.trajectories] == [(1, 1), (1, 0.25), (0, 0), (1, 0.25)]
    assert group.verdicts == {"right": 3, "wrong": 1}


@pytest.mark.parametrize("spoil, sentence", [
    (list.clear, "a workflow returned no trajectory"),
    (lambda pair: setattr(pair[1], "reward", float("nan")), "102 tokens, 3 of them generated, with reward nan"),
    (lambda pair: pair[1].append([5] * 8), "returned 110 tokens, 3 of them .* at most 109 tokens"),
    (lambda pair: pair[1].logprobs.fill(0.5), "trajectory 1 of ticket 7: the log-probability of token 0 is 0.5"),
    (lambda pair: pair.append(Trajectory(7, 0, reward=1.0)), "returned 0 tokens, 0 of them generated, with reward 1.0"),
])  # fmt: skip
def test_what_could_not_be_trained_is_refused(spoil, sentence):
    with pytest.raises(ValueError, match=sentence):
        sampled(spoil)


@needs
def test_what_a_program_prints_or_raises_is_the_next_message_up_to_a_limit_of_calls():
    programs = ["print(6 * 7)", "x = 1\nx / 0", "def", "x = 1", "print('ab' * 50)", "print(7)", "print(8)"]
    texts = [f"ab\n```python\n{program}\n```" for program in programs]
    one, said, replies = play(tool(MAX_CALLS=5, CHARACTERS=80), Scripted([*map(spelled, texts)]), 0.5)
    outputs = ["42", '  File "answer.py", line 2, in <module>\nZeroDivisionError: division by zero',
               "       ^\nSyntaxError: invalid syntax", "(no output)", "ab" * 40 + "... (100 characters)"]
    assert [letters().decode(reply) for reply in replies] == [f"\n```output\n{text}\n```\n" for text in outputs]
    assert said == [texts[5]] and one.reward == 0.5  # only the last message is scored, and what it calls is not run
    engine = Scripted([spelled("```python\nwhile True: pass\n```"), spelled("ab")], template=CHATML)
    _, _, (reply,) = play(tool(TIMEOUT_S=0.5), engine, chat=True)
    assert "<|im_start|>user\n```output\nstopped: it ran for 0.5 s\n```<|im_end|>" in engine.tokenizer.decode(reply)
    assert play(tool(), Scripted([spelled(texts[0], end=False)]))[2] == []  # cut off


def test_only_a_complete_block_at_the_end_of_a_message_is_a_call():
    find, block = load_function(f"{TOOL}:find_program")[0], "```python\nprint(1)\n```"
    assert find(block) == find(f"```python\n2\n```\nor\n{block}\n \n") == "print(1)\n"
    for text in ("", "4", "a ```", f"{block} so 1", "```\nprint(1)\n```", block[:-3], f"{block}\n```\n1\n```"):
        assert not find(text), text


def test_without_a_sandbox_nothing_is_asked_of_the_model():
    with pytest.raises(RuntimeError, match="no sandbox for it here: there is no bwrap"):
        play(tool(sandbox_fault=lambda: "there is no bwrap"), Scripted([]))


def test_hints_are_problems_of_their_split_whose_second_turn_can_be_known(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hints.py", "--folder", str(tmp_path), "--seed", "2"])
    load_function(f"{HINTS}:main")[0]()
    for name, split, count in (("hints", "train", 1024), ("hints-test", "test", 200)):
        problems = encode_problems(load_problems(f"{tmp_path}/{name}.jsonl"), toy.build_tokenizer(), 4)
        pairs = [(problem.prompt, *problem.row["hints"]) for problem in problems]
        assert len(problems) == count and (split == "train" or len({*pairs}) == count)
        for problem, (prompt, hint) in zip(problems, pairs, strict=True):
            a, b, s, c = (int(word) for word in f"{prompt} {hint}".split() if word.isdigit())
            assert (prompt, hint, s) == (f"{a} + {b} =", f"{s} + {c} =", a + b) and 0 < c and s + c <= toy.LARGEST
            assert problem.solutions == (toy.boxed(s + c),) and toy.split_of(prompt) == toy.split_of(hint) == split


@pytest.mark.slow
def test_the_toy_learns_from_hints(job, tmp_path):
    subprocess.run([sys.executable, HINTS, "--seed", "2"], cwd=tmp_path, check=True)
    printed = HINTS.read_text().partition("train.py ")[2].partition("\n\n")[0]
    one = job(*printed.replace("\\\\\n", " ").split(), "--steps", 45)
    assert one.wait(400) == 0, one.text()
    summary = json.loads((tmp_path / "runs" / "hints" / "summary.json").read_text())
    assert summary["pass@1_before"] < 0.3 and summary["pass@1_after"] > 0.6
