"""Judge a model: sample answers to benchmarks, score them, and say pass@1 with its interval, pass@k, maj@k and more.

The engine is that of training (SGLang, or transformers on any machine), the verifiers are those of the reward. Answers
go to `OUT/answers-RANK.jsonl` as they come, and an evaluation that was interrupted goes on where it stopped, with any
number of processes. Then `OUT/results.json`, the table on the terminal, and `OUT/wrong.md`, to be read.

What benchmarks are and how they are asked is `benchmarks/table.yaml` and `benchmarks/load.py`, the estimators are
`benchmarks/scores.py`, the published numbers beside one's own `benchmarks/compare.py`.

Left out: judge models, and few-shot prompts (the published runs have none). pass@1 during training is the generators'.

    python evaluate.py --model runs/toy --benchmarks problems.jsonl --samples 4 --max_new_tokens 160
    torchrun --nproc_per_node 8 evaluate.py --model MODEL --benchmarks aime24,aime25,gpqa_diamond --sampling rl
    python evaluate.py --model MODEL --benchmarks train.jsonl --samples 8 --filter harder.jsonl
    pytest tests/test_evaluate.py
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections import ChainMap, defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
import transformers
import yaml
from tqdm import tqdm

import toy
from benchmarks.load import choose_template, load_benchmark, table
from benchmarks.scores import codeforces, read_standings, summarise
from packing import Problem
from recipes.data import Refused, encode_problems, template_text
from recipes.ledger import whole_lines, write_json
from recipes.plan import choose_engine
from reward import Scorer, extract_answer, need_sandbox, read_rows
from sandbox import die_with_parent
from sync import Channel, die

SETTLED = ("model", "template", "temperature", "top_p", "max_new_tokens", "seed")  # another one makes other answers


def read_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what it leaves open comes from the named sampling of benchmarks/table.yaml."""
    parser = argparse.ArgumentParser(description="Answers of a model to benchmarks, judged.", allow_abbrev=False)
    add = parser.add_argument
    add("--model", required=True, help="folder, hub name, or folder of a run: its model, else its newest checkpoint")
    add("--benchmarks", required=True, help="names in benchmarks/table.yaml or JSONL files, a comma between two")
    add("--sampling", default="rl", choices=list(table()["sampling"]), help="named settings of the next four")
    add("--samples", type=int, help="answers to each problem")
    add("--temperature", type=float, help="of sampling; 0: greedy")
    add("--top_p", type=float, help="nucleus; 1: off")
    add("--max_new_tokens", type=int, help="budget of an answer")
    add("--template", default="", help="chat, verbatim or one of recipes/published/templates.yaml; empty: the table's")
    add("--pass_at", default="", help="k of pass@k, a comma between two")
    add("--majority", default="", help="k of maj@k, a comma between two")
    add("--standings", default="", help="file of contests, for a Codeforces rating (benchmarks/scores.py)")
    add("--filter", default="", help="write the rows of the one JSONL file that are neither too easy nor too hard here")
    add("--filter_lower", type=float, default=0.0, help="least pass rate that is kept; 0: off")
    add("--filter_upper", type=float, default=1.0, help="pass rate from which on rows are dropped; above 1: off")
    add("--out", default="", help="folder of answers and results; empty: evals/NAME OF THE MODEL. It is continued")
    add("--folder", default="data/benchmarks", help="where the files of benchmarks are looked for first")
    add("--seed", type=int, default=1, help="of sampling and of the order of options")
    add("--engine", default="auto", choices=["auto", "sglang", "transformers"], help="as in training")
    add("--engine_args", default="{}", help="more settings of the SGLang server as YAML")
    add("--published_engine", action="store_true", help="the table's equivalents of the published engine's flags")
    add("--generator_tp", type=int, default=1, help="GPUs of a server; as many fewer processes")
    add("--engine_batch", type=int, default=0, help="answers at once; 0: 96 by transformers, 512 by SGLang")
    add("--cache_gb", type=float, default=1.0, help="GiB of KV cache on a CPU and of the transformers engine")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: bfloat16 on a GPU")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: a GPU if there is one")
    add("--scorers", type=int, default=2, help="processes that judge")
    add("--unsafe_code", action="store_true", help="run programs without a sandbox, as you")
    add("--startup_timeout", type=float, default=1800.0, help="seconds until the engine is up")
    add("--wait_timeout", type=float, default=86400.0, help="seconds that the first process waits for the others")
    cfg = parser.parse_args(argv)
    for name, value in table()["sampling"][cfg.sampling].items():
        setattr(cfg, name, value if getattr(cfg, name) is None else getattr(cfg, name))
    try:
        cfg.ks, cfg.majorities = ([int(k) for k in text.split(",") if k] for text in (cfg.pass_at, cfg.majority))
    except ValueError:
        raise Refused("--pass_at and --majority are numbers with commas between them, as 1,8,32") from None
    if cfg.samples < 1 or cfg.max_new_tokens < 1 or not 0 < cfg.top_p <= 1 or not 0 <= cfg.temperature < 100:
        raise Refused("--samples and --max_new_tokens are at least 1, --top_p is in (0, 1], --temperature in [0, 100)")
    if not 1 <= min(ks := [1, *cfg.ks, *cfg.majorities]) <= max(ks) <= cfg.samples:
        raise Refused(f"pass@k and maj@k need k answers to a problem, and --samples is {cfg.samples}; k is 1 at least")
    if cfg.temperature == 0 and cfg.samples > 1:
        raise Refused(f"--temperature 0 gives one answer {cfg.samples} times: --samples 1, or --sampling greedy")
    cfg.names = cfg.benchmarks.split(",")
    if cfg.filter and (len(cfg.names) != 1 or not os.path.isfile(cfg.names[0])):
        raise Refused("--filter copies rows of one JSONL file, so --benchmarks has to name one")
    if cfg.filter and (not (parent := Path(cfg.filter).resolve().parent).is_dir() or os.path.isdir(cfg.filter)):
        raise Refused(f"--filter {cfg.filter}: it is written into {parent}, a folder that has to be there")
    if cfg.filter and Path(cfg.filter).resolve() == Path(cfg.names[0]).resolve():
        raise Refused(f"--filter {cfg.filter} would write over the rows that it reads")
    try:
        more = yaml.safe_load(cfg.engine_args) or {}
    except yaml.YAMLError:
        more = None
    if not isinstance(more, dict):
        raise Refused(f"--engine_args {cfg.engine_args!r} is no YAML mapping of names to values")
    if cfg.published_engine:
        published = [entry["sglang"] for entry in table()["engine"] if entry["sglang"]]
        cfg.engine_args = yaml.safe_dump(dict(ChainMap(more, *published)))
    cfg.out = cfg.out or f"evals/{Path(cfg.model).resolve().name if os.path.isdir(cfg.model) else Path(cfg.model).name}"
    # What an engine and a scorer ask a configuration of training for.
    more = {"bucket_mb": 64, "update_timeout": 600.0, "engine_timeout": 120.0, "score_timeout": 10.0, "reward": ""}
    vars(cfg).update(more, test_timeout=6.0, code_timeout=600.0)
    return cfg


def find_model(model: str, out: Path) -> str:
    """A folder that transformers can load, or the hub name. A run without an exported model gives that of its newest
    checkpoint, written to `out`."""
    run = Path(model)
    if not (run / "config.yaml").is_file():
        return model
    if (run / "model").is_dir():
        return str(run / "model")
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    if not checkpoints:
        raise Refused(f"{model} is a run without a model and without a checkpoint")
    folder, source = out / checkpoints[-1].name, yaml.safe_load((run / "config.yaml").read_text())["model"]
    if not folder.is_dir():
        new = folder.with_name(f".{folder.name}.{os.getpid()}")
        lm = toy.empty_model(source, torch.float32, 0)
        dcp.load({"model": {f"lm.{name}": p.detach() for name, p in lm.named_parameters()}},
                 checkpoint_id=checkpoints[-1], no_dist=True)  # fmt: skip
        if source != "toy":
            with contextlib.suppress(OSError):  # it has none; else it may name more tokens that end an answer
                lm.generation_config = transformers.GenerationConfig.from_pretrained(source)
        for part in (lm, toy.load_tokenizer(source)):
            part.save_pretrained(new)
        try:
            os.replace(new, folder)
        except OSError:  # another process was faster
            shutil.rmtree(new)
    return str(folder)


def read_answers(out: Path) -> list[dict]:
    """All answers so far, of any number of processes, without a line that is only half there."""
    files = (file.read_text().splitlines(keepends=True) for file in sorted(out.glob("answers-*.jsonl")))
    return [json.loads(line) for lines in files for line in lines if line.endswith("\n")]


async def answer_all(cfg, me, tokenizer, units: list[tuple], scorer: Scorer, file, done: int) -> None:
    """Sample and judge every (benchmark, problem, sample); a line of `file` each, as it comes. The seed depends on how
    many answers are there already: with the same one those that are added would repeat them."""
    seeded = argparse.Namespace(**vars(cfg) | {"seed": cfg.seed + done})
    engine = toy.make_engine(seeded, me, tokenizer, top_p=cfg.top_p, trained=True)
    await engine.start()
    engine.version = 0  # its weights are there: no update follows
    engine.gate.open.set()
    gate = asyncio.Semaphore(cfg.engine_batch or (512 if me.engine == "sglang" else 96))

    async def one(name: str, problem: Problem, sample: int) -> None:
        async with gate:
            made = await engine.generate(list(problem.prompt_ids))
        response = tokenizer.decode(made.tokens, skip_special_tokens=True)  # the engine goes on meanwhile
        score, verdict = await scorer.score(problem, response)
        found = extract_answer(response) if problem.tests is None else None
        row = {"benchmark": name, "id": problem.id, "sample": sample, "score": score, "verdict": verdict,
               "answer": found, "tokens": len(made.tokens), "finish_reason": made.finish_reason, "response": response}
        file.write(json.dumps(row) + "\n")
        file.flush()
        bar.update()

    watch = asyncio.ensure_future(engine.watch())  # it ends by an error alone
    with tqdm(total=len(units), unit="answer", disable=me.rank > 0, dynamic_ncols=True) as bar:
        work = asyncio.gather(*(one(*unit) for unit in units))
        await asyncio.wait([watch, work], return_when=asyncio.FIRST_COMPLETED)
        await (work if work.done() else watch)
    watch.cancel()
    await engine.close()


# -- Results -----------------------------------------------------------------------------------------------------------


def judge(cfg, problems: dict[str, list[Problem]], answers: list[dict]) -> dict:
    """{benchmark: numbers} of all answers."""
    results = {}
    for name in problems:
        mine = [answer for answer in answers if answer["benchmark"] == name]
        results[name] = summarise(mine, ks=[1, *cfg.ks], majority=cfg.majorities)
        if cfg.standings and name == "codeforces":
            passed = defaultdict(list)
            for answer in sorted(mine, key=lambda answer: answer["sample"]):
                passed[answer["id"]].append(answer["score"] >= 1)
            try:
                rated = codeforces(cfg.contests, passed)
            except ValueError as error:  # the other numbers are right all the same
                rated = {"rating": None, "skipped": {"all": str(error)}}
            results[name] |= rated
    return results


def show(results: dict) -> str:
    """A line a benchmark."""
    names = [name for numbers in results.values() for name in numbers]
    columns = [name for name in dict.fromkeys(names) if name not in ("interval", "verdicts", "contests", "skipped")]
    lines = [["benchmark", *columns]]
    for benchmark, numbers in results.items():
        cells = {name: f"{value:.3f}" if isinstance(value, float) else str(value) for name, value in numbers.items()}
        cells["pass@1"] += " ({:.3f} to {:.3f})".format(*numbers["interval"])
        lines.append([benchmark, *(cells.get(name, "-") for name in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def write_wrong(path: Path, problems: dict[str, list[Problem]], answers: list[dict]) -> None:
    """For each problem that was not always solved: how often, the prompt, the key, and one wrong answer's end."""
    tried, parts = defaultdict(list), []
    for answer in answers:
        tried[answer["benchmark"], answer["id"]].append(answer)
    for name, asked in problems.items():
        for problem in asked:
            mine = sorted(tried[name, problem.id], key=lambda answer: answer["sample"])
            wrong = [answer for answer in mine if answer["score"] < 1]
            if wrong:
                key, end = " or ".join(problem.solutions) or "its tests", wrong[0]["response"][-1500:]
                fence = "`" * max(3, 1 + max(map(len, re.findall("`+", end)), default=0))  # no fence within ends it
                parts.append(
                    f"## {name}, {problem.id}: {len(mine) - len(wrong)} of {len(mine)} right\n\n{problem.prompt}\n\n"
                    f"**Key:** {key}  \n**Sample {wrong[0]['sample']}:** {wrong[0]['answer']} "
                    f"({wrong[0]['verdict']}, {wrong[0]['tokens']} tokens)\n\n{fence}\n{end}\n{fence}\n"
                )
    path.write_text("\n".join(parts) or "All answers are right.\n")


def write_filtered(cfg, answers: list[dict]) -> tuple[int, int]:
    """The rows whose pass rate lies in [lower, upper), with it, written beside and renamed; (kept, all)."""
    rates = defaultdict(list)
    for answer in answers:
        rates[answer["id"]].append(answer["score"])
    rows, new = read_rows(cfg.names[0]), Path(f"{cfg.filter}.new")
    kept = []
    for number, row in rows:
        scores = rates[str(row.get("query_id", number))]
        rate = sum(scores) / len(scores) if scores else None  # None: its prompt is too long, and was not asked
        if rate is not None and cfg.filter_lower <= rate and (rate < cfg.filter_upper or cfg.filter_upper > 1):
            kept.append({**row, "pass_rate": rate})
    new.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    os.replace(new, cfg.filter)
    return len(kept), len(rows)


# -- The whole of it ---------------------------------------------------------------------------------------------------


def settle(cfg, out: Path, root: bool, problems: dict[str, list[Problem]], answered: bool) -> None:
    """OUT/settings.json; Refused if answers are there already that were made another way, or to other problems."""
    settings, file, asked = {name: getattr(cfg, name) for name in SETTLED}, out / "settings.json", {}
    for name, these in problems.items():
        content = json.dumps([[p.id, p.prompt_ids, p.solutions, p.tests] for p in these]).encode()
        asked[name] = hashlib.sha256(content).hexdigest()[:16]
    before = json.loads(file.read_text()) if answered and file.is_file() else {}
    for name, value in settings.items():
        if before.get(name, value) != value:
            raise Refused(f"{out} has answers made with {name}={before[name]!r}, now it is {value!r}: give --out")
    asked_before = before.get("problems", {})
    for name, value in asked.items():
        if asked_before.get(name, value) != value:
            raise Refused(f"{out} has answers to other problems of {name}, which has changed since: give --out")
    out.mkdir(parents=True, exist_ok=True)  # by every process: the first may be the last to come here
    if root:
        write_json(file, settings | {"problems": asked_before | asked})


def run(cfg) -> dict | None:
    """The results, of the first process; None of the others."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    out, root = Path(cfg.out), rank == 0
    cfg.model = find_model(cfg.model, out)
    try:
        tokenizer = toy.load_tokenizer(cfg.model)
        problems = {name: load_benchmark(name, cfg.seed, cfg.folder) for name in cfg.names}
        for name, asked in problems.items():
            template = choose_template(name, cfg.template, cfg.model)
            text = "" if template == "verbatim" else template_text(template)
            try:
                problems[name] = encode_problems(asked, tokenizer, 2**30, text)
            except Exception as error:  # what tokenizers raise for text they have no tokens for is a bare Exception
                raise Refused(f"{name}: {cfg.model} cannot tokenise a prompt: {error}") from error
        if any(problem.tests for asked in problems.values() for problem in asked):
            need_sandbox(cfg.unsafe_code)
        cfg.contests = read_standings(cfg.standings) if cfg.standings else {}
        cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
        engine, why = choose_engine(cfg.engine, cuda)
        more = toy.check_settings(yaml.safe_load(cfg.engine_args) or {})
        if engine != "sglang" and (more or cfg.generator_tp > 1):
            raise ValueError("engine_args, published_engine and generator_tp are for SGLang, but the engine here would "
                             f"be transformers ({why})")  # fmt: skip
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from error
    cfg.max_prompt_tokens = max(len(problem.prompt_ids) for asked in problems.values() for problem in asked)
    most = getattr(toy.load_config(cfg.model).get_text_config(), "max_position_embeddings", None)
    if most and cfg.max_prompt_tokens + cfg.max_new_tokens > most:
        raise Refused(f"{cfg.model} was made for {most} positions, a prompt of {cfg.max_prompt_tokens} tokens and "
                      f"--max_new_tokens {cfg.max_new_tokens} are more")  # fmt: skip
    answers = read_answers(out)
    settle(cfg, out, root, problems, bool(answers))
    done = {(answer["benchmark"], answer["id"], answer["sample"]) for answer in answers}
    units = [(name, problem, sample) for name, asked in problems.items() for problem in asked
             for sample in range(cfg.samples)][rank::world]  # fmt: skip
    units = [unit for unit in units if (unit[0], unit[1].id, unit[2]) not in done]
    if root:
        counts = ", ".join(f"{name} {len(asked)}" for name, asked in problems.items())
        print(f"{cfg.model} by {engine} ({why}): {counts} problems x {cfg.samples}; {len(done)} answers are there",
              flush=True)  # fmt: skip
    if units:
        dtype = getattr(torch, cfg.dtype if cfg.dtype != "auto" else "bfloat16" if cuda else "float32")
        gpu = int(os.environ.get("LOCAL_RANK", 0)) * cfg.generator_tp
        device = torch.device("cuda", gpu % torch.cuda.device_count()) if cuda else torch.device("cpu")
        me = SimpleNamespace(rank=rank, checkpoint=None, engine=engine, device=device, dtype=dtype, folder=out,
                             weight_group=None)  # fmt: skip
        scorer = Scorer(cfg)
        with open(whole_lines(out / f"answers-{rank}.jsonl"), "a") as file:
            asyncio.run(answer_all(cfg, me, tokenizer, units, scorer, file, len(done)))
        scorer.close()
    if not root:
        Channel().push("judged", {"rank": rank})
        return None
    channel = Channel() if world > 1 else None
    for _ in range(world - 1):
        channel.pop("judged", cfg.wait_timeout, "the first process waited for the answers of the others")
    answers = [answer for answer in read_answers(out)  # OUT may hold others: of more samples, of other benchmarks
               if answer["benchmark"] in problems and answer["sample"] < cfg.samples]  # fmt: skip
    results = judge(cfg, problems, answers)
    for name, asked in problems.items():
        if results[name]["problems"] != len(asked):
            raise RuntimeError(f"{name}: {len(asked)} asked, but only {results[name]['problems']} answered")
    settings = {name: value for name, value in vars(cfg).items() if name != "contests"}
    write_json(out / "results.json", {"settings": settings, "benchmarks": results})
    write_wrong(out / "wrong.md", problems, answers)
    print(f"{show(results)}\nin {out}: results.json, wrong.md, answers-*.jsonl", flush=True)
    if cfg.filter:
        print("{} of {} rows are in {}".format(*write_filtered(cfg, answers), cfg.filter))
    return results


def main(argv: list[str] | None = None) -> None:
    rank = int(os.environ.get("RANK", 0))
    try:
        cfg = read_options(argv)
        if "RANK" in os.environ:
            die_with_parent()
        transformers.logging.set_verbosity_error()
        run(cfg)
        sys.stdout.flush()
        os._exit(0)  # a thread of the engine could keep the interpreter
    except (Refused, ValueError) as error:
        if rank:
            time.sleep(10)  # rank 0 says it first, and torchrun then ends this one; else this one has to say it
        print(f"evaluate.py: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # as above
    except KeyboardInterrupt:
        print("evaluate.py: interrupted; the same command goes on", file=sys.stderr, flush=True)
        os._exit(130)
    except Exception as error:
        die("evaluator", rank, error)


if __name__ == "__main__":
    main()
