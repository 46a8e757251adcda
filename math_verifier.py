r"""Does the final answer of a response equal the answer key? `reward.py` decides where this runs, and for how long.

Rules that people dispute, as they are decided here (`tests/test_reward.py` holds examples of each):
- The answer is the content of the last complete `\boxed{}` after the last `</think>` (of the whole text without that
  tag). No box, an empty box and a box that never closes are no answer; a number in prose is not one either.
- Numbers are exact. A decimal equals a value that it merely rounds only from six significant digits on.
- 5\% is 5/100 or, where the other side has no percent sign, plain 5. A unit may be left out but not be a wrong one. A
  numeral with a base is its value; without one it is decimal. A ratio equals its multiples.
- Tuples, intervals and matrices are ordered; sets, unions and bare lists (comma, "and", "or", plus-minus) are not, and
  every item counts. Brackets tell intervals apart, and a set from a tuple; a bare list may stand for either.
- `x=` in front of a value is decoration. Equations are equal up to a factor. Words are equal when spelled alike,
  capitals aside, and never when parsed alike. A choice letter may be decorated: (B), B., B. 42.
- 1,234 is a number, or the list 1, 234 if the other side is one. Any one of several answer keys is enough.

math-verify parses single expressions and has the last word on what has no numerical value; alone it rounds to six
decimals, multiplies the letters of words and drops bases, order and factors before a unit. What has no reading is
`unparsed`, counted apart from `wrong`. Nothing is evaluated as Python. Left out: prose, which needs a judge model.
"""

import functools
import logging
import random
import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction

LONGEST_ANSWER = 2000  # characters; a longer one is only compared as text


class UnparsedError(ValueError):
    """A text has no mathematical reading."""


# From a response to one line of canonical LaTeX: no parser and hardly any time, so this part may run in an event loop.

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


# Applied in order; @ is the end of a command. Upright and bold wrappers become \text{}, and what joins items becomes
# ";", so that "3, 500" stays a list where "3,500" may be a number.
REWRITES = [(re.compile(pattern.replace("@", "(?![A-Za-z])")), replacement) for pattern, replacement in (
    (r"\\f?box(?:ed)?\s*\{([^{}]*)\}", r"\1"),
    (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|rm|bf)@\.?", ""),
    (r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|math(?:rm|bf|it|sf)|operatorname\*?|boldsymbol|bm|emph|underline"
     r"|textcolor\s*\{\w+\}|color\s*\{\w+\})\s*\{", r"\\text{"),
    (r"(?:(?<!\\)\\(?:[,;: ]|q?quad@)|~|\s)+", " "), (r"\{ ?, ?\}", ","),
    (r"(?<!\\)\\[!()\[\]]|\\?\$|[€£¥₹\"“”]|^\*\*|\*\*$|\\color\s*\{\w+\}", ""),
    (r"\\?%|\\text\{ ?(?:percent|per cent|pct) ?\}|\b(?:percent|per cent)\b", "%"),
    (r"\\text\{(sin|cos|tan|log|ln|exp|lcm|gcd|max|min)\}", r"\\\1 "), (r"\\text\{ ?([eid]|\\pi) ?\}", r"\1"),
    (r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|log|ln|pi|infty)@", r"\\\1 "), (r"\\neq@", r"\\ne "),
    (r"\\leq(?:slant)?@|<=", r"\\le "), (r"\\geq(?:slant)?@|>=", r"\\ge "), (r"\\lt@", "<"), (r"\\gt@", ">"),
    (r"\\div@", "/"), (r"\\colon@", ":"), (r"\\(?:[lr]?vert|mid)@", "|"), (r"\*\*", "^"),
    (r"\\(?:times|ast|cdotp?)@|\*", r"\\cdot "), (r"\\lbrace@", r"\\{"), (r"\\rbrace@", r"\\}"),
    (r"\\varnothing@|\\\{ ?\\\}", r"\\emptyset "), (r"\+ ?\\infty", r"\\infty "),
    (r"\( ?- ?\\infty ?, ?\\infty ?\)", r"\\mathbb{R}"), (r"\\(?:[dtc]|nice|s)frac@", r"\\frac"),
    (r"\{([^{}]*)\\over@([^{}]*)\}", r"\\frac{\1}{\2}"), (r"\\frac ?(\\[A-Za-z]+|[^\s{\\]) ?", r"\\frac{\1}"),
    (r"(\\frac ?\{(?:[^{}]|\{[^{}]*\})*\}) ?(\\[A-Za-z]+|[^\s{\\])", r"\1{\2}"),
    (r"\\sqrt ?(\\[A-Za-z]+|[^\s{\[\\(])", r"\\sqrt{\1}"), (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\^ ?\(([^()]*)\)", r"^{\1}"), (r"([_^]) ?(\d+|[A-Za-z])", r"\1{\2}"),
    (r"\^ ?\{? ?\\circ ?\}?|\\degree@", r"^\\circ "),
    (r"(?<![\w.])(\d+(?:\.\d*)?)[eE]([+-]?\d+)(?![\w.])", r"\1\\cdot 10^{\2}"),
    (r"(?<=[\d}]) ?(?:\\text\{)? ?million@ ?\}?", r"\\cdot 10^{6}"), (r"(?<=\d) ?(?:\\text\{)? ?to ?\}? ?(?=\d)", ":"),
    (r"(?<=[\d}]) ?(?:\\text\{)? ?billion@ ?\}?", r"\\cdot 10^{9}"), (r"\\(?:lor|vee|land|wedge)@", " and "),
    (r",? ?(?:\\text\{ ?(?:and|or) ?\}|(?<![A-Za-z{])(?<!\{ )(?:and|or)(?![A-Za-z}])) ?|[,;] +", ";"),
    (r"(?<![A-Za-z0-9]) +| +(?![A-Za-z0-9])", ""),
)]  # fmt: skip
OUTER = re.compile(r"\\text\{([^{}A-Za-z]*\d[^{}A-Za-z]*|\(?[A-Za-z]\)?[.:]?)\}|\{([^{}]*)\}")
SYMBOLS = str.maketrans({
    "−": "-", "–": "-", "×": r"\cdot ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "√": r"\sqrt ",
    "∞": r"\infty ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ",
    "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "∠": r"\angle ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "、": ", ", "；": "; ", "。": "."})  # fmt: skip


@functools.lru_cache(maxsize=8192)  # a key is met once for every answer of its group
def canonical(answer: str) -> str:
    r"""One spelling for answers that differ in typography only. Takes about 0.1 ms; a plain integer takes none.

    >>> canonical(r"\dfrac34 "), canonical("x²"), canonical(r"\text{42}."), canonical("3, 5 and 7")
    ('\\frac{3}{4}', 'x^{2}', '42', '3;5;7')
    """
    text = answer.strip()
    if (text.isascii() and text.isdigit()) or len(text) > LONGEST_ANSWER:
        return text
    if not text.isascii():
        text = _spell_unicode(text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    for _ in range(3):  # \text{{42}.}
        text = text.strip(" ").rstrip(".,;:").removeprefix("=")
        if match := OUTER.fullmatch(text):
            text = match[1] or match[2] or ""
    return text


def _spell_unicode(text: str) -> str:
    """Full-width and foreign digits, superscripts, fractions, Greek letters and operators in LaTeX."""
    out = []
    for char in re.sub(r"√ ?(\d+(?:\.\d+)?)", r"\\sqrt{\1}", text).translate(SYMBOLS):
        kind = unicodedata.decomposition(char).partition("> ")[0]
        plain = unicodedata.normalize("NFKC", char).translate(SYMBOLS)
        if kind in ("<super", "<sub"):
            plain = f"{'^' if kind == '<super' else '_'}{{{plain}}}"
        elif kind == "<fraction":
            plain = r"\frac{" + plain.replace("/", "}{") + "}"
        elif unicodedata.decimal(char, None) is not None:
            plain = str(unicodedata.decimal(char))
        elif match := re.fullmatch("GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", unicodedata.name(char, "")):
            plain = f"\\{match[2].lower() if match[1] == 'SMALL' else match[2].capitalize()} "
        elif unicodedata.category(char) == "Cf":  # invisible
            plain = ""
        out.append(plain)
    return "".join(out).replace("}^{", "").replace("}_{", "")


@functools.lru_cache(maxsize=8192)
def answer_key(solution: str) -> str:
    """Canonical text of a key given bare, in a box or as a full solution; ValueError where there is none."""
    answer = extract_answer(solution) if BOX.search(solution) else solution
    if not answer or not canonical(answer):
        raise ValueError(f"answer key {solution[:60]!r} is empty or its box never closes")
    return canonical(answer)


DECIMAL = re.compile(r"(\d{1,3}(?:[ ,]\d{3})+|\d+|(?=\.\d))(\.\d*)?(?:\\cdot 10\^\{([+-]?\d{1,3})\})?")
FRACTION = re.compile(r"(?:(\d+)(?: (?=\d+/)|(?=\\)))?(?:\\frac\{([+-]?\d+)\}\{([+-]?0*[1-9]\d*)\}|(\d+)/(0*[1-9]\d*))")
REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")


def plain_number(text: str) -> Fraction | None:
    r"""Value of a canonical integer, decimal, fraction, mixed number or multiple of a power of ten; None for all else.

    >>> plain_number("-1 1/2"), plain_number(r"2\frac{3}{2}"), plain_number("1,234"), plain_number("12,34")
    (Fraction(-3, 2), Fraction(3, 1), Fraction(1234, 1), None)
    """
    if len(text) > LONGEST_ANSWER:
        return None
    digits = text[1:] if text[:1] in ("+", "-") else text
    if match := DECIMAL.fullmatch(digits):
        whole, places, exponent = match.groups()
        value = Fraction(re.sub("[ ,]", "", whole or "0") + (places or "").rstrip("."))
        value *= Fraction(10) ** int(exponent or 0)
    elif match := FRACTION.fullmatch(digits):
        whole, top, bottom = match[1], int(match[2] or match[4]), int(match[3] or match[5])
        value = Fraction(top, bottom)
        if whole:  # only a proper fraction makes a mixed number, anything else is a product
            value = int(whole) + value if 0 < value < 1 else int(whole) * value
    elif match := REPEATING.fullmatch(digits):
        whole, places, cycle = match.groups()
        value = Fraction(f"{whole or 0}.{places}0") + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(places))
    else:
        return None
    return -value if text[0] == "-" else value


def same_number(x: Fraction, x_text: str, y: Fraction, y_text: str) -> bool:
    """Exact equality, or one is a decimal of six or more significant digits to which the other is rounded or cut."""
    for value, text, other in ((x, x_text, y), (y, y_text, x)):
        whole, point, places = text.lstrip("+-").partition(".")
        if point and (whole + places).isdigit() and len((whole + places).lstrip("0")) >= 6:
            if abs(value - other) < Fraction(1, 10 ** len(places)):
                return True
    return x == y


def words(text: str) -> str | None:
    r"""The lower-case words of an answer in words: letters in `\text{}`, or letters that spell something."""
    bare = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text) if "\\" in text else text
    spelled = " ".join(bare.split()).casefold()
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ ,;'.-])*", spelled):
        return None
    word = re.search(r"[^\x00-\x7f]|\b(?!and\b)(?=[a-z]*[aeiou])[a-z]{3,}", spelled)
    return spelled if word or (text.startswith(r"\text{") and len(spelled) > 1) else None


CHOICE = re.compile(r"(?i:option|choice)? ?(?:\(([A-Ja-j])\)|([A-Ja-j])(?:$|[.:)]))(?![,;])(?!.*\([A-Ja-j]\)).*")


def choice_letter(text: str) -> str | None:
    """The letter of a multiple-choice answer: B, (B), B., B: 42, (B) 42."""
    match = CHOICE.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r"\1", text) if "\\" in text else text)
    return match and (match[1] or match[2]).upper()


# The structure of an answer. From here on a call may take for ever, so it runs in a process that can be killed.


@dataclass(frozen=True)
class Node:
    """A parsed answer. Kinds: text, value, list, set, union, relation, ratio, matrix, row, a pair of brackets such as
    "(]", and either (of two readings)."""

    kind: str
    text: str  # canonical LaTeX, or the words
    items: tuple["Node", ...] = ()
    expr: object = None  # sympy value
    unit: str = ""
    ops: tuple[str, ...] = ()  # between the items of a relation


TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[^\\]", re.DOTALL)
DEPTH = dict.fromkeys(r"( [ { \{ \langle \begin".split(), 1) | dict.fromkeys(r") ] } \} \rangle \end".split(), -1)
FLIP = {"<": ">", r"\le": r"\ge", ">": "<", r"\ge": r"\le"}
RELATIONS = {"=", r"\ne", r"\approx", r"\equiv", *FLIP}
VARIABLE = re.compile(r"(?:\\?[A-Za-z]+(?:[_^]\{[-\w]+\})?(?:\([A-Za-z](?:[,;][A-Za-z])*\))?)|\|[A-Z]{2}\|"
                      r"|\([A-Za-z](?:[,;][A-Za-z])+\)|\\(?:overline|text)\{[^{}]*\}|m?\\(?:angle|triangle) ?[A-Z]+")
THOUSANDS = re.compile(r"([+-]?\d{1,3}(?:[ ,]\d{3})+)(?!\d)([^,;]*)")
MATRIX = re.compile(r"\\begin\{(?:[pb]?matrix|array)\}(?:\{[lcr|]+\})?(.*)\\end\{(?:[pb]?matrix|array)\}", re.DOTALL)
UNIT = re.compile(r"""(.*?[\d})a-z])(\ ?(?:(?:\\cdot\ ?|/)?(?:
    %|\^\\circ\ ?[CF]?|\\pmod\{\w+\}|[^\x00-\x7f]+
    |\\text\{(?!(?:[^{}]*\ )?(?:and|or|not|than|more|less|if|base|mod)\b)[^{}]+\}
    |(?:(?<=[\d}]\ )|(?<=/))[mgshLNJWVA](?![A-Za-z])
    |(?<![A-Za-z\\])(?:[cmk]m|kg|m[glL]|ft|mph|hrs?|min|sec|lbs?|(?=[a-z]*[aeiou])[a-z]{4,})(?![A-Za-z])
    )(?:\^\{-?\d\})?\ ?)+)""", re.VERBOSE)
UNIT_NAMES = dict(pair.split("=") for pair in (  # one spelling, in the singular; nothing is no unit at all
    r"^\circ=deg degree=deg unit= squareunit= centimeter=cm centimetre=cm meter=m metre=m kilometer=km kilometre=km "
    "hour=h hr=h minute=min second=s sec=s kilogram=kg gram=g foot=ft feet=ft inche=inch").split())  # fmt: skip


def parse(text: str) -> Node:
    """Structure of canonical text down to sympy values; UnparsedError where a part has no reading."""
    if not text or len(text) > LONGEST_ANSWER and not text.isdigit():
        raise UnparsedError("empty or too long")
    if spelled := words(text):
        names = re.split(r"[;,] ?", spelled)
        return Node("list", spelled, tuple(Node("text", n) for n in names)) if names[1:] else Node("text", spelled)
    if match := THOUSANDS.fullmatch(text):
        number = parse(re.sub("[ ,]", "", match[1]) + match[2])
        return Node("either", text, (number, _list(text, ",", "list"))) if "," in text else number
    if (number := plain_number(text)) is not None:
        import sympy  # not at the top: the ranks, which use the first half of this file, do without it

        return Node("value", text, expr=sympy.Rational(number.numerator, number.denominator))
    if text.isdigit():
        return Node("text", text.lstrip("0"))  # more digits than one can calculate with
    for separator in (";", ","):
        if len(_split(text, {separator})[0]) > 1:
            return _list(text, separator, "list")
    if re.search(r"\\[pm][pm](?![A-Za-z])", text):
        signed = (text.replace(r"\pm", "+").replace(r"\mp", "-"), text.replace(r"\mp", "+").replace(r"\pm", "-"))
        return Node("list", text, tuple(parse(s.removeprefix("+")) for s in signed))
    if match := re.match(r"[A-Za-z]\\in ?(?=.)", text):
        return parse(text[match.end() :])
    if len(_split(text, {r"\cup"})[0]) > 1:
        return _list(text, r"\cup", "union")
    if match := MATRIX.fullmatch(text):
        rows = [row.split("&") for row in match[1].split(r"\\") if row.strip()]
        return Node("matrix", text, tuple(Node("row", "&".join(row), tuple(map(parse, row))) for row in rows))
    if brackets := _brackets(text):
        opening, inner, closing = brackets
        if match := re.fullmatch(r"[A-Za-z](?:\\in ?\\mathbb\{R\})?[|:](.+)", inner):  # {x | x > 3}
            return parse(match[1])
        node = parse(inner)
        node = node.items[1] if node.kind == "either" else node
        if opening == r"\{":
            return Node("set", text, node.items if node.kind == "list" else (node,))
        return Node(opening + closing, text, node.items) if node.kind == "list" else node
    parts, ops = _split(text, RELATIONS)
    if ops:
        if ops == [r"\approx"] and parts[0] and not VARIABLE.fullmatch(parts[0]):
            return parse(parts[0])  # the exact side
        ops = ["=" if op in (r"\approx", r"\equiv") else op for op in ops]
        first = Node("text", parts[0]) if set(ops) == {"="} else parse(parts[0])  # may be a name without a reading
        return Node("relation", text, (first, *map(parse, parts[1:])), ops=tuple(ops))
    if len(text) < 300 and (match := UNIT.fullmatch(text)) and not re.search(r"\\(?!frac|sqrt|pi|cdot)[a-z]", match[1]):
        unit = re.sub(r"\\text|\\cdot|[{} .]", "", match[2]).casefold()
        measured = replace(parse(match[1]), unit=UNIT_NAMES.get(unit.removesuffix("s"), unit.removesuffix("s") or unit))
        if re.match(" [A-Za-z](?![A-Za-z])", match[2]):  # 5 m may be a product
            return Node("either", text, (measured, Node("value", text, expr=_expression(text))))
        return measured
    if len(_split(text, {":"})[0]) > 1:
        return _list(text, ":", "ratio")
    return Node("value", text, expr=_expression(text))


def _list(text: str, separator: str, kind: str) -> Node:
    nodes = [parse(part) for part in _split(text, {separator})[0]]  # a list within a list is the same list
    return Node(kind, text, tuple(i for n in nodes for i in (n.items if n.kind == kind == "list" else (n,))))


def _split(text: str, separators: set[str]) -> tuple[list[str], list[str]]:
    """Parts of the text between the separators outside of brackets, and the separators found."""
    parts, found, start, depth = [], [], 0, 0
    for token in TOKEN.finditer(text):
        depth += DEPTH.get(token[0], 0)
        if depth < 0:
            break
        if depth == 0 and token[0] in separators:
            parts.append(text[start : token.start()].strip(" "))
            found.append(token[0])
            start = token.end()
    if depth:
        raise UnparsedError("brackets that do not match")
    return [*parts, text[start:].strip(" ")], found


def _brackets(text: str) -> tuple[str, str, str] | None:
    r"""(opening, inside, closing) where one pair encloses everything; \langle reads as a parenthesis."""
    match = re.fullmatch(r"(\\\{|\\langle ?|[(\[{]) ?(.+?) ?(\\\}|\\rangle|[)\]}])", text)
    try:
        _split(match[2] if match else ")", set())
    except UnparsedError:  # as in (1,2)-(3,4)
        return None
    return match[1].replace(r"\langle", "(").strip(), match[2], match[3].replace(r"\rangle", ")")


def _expression(latex: str):
    """sympy expression of one canonical expression, not evaluated; UnparsedError."""
    import sympy
    from latex2sympy2_extended import latex2sympy  # math-verify's parser
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    if match := re.fullmatch(r"\(?(\d[0-9A-Z]*)\)?_\{\(?(\d\d?)\)?\}", latex):
        base = int(match[2])
        if 2 <= base <= 36 and all(int(digit, 36) < base for digit in match[1]):
            return sympy.Integer(int(match[1], base))
        raise UnparsedError(f"{latex} is no numeral of its base")
    # The parser reads an integer next to any fraction, even in parentheses, as a mixed number, a decimal as a binary
    # float and two numbers side by side as their sum: so all of these are spelled out first.
    latex = re.sub(r"\\text\{([^{}]{1,2})\}", r"\1", latex)
    latex = re.sub(r"(\d+(?:\.\d+)?)\^\\circ ?", r"(\1\\cdot \\frac{\\pi}{180})", latex)
    latex = re.sub(r"(?<![\d.])(\d*)\.(\d+)", lambda m: rf"(\frac{{{m[1]}{m[2]}}}{{{10 ** len(m[2])}}})", latex)
    latex = re.sub(r"(?<![\w^}])(\d+) (\d+)/(\d+)", r"\1\\frac{\2}{\3}", latex)
    latex = re.sub(r"(?<![\d.^_\\A-Za-z])(\d+)(\\frac\{(\d+)\}\{(\d+)\})",
                   lambda m: f"({m[1]}{'+' if int(m[3]) < int(m[4]) else chr(92) + 'cdot '}{m[2]})", latex)  # fmt: skip
    latex = re.sub(r"((?<![\w^\\])\d+|\)) ?(?=\(|\\frac)", r"\1\\cdot ", latex)
    if r"\text" in latex or re.search(r"\d \d", latex):
        raise UnparsedError("words within mathematics, or two numbers side by side")
    keep_case = ConversionConfig(lowercase_symbols=False)
    try:
        expr = latex2sympy(latex, is_real=True, normalization_config=None, conversion_config=keep_case)
    except Exception as error:  # the parser raises bare Exception, and whatever its conversions stumble over
        raise UnparsedError(f"{type(error).__name__} at {latex[:60]!r}") from None
    units = {s: sympy.I for s in getattr(expr, "free_symbols", ()) if s.name == "i"}
    return expr.subs(units) if units else expr


def equal(key: Node, answer: Node) -> bool:
    """Whether the answer says what the key says. Not symmetric: decoration is forgiven in the answer."""
    kinds = {key.kind, answer.kind}
    if len(kinds) == 1 and key.text == answer.text and key.unit == answer.unit:
        return True
    if "either" in kinds:
        keys, answers = (n.items if n.kind == "either" else (n,) for n in (key, answer))
        return any(equal(k, a) for k in keys for a in answers)
    if "relation" in kinds:
        return _equal_relations(key, answer)
    if key.unit and answer.unit and key.unit != answer.unit:
        return False
    if kinds == {"value"}:
        return _equal_values(key, answer)
    if kinds <= {"text", "value"}:  # \text{no} and no, which reads as a product
        return key.text.casefold() == answer.text.casefold()
    keys, answers = (n.items or (n,) for n in (key, answer))
    if "ratio" in kinds:
        keys, answers = ([node.expr for node in nodes] + [1] * (len(nodes) == 1) for nodes in (keys, answers))
        same = len(keys) == len(answers) and None not in (*keys, *answers)
        return same and all(_same(keys[0] * a, answers[0] * k) for k, a in zip(keys, answers, strict=True))
    if kinds == {"set"}:
        pairs = [[equal(k, a) for a in answers] for k in keys]
        return all(map(any, pairs)) and all(map(any, zip(*pairs, strict=True)))
    if kinds <= {"text", "value", "list", "set", "union"} and kinds != {"set", "union"} and len(keys) == len(answers):
        left = list(answers)
        for k in keys:
            if (match := next((a for a in left if equal(k, a)), None)) is None:
                return False
            left.remove(match)
        return True
    if len(kinds) == 1 or kinds in ({"()", "list"}, {"()", "[]"}):
        # A bare list may stand for a tuple, in its order; [] is an interval around two items, decoration around more.
        same = len(keys) == len(answers) and (kinds != {"()", "[]"} or len(keys) > 2)
        return same and all(map(equal, keys, answers))
    sets = bool(kinds & {"union", "value"}) and not kinds & {"matrix", "row", "text", "list"}
    return sets and _math_verify(key, answer)  # written in two ways, such as a union and a difference


def _equal_relations(key: Node, answer: Node) -> bool:
    equations = [set(node.ops) == {"="} for node in (key, answer)]
    names = [is_equation and VARIABLE.fullmatch(node.items[0].text) and node.items[0].text
             for is_equation, node in zip(equations, (key, answer), strict=True)]  # fmt: skip
    if equations[1] and (not key.ops or names[0] and names[0] == names[1]):  # y = 2x for 2x, y = 2x for y = x + x
        return equal(key.items[-1] if key.ops else key, answer.items[-1])
    if names[0] and not answer.ops:
        return equal(key.items[-1], answer)
    if all(equations) and key.items[-1].kind == answer.items[-1].kind == "value":
        differences = [_expression(n.items[0].text) - n.items[-1].expr for n in (key, answer)]
        return _proportional(*differences) or _math_verify(key, answer)
    facts, others = _inequalities(key), _inequalities(answer)
    if facts and len(facts) == len(others):
        return all(any(op == o and _proportional(x, y, op != r"\ne") for o, y in others) for op, x in facts)
    return bool(facts or others) and _math_verify(key, answer)  # 1 < x < 2 and an interval


def _inequalities(node: Node) -> list[tuple[str, object]]:
    """The facts "expression > 0", ">= 0" or "!= 0" that a chain of inequalities states; none for everything else."""
    if "=" in node.ops or not node.ops or {item.kind for item in node.items} != {"value"}:
        return []
    sides = zip([i.expr for i in node.items], node.ops, [i.expr for i in node.items[1:]], strict=False)
    return [(FLIP[op], right - left) if op in ("<", r"\le") else (op, left - right) for left, op, right in sides]


def _equal_values(key: Node, answer: Node) -> bool:
    import sympy

    k, a = key.expr, answer.expr
    if isinstance(k, sympy.Set) != isinstance(a, sympy.Set):
        return False
    scales = {"%": sympy.Rational(1, 100), "deg": sympy.pi / 180}
    for unit, other, x, y in ((key.unit, answer.unit, k, a), (answer.unit, key.unit, a, k)):
        if unit in scales and not other and _same(x * scales[unit], y):
            return True  # the side without a unit gives the value; the number before the unit is compared below
    for node, other in ((key, a), (answer, k)):  # a decimal that rounds a root, say
        number = plain_number(node.text) if "." in node.text else None
        value = _at(other, {}) if number is not None and not getattr(other, "free_symbols", True) else None
        if value is not None and value.is_real and same_number(number, node.text, Fraction(str(value)), ""):
            return True
    same = _same(k, a)
    return _math_verify(key, answer) if same is None else same


def _math_verify(key: Node, answer: Node) -> bool:
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that nothing limits its time: the pool does
    sides = [_expression(node.text.replace(";", ",")) for node in (key, answer)]
    return verify(*sides, timeout_seconds=None, allow_set_relation_comp=True)


def _same(x, y) -> bool | None:
    """Equality by value, at random points of the variables; None without one (matrices, sets, unknown functions)."""
    if x == y:
        return True
    values = _values(x, y)
    return all(_close(a, b) for a, b in values) if values else None


def _proportional(x, y, positive: bool = False) -> bool:
    """Whether x = c y for one constant c that is not zero and, if asked, positive."""
    values = [(a, b) for a, b in _values(x, y) if a != 0 and b != 0]
    ratio = values[0][0] / values[0][1] if values else None
    return bool(values) and all(_close(a, ratio * b) for a, b in values) and (not positive or bool(ratio > 0))


def _close(a, b) -> bool:  # exact for rationals, else to 40 of 60 digits
    if a.is_Rational and b.is_Rational:
        return a == b
    size, other, difference = (abs(v).evalf(60) for v in (a, b, (a - b).evalf(60)))
    return bool(difference <= max(size, other) * 1e-40)


def _values(x, y) -> list[tuple]:
    """Pairs of values at up to eight points, the first half of them positive."""
    import sympy

    symbols = sorted(set(getattr(x, "free_symbols", ())) | set(getattr(y, "free_symbols", ())), key=str)
    draw = random.Random(0)
    lows = (0.3, 0.3, 0.3, 0.3, -3, -3, -3, -3) if symbols else (0,)
    points = [{s: sympy.Float(str(draw.uniform(low, 3)), 80) for s in symbols} for low in lows]
    pairs = [pair for pair in ((_at(x, point), _at(y, point)) for point in points) if None not in pair]
    # Where one side is complex (roots and logarithms of negative numbers) equality hangs on the choice of a branch.
    return [pair for pair in pairs if all(value.is_real for value in pair)] or pairs


def _at(expression, point: dict):
    """Value at a point, exact where rational and to 60 digits elsewhere; None where there is none."""
    try:
        value = expression.subs(point).doit()
        value = value if value.is_Rational else value.evalf(60, chop=bool(point))
    except Exception:  # sympy raises nearly everything on undefined values, and on objects without arithmetic
        return None
    if value.is_Float and value._prec == 1:  # sympy's mark of a sum that cancels to the last digit
        return 0 * value
    return value if value.is_number and value.is_finite else None


@functools.lru_cache(maxsize=1024)
def parse_key(solution: str) -> Node:
    """The parsed answer key; ValueError where it has no reading."""
    try:
        return parse(answer_key(solution))
    except (UnparsedError, RecursionError) as error:
        raise ValueError(f"answer key {solution[:60]!r} cannot be parsed ({error})") from None
