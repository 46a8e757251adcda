"""The transformers engine: every log-probability belongs to the version stamped on it, whatever happens in between.

    pytest tests/test_rollout.py
"""

import asyncio
import copy
import inspect
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import toy
from packing import Problem, check_request
from recipes.data import encode_problems, hold_out
from rollout import SGLangEngine, single_turn, user_turn
from toy import TransformersEngine, stop_ids

torch.set_num_threads(1)
EOS = 60
ENGINES: list[TransformersEngine] = []


def tiny(seed: int, tied: bool = True) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
                         tie_word_embeddings=tied, attn_implementation="sdpa")  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.ndim > 1 else 1)  # far from uniform, so a wrong version shows
    return model


async def make(model, **changes) -> TransformersEngine:
    settings = dict(temperature=1.0, max_new_tokens=120, max_prompt_tokens=16, stop_ids=[EOS], batch_tokens=16,
                    cache_bytes=1 << 26, seed=1, timeout_s=10.0, receive=lambda named: 0)  # fmt: skip
    engine = TransformersEngine(model, None, **(settings | changes))
    await engine.start()
    ENGINES.append(engine)
    return engine


@pytest.fixture(autouse=True)
def no_engine_survives():
    """The threads of an engine that a failed test left open would keep pytest from ending."""
    yield
    while ENGINES:
        asyncio.run(ENGINES.pop().close())


async def decoding(engine, count: int) -> None:
    """Returns in the middle of at least `count` long answers."""
    while True:
        await asyncio.sleep(0.01)
        lengths = [len(output.generated_tokens) for name, output in engine._latest.items() if name in engine._pieces]
        if sum(length > 10 for length in lengths) >= count:
            return


async def update(engine, version: int, source: torch.nn.Module, interrupt: bool = True) -> None:
    def fill(named):
        new = dict(source.named_parameters())
        with torch.no_grad():
            for name, tensor in named:
                tensor.copy_(new[name])
        return version

    engine.receive = fill
    await engine.pause(interrupt)
    await engine.load(version)
    await engine.resume()


@torch.no_grad()
def clean(model, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log p(token i | before) of a plain forward over the whole sequence, [L - 1]."""
    logits = model(torch.tensor([tokens])).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)


@pytest.mark.parametrize("tied, temperature", [(True, 1.0), (False, 0.7)])
def test_logprobs_match_the_version_stamped_on_every_token(tied, temperature):
    models = [tiny(seed, tied) for seed in (1, 2, 3)]
    # More than fit into a batch, so some wait and some run; a common beginning longer than a page of the cache, which
    # an engine that shares prefixes would find again after an update, computed with the old weights.
    prompts = [[7] * 130 + [1 + i, 2, 3, 4 + i] for i in range(24)]

    extra = Counter()  # outputs of requests that were cut

    async def run():
        engine = await make(copy.deepcopy(models[0]), temperature=temperature, max_prompt_tokens=140)
        note = engine._note

        def spy(output):
            extra[output.request_id] += output.request_id not in engine._pieces
            note(output)

        engine._note = spy
        await update(engine, 0, models[0])
        tasks = [asyncio.ensure_future(engine.generate(prompt)) for prompt in prompts]
        for version in (1, 2):
            await decoding(engine, 4)
            await update(engine, version, models[version])
        answers = await asyncio.gather(*tasks)
        await engine.close()
        return answers

    answers = asyncio.run(run())
    assert max(extra.values()) <= 2  # the cut ones do not go on in secret
    cut = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == len(answer.logprobs) == len(answer.versions)
        assert answer.versions == sorted(answer.versions)
        by_version = [clean(model, prompt + answer.tokens, temperature)[len(prompt) - 1 :] for model in models]
        for i, (logprob, version) in enumerate(zip(answer.logprobs, answer.versions, strict=True)):
            assert abs(by_version[version][i] - logprob) < 1e-4, (i, version)
        # Nothing was lost, and an answer that an update cut was never taken for a finished one.
        if answer.finish_reason == "stop":
            assert answer.tokens[-1] == EOS and EOS not in answer.tokens[:-1]
        else:
            assert answer.finish_reason == "length" and len(answer.tokens) == 120 and EOS not in answer.tokens
        cut += len(set(answer.versions)) > 1
        assert (answer.interruptions > 0) == (len(set(answer.versions)) > 1)
    assert cut >= 4
    assert {version for answer in answers for version in answer.versions} == {0, 1, 2}


def test_what_was_streamed_but_not_yet_noted_survives_an_update():
    async def run():
        models = [tiny(1), tiny(2)]
        engine = await make(copy.deepcopy(models[0]), stop_ids=[63], max_new_tokens=400)
        await update(engine, 0, models[0])
        streamed, real = {}, engine.manager.output_router.deliver_batch

        def spy(outputs):
            streamed.update({output.request_id: len(output.generated_tokens) for output in outputs})
            real(outputs)

        engine.manager.output_router.deliver_batch = spy
        tasks = [asyncio.ensure_future(engine.generate([1, 2, i])) for i in range(8)]
        await asyncio.sleep(0.05)
        time.sleep(0.3)  # an event loop that is too busy to note a token before the pause
        await engine.pause()
        old = dict(streamed)
        await engine.load(1)
        await engine.resume()
        answers = await asyncio.gather(*tasks)
        await engine.close()
        return answers, old

    answers, old = asyncio.run(run())
    assert {f"r{i + 1}": answer.versions.count(0) for i, answer in enumerate(answers)} == old and max(old.values()) > 5


def test_sampling_follows_the_policy_and_no_filter_of_the_model():
    model = tiny(1)
    # What a published model's folder may ask for; each would make the log-probabilities another distribution's.
    model.generation_config.update(top_k=2, top_p=0.5, repetition_penalty=1.5, min_p=0.2, temperature=0.3)

    async def run():
        engine = await make(model, max_new_tokens=1)
        await update(engine, 0, copy.deepcopy(model))
        answers = await asyncio.gather(*(engine.generate([5, 6, 7]) for _ in range(3000)))
        await engine.close()
        return answers

    answers = asyncio.run(run())
    with torch.no_grad():
        p = model(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([answer.tokens[0] for answer in answers]), minlength=64) / 3000
    assert 0.5 * (counts - p).abs().sum() < 0.06  # total variation; two-of-64 sampling would be far off
    assert (p.topk(2).values.sum() < 0.9) and (counts > 0).sum() > 5


def test_a_prompt_waits_for_the_first_weights_and_for_an_update_to_end():
    async def run():
        engine = await make(tiny(1), max_new_tokens=5)
        early = asyncio.ensure_future(engine.generate([1, 2]))
        await asyncio.sleep(0.3)
        assert not early.done()
        await update(engine, 7, tiny(2))
        assert (await early).versions == [7] * 5
        await engine.pause()
        late = asyncio.ensure_future(engine.generate([1, 2]))
        await asyncio.sleep(0.3)
        assert not late.done()
        await engine.load(8)
        await engine.resume()
        assert set((await late).versions) == {8}
        await engine.close()

    asyncio.run(run())


def test_an_update_that_may_not_interrupt_waits_until_answers_are_complete():
    async def run():
        models = [tiny(1), tiny(2)]
        engine = await make(copy.deepcopy(models[0]), stop_ids=[63], max_new_tokens=100)
        await update(engine, 0, models[0])
        running = [asyncio.ensure_future(engine.generate([1, 2, i])) for i in range(6)]
        await decoding(engine, 3)
        pause, engine.receive = asyncio.ensure_future(engine.pause(interrupt=False)), lambda named: 0
        await asyncio.sleep(0)
        late = asyncio.ensure_future(engine.generate([1, 2, 7]))
        assert sum(not task.done() for task in running) >= 3
        await asyncio.wait_for(pause, 60)
        assert all(task.done() for task in running) and not late.done()
        await engine.load(1)
        await engine.resume()
        answers = [task.result() for task in running], await late
        await engine.close()
        return answers

    answers, late = asyncio.run(run())
    assert [answer.interruptions for answer in answers] == [0] * 6
    assert all(set(answer.versions) == {0} and len(answer.versions) == len(answer.tokens) for answer in answers)
    assert all(answer.tokens[-1] == 63 or len(answer.tokens) == 100 for answer in answers)
    assert sum(len(answer.tokens) for answer in answers) > 60 and set(late.versions) == {1}


REFUSED = [
    ([1, 64], 5, {}, "the model has no token 64: its vocabulary ends at 63"),
    ([-1, 1], 5, {}, "the model has no token -1: its vocabulary ends at 63"),
    ([], 5, {}, "a prompt without tokens cannot be continued"),
    ([1, 2], 0, {}, "a prompt of 2 tokens and 0 new ones do not fit into the 12 that"),
    ([1, 2], 11, {}, "a prompt of 2 tokens and 11 new ones do not fit into the 12 that"),
    ([1, 2], 5, {"top_p": 0.9}, "top_p: a request sets max_new_tokens only; filters and penalties would make"),
    ([1, 2], 5, {"temperature": 1.0, "stop": []}, "stop: a request sets max_new_tokens only"),
]


def test_a_request_that_no_engine_may_see_is_refused_and_the_engine_lives():
    async def run():
        engine = await make(tiny(1), max_prompt_tokens=8, max_new_tokens=4)
        await update(engine, 0, tiny(1))
        for tokens, budget, sampling, sentence in REFUSED:
            with pytest.raises(ValueError, match=f"^{sentence}"):
                check_request(tokens, budget, 64, 12, sampling)
            with pytest.raises(ValueError, match=f"^{sentence}"):
                await asyncio.wait_for(engine.generate(tokens, budget, **sampling), 5)
        assert (await engine.generate([0, 63] * 4)).tokens  # 12 are as many as there may be
        await engine.close()

    asyncio.run(run())


def served(**more) -> dict:
    """The settings of a server that a user has given `more`."""
    return SGLangEngine([], None, who="generator rank 1", folder=Path("f"), settings={"device": "cpu"},
                        more=toy.check_settings(more), sessions=True,
                        vocabulary=64, temperature=1.0, max_new_tokens=8, max_prompt_tokens=4, stop_ids=[EOS],
                        startup_timeout=1.0, update_timeout=1.0, health_timeout=1.0).settings  # fmt: skip


def test_settings_of_a_server_that_are_the_jobs_or_change_the_policy_are_refused():
    for why, names in [("the job does", "port host nccl-port api_key tp_size model_path load-format dtype --device "
                        "tensor-parallel-size dp-size nnodes nccl-init-addr gpu_id_step load-form model"),
                       ("log-prob", "preferred-sampling-params speculative_algorithm quantization --lora-paths "
                        "modelopt-quant sampling-defaults kv-cache-dtype")]:
        for name in names.split():
            with pytest.raises(ValueError, match=f"may not set {name.lstrip('-').replace('_', '-')}: {why}"):
                served(**{name: 1})
    settings = served(mem_fraction_static=0.5, **{"stream-interval": 4, "attention_backend": "triton",
                                                  "sampling-backend": "pytorch"})
    assert (settings["mem-fraction-static"], settings["stream-interval"]) == (0.5, 4)
    assert (settings["attention-backend"], served()["attention-backend"]) == ("triton", "torch_native")


def test_a_failure_inside_the_engine_reaches_whoever_waits():
    async def run():
        model = tiny(1)
        engine = await make(model)
        await update(engine, 0, copy.deepcopy(model))

        def broken(*args, **kwargs):
            raise ValueError("a broken kernel")

        model.forward = broken
        watch = asyncio.ensure_future(engine.watch())
        await asyncio.sleep(0.1)
        assert not watch.done()
        with pytest.raises(RuntimeError, match="broken kernel"):
            await asyncio.wait_for(engine.generate([1, 2, 3]), 10)
        with pytest.raises(RuntimeError, match="broken kernel"):
            await asyncio.wait_for(watch, 1)  # a generator rank ends by it, whether or not it waits for an answer

    asyncio.run(run())


def test_a_pause_that_does_not_come_has_a_deadline():
    async def run():
        model = tiny(1)
        engine = await make(model, timeout_s=0.5)
        await update(engine, 0, copy.deepcopy(model))
        real = model.forward

        def slow(*args, **kwargs):
            time.sleep(1.5)
            return real(*args, **kwargs)

        model.forward = slow
        task = asyncio.ensure_future(engine.generate([1, 2, 3], 2))
        await asyncio.sleep(0.2)
        with pytest.raises(TimeoutError, match="did not pause within"):
            await engine.pause()
        await engine.resume()
        await task
        await engine.close()

    asyncio.run(run())


def test_a_cache_too_small_for_one_answer_is_refused():
    async def run():
        with pytest.raises(ValueError, match="raise cache_gb"):
            await make(tiny(1), cache_bytes=1 << 10)

    asyncio.run(run())


def test_a_trajectory_holds_the_engines_tokens_untouched():
    tokenizer = toy.build_tokenizer()

    async def run():
        model = toy.build_model(1)
        engine = await make(model, stop_ids=stop_ids("toy", tokenizer), max_new_tokens=20)
        engine.tokenizer = tokenizer
        seen = []
        real = engine.generate

        async def spy(*args):
            seen.append((args[0], await real(*args)))
            return seen[-1][1]

        engine.generate = spy
        await update(engine, 0, copy.deepcopy(model))
        (problem,) = encode_problems([Problem("p", "3 + 4 =", ("7",))], tokenizer, 32)

        async def score(problem, response):
            assert response == tokenizer.decode(seen[-1][1].tokens, skip_special_tokens=True)
            return 1.0

        (trajectory,) = await single_turn(problem, engine, score)
        await engine.close()
        return problem, seen[0][1], trajectory

    problem, answer, trajectory = asyncio.run(run())
    assert trajectory.tokens.tolist() == list(problem.prompt_ids) + answer.tokens
    assert trajectory.loss_mask.tolist() == [False] * len(problem.prompt_ids) + [True] * len(answer.tokens)
    assert trajectory.reward == 1.0 and trajectory.finish_reason == answer.finish_reason
    # Nothing in that file turns a response back into tokens.
    source = Path(single_turn.__code__.co_filename).read_text()
    source = source.replace(inspect.getsource(user_turn), "")  # which is given what the environment says
    assert not re.search(r"(?<!_)tokenizer\(|tokenizer\.encode\(", source)


def test_prompts_too_long_are_dropped_and_held_out_ones_do_not_depend_on_order():
    tokenizer = toy.build_tokenizer()
    problems = [Problem(str(i), f"{i % 40} + {i // 40} =", (str(i % 40 + i // 40),)) for i in range(200)]
    long = Problem("long", "1 + 1 + 1 + 1 + 1 =", ("5",))
    kept = encode_problems([*problems, long], tokenizer, 4)
    assert len(kept) == 200 and all(problem.prompt_ids for problem in kept)
    train, test = hold_out(problems, 50)
    assert len(test) == 20 and len(train) == 180  # a tenth at most
    train_back, test_back = hold_out(problems[::-1], 50)
    assert {p.id for p in test} == {p.id for p in test_back} and {p.id for p in train} == {p.id for p in train_back}
    twice = problems + [Problem(p.id + "b", p.prompt, p.solutions) for p in problems]
    train, test = hold_out(twice, 10)
    assert not {p.prompt for p in train} & {p.prompt for p in test}
