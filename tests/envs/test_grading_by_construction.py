"""Pairs of answer and label whose verdict is known: a collection by hand, and pairs whose truth follows from how they
are made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from math import gcd
from random import Random

import pytest

from envs.math_reward import grade, label_problem, reward_function
from tests.support.paths import DATA

OPTIONS = ["30", r"$45^\circ$", r"$\frac{\pi}{3}$", "an acute angle", "(E) 90"]


def test_each_pair_of_the_collection_has_its_verdict():
    pairs = [json.loads(line) for line in (DATA / "grading_pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(pairs) == 110
    graded = [(pair, grade(pair["answer"], pair["label"], tolerance=pair.get("tolerance"))) for pair in pairs]
    assert [pair for pair, score in graded if (score == 1.0) != pair["right"]] == []


def test_each_pair_of_the_wide_collection_has_its_verdict():
    pairs = [json.loads(line) for line in (DATA / "grading_more_pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(pairs) > 600
    graded = [(pair, grade(pair["response"], pair["label"], choices=pair.get("choices", ()))) for pair in pairs]
    assert [pair for pair, score in graded if (score == 1.0) != pair["right"]] == []


@pytest.mark.parametrize(
    "label",
    [r"\{x | x > 2\}", r"0.\dot{3}", "0.(3)", "2024年5月1日", "May 1, 2024", "2 pm", r"\langle 1,2\rangle", r"\lg 100",
     r"{4 \choose 2}", "A(1,2)", r"x<1 \cup x>2", r"\log_{10} 100", r"11,\! 111,\! 100", "['A', 'C']"],
)  # fmt: skip
def test_a_label_of_such_a_form_can_be_read(label):
    assert label_problem(label) == ""


@pytest.mark.parametrize(
    "label", [r"\frac{60}{1", "60}", r"\boxed{60", "1/0", r"\frac{1}{0}", "nan", "null", "#### 60", "x="]
)
def test_a_label_that_is_broken_has_a_problem(label):
    assert label_problem(label)


def fractions(rng: Random) -> Iterator[tuple[str, str, bool]]:
    for _ in range(12):
        value = Fraction(rng.randint(1, 400), rng.randint(2, 99))
        factor = rng.randint(2, 9)
        text = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
        yield rf"\frac{{{value.numerator * factor}}}{{{value.denominator * factor}}}", text, True
        yield rf"{value.numerator * factor}/{value.denominator * factor}", text, True
        yield rf"\frac{{{value.numerator * factor + 1}}}{{{value.denominator * factor}}}", text, False
        yield text, repr(value.numerator / value.denominator), True  # a printed float


def tiny_and_huge_numbers(rng: Random) -> Iterator[tuple[str, str, bool]]:
    for _ in range(8):
        power = rng.randint(41, 99)
        yield rf"\frac{{1}}{{2^{{{power}}}}}", rf"2^{{-{power}}}", True
        yield rf"\frac{{1}}{{2^{{{power + 1}}}}}", rf"\frac{{1}}{{2^{{{power}}}}}", False
        yield rf"10^{{{power}}}", f"1e+{power}", True
        yield rf"10^{{{power - 1}}}", f"1e+{power}", False


def ratios(rng: Random) -> Iterator[tuple[str, str, bool]]:
    for _ in range(10):
        terms = [rng.randint(1, 9) for _ in range(rng.choice((2, 3, 4)))]
        factor = rng.randint(2, 5)
        label = ":".join(map(str, terms))
        yield " : ".join(str(term * factor) for term in terms), label, True
        yield ":".join(map(str, [*terms[:-1], terms[-1] + 1])), label, False
        yield ":".join(map(str, [*terms, 1])), label, False


def times(rng: Random) -> Iterator[tuple[str, str, bool]]:
    for _ in range(8):
        hour, minute = rng.randint(1, 11), rng.randint(0, 59)
        label = f"{hour}:{minute:02d}"
        yield label, label, True
        yield rf"{label}\text{{ pm}}", f"{hour + 12}:{minute:02d}", True
        yield f"{hour + 12}:{minute:02d}", label, False
        yield f"{hour}:{(minute + 7) % 60:02d}", label, False


def roots(rng: Random) -> Iterator[tuple[str, str, bool]]:
    for _ in range(10):
        outer, inner = rng.randint(2, 12), rng.choice((2, 3, 5, 6, 7))
        label = rf"{outer}\sqrt{{{inner}}}"
        yield rf"\sqrt{{{outer * outer * inner}}}", label, True
        yield rf"\frac{{{outer * inner}}}{{\sqrt{{{inner}}}}}", label, True
        yield rf"\sqrt{{{outer * outer * inner + 1}}}", label, False
        yield f"{outer * inner**0.5:.3f}", label, False


def lists(rng: Random) -> Iterator[tuple[str, str, bool]]:
    for _ in range(8):
        values = rng.sample(range(-30, 100), rng.randint(2, 4))
        shuffled = rng.sample(values, len(values))
        label = ", ".join(map(str, values))
        yield ", ".join(map(str, shuffled)), label, True
        yield rf"{shuffled[0]}\text{{ and }}{', '.join(map(str, shuffled[1:]))}", label, True
        yield ", ".join(map(str, [*values[:-1], values[-1] + 1])), label, False
        yield str(values[0]), label, False


def intervals(rng: Random) -> Iterator[tuple[str, str, bool]]:
    for _ in range(6):
        a, b, c, d = sorted(rng.sample(range(-20, 40), 4))
        label = rf"({a},{b})\cup[{c},{d})"
        yield rf"{a}<x<{b} \text{{ or }} {c} \le x<{d}", label, True
        yield rf"{a}<x<{b} \text{{ or }} {c}<x<{d}", label, False
        yield rf"x<{a} \text{{ or }} x \ge {b}", rf"(-\infty,{a})\cup[{b},\infty)", True
        yield rf"y \le {a}", rf"x \le {a}", False


def shares(rng: Random) -> Iterator[tuple[str, str, bool]]:
    for _ in range(6):
        percent = rng.randint(1, 99)
        yield rf"{percent}\%", rf"\frac{{{percent}}}{{100}}", True
        yield rf"{percent}\%", str(percent), True
        yield rf"{percent + 1}\%", rf"\frac{{{percent}}}{{100}}", False


def bases(rng: Random) -> Iterator[tuple[str, str, bool]]:
    for _ in range(5):
        number = rng.randint(4, 200)
        yield str(number), f"{number:b}_2", True
        yield rf"{number:o}_{{8}}", f"{number:b}_2", True
        yield str(number + 1), f"{number:b}_2", False


def mixed_numbers(rng: Random) -> Iterator[tuple[str, str, bool]]:
    for _ in range(6):
        whole, below = rng.randint(1, 30), rng.randint(3, 12)
        above = next(n for n in range(below - 1, 0, -1) if gcd(n, below) == 1)
        label = rf"{whole}\frac{{{above}}}{{{below}}}"
        yield rf"\frac{{{whole * below + above}}}{{{below}}}", label, True
        yield rf"\frac{{{whole * above}}}{{{below}}}", label, False


@pytest.mark.parametrize(
    "kind",
    [fractions, tiny_and_huge_numbers, ratios, times, roots, lists, intervals, shares, bases, mixed_numbers],
    ids=lambda kind: kind.__name__,
)
def test_pairs_are_graded_by_the_truth_that_they_were_made_with(kind):
    pairs = list(kind(Random(7)))
    assert [pair for pair in pairs if (grade(rf"\boxed{{{pair[0]}}}", pair[1]) == 1.0) != pair[2]] == []


@pytest.mark.parametrize(
    ("answer", "label", "is_right"),
    [
        ("B", "B", True),
        ("b", "B", True),
        (r"\text{(B)}", "B", True),
        (r"B. $45^\circ$", "B", True),
        (r"\text{Option B: }45", "B", True),
        ("45", "B", True),
        ("45", r"45^\circ", True),
        ("B", r"45^\circ", True),
        ("A", r"45^\circ", False),
        ("B. 30", "B", False),  # the letter of one option with the text of another
        (r"60^\circ", "C", True),
        (r"C. \frac{\pi}{3}", "C", True),
        (r"\text{an acute angle}", "D", True),
        ("D", "an acute angle", True),
        ("90", "E", True),
        ("30", "E", False),
        ("F", "E", False),
        ("46", "B", False),
        ("A, C", "A,C", True),
        ("CA", "A,C", True),
        ("A", "A,C", False),
        ("A, B, C", "A,C", False),
    ],
)
def test_an_option_is_chosen_by_its_letter_its_text_or_both(answer, label, is_right):
    assert grade(rf"\boxed{{{answer}}}", label, choices=OPTIONS) == float(is_right)


@pytest.mark.parametrize(
    ("answer", "label"),
    [("no", "on"), ("cat", "act"), ("BAC", "ABC"), (r"\angle BCA", r"\angle ABC"), ("A", "B"), ("(b, a)", "(a, b)")],
)
def test_words_and_names_of_points_are_no_products_of_their_letters(answer, label):
    assert grade(rf"\boxed{{{answer}}}", label) == 0.0
    assert grade(rf"\boxed{{{label}}}", label) == 1.0


def test_an_angle_may_be_named_from_either_end_and_letters_may_be_multiplied():
    assert grade(r"\boxed{\angle CBA}", r"\angle ABC") == 1.0
    assert grade(r"\boxed{CA}", "AC") == 1.0
    assert grade(r"\boxed{ba}", "ab") == 1.0


def test_a_box_in_the_thoughts_is_no_answer():
    assert reward_function(r"<think>perhaps \boxed{60}</think> I do not know.", "60").outcome == "no_answer"
    assert reward_function(r"perhaps \boxed{60}</think> I do not know.", "60").outcome == "no_answer"
    assert reward_function(r"<think>perhaps \boxed{60}", "60").outcome == "no_answer"
    assert grade(r"<think>\boxed{61}</think> \boxed{60}", "60") == 1.0


def test_several_boxes_in_one_line_are_one_list_if_the_label_is_a_list_of_as_many_values():
    assert grade(r"$x = \boxed{1}$ and $y = \boxed{2}$", "1,2") == 1.0
    assert grade(r"\boxed{1} and \boxed{3}", "1,2") == 0.0
    assert grade("\\boxed{1}\n\n\\boxed{2}", "1,2") == 0.0
    assert grade(r"\boxed{3}, \boxed{1}, \boxed{2}", "1,2") == 0.0


def test_a_decimal_comma_of_a_label_is_read_as_a_point_and_a_short_list_as_a_list():
    assert grade(r"\boxed{60.5}", "60,5") == 1.0
    assert grade(r"\boxed{60, 5}", "60,5") == 1.0
    assert grade(r"\boxed{1.2}", "1,2") == 0.0


@pytest.mark.parametrize(
    "label", ["0.30000000000000004", "100000000000000000000", "是", "A,C", "(B) 30", "1:2:3", "8:05"]
)
def test_labels_of_public_data_can_be_compared_with(label):
    assert label_problem(label) == ""
    assert grade(rf"\boxed{{{label}}}", label) == 1.0
