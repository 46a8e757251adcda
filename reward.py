r"""Problems, and an examiner's verdict on a response: right, wrong, or why it cannot be told.

math-verify parses and compares; the rules here close its known faults. Those that people dispute:
- The answer is the content of the last complete `\boxed{}` after the last `</think>` (of the whole text without that
  tag). No box, an empty box and a box that never closes are no answer; a number in prose is not one either.
- Numbers are exact: a decimal does not equal what it rounds. 1,234 is a number. A numeral with a base is its value.
  2\frac13 is a mixed number, 2\frac32 and 2\frac x3 are products.
- 5\% is 5/100 or, where the other side has no percent sign, plain 5. A unit may be left out but not be a wrong one.
- Tuples and intervals are ordered and their brackets count; sets, unions and lists (comma, "and", "or", plus-minus)
  have no order, and every item counts. A bare list may stand for a tuple, in its order, or for a set.
- `x=` in front of a value is decoration. Words are equal when spelled alike, capitals aside, and never when parsed
  alike. A choice letter may be decorated: (B), B., B. 42. Any one of several answer keys is enough.

What has no reading is `unparsed`, not `wrong`. Nothing is evaluated as Python. Judging may never end (power towers), so
`Scorer` leaves it to processes that can be killed (`sandbox.py`), except where equal text, numbers or letters settle it
in linear time. Left out: prose, which needs a judge model, and closeness to a rounded value.

    python reward.py check tests/data/math.jsonl    # examine the verifier: rows of id, response, gold, expected
"""

import argparse
import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import sys
import unicodedata
from collections import namedtuple
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

from sandbox import Pool, PoolError

ScorerError = PoolError  # the scorer is broken: no verdict can be trusted and the run must stop
JUDGE = f"{os.path.abspath(__file__)}:judge"
LONGEST_INLINE = 50_000  # characters; looking for a box in more of them would hold up the event loop
LONGEST_ANSWER = 2000  # characters; a longer one is only compared as text


class Verdict(StrEnum):
    """Outcome for one response. Only `right` earns the reward; the others are separate counts in the metrics."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # no box
    UNPARSED = "unparsed"  # a box without a mathematical reading
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Problem:
    """A prompt and its answer keys, any one of which is enough."""

    id: str
    prompt: str
    solutions: tuple[str, ...]
    task: str = "math"
    prompt_ids: tuple[int, ...] = ()


def load_problems(path: str) -> list[Problem]:
    """Read JSON lines of `prompt` with `solutions` (list of text) or `answer` (text or number), and optionally
    `query_id` (default: the line number) and `task` (math, the default, or stem, judged alike). FileNotFoundError, or a
    ValueError that names file, line and reason. Keys that need the parser meet it in a pool that is gone on return."""
    problems: list[Problem] = []
    lines: dict[str, int] = {}  # id -> line
    doubtful: dict[str, str] = {}  # key that needs the parser -> where it was met first
    for number, row in _rows(path):
        where, name = f"{path}:{number}", row.get("query_id", number)
        if row.get("task", "math") not in ("math", "stem"):
            raise ValueError(f"{where}: task {row['task']!r} is not supported, only math and stem are")
        prompt, solutions, answer = _text(row, "prompt", where), row.get("solutions"), row.get("answer")
        if solutions is None and answer is not None:
            is_number = type(answer) in (int, float) and answer - answer == 0  # neither true nor NaN
            solutions = [str(answer) if is_number else _text(row, "answer", where)]
        if not isinstance(solutions, list) or not solutions or not all(isinstance(s, str) for s in solutions):
            raise ValueError(f"{where}: no answer key: give 'solutions', a non-empty list of text, or 'answer'")
        if type(name) not in (str, int):
            raise ValueError(f"{where}: 'query_id' must be text or an integer, not {type(name).__name__}")
        if lines.setdefault(str(name), number) != number:
            raise ValueError(f"{where}: query_id {name!r} was already used on line {lines[str(name)]}")
        try:
            keys = {solution: answer_key(solution) for solution in solutions}
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        for solution, key in keys.items():
            if plain_number(key) is None and not words(key) and not LETTER.fullmatch(key):
                doubtful.setdefault(solution, where)
        problems.append(Problem(str(name), prompt, tuple(solutions)))
    faults = asyncio.run(_examine([(key, None) for key in doubtful], 2, deadline_s=10.0)) if doubtful else []
    bad = [f"{where}: {fault}" for where, fault in zip(doubtful.values(), faults, strict=True) if fault]
    if bad:
        raise ValueError("; ".join(bad[:5]) + (f"; and {len(bad) - 5} keys more" if len(bad) > 5 else ""))
    return problems


def load_demonstrations(path: str) -> list[tuple[str, str]]:
    """Read (prompt, full text of the answer) from JSON lines for supervised training; errors as in load_problems."""
    return [(_text(row, "prompt", f"{path}:{n}"), _text(row, "answer", f"{path}:{n}")) for n, row in _rows(path)]


def _rows(path: str) -> list[tuple[int, dict]]:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file")
    rows = []
    with open(path, "rb") as file:
        for number, line in ((n, line) for n, line in enumerate(file, 1) if line.strip()):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError also stands for bytes that are not UTF-8
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a JSON object is needed, not {type(row).__name__}")
            rows.append((number, row))
    if not rows:
        raise ValueError(f"{path}:1: the file holds no rows")
    return rows


def _text(row: dict, field: str, where: str) -> str:
    if not isinstance(row.get(field), str) or not row[field].strip():
        raise ValueError(f"{where}: {field!r} must be text that is not empty")
    return row[field]


def encode_problems(problems: list[Problem], tokenizer, max_prompt_tokens: int, chat: bool) -> list[Problem]:
    """Fill in `prompt_ids`; drop prompts longer than `max_prompt_tokens`. With `chat` the prompt is a user message
    rendered by the tokenizer's template, otherwise it is taken verbatim (as the published data wants it)."""
    if not problems:
        return []
    texts = [problem.prompt for problem in problems]
    if chat:
        texts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False,
                                               add_generation_prompt=True) for text in texts]  # fmt: skip
    pairs = zip(problems, tokenizer(texts, add_special_tokens=not chat)["input_ids"], strict=True)
    return [replace(p, prompt_ids=tuple(ids)) for p, ids in pairs if 0 < len(ids) <= max_prompt_tokens]


def hold_out(problems: list[Problem], count: int) -> tuple[list[Problem], list[Problem]]:
    """(train, test): about `count` problems, at most a tenth, set apart by a hash of the prompt, so that equal prompts
    fall on one side and the split does not depend on the order of the file."""
    marks = {problem.prompt: hashlib.sha256(problem.prompt.encode()).digest() for problem in problems}
    chosen = set(sorted(marks.values())[: min(count, len(marks) // 10)])
    return ([p for p in problems if marks[p.prompt] not in chosen], [p for p in problems if marks[p.prompt] in chosen])


# ----------------------------------------------------------------------------------------------------------------------
# From a response to one line of LaTeX. No parser and linear time, so this part may run in an event loop.

BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text


def extract_answer(response: str) -> str | None:
    r"""Content of the last complete `\boxed{}` (or `\fbox{}`) after the last `</think>`, stripped; None without one."""
    end = len(response)
    # From the last box backwards, each up to the start of the next: that one never closed, so a box still open there
    # holds it and does not close either. No stretch is scanned twice, however many boxes a response opens.
    for box in reversed(list(BOX.finditer(response, response.rfind("</think>") + 1))):
        depth = 1
        for brace in BRACE.finditer(response, box.end(), end):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return response[box.end() : brace.start()].strip()
        end = box.start()


# Typography that neither the parser nor the comparisons look through, in this order; @ ends a command. What joins items
# becomes ";", so that "3, 500" stays a list where "3,500" may be a number.
REWRITES = [(re.compile(pattern.replace("@", "(?![A-Za-z])")), replacement) for pattern, replacement in (
    (r"\\(?:left|right|displaystyle)@\.?", ""), (r"\{ ?, ?\}", ","), (r"\\[dtc]frac@", r"\\frac"),
    (r"\\(?:text(?:bf|it|rm)|math(?:rm|bf|it)|operatorname|underline|color\{\w+\})\s*\{", r"\\text{"),
    (r"(?:(?<!\\)\\(?:[,;: ]|q?quad@)|~|\s)+", " "), (r"(?<!\\)\\[!()\[\]]|\\?\$|[\"“”]|\*\*(?!\w)|(?<!\w)\*\*", ""),
    (r"\\?%|\\text\{ ?percent ?\}|\bpercent\b", "%"), (r"\^ ?\{? ?\\circ ?\}?|\\text\{ ?degrees?\}", r"^\\circ "),
    (r"\\text\{ ?([ei]) ?\}", r"\1"), (r"\*\*", "^"), (r"\\varnothing@|\\\{ ?\\\}", r"\\emptyset "),
    (r"\\frac ?(\\[A-Za-z]+|[^\s{\\]) ?", r"\\frac{\1}"), (r"(\\frac\{\d+\}) ?(\d)", r"\1{\2}"),
    (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"), (r"([_^]) ?(\d+|[A-Za-z])", r"\1{\2}"),
    (r"(?<![\w.])(\d+(?:\.\d*)?)[eE]([+-]?\d+)(?![\w.])", r"\1\\cdot 10^{\2}"),
    (r",? ?(?:\\text\{ ?(?:and|or) ?\}|(?<![A-Za-z{])(?<!\{ )(?:and|or)(?![A-Za-z}])) ?|[,;] +", ";"),
    (r"(?<![A-Za-z0-9]) +| +(?![A-Za-z0-9])", ""))]  # fmt: skip
OUTER = re.compile(r"\\text\{([^{}A-Za-z]*\d[^{}A-Za-z]*|\(?[A-Za-z]\)?[.:]?)\}|\{([^{}]*)\}")
SYMBOLS = str.maketrans({
    "−": "-", "×": r"\cdot ", "·": r"\cdot ", "÷": "/", "⁄": "/", "√": r"\sqrt ", "∞": r"\infty ", "°": r"^\circ ",
    "≤": r"\le ", "≥": r"\ge ", "±": r"\pm ", "∪": r"\cup ", "π": r"\pi ", "θ": r"\theta ", "\u200b": ""})  # fmt: skip


@functools.lru_cache(maxsize=8192)  # a key is met once for every answer of its group
def canonical(answer: str) -> str:
    """One spelling for answers that differ in typography only, in about 0.1 ms: "x² and ½" becomes "x^{2};1/2"."""
    text = answer.strip()
    if (text.isascii() and text.isdigit()) or len(text) > LONGEST_ANSWER:
        return text
    if not text.isascii():
        plain = functools.partial(unicodedata.normalize, "NFKC")
        text = re.sub("√ ?([0-9.]+)", r"\\sqrt{\1}", text)
        text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda m: f"^{{{plain(m[0])}}}", text)
        text = re.sub("[₀-₉]+", lambda m: f"_{{{plain(m[0])}}}", text)
        text = plain(re.sub("[¼-¾⅐-⅞]", lambda m: " " + m[0], text).translate(SYMBOLS)).translate(SYMBOLS)
        text = "".join(str(unicodedata.decimal(c, c)) for c in text)  # digits of other scripts
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    for _ in range(3):  # \text{{42}.}
        text = text.strip(" ").rstrip(".,;:").removeprefix("=")
        if match := OUTER.fullmatch(text):
            text = match[1] or match[2] or ""
    return text


@functools.lru_cache(maxsize=8192)
def answer_key(solution: str) -> str:
    """Canonical text of a key given bare, in a box or as a full solution; ValueError where there is none."""
    answer = extract_answer(solution) if BOX.search(solution) else solution
    if not answer or not canonical(answer):
        raise ValueError(f"answer key {solution[:60]!r} is empty or its box never closes")
    return canonical(answer)


DECIMAL = re.compile(r"((?:\d{1,3}(?:[ ,]\d{3})+|\d+|(?=\.\d))(?:\.\d*)?)")
FRACTION = re.compile(r"(?:(\d+)(?: (?=\d+/)|(?=\\)))?(?:\\frac\{([+-]?\d+)\}\{([+-]?0*[1-9]\d*)\}|(\d+)/(0*[1-9]\d*))")


def plain_number(text: str) -> Fraction | None:
    """Value of a canonical integer, decimal, fraction or mixed number; None for all else."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    if len(text) > LONGEST_ANSWER or not digits:
        return None
    if match := DECIMAL.fullmatch(digits):
        value = Fraction("0" + re.sub("[ ,]", "", match[1]).rstrip("."))
    elif match := FRACTION.fullmatch(digits):
        whole, value = match[1], Fraction(int(match[2] or match[4]), int(match[3] or match[5]))
        if whole:  # only a proper fraction makes a mixed number, anything else is a product
            value = int(whole) + value if 0 < value < 1 else int(whole) * value
    else:
        return None
    return -value if text[0] == "-" else value


def words(text: str) -> str:
    r"""The lower-case words of an answer in words (letters in `\text{}`, or letters that spell something), or ""."""
    spelled = " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).split()).casefold().rstrip(".")
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ ,;'.-])*", spelled):
        return ""
    word = re.search(r"[^\x00-\x7f]|(?=[a-z]*[aeiou])[a-z]{3,}", spelled)
    return spelled if word or (text.startswith(r"\text{") and len(spelled) > 1) else ""


CHOICE = re.compile(r"(?i:option|choice)? ?(?:\(([A-Ja-j])\)|([A-Ja-j])(?:$|[.:)]))(?![,;])(?!.*\([A-Ja-j]\)).*")
LETTER = re.compile(r"\(?([A-J])\)?")  # as an answer key


def quick_verdict(response: str, solutions: tuple[str, ...]) -> Verdict | None:
    """The verdict where no parser is needed (no box, same text, numbers, choice letters), else None; in linear time."""
    answer = extract_answer(response)
    text = canonical(answer) if answer else ""
    if not text:
        return Verdict.NO_ANSWER
    keys = [answer_key(solution) for solution in solutions]
    if text.replace(";", ",") in [key.replace(";", ",") for key in keys]:
        return Verdict.RIGHT
    number, decided = plain_number(text), True
    for key in keys:
        if number is not None and (value := plain_number(key)) is not None:
            right, known = number == value, "," not in text + key  # 1,234 may be a list
        else:
            letter, choice = LETTER.fullmatch(key), CHOICE.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r"\1", text))
            known = letter is not None and choice is not None
            right = known and (choice[1] or choice[2]).upper() == letter[1]
        if right:
            return Verdict.RIGHT
        decided &= known
    return Verdict.WRONG if decided else None


# ----------------------------------------------------------------------------------------------------------------------
# The full judgement. From here on a call may take for ever and all memory, so it runs in a process that can be killed.

BASE = re.compile(r"\(?(\d[0-9A-Z]*)\)?_\{(\d\d?)\}")
UNIT = re.compile(r"""([^A-Za-z]*|[^A-Za-z]*\\(?:frac|sqrt|pi)\b.*)(?<=[\d})i])
    (?!.*\b(?:or|and|than|not|[mb]illion)\b)(?:(%|\^\\circ|[^\x00-\x7f]+)|\ ?\\text\{([^{}]+)\}|\ ([A-Za-z]{2,}))
    ((?:\^\{\d\})?)\ ?""", re.VERBOSE)  # fmt: skip
SCALES = {"%": "/100", r"^\circ": r"\cdot \frac{\pi}{180}"}
Reading = namedtuple("Reading", "text value unit", defaults=(None, ""))  # canonical; sympy, None for words; or ""


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Reading:
    """The reading of canonical text; ValueError where it has none."""
    if len(text) > LONGEST_ANSWER:
        return Reading(text)
    if spelled := words(text):
        return Reading(";".join(sorted(re.split(" ?[;,] ?", spelled))))
    text, unit = re.sub(r"(?<!\d);|;(?!\d{3}(?!\d))", ",", text), ""
    if match := UNIT.fullmatch(text):
        text = match[1]
        unit = re.sub("[ .]", "", match[2] or match[3] or match[4]).casefold().removesuffix("s") + match[5]
    if match := BASE.fullmatch(text):
        text = str(int(match[1], int(match[2])))
    if len(parts := text.split(":")) > 2:  # a ratio, known by the quotients with its last part
        text = ",".join(rf"\frac{{{part}}}{{{parts[-1]}}}" for part in parts[:-1]).join("()")
    if (number := plain_number(text)) is not None:
        text = f"{number.numerator}/{number.denominator}" if number.denominator > 1 else str(number)
    return Reading(text, _sympy(text), unit)


def _sympy(latex: str):
    """The value of an expression, list, set, relation or the like, not evaluated; ValueError."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy  # math-verify's

    if re.search(r"\\text|\d \d", latex):
        raise ValueError(f"words within mathematics, or two numbers side by side: {latex[:60]!r}")
    # The parser makes decimals binary, degrees numbers, and a mixed number of an integer next to any fraction.
    latex = re.sub(r"(\d+(?:\.\d+)?)\^\\circ ?", r"(\1\\cdot \\frac{\\pi}{180})", latex)
    latex = re.sub(r"(?<![\d.])(\d*)\.(\d+)", lambda m: rf"(\frac{{{m[1]}{m[2]}}}{{{10 ** len(m[2])}}})", latex)
    latex = re.sub(r"(?<![\d.^_\\A-Za-z])(\d+)(\\frac\{(\d+)\}\{(\d+)\})",
                   lambda m: f"({m[1]}+{m[2]})" if int(m[3]) < int(m[4]) else m[0], latex)  # fmt: skip
    latex = re.sub(r"(?<=[\d)]) ?(?=\(|\\frac)", r"\\cdot ", latex)
    spelling = NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
    reading = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
    try:
        value = latex2sympy(latex, is_real=True, normalization_config=spelling, conversion_config=reading)
    except Exception as error:  # the parser raises bare Exception, and whatever its conversions stumble over
        raise ValueError(f"{type(error).__name__} at {latex[:60]!r}") from None
    units = {s: sympy.I for s in getattr(value, "free_symbols", ()) if s.name == "i"}
    return value.subs(units) if units else value


def equal(key: Reading, answer: Reading) -> bool:
    """Whether the answer says what the key says. Not symmetric: decoration is forgiven in the answer."""
    import sympy
    from math_verify import verify

    if key.value is None or answer.value is None:  # \text{no} and no, which reads as a product
        return key.text.casefold() == answer.text.casefold()
    for x, y in ((key, answer), (answer, key)):
        if x.unit in SCALES and not y.unit and equal(Reading("", _sympy(f"({x.text}){SCALES[x.unit]}")), y):
            return True
        if re.fullmatch(r"\\\{.*\\\}", x.text) and re.fullmatch(r"[(\[].*[)\]]", y.text):
            return False
    short, long = sorted((key.unit, answer.unit), key=len)
    if short and not re.fullmatch("[^^]*".join(map(re.escape, short)) + "[^^]*", long):  # cm abbreviates centimeters
        return False
    if isinstance(answer.value, sympy.Expr) and isinstance(getattr(key.value, "lhs", None), sympy.Add):
        return False  # 5 for a+b=5, where verify takes any sum for a name
    if isinstance(answer.value, sympy.Expr) and isinstance(key.value, sympy.Expr):
        if (same := key.value.doit().equals(answer.value.doit())) is not None:  # exact, where verify rounds
            return bool(same)
    return verify(key.value, answer.value, timeout_seconds=None, allow_set_relation_comp=True)


def math_verdict(response: str, solutions: tuple[str, ...]) -> Verdict:
    """The full judgement. May take for ever and all memory. Raises ValueError for an answer key without a reading."""
    if (quick := quick_verdict(response, solutions)) is not None:
        return quick
    otherwise = Verdict.WRONG
    for key in [parse(answer_key(solution)) for solution in solutions]:
        try:
            if equal(key, parse(canonical(extract_answer(response)))):
                return Verdict.RIGHT
        except Exception:  # model text provokes anything in sympy; a broken verifier is found when the pool starts
            otherwise = Verdict.UNPARSED
    return otherwise


# -- The pool, and the command -----------------------------------------------------------------------------------------


def before_fork() -> None:
    """In the pool's child: fill the parser's caches. A verifier that cannot do this would call all answers unparsed."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that nothing limits its time: the pool does
    os.environ |= {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}  # where these raise, GMP ends the process
    if math_verdict(r"\boxed{\sec^2(y)}", ("(y,2)", r"\tan^2(y)+1")) != Verdict.RIGHT:
        raise RuntimeError("the verifier does not know the secant")


def judge(request: dict) -> str:
    """What a worker runs. Without a response it tells what is wrong with the answer keys, "" for nothing."""
    if request["response"] is not None:
        return math_verdict(request["response"], tuple(request["solutions"]))
    try:
        return "" if [parse(answer_key(solution)) for solution in request["solutions"]] else "no key"
    except (ValueError, RecursionError) as error:
        return f"an answer key cannot be parsed: {error}"


class Scorer:
    """Verdicts from a pool of `workers` processes, each killed when one answer takes it longer than `deadline_s`. Make
    it on the main thread and before the process group exists; close() it at the end."""

    def __init__(self, workers: int, deadline_s: float):
        pool = Pool(JUDGE, workers, deadline_s)
        self._call, self.close = pool.call, pool.close

    async def score(self, problem: Problem, response: str) -> Verdict:
        """The verdict on one response. ScorerError when the pool is broken, or for a key that cannot be parsed."""
        if len(response) - max(0, response.rfind("</think>")) <= LONGEST_INLINE:  # characters that may hold the answer
            with contextlib.suppress(ValueError):  # a key that load_problems would have refused: below it is an error
                if (verdict := quick_verdict(response, problem.solutions)) is not None:
                    return verdict
        reply = await self._call({"solutions": problem.solutions, "response": response})
        return Verdict.TIMEOUT if "timeout" in reply else Verdict(reply["value"])


async def _examine(rows: list[tuple[str, str | None]], workers: int, deadline_s: float) -> list[str]:
    """For each (key, response) what is wrong with the key, else the verdict; "" for a good key without a response."""

    async def one(key: str, response: str | None) -> str:
        reply = await pool.call({"solutions": [key], "response": None})
        if response is not None and reply.get("value") == "":
            reply = await pool.call({"solutions": [key], "response": response})
        return reply.get("value", Verdict.TIMEOUT)

    with contextlib.closing(Pool(JUDGE, workers, deadline_s)) as pool:
        return await asyncio.gather(*(one(*row) for row in rows))


def check(path: str, workers: int, deadline_s: float) -> int:
    """Judge a file of rows of id, response, gold and expected, print what differs, return how much did."""
    rows, wrong = _rows(path), 0
    for number, row in rows:
        if [type(row.get(field)) for field in ("id", "response", "gold", "expected")] != [str, str, str, bool]:
            raise ValueError(f"{path}:{number}: 'id', 'response', 'gold' must be text and 'expected' true or false")
    verdicts = asyncio.run(_examine([(row["gold"], row["response"]) for _, row in rows], workers, deadline_s))
    for (number, row), verdict in zip(rows, verdicts, strict=True):
        if (verdict == Verdict.RIGHT) != row["expected"] or verdict not in set(Verdict):
            wrong += 1
            wanted, answer = "right" if row["expected"] else "not right", extract_answer(row["response"])
            print(f"{path}:{number}: {row['id']}: {verdict}, expected {wanted}: {answer!r} for {row['gold']!r}")
    print(f"{len(rows) - wrong} right, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Examine the verifier with your own data.")
    parser.add_argument("command", choices=["check"])
    parser.add_argument("file", help="JSON lines of id, response, gold, expected")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--deadline", type=float, default=5.0, help="seconds for one answer")
    args = parser.parse_args()
    try:
        sys.exit(1 if check(args.file, args.workers, args.deadline) else 0)
    except (ValueError, OSError, ScorerError) as error:
        sys.exit(f"reward.py: {error}")
