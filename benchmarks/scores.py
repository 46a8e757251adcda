"""From judged answers to numbers: pass@1 with an interval, pass@k, maj@k, lengths, and a Codeforces rating.

An answer is a line of answers.jsonl as a dict: benchmark, id (of the problem), sample (number of the try), answer (what
was extracted, or None), score (0 to 1), verdict, tokens, finish_reason ("length": cut by the budget).

Left out, and why: judging (the verifiers of `reward.py` did), several benchmarks in one mean (they have no common
unit), whether two models differ (that needs pairs of answers, not two summaries), and the standings of Codeforces (they
are not ours to hand on; `read_standings` says what a file must hold).

    pytest tests/test_scores.py
"""

import bisect
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SMALLEST_CONTEST = 201  # rows; a rating from fewer is not computed
TRY_POINTS, TRY_PENALTY = 50, 10  # what each failed try before the first right one costs


def _check_k(name: str, n: int, k: int) -> None:
    if k < 1:
        raise ValueError(f"{name}@{k} makes no sense: k counts answers, from 1 on")
    if n < k:
        raise ValueError(f"{name}@{k} needs {k} answers to each problem, but there are {n}")


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k answers is right, drawn without replacement from n of which c are; unbiased.

    >>> round(pass_at_k(8, 2, 4), 6)
    0.785714
    """
    _check_k("pass", n, k)
    if not 0 <= c <= n:
        raise ValueError(f"{c} right answers among {n} cannot be")
    return 1.0 if n - c < k else 1.0 - math.prod(1 - k / i for i in range(n - c + 1, n + 1))


def _best_of_k(scores: Sequence[float], k: int) -> float:
    """Expected best score of k answers: `pass_at_k` for scores 0 and 1, the mean for k = 1. Each level that scores take
    adds its height times the probability that one of the k reaches it, so no score must be called right or wrong."""
    levels = sorted({0.0, *scores})
    return sum((level - below) * pass_at_k(len(scores), sum(score >= level for score in scores), k)
               for below, level in zip(levels, levels[1:], strict=False))  # fmt: skip


def maj_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """Score of the majority of the first k answers: of the largest group of equal strings (of equally large ones, the
    one that appears first) its first element's. None, no answer, is not voted for: it wins only if all k are None.

    >>> maj_at_k(["4", "5", "5.0", "5"], [0, 1, 1, 1], 4)
    1.0
    """
    _check_k("maj", len(answers), k)
    votes = Counter(answer for answer in answers[:k] if answer is not None)  # keeps the order of appearance
    winner = votes.most_common(1)[0][0] if votes else None
    return float(scores[answers.index(winner)])


def interval(values: Sequence[float], level: float = 0.95, draws: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """Interval for the mean over all problems of a kind, from the means of some, each 0 to 1: a percentile bootstrap
    over these problems and two made-up ones, one that is never solved and one that always is.

    Problems are drawn, not answers: more samples of 30 problems do not make them 300. The made-up ones stand for what
    few problems cannot show. Without them equal values give a width of 0, and 10 problems with a mean of 0.05 an
    interval of 95 % that misses the truth in 30 % of cases; with them it misses in 7 % at most, of 5 problems in 12 %
    (simulated). No case is special: 30 of 30 wrong give 0 to 0.094 (Clopper-Pearson: 0.116), one problem gives 0 to 1.
    The two weigh 2 in n + 2 and vanish. The mean is always inside; the order of the values does not matter.
    """
    values = np.sort(np.asarray(values, float))
    if not len(values) or not ((values >= 0) & (values <= 1)).all():
        raise ValueError("an interval needs the values of one problem at least, all of them from 0 to 1")
    drawn, rng = np.array([0.0, *values, 1.0]), np.random.default_rng(seed)
    rows = max(1, 1_000_000 // len(drawn))  # at a time, so that memory does not grow with the number of problems
    means = np.concatenate([rng.choice(drawn, (min(rows, draws - start), len(drawn))).mean(1)
                            for start in range(0, draws, rows)])  # fmt: skip
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(min(low, values.mean())), float(max(high, values.mean()))


def summarise(answers: Sequence[dict], ks: Sequence[int] = (1,), majority: Sequence[int] = ()) -> dict:
    """The numbers of one benchmark, whatever the order of its answers.

    problems, samples (of each), pass@1 (mean score), interval [low, high] of it, pass@k for `ks` (scores between 0 and
    1: the expected best of k), maj@k for `majority`, length (mean tokens), truncated and no_answer (shares of answers),
    verdicts {name: count}. ValueError without answers, for several benchmarks, an answer that occurs twice, a problem
    with fewer than others, and a k that is too large.
    """
    if not answers:
        raise ValueError("there are no answers to summarise")
    names = sorted({answer["benchmark"] for answer in answers})
    if len(names) > 1:
        raise ValueError(f"a summary is of one benchmark, but these answers are of {' and '.join(names)}")
    answers = sorted(answers, key=lambda answer: (answer["id"], answer["sample"]))
    problems: dict[str, list[dict]] = {}
    for answer in answers:
        tries, where = problems.setdefault(answer["id"], []), f"{names[0]}, problem {answer['id']!r}"
        if tries and tries[-1]["sample"] == answer["sample"]:
            raise ValueError(f"{where}: sample {answer['sample']} is there twice")
        if not 0 <= answer["score"] <= 1:
            raise ValueError(f"{where}: sample {answer['sample']} has the score {answer['score']}, not one from 0 to 1")
        tries.append(answer)
    samples = max(map(len, problems.values()))
    for name, tries in problems.items():
        if len(tries) < samples:
            raise ValueError(f"{names[0]}, problem {name!r}: {len(tries)} answers, but other problems have {samples}")
    for kind, numbers in (("pass", ks), ("maj", majority)):
        for k in numbers:
            _check_k(kind, samples, k)
    scores = [[answer["score"] for answer in tries] for tries in problems.values()]
    texts = [[answer["answer"] for answer in tries] for tries in problems.values()]
    means = [float(np.mean(row)) for row in scores]
    verdicts = Counter(answer["verdict"] for answer in answers)
    return {
        "problems": len(problems),
        "samples": samples,
        "pass@1": float(np.mean(means)),
        "interval": list(interval(means)),
        **{f"pass@{k}": float(np.mean([_best_of_k(row, k) for row in scores])) for k in ks if k > 1},
        **{f"maj@{k}": float(np.mean([maj_at_k(*pair, k) for pair in zip(texts, scores, strict=True)]))
           for k in majority},
        "length": float(np.mean([answer["tokens"] for answer in answers])),
        "truncated": float(np.mean([answer["finish_reason"] == "length" for answer in answers])),
        "no_answer": verdicts["no_answer"] / len(answers),
        "verdicts": dict(sorted(verdicts.items())),
    }  # fmt: skip


# -- Codeforces: the rating of a participant who would have had the model's rank ---------------------------------------


def read_standings(path: str | Path) -> dict:
    """Reads the standings that you supply, JSON of this form:

        {"ratings": [1502, 987, ...],                             ratings of all users, for the percentile
         "contests": {"1842": {"problems": {"1842A": 500, ...},   points, or null where a contest has none
                               "rows": [[4250, 0, 2810], ...]}}}  points, penalty, old rating of a participant

    A row is a participant who is in `contest.standings` and in `contest.ratingChanges` of the Codeforces API. A problem
    has one contest: what two divisions share has two ids. Returns the same with ratings ascending and rows from the
    best (most points, then least penalty) down. Raises ValueError with the path, the contest and what is wrong.
    """

    def number(value, kinds: tuple = (int, float)) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)

    def refuse(sentence: str):
        raise ValueError(f"{path}: {sentence}")

    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        refuse(f"not JSON ({error})")
    ratings, contests = (data.get(name) if isinstance(data, dict) else None for name in ("ratings", "contests"))
    if not isinstance(ratings, list) or not ratings or not all(map(number, ratings)):
        refuse('"ratings" must be the list of all users\' ratings, numbers')
    if not isinstance(contests, dict) or not contests:
        refuse('"contests" must hold a contest at least, by its id')
    result, owner = {}, {}
    for name, contest in contests.items():
        problems, rows = (contest.get(key) if isinstance(contest, dict) else None for key in ("problems", "rows"))
        if not isinstance(problems, dict) or not all(p is None or number(p) for p in problems.values()):
            refuse(f'contest {name}: "problems" must give each problem its points, or null')
        for problem in problems:
            if owner.setdefault(problem, name) != name:
                refuse(f"contest {name}: problem {problem} belongs to contest {owner[problem]} already")
        for index, row in enumerate(rows if isinstance(rows, list) else [rows]):
            if not isinstance(row, list) or len(row) != 3 or not all(map(number, row)) or not number(row[2], (int,)):
                refuse(f'contest {name}: row {index} of "rows" must be [points, penalty, old rating], the last whole')
        result[name] = {"problems": problems, "rows": sorted(rows, key=lambda row: (-row[0], row[1]))}
    return {"ratings": sorted(ratings), "contests": result}


def contest_rank(rows: Sequence[Sequence[float]], points: float, penalty: float) -> int:
    """0-based index of the first row, from the best down, with fewer points, or as many and a larger penalty; a tie is
    thus lost. Behind all rows it is their number."""
    worse = (i for i, row in enumerate(rows) if row[0] < points or (row[0] == points and row[1] > penalty))
    return next(worse, len(rows))


def contest_rating(rank: int, old_ratings: Sequence[int]) -> int:
    """The rating at which a participant's expected rank among these is `rank`; by bisection in whole numbers from 0 to
    the best rating + 100, of which the lower end is the answer. Ranks 0 and 1 give the top of that range.

    >>> contest_rating(100, range(1000, 3010, 10))
    2015
    """
    old = np.asarray(old_ratings, float)
    bottom, top = 0, int(max(old_ratings)) + 100
    while top - bottom > 1:
        middle = (bottom + top) // 2
        if 1 + (1 / (1 + 10 ** ((middle - old) / 400))).sum() < rank:
            top = middle
        else:
            bottom = middle
    return bottom


def codeforces(standings: dict, passed: dict[str, Sequence[bool]]) -> dict:
    """The model as a participant of each contest of which it was asked a problem; the others of that contest count as
    unsolved. passed: for each problem whether the samples, in their order, pass all tests. They are taken as tries: the
    first that passes counts max(0, points - 50 a failed try), or 1 and a penalty of 10 a failed try without points.

    Returns rating (mean over contests), percentile (% of users rated below it), contests {id: {"rank", "rating"}} and
    skipped {id of a contest or problem: why}. Raises ValueError if nothing is left to rate.
    """
    known = {problem for contest in standings["contests"].values() for problem in contest["problems"]}
    contests, skipped = {}, {problem: "in no contest of the standings" for problem in passed if problem not in known}
    for name, contest in standings["contests"].items():
        asked = {problem: worth for problem, worth in contest["problems"].items() if problem in passed}
        if asked and len(contest["rows"]) < SMALLEST_CONTEST:
            skipped[name] = f"{len(contest['rows'])} participants, {SMALLEST_CONTEST} are needed"
        elif asked:
            points = penalty = 0
            for problem, worth in asked.items():
                first = next((i for i, right in enumerate(passed[problem]) if right), None)
                if first is not None:
                    points += 1 if worth is None else max(0, worth - TRY_POINTS * first)
                    penalty += TRY_PENALTY * first if worth is None else 0
            rank = contest_rank(contest["rows"], points, penalty)
            contests[name] = {"rank": rank, "rating": contest_rating(rank, [row[2] for row in contest["rows"]])}
    if not contests:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(skipped.items())[:5]) or "no problem was asked"
        raise ValueError(f"there is no contest to rate the model in ({reasons})")
    rating = sum(contest["rating"] for contest in contests.values()) / len(contests)
    below = bisect.bisect_left(standings["ratings"], rating) / len(standings["ratings"])
    return {"rating": rating, "percentile": round(below * 100, 1), "contests": contests, "skipped": skipped}
