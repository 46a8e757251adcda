"""Every estimator against numbers known beforehand and against brute force; intervals against the truth; refusals.
No model, no torch.

    pytest tests/test_scores.py          # CPU, offline, a few seconds
"""

import doctest
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks import scores
from benchmarks.scores import (
    codeforces,
    contest_rank,
    contest_rating,
    interval,
    maj_at_k,
    pass_at_k,
    read_standings,
    summarise,
)

FIELD = range(1000, 3010, 10)  # old ratings of 201 participants


def line(name: str, sample: int, score: float = 0.0, answer: str | None = "1", **rest) -> dict:
    verdict = "no_answer" if answer is None else "right" if score else "wrong"
    return {"benchmark": "toy", "id": name, "sample": sample, "response": "...", "answer": answer, "score": score,
            "verdict": verdict, "tokens": 10, "finish_reason": "stop", **rest}  # fmt: skip


def test_examples_in_docstrings():
    assert doctest.testmod(scores).failed == 0


@pytest.mark.parametrize("n, c, k, value", [
    (32, 8, 1, 0.25), (32, 8, 8, 0.930077), (32, 1, 8, 0.25), (8, 2, 4, 0.785714), (4, 0, 4, 0.0), (4, 4, 1, 1.0),
    (4, 1, 4, 1.0),
])  # fmt: skip
def test_pass_at_k_known_values(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-6)


def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_answer():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            hits = [any(i < c for i in subset) for subset in itertools.combinations(range(n), k)]
            assert pass_at_k(n, c, k) == pytest.approx(np.mean(hits))


@pytest.mark.parametrize("n, c, k, sentence", [
    (4, 2, 8, "pass@8 needs 8 answers to each problem, but there are 4"), (4, 2, 0, "pass@0 makes no sense"),
    (4, 5, 1, "5 right answers among 4"), (4, -1, 1, "-1 right answers among 4"),
])  # fmt: skip
def test_pass_at_k_refuses(n, c, k, sentence):
    with pytest.raises(ValueError, match=sentence):
        pass_at_k(n, c, k)


def test_pass_at_k_of_scores_between_0_and_1_is_the_mean_best_of_all_subsets():
    rng = random.Random(0)
    for n in range(1, 7):
        row = [rng.choice([0, 0.25, 0.5, 1, rng.random()]) for _ in range(n)]
        for k in range(2, n + 1):
            best = np.mean([max(subset) for subset in itertools.combinations(row, k)])
            assert summarise([line("a", i, s) for i, s in enumerate(row)], [k])[f"pass@{k}"] == pytest.approx(best)


@pytest.mark.parametrize("answers, right, k, value", [
    (["4", "5", "5"], [1, 0, 0], 3, 0),
    (["4", "5", "5"], [1, 0, 0], 1, 1),  # the first k only
    (["4", "5", "5", "4"], [1, 0, 0, 1], 4, 1),  # a tie goes to the one that appears first
    (["5", "4", "4", "5"], [0, 1, 1, 0], 4, 0),
    (["1/2", "0.5", "3", "3"], [1, 1, 0, 0], 4, 0),  # equal strings, not equal numbers
    (["3", "3"], [0, 1], 2, 0),  # the first element's score
    ([None, None, None, "4"], [0, 0, 0, 1], 4, 1),  # no answer is not voted for
    ([None, "4", None], [0, 1, 0], 1, 0),
    ([None, None], [0, 0], 2, 0),
    (["", "", "4"], [0, 0, 1], 3, 0),  # an empty string was extracted and is an answer
    (["a"], [0.5], 1, 0.5),
])  # fmt: skip
def test_maj_at_k(answers, right, k, value):
    assert maj_at_k(answers, right, k) == value


def test_maj_at_k_against_counting_all_groups_anew():
    for answers in itertools.product(["a", "b", "c", None], repeat=5):
        for k in range(1, 6):
            head = [answer for answer in answers[:k] if answer is not None] or [None]
            winner = sorted(head, key=lambda answer: (-head.count(answer), head.index(answer)))[0]
            marks = [0.1 * i for i in range(5)]  # tells which element was taken
            assert maj_at_k(answers, marks, k) == marks[answers.index(winner)]


@pytest.mark.parametrize("k, sentence", [(3, "maj@3 needs 3 answers to each problem, but there are 2"), (0, "maj@0")])
def test_maj_at_k_refuses(k, sentence):
    with pytest.raises(ValueError, match=sentence):
        maj_at_k(["1", "2"], [0, 1], k)


@pytest.mark.parametrize("n, a, b, samples", [
    (5, 2, 2, 8), (10, 0.1, 2, 8), (30, 0.3, 0.3, 8), (30, 2, 0.1, 1), (30, 0.5, 4, 32), (100, 1, 1, 1),
])  # fmt: skip
def test_interval_of_95_percent_covers_the_truth(n, a, b, samples):
    """Problems whose pass rates are beta(a, b), so the truth is a / (a + b), and `samples` answers to each."""
    rng, covered, plain = np.random.default_rng(1), 0, 0
    for _ in range(300):
        values = rng.binomial(samples, rng.beta(a, b, n)) / samples
        low, high = interval(values, draws=1000)
        covered += low - 1e-9 <= a / (a + b) <= high + 1e-9
        low, high = np.quantile(rng.choice(values, (1000, n)).mean(1), [0.025, 0.975])
        plain += low - 1e-9 <= a / (a + b) <= high + 1e-9
    assert 270 <= covered <= (300 if n < 30 or samples == 1 else 297)  # few problems: rather too wide than too narrow
    if n == 10:
        assert plain < 225  # what the two made-up problems are there for


def test_interval_narrows_with_problems_and_level():
    values = [0.0, 0.25, 0.5, 1.0]
    widths = [np.subtract(*interval(values * n)[::-1]) for n in (1, 4, 16, 64)]
    assert all(wide > 1.7 * narrow for wide, narrow in itertools.pairwise(widths))
    low, high = interval(values * 64)
    assert high - low == pytest.approx(2 * 1.96 * np.std(values) / 16, rel=0.05)  # of many: the normal one
    inner = interval(values * 4, level=0.5)
    assert interval(values * 4)[0] < inner[0] < np.mean(values) < inner[1] < interval(values * 4)[1]


@pytest.mark.parametrize("n", [1, 2, 5, 30, 500])
def test_interval_of_equal_values_claims_no_certainty(n):
    low, high = interval([0.0] * n)
    assert low == 0 and 1 - 0.025 ** (1 / n) <= 1.5 * high and high > 2 / (n + 2)  # Clopper-Pearson at most half wider
    low, high = interval([1.0] * n)
    assert high == 1 and low < 1 - 2 / (n + 2)
    low, high = interval([0.25] * n)
    assert low < 0.25 < high
    assert interval([1.0]) == (0, 1)


def test_interval_is_a_function_of_its_values_and_includes_their_mean():
    rng = np.random.default_rng(0)
    for n, level in itertools.product((1, 2, 7, 40), (0.01, 0.5, 0.95)):
        values = rng.random(n) ** 4
        low, high = interval(values, level=level, draws=500)
        assert 0 <= low <= values.mean() <= high <= 1
        assert interval(rng.permutation(values), level=level, draws=500) == pytest.approx((low, high), abs=1e-12)
    assert interval([0.1, 0.9, 0.5]) == interval([0.5, 0.1, 0.9])
    assert interval(values, seed=1) != interval(values, seed=2)
    many = interval(rng.random(30_000), draws=50)  # drawn in pieces
    assert 0.49 < many[0] < many[1] < 0.51


@pytest.mark.parametrize("values", [[], [0.5, 1.5], [-0.1], [math.nan]])
def test_interval_refuses(values):
    with pytest.raises(ValueError, match="values of one problem at least, all of them from 0 to 1"):
        interval(values)


def test_summary_known_values():
    answers = [
        line("a", 0, 0, "5", tokens=100), line("a", 1, 1, "4", tokens=20), line("a", 2, 1, "4", tokens=30),
        line("a", 3, 0, None, tokens=200, finish_reason="length"),
        line("b", 0, 0, "7", tokens=10), line("b", 1, 0, "7", tokens=10), line("b", 2, 0, "x", verdict="unparsed"),
        line("b", 3, 1, "8", tokens=20),
    ]  # fmt: skip
    summary = summarise(answers, [1, 2, 4], [1, 4])
    low, high = interval([0.5, 0.25])
    assert summary == {
        "problems": 2, "samples": 4, "pass@1": 0.375, "interval": [low, high],
        "pass@2": pytest.approx((5 / 6 + 1 / 2) / 2), "pass@4": 1.0, "maj@1": 0.0, "maj@4": 0.5, "length": 50.0,
        "truncated": 0.125, "no_answer": 0.125,
        "verdicts": {"no_answer": 1, "right": 3, "unparsed": 1, "wrong": 3},
    }  # fmt: skip
    assert json.loads(json.dumps(summary)) == summary
    assert list(summarise(answers))[2:5] == ["pass@1", "interval", "length"]


@pytest.mark.parametrize("problems", range(1, 18))
@pytest.mark.parametrize("workers", range(1, 5))
def test_shares_of_any_number_of_workers_in_any_order_are_one_summary(problems, workers):
    rng = random.Random(problems)
    answers = [line(f"p{i}", j, rng.random(), rng.choice(["1", "2", None]), tokens=rng.randrange(9))
               for i in range(problems) for j in range(3)]  # fmt: skip
    whole = summarise(answers, [1, 3], [3])
    shares = [answers[rank::workers] for rank in range(workers)]
    rng.shuffle(shares)
    assert summarise(sum(shares, []), [1, 3], [3]) == whole and whole["problems"] == problems
    again = rng.choice(answers)
    with pytest.raises(ValueError, match=f"toy, problem '{again['id']}': sample {again['sample']} is there twice"):
        summarise([*sum(shares, []), dict(again)])
    if problems > 1:
        with pytest.raises(ValueError, match=f"toy, problem '{again['id']}': 2 answers, but other problems have 3"):
            summarise([answer for answer in answers if answer is not again])


@pytest.mark.parametrize("answers, options, sentence", [
    ([], {}, "no answers"),
    ([line("a", 0), line("b", 0, benchmark="other")], {}, "these answers are of other and toy"),
    ([line("a", 0), line("a", 1), line("a", 1)], {}, "problem 'a': sample 1 is there twice"),
    ([line("a", 0), line("a", 1), line("b", 0)], {}, "problem 'b': 1 answers, but other problems have 2"),
    ([line("a", 0), line("a", 1)], {"ks": [1, 4]}, "pass@4 needs 4 answers to each problem, but there are 2"),
    ([line("a", 0), line("a", 1)], {"majority": [3]}, "maj@3 needs 3 answers to each problem, but there are 2"),
    ([line("a", 0)], {"ks": [0]}, "k counts answers"),
    ([line("a", 0, math.nan)], {}, "sample 0 has the score nan"),
    ([line("a", 0, -5.0)], {}, "sample 0 has the score -5.0, not one from 0 to 1"),
])  # fmt: skip
def test_summary_refuses_in_a_sentence(answers, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        summarise(answers, **options)


# -- Codeforces --------------------------------------------------------------------------------------------------------


def standings(**contests) -> dict:
    """Like a file's content; 201 participants with 2010, 2000, ... 10 points."""
    rows = [[2010 - 10 * i, 0, 3000 - 10 * i] for i in range(201)]
    filled = {name: {"problems": problems, "rows": list(rows)} for name, problems in contests.items()}
    return {"ratings": list(range(4000)), "contests": filled}


def write(folder: Path, data) -> Path:
    path = folder / "standings.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


@pytest.mark.parametrize("rank, rating", [(0, 3099), (1, 3099), (50, 2525), (100, 2015), (200, 629)])
def test_contest_rating_known_values(rank, rating):
    assert contest_rating(rank, FIELD) == contest_rating(rank, list(FIELD)[::-1]) == rating


def test_contest_rating_is_the_highest_whose_expected_rank_is_not_better():
    rng = random.Random(0)
    for _ in range(5):
        old = [rng.randrange(-50, 900) for _ in range(30)]
        for rank in (1, 2, 11, 30):
            fit = [m for m in range(max(old) + 100)
                   if 1 + sum(1 / (1 + 10 ** ((m - one) / 400)) for one in old) >= rank]  # fmt: skip
            assert contest_rating(rank, old) == max(fit, default=0)
    assert contest_rating(2, [1000, 1000]) == 1000  # an expected rank of 2 exactly


@pytest.mark.parametrize("points, penalty, rank", [
    (400, 0, 0), (300, 0, 0), (300, 10, 1), (300, 11, 1), (250, 0, 1), (200, 19, 1), (200, 20, 2), (200, 30, 3),
    (0, 0, 3), (-1, 0, 4),
])  # fmt: skip
def test_contest_rank_is_the_index_of_the_first_row_that_is_worse(points, penalty, rank):
    assert contest_rank([(300, 10, 0), (200, 20, 0), (200, 30, 0), (0, 5, 0)], points, penalty) == rank


def test_points_shrink_by_50_a_failed_try_and_a_rating_is_the_mean_of_contests():
    field = standings(c1={"1A": 500, "1B": 1000, "1C": 1500}, c2={"2A": 60, "2B": 551, "2C": 3000}, c3={"3A": 500})
    tries = {"1A": [False, True, False, True], "1B": [False] * 4, "1C": [True, False, False, False]}  # 450 + 0 + 1500
    tries |= {"2A": [False, False, True, True], "2B": [False, True]}  # 60 - 100 < 0, and 501; 3A was not asked
    result = codeforces(field, tries)
    ranks = {"c1": 7, "c2": 151}  # 1950: behind 2010, ..., 1950; 501: before 500
    assert result["contests"] == {name: {"rank": rank, "rating": contest_rating(rank, FIELD)}
                                  for name, rank in ranks.items()}  # fmt: skip
    assert result["rating"] == (contest_rating(7, FIELD) + contest_rating(151, FIELD)) / 2
    assert result["rating"] == 2297 and result["percentile"] == 57.4  # 2297 of 4000 users are below
    assert result["skipped"] == {}
    assert json.loads(json.dumps(result)) == result


def test_without_points_a_problem_counts_1_and_a_failed_try_costs_a_penalty_of_10():
    field = standings(c={"A": None, "B": None, "C": None})
    field["contests"]["c"]["rows"] = [[2, i, 1000 + i] for i in range(205)]
    result = codeforces(field, {"A": [False, True], "B": [False, False, False, True], "C": [False]})
    assert result["contests"]["c"]["rank"] == 41  # 2 solved, penalty 10 + 30: behind 0, 1, ..., 40
    assert codeforces(field, {"A": [], "B": [True], "C": []})["contests"]["c"]["rank"] == 205


def test_percentile_counts_ratings_below_in_percent_with_one_decimal():
    field = standings(c={"A": 2030})
    rating = codeforces(field, {"A": [True]})["rating"]
    assert rating == 3099
    for ratings, percentile in (([3099, 4000], 0.0), ([1000, 3099, 3100], 33.3), ([1, 2, 3098], 100.0)):
        assert codeforces({**field, "ratings": ratings}, {"A": [True]})["percentile"] == percentile


def test_small_contests_and_unknown_problems_are_skipped_with_a_reason():
    field = standings(c1={"A": 500}, c2={"B": 500})  # 201 participants each, of which c2 loses one
    del field["contests"]["c2"]["rows"][200]
    result = codeforces(field, {"A": [True], "B": [True], "Z": [True]})
    assert list(result["contests"]) == ["c1"]
    assert result["skipped"] == {"Z": "in no contest of the standings", "c2": "200 participants, 201 are needed"}
    with pytest.raises(ValueError, match=r"no contest to rate the model in \(c2: 200 participants"):
        codeforces(field, {"B": [True]})
    with pytest.raises(ValueError, match="no problem was asked"):
        codeforces(field, {})


def test_standings_are_read_in_any_order_of_rows_and_ratings(tmp_path):
    field = standings(c={"A": 400, "B": None})
    field["contests"]["c"]["rows"] += [[100, penalty, 1500] for penalty in (20, 5)]
    shuffled = json.loads(json.dumps(field))
    random.Random(0).shuffle(shuffled["ratings"])
    random.Random(0).shuffle(shuffled["contests"]["c"]["rows"])
    got = read_standings(write(tmp_path, shuffled))
    assert got["ratings"] == field["ratings"] and got["contests"]["c"]["problems"] == {"A": 400, "B": None}
    assert [row[:2] for row in got["contests"]["c"]["rows"]][-12:-8] == [[100, 0], [100, 5], [100, 20], [90, 0]]
    tries = {"A": [False, True]}  # 350 points: behind 2010, ..., 350
    assert codeforces(got, tries)["contests"]["c"]["rank"] == 167


def broken(**change) -> dict:
    field = standings(c7={"A": 500})
    field["contests"]["c7"].update(change)
    return field


@pytest.mark.parametrize("data, sentence", [
    ("{", "not JSON"),
    ([], '"ratings" must be the list'),
    ({"contests": {}}, '"ratings" must be the list'),
    ({"ratings": [], "contests": {}}, '"ratings" must be the list'),
    ({"ratings": ["1500"], "contests": {}}, '"ratings" must be the list'),
    ('{"ratings": [NaN], "contests": {}}', '"ratings" must be the list'),
    ({"ratings": [1], "contests": {}}, '"contests" must hold a contest at least'),
    ({"ratings": [1], "contests": [1]}, '"contests" must hold a contest at least'),
    ({"ratings": [1], "contests": {"c7": 3}}, 'contest c7: "problems" must give'),
    (broken(problems=["A"]), 'contest c7: "problems" must give each problem its points, or null'),
    (broken(problems={"A": "500"}), 'contest c7: "problems" must give'),
    (broken(rows=None), 'contest c7: row 0 of "rows" must be'),
    (broken(rows=[[1, 0, 1500], [1, 0]]), r'contest c7: row 1 of "rows" must be \[points, penalty, old rating\]'),
    (broken(rows=[[1, 0, 1500.5]]), "contest c7: row 0 .* the last whole"),
    (broken(rows=[[1, None, 1500]]), "contest c7: row 0"),
    (broken(rows=[[True, 0, 1500]]), "contest c7: row 0"),
    (standings(c7={"A": 1}, c8={"A": 1}), "contest c8: problem A belongs to contest c7 already"),
])  # fmt: skip
def test_a_malformed_file_is_refused_with_its_path_and_contest(tmp_path, data, sentence):
    path = write(tmp_path, data)
    with pytest.raises(ValueError, match=sentence) as caught:
        read_standings(path)
    assert str(caught.value).startswith(f"{path}: ")
