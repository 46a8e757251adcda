r"""An examiner's verdict on a response: right, wrong, or why it cannot be told. Or a function's: docs/rewards.md.

Mathematics: math-verify parses and compares; the rules here close its known faults. Those that people dispute:
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

Programs: the answer is the last complete fenced block marked python, py or python3 after the last `</think>`, else the
last one without a mark. The sandbox runs it once for each test, and its output is compared here, as data:
- All tests must pass; the first that fails decides, at 6 s for one and 200 s for all. No tests are no pass.
- Lines as lines, words as words, blanks and blank lines around them aside. Numbers to 1e-6: of the wanted value, or
  absolute where that is an integer or below 1. NaN equals nothing. Results of functions are compared as JSON: tuples
  are lists, True is 1. An exception, also after the output, is `crashed`; sys.exit is fine.

    python reward.py check tests/data/math.jsonl    # examine the verifier: rows of id, response, gold, expected
    python reward.py check tests/data/code.jsonl    # ... or of id, response, tests, expected
"""

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import sys
import textwrap
import time
import unicodedata
from collections import namedtuple
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction

from sandbox import Pool, PoolError, run_program, sandbox_fault

ScorerError = PoolError  # the scorer is broken: no verdict can be trusted and the run must stop
JUDGE = f"{os.path.abspath(__file__)}:judge"
LONGEST_INLINE = 50_000  # characters; looking for a box in more of them would hold up the event loop
LONGEST_ANSWER = 2000  # characters; a longer one is only compared as text


class Verdict(StrEnum):
    """Outcome for one response. Only `right` earns the reward; the others are separate counts in the metrics."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # no box, no fenced program
    UNPARSED = "unparsed"  # a box without a mathematical reading, a program that is not Python
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # a program that raised, or went beyond its memory, output or processes
    SCORED = "scored"  # by a reward of one's own


def read_tests(row: dict, where: str) -> dict:
    """{"function": name, or "" for stdin and stdout, "inputs": [text], "outputs": [text]}, for a function JSON of its
    arguments and of its result. From the published `input_output` (JSON text of inputs, outputs, fn_name; an argument a
    line) or `tests` {kind, entry_point, inputs, outputs} with plain values. ValueError that begins with `where`."""
    plain = "tests" in row
    try:
        tests = row["tests"] if plain else row["input_output"]
        tests = json.loads(tests) if isinstance(tests, str) else tests
        inputs, outputs = tests["inputs"], tests["outputs"]
        function = tests.get("entry_point" if plain else "fn_name") or ""
        if function and not plain:  # text is JSON, anything else is what it is
            inputs = [list(map(json.loads, x.strip().split("\n"))) if isinstance(x, str) else x for x in inputs]
            outputs = [json.loads(x) if isinstance(x, str) else x for x in outputs]
        kinds = {*map(type, inputs)} if function else {*map(type, inputs + outputs)}
        same = type(inputs) is type(outputs) is list and type(function) is str and "\0" not in function
        if not same or len(inputs) != len(outputs) or kinds - {list if function else str}:
            raise ValueError("as many inputs as outputs are needed, all text; for a function inputs are argument lists")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: the tests of a program cannot be read: {type(error).__name__}: {error}") from None
    inputs, outputs = ([json.dumps(x) if function else x for x in values] for values in (inputs, outputs))
    return {"function": function, "inputs": inputs, "outputs": outputs}


def read_rows(path: str) -> list[tuple[int, dict]]:
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


# -- From a response to one line of LaTeX: no parser and linear time, so this may run in an event loop -----------------

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


def needs_parser(solution: str) -> bool:
    """Whether only the parser can tell that an answer key has a reading; ValueError where there is no key."""
    key = answer_key(solution)
    return plain_number(key) is None and not words(key) and not LETTER.fullmatch(key)


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
    if not (text := canonical(extract_answer(response) or "")):
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


# -- The full judgement: it may take for ever and all memory, so it runs in a process that can be killed --------------

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


# -- Programs ----------------------------------------------------------------------------------------------------------

FENCE = re.compile(r"\s*+(`{3,}+|~{3,}+)\s*+([^\s`]*+)[^`]*")
NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?")
UNJUDGED = {"": Verdict.WRONG, "syntax": Verdict.UNPARSED, "timeout": Verdict.TIMEOUT}  # by outcome; others crashed


def extract_program(response: str) -> str:
    """Text of the last complete fenced block that is marked as Python, else of the last without a mark, or ""."""
    blocks, fence, mark, lines = {}, "", "", []
    for line in response.rpartition("</think>")[2].replace("\r\n", "\n").split("\n"):
        if fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            blocks[mark], fence = "\n".join(lines), ""
        elif fence:
            lines.append(line)
        elif match := FENCE.fullmatch(line):
            fence, mark, lines = match[1], re.sub("^py(thon3)?$", "python", match[2].lower()), []
    return textwrap.dedent(blocks.get("python") or blocks.get("") or "")


def close(wanted: Decimal, number: Decimal) -> bool:
    scale = 1 if wanted == wanted.to_integral_value() else max(1, abs(wanted))
    return abs(wanted - number) <= Decimal("1e-6") * scale


def same_output(wanted: str, output: str) -> bool:
    """Whether a program's output is the wanted one: line by line, word by word, numbers within 1e-6."""
    lines = [[line.split() for line in text.strip().split("\n")] for text in (wanted, output)]
    if [len(words) for words in lines[0]] != [len(words) for words in lines[1]]:
        return False
    pairs = (pair for two in zip(*lines, strict=True) for pair in zip(*two, strict=True))
    return all(x == y or bool(NUMBER.fullmatch(x) and NUMBER.fullmatch(y) and close(Decimal(x), Decimal(y)))
               for x, y in pairs)  # fmt: skip


def same_value(wanted, value) -> bool:
    """Whether two values read from JSON (numbers as Decimal) are the same."""
    if type(wanted) is type(value) is list:
        return len(wanted) == len(value) and all(map(same_value, wanted, value))
    if type(wanted) is type(value) is dict:
        return wanted.keys() == value.keys() and all(same_value(wanted[key], value[key]) for key in wanted)
    return wanted == value or (type(wanted) is type(value) is Decimal and close(wanted, value))


def code_verdict(response: str, tests: dict, test_s: float, total_s: float, unsafe: bool) -> Verdict:
    """Run the program of a response on its tests, one after the other. SandboxError where there is no sandbox."""
    program, deadline = extract_program(response), time.monotonic() + total_s
    if not program.strip():
        return Verdict.NO_ANSWER
    read = functools.partial(json.loads, parse_int=Decimal, parse_float=Decimal)
    for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True):
        left = max(0.0, min(test_s, deadline - time.monotonic()))
        ran = run_program(program, given, function=tests["function"], timeout_s=left, unsafe=unsafe,
                          output_bytes=2 * len(wanted.encode(errors="replace")) + (1 << 20))  # fmt: skip
        output = ran.output.decode(errors="replace")
        try:
            same = same_value(read(wanted), read(output)) if tests["function"] else same_output(wanted, output)
        except (ValueError, ArithmeticError, RecursionError):  # it left without a result, or sent a strange one
            same = False
        if ran.outcome or not same:
            return UNJUDGED.get(ran.outcome, Verdict.CRASHED)
    return Verdict.RIGHT if tests["inputs"] else Verdict.WRONG


# -- The pool, and the command -----------------------------------------------------------------------------------------


def before_fork() -> None:
    """In the pool's child: fill the parser's caches. A verifier that cannot do this would call all answers unparsed."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that nothing limits its time: the pool does
    os.environ |= {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}  # where these raise, GMP ends the process
    if math_verdict(r"\boxed{\sec^2(y)}", ("(y,2)", r"\tan^2(y)+1")) != Verdict.RIGHT:
        raise RuntimeError("the verifier does not know the secant")


def judge(response: str = "", tests: dict | None = None, limits: tuple = (), solutions: tuple = (), keys: bool = False):
    """What a worker runs: the verdict. With `keys` it tells what is wrong with an answer key, if something is."""
    if tests is not None:
        return code_verdict(response, tests, *limits)
    try:
        [parse(answer_key(solution)) for solution in solutions if keys]
    except (ValueError, RecursionError) as error:
        return f"an answer key cannot be parsed: {error}"
    return math_verdict(response, tuple(solutions))


class Scorer:
    """Rewards from a pool of processes, each killed when one answer takes it too long. `cfg` has scorers (how many),
    score_timeout, test_timeout, code_timeout, unsafe_code, reward ("file.py:function" of one's own, or ""). Make it on
    the main thread and before the process group exists; close() it at the end."""

    def __init__(self, cfg):
        self.reward, self.limits = cfg.reward, (cfg.test_timeout, cfg.code_timeout, cfg.unsafe_code)
        pool = Pool(cfg.reward or JUDGE, cfg.scorers, cfg.score_timeout)
        self._call, self.close = pool.call, pool.close

    async def score(self, problem, response: str) -> tuple[float, Verdict]:
        """(reward, verdict) of a response to a `packing.Problem`; the reward is 1, 0 or what one's function returned.
        ScorerError when the pool is broken, for a key that cannot be parsed, or when that function failed."""
        verdict, request = None, {"solutions": problem.solutions, "response": response}
        if self.reward:
            reply = await self._call({"row": problem.row, "response": response})
            value = reply.get("value", 0.0)
            if not isinstance(value, int | float) or not abs(value) < 1e300:
                raise ScorerError(f"the reward {self.reward} returned {value!r}, which is no finite number")
            return float(value), Verdict.TIMEOUT if "timeout" in reply else Verdict.SCORED
        if problem.tests is not None:
            request = {"tests": problem.tests, "response": response, "limits": self.limits}
        elif len(response) - max(0, response.rfind("</think>")) <= LONGEST_INLINE:  # that may hold the answer
            with contextlib.suppress(ValueError):  # a key that load_problems would have refused: below it is an error
                verdict = quick_verdict(response, problem.solutions)
        if verdict is None:
            verdict = Verdict((await self._call(request, _deadline(request))).get("value", Verdict.TIMEOUT))
        return float(verdict == Verdict.RIGHT), verdict


def _deadline(request: dict) -> float | None:  # seconds; None: the pool's own
    return request["limits"][1] + 10 if "limits" in request else None


def examine(requests: list[dict], workers: int, deadline_s: float) -> list[str]:
    """The results of `judge`, from a pool that is gone on return."""

    async def every() -> list[dict]:
        return await asyncio.gather(*map(pool.call, requests, map(_deadline, requests)))

    with contextlib.closing(Pool(JUDGE, workers, deadline_s)) as pool:
        return [reply.get("value", Verdict.TIMEOUT) for reply in asyncio.run(every())]


def need_sandbox(unsafe: bool) -> None:
    """Before programs are run: ValueError in a sentence if this machine has no sandbox; a loud box with `unsafe`."""
    if fault := "" if unsafe else sandbox_fault():
        raise ValueError(f"programs cannot be judged here: {fault}; --unsafe_code runs them without a sandbox")
    if unsafe and os.environ.get("RANK", "0") == "0":
        text = "UNSAFE CODE: programs written by a model run here with your rights, your files, your network"
        print(f"{'#' * 100}\n##  {text}  ##\n{'#' * 100}", flush=True)


def check(path: str, workers: int, deadline_s: float, unsafe: bool) -> int:
    """Judge a file of rows of id, response, expected and gold or tests, print what differs, return how much did."""
    rows, requests, wrong = read_rows(path), [], 0
    for number, row in rows:
        kinds = [type(row.get(name)) for name in ("id", "response", "expected")]
        if kinds != [str, str, bool] or not ("tests" in row or isinstance(row.get("gold"), str)):
            raise ValueError(f"{path}:{number}: 'id', 'response', 'gold' must be text and 'expected' true or false; "
                             f"for a program 'tests' take the place of 'gold'")  # fmt: skip
        how = {"solutions": [row.get("gold")], "keys": True}
        if "tests" in row:
            how = {"tests": read_tests(row, f"{path}:{number}"), "limits": (6.0, 200.0, unsafe)}
        requests.append({"response": row["response"], **how})
    if any("tests" in row for _, row in rows):
        need_sandbox(unsafe)
    for (number, row), verdict in zip(rows, examine(requests, workers, deadline_s), strict=True):
        if (verdict == Verdict.RIGHT) != row["expected"] or verdict not in set(Verdict):
            wrong += 1
            what = f": {extract_answer(row['response'])!r} for {row['gold']!r}" if "gold" in row else ""
            print(f"{path}:{number}: {row['id']}: {verdict}, expected {'not ' * (not row['expected'])}right{what}")
    print(f"{len(rows) - wrong} right, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Examine the verifier with your own data.")
    parser.add_argument("command", choices=["check"])
    parser.add_argument("file", help="JSON lines of id, response, expected, and gold or tests")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--deadline", type=float, default=5.0, help="seconds for one mathematical answer")
    parser.add_argument("--unsafe_code", action="store_true", help="run programs without a sandbox")
    args = parser.parse_args()
    try:
        sys.exit(bool(check(args.file, args.workers, args.deadline, args.unsafe_code)))
    except (ValueError, OSError, ScorerError) as error:
        sys.exit(f"reward.py: {error}")
