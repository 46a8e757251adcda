"""A workflow of one's own: the model may run Python on its way to an answer. To be copied and changed.

A message of the model that ends with a fenced block, marked python, is a call: the block runs in the sandbox, what it
printed is the next message, and the model goes on. Any other message is the final answer, which `score` judges. All
is one trajectory; the output is context like the prompt, only the model's own tokens are trained.

    torchrun --nproc_per_node 8 train.py --workflow recipes/tool_use.py:tool_use --template chat \\
        --model Qwen/Qwen3-1.7B --data problems.jsonl \\
        --max_prompt_tokens 1024 --max_new_tokens 8192 --microbatch_tokens 16384 --lr 1e-6

The model has to be told, by the prompts in the data: "You may run Python. End your message with a ```python block,
nothing after it, and you will be sent what it prints. When you are done, put the final answer in \\boxed{}."

Left out: a state that is kept between calls (each program starts from nothing), calls in the middle of a message (an
engine stops at the model's own stop tokens only), tools in JSON, a price for calls, and problems whose answer is itself
a program (the last block would be run, not judged).

    pytest tests/test_workflows.py
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from packing import Problem, Trajectory
from rollout import user_turn
from sandbox import Ran, run_program, sandbox_fault

MAX_CALLS = 4  # a later block is not run, it stands as the final answer
TIMEOUT_S = 5.0  # for one program
CHARACTERS = 1000  # of its output that the model gets to read
THREADS = ThreadPoolExecutor(8)  # programs at once, in threads of their own: in asyncio's they could hold up an update


async def tool_use(problem: Problem, engine, score) -> list[Trajectory]:
    """Up to MAX_CALLS programs and a final answer, whose score is the reward. As in `rollout.multi_turn` everything
    after the prompt counts against `engine.max_new_tokens`, and what would leave no room to go on is not appended."""
    if fault := await asyncio.to_thread(sandbox_fault):
        raise RuntimeError(f"tool_use runs what a model wrote, and there is no sandbox for it here: {fault}")
    tokenizer, prompt, budget = engine.tokenizer, len(problem.prompt_ids), engine.max_new_tokens
    trajectory = Trajectory(ticket=-1, index=-1)
    trajectory.append(problem.prompt_ids)
    for call in range(MAX_CALLS + 1):
        answer = await engine.generate(trajectory.tokens.tolist(), budget - (len(trajectory.tokens) - prompt))
        trajectory.append(answer.tokens, answer.logprobs, answer.versions)
        text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
        program = find_program(text)
        if not program or call == MAX_CALLS or answer.finish_reason != "stop":
            break
        reply = tool_turn(tokenizer, await run(program), answer.tokens[-1])
        if len(trajectory.tokens) + len(reply) - prompt >= budget:
            break
        trajectory.append(reply)
    trajectory.finish_reason = answer.finish_reason
    trajectory.reward = await score(problem, text)
    return [trajectory]


def find_program(text: str) -> str:
    """The content of the block that ends `text`, "" if none does.

    >>> find_program("Let me see.\\n```python\\nprint(6 * 7)\\n```\\n")
    'print(6 * 7)\\n'
    """
    _, found, program = text.rstrip().rpartition("```python\n")
    return program.removesuffix("```") if found and program.endswith("```") and program.count("```") == 1 else ""


async def run(program: str) -> str:
    """What the model is told about a run of its program."""
    ran: Ran = await asyncio.get_running_loop().run_in_executor(
        THREADS, lambda: run_program(program, timeout_s=TIMEOUT_S))  # fmt: skip
    said = ran.output.decode(errors="replace").strip()
    said = said if len(said) <= CHARACTERS else f"{said[:CHARACTERS]}... ({len(said)} characters)"
    wrong = "\n".join(ran.errors.strip().splitlines()[-2:])  # where, and what
    why = {"": "", "timeout": f"stopped: it ran for {TIMEOUT_S:g} s", "limit": "stopped: too much memory or output"}
    return "\n".join(filter(None, (said, why.get(ran.outcome, wrong[-CHARACTERS:])))) or "(no output)"


def tool_turn(tokenizer, output: str, last: int) -> list[int]:
    """Token ids of what comes between a call, which ended with token `last`, and the model's next message."""
    block = f"```output\n{output}\n```"
    if tokenizer.chat_template:
        return user_turn(tokenizer, block, True, last)
    return user_turn(tokenizer, f"\n{block}\n", False, last)
