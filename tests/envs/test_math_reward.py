"""The math reward: recorded and own cases, boxes, hostile answers, and the worker that can be killed."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from envs.math_grading.normalize import last_box
from envs.math_grading.worker_pool import WorkerFailed, WorkerPool, WorkerTimeout
from envs.math_reward import grade, is_modest, label_problem, reward_function
from tests.support.paths import DATA

SLOW = r"\binom{999999}{499999}"  # a minute's computation


def rows(name):
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("math_reward.jsonl", 45), ("math_cases.jsonl", 595)])
def test_answers_are_graded_by_mathematical_truth(name, count):
    cases = [
        (case.get("response", rf"\boxed{{{case.get('answer')}}}"), case["label"], case.get("truth", case.get("equal")))
        for case in rows(name)
    ]
    assert len(cases) == count
    assert [case for case in cases if (grade(*case[:2]) == 1.0) != case[2]] == []


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \fbox{3}", "3"),
        (r"\fbox{3} then \boxed{1}", "1"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{60}}", "60"),
        (r"\boxed {60}", "60"),
        (r"\boxed 60", "60"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{48\\}", r"48\\"),
        (r"\boxed{60", None),
        (r"\boxed", None),
        ("60", None),
    ],
)
def test_the_last_closed_box_is_the_answer(text, box):
    assert last_box(text) == box


def test_no_box_is_an_outcome_of_its_own():
    assert reward_function("The answer is 60", "60").outcome == "no_answer"
    assert reward_function(r"\boxed{}", "60").outcome == "no_answer"
    assert reward_function(r"\boxed{61}", "60").outcome == "wrong"
    assert reward_function(r"\boxed{60}", "60").outcome == "right"


def test_tolerance_forgives_rounded_labels_only_when_asked():
    assert [grade(r"\boxed{36.87}", "36.9", tolerance=t) for t in (None, 0.0, 0.05)] == [0.0, 0.0, 1.0]
    assert grade(r"\boxed{10\sqrt{3}}", "17.3", tolerance=0.05) == 1.0
    assert grade(r"\boxed{36.8}", "36.9", tolerance=0.05) == 0.0


def test_a_tolerance_of_zero_takes_no_rounding_and_no_other_unit_of_a_share():
    for answer, label in [(r"36.87 \approx 36.9", "36.9"), (r"\approx 36.9", "36.9"), (r"60\%", "60")]:
        assert [grade(rf"\boxed{{{answer}}}", label, tolerance=t) for t in (None, 0.0, 0.05)] == [1.0, 0.0, 1.0]
    for answer, label in [(r"2\sqrt{3} \approx 3.46", r"2\sqrt{3}"), (r"60\text{ cm}", "60"), ("120/2", "60")]:
        assert grade(rf"\boxed{{{answer}}}", label, tolerance=0.0) == 1.0


HEDGES = [  # answers that give several values, each with labels for which one of them would be right
    (r"60.5 \approx 60 \approx 61", ["60", "60.5", "61"]),
    (r"60.5 \approx 60", ["60", "60.5"]),
    (r"0.5 ≈ 0 \approx 1", ["0", "0.5", "1"]),
    (r"40 \approx \frac{397}{10} \approx \frac{404}{10}", ["39.7", "40", "40.4"]),
    (r"0.7 \approx \frac{\sqrt{3}}{2}", ["0.7", r"\frac{\sqrt{3}}{2}"]),
    (r"\frac{1}{2} \approx \frac{2}{5}", ["0.5", "0.4"]),
    (r"-3 \approx 3", ["3", "-3"]),
    (r"60.5 \simeq 60 \doteq 61", ["60", "61"]),
    (r"60.5 \sim 60 \text{ or about } 61", ["60", "61"]),
    (r"x=60 \approx 61", ["x=60", "x=61", "60", "61"]),
    ("60 ≃ 61", ["60", "61"]),
    ("60 ≒ 61", ["60", "61"]),
    ("60 ≅ 61", ["60", "61"]),
    ("60 ≋ 61", ["60", "61"]),
    ("60 ≟ 61", ["60", "61"]),
    (r"61 \equiv 60", ["60", "61"]),
    ("59 ≡ 61 ≡ 60", ["59", "60", "61"]),
    ("x=61=60", ["x=60", "x=61", "60"]),
    (r"x=61 \lor x=60", ["x=60", "x=61"]),
    ("x+y=2=1", ["x+y=1", "x+y=2"]),
    (r"5 := x \le 4 := x \le 3", [r"x \le 3", r"x \le 4"]),
    ("(2,3) = (1,2)", ["(1,2)", "(2,3)"]),
    ("5(3) = 60", ["60", "15"]),
    (r"60^\circ = 60\text{ rad}", [r"60^\circ", r"60\text{ rad}", "60"]),
    (r"60 = 60^\circ", [r"60\text{ rad}"]),
    (r"60\text{ m} \approx 60\text{ cm}", [r"60\text{ m}", r"60\text{ cm}", "60"]),
    (r"60\text{ cm} = 60\text{ cm}^2", [r"60\text{ cm}", r"60\text{ cm}^2"]),
    (r"60\text{ i.e. }3", ["60", "3"]),
    (r"60 \pm 1", ["59", "60", "61"]),
    (r"60 \mp 1", ["59", "60", "61"]),
    (r"60\text{ or }61", ["60", "61"]),
    ("60, 61", ["60", "61"]),
]


@pytest.mark.parametrize(("answer", "labels"), HEDGES)
def test_an_answer_that_leaves_the_choice_of_its_value_to_the_label_is_wrong_for_every_label(answer, labels):
    assert [label for label in labels if grade(rf"\boxed{{{answer}}}", label) == 1.0] == []


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        (r"\sqrt{2} \approx 1.41", r"\sqrt{2}"),
        (r"x = 5\sqrt{3} \approx 8.66", r"5\sqrt{3}"),
        (r"x = \frac{10\sqrt{3}}{2} = 5\sqrt{3} \approx 8.66\text{ cm}", r"5\sqrt{3}\text{ cm}"),
        (r"x \approx 5\sqrt{3} \approx 9", r"5\sqrt{3}"),
        (r"8.66 \approx 5\sqrt{3}", r"5\sqrt{3}"),
        (r"-\sqrt{2} \doteq -1.414", r"-\sqrt{2}"),
        (r"\frac{2}{3} ≈ .67", r"\frac{2}{3}"),
        ("60.5 ≈ 61", "61"),
        ("-2.5 ≈ -3", "-2.5"),
        (r"1,234.5 \approx 1,235", "1234.5"),
        (r"12\pi\text{ cm}^2 \simeq 37.7\text{ cm}^2", r"12\pi\text{ cm}^2"),
        (r"x \equiv 60", "60"),
        (r"2 \pm 1", "3, 1"),
    ],
)
def test_one_correct_rounding_after_the_exact_value_leaves_an_answer_right(answer, label):
    assert grade(rf"\boxed{{{answer}}}", label) == 1.0


@pytest.mark.parametrize(
    "side", ["8.67", "8.65", "8.6", "8", "8.660", "8.661", r"\frac{866}{100}", r"5\sqrt{2}", "-8.66"]
)
def test_a_rounded_side_is_the_nearest_decimal_of_its_places(side):
    assert grade(rf"\boxed{{5\sqrt{{3}} \approx {side}}}", r"5\sqrt{3}") == float(side == "8.660")


def hostile(index: int, rng: Random) -> str:
    """One of many kinds of answers that are made to be slow."""
    n, a = rng.randint(3, 3000), rng.randint(2, 99)
    depth = rng.randint(2, 40)
    return [
        "9^{" * depth + "9" + "}" * depth,
        "{" * n + "60" + "}" * n,
        "(" * n,
        r"\frac{" * n + "1" + "}{2}" * n,
        r"\sqrt{" * n + "2" + "}" * n,
        r"\text{" * n + "60" + "}" * n,
        rf"\sum_{{k=1}}^{{10^{{{a}}}}} k^{{{a}}}",
        "".join(chr(rng.randint(0x80, 0x2FFF)) for _ in range(n)),
        "1" * rng.choice((100, 10_000, 1_000_000)),
        "+".join(["1"] * n),
        f"(x+{a})^{{{a}0}}(y-1)^{{{a}0}}",
        f"{a}!!!!",
        rf"\int_0^{{\infty}} \frac{{\sin(x^{{{a}}})}}{{x^{{{a}}}+1}} dx",
        "a" * 1_000_000,
        f"e^{{e^{{e^{{{a}}}}}}}",
        rf"\prod_{{p=1}}^{{{10**a}}} (1+p^x)",
        "9**9**9**9",
        r"\sin(10^{10^{10}})",
        f"x^{{{a}}}+y^{{{a}}}=z^{{{a}}}",
        ",".join(f"{i}+x^{i % 9}" for i in range(n)),
        r"\begin{pmatrix}" + "&".join(f"x^{i}" for i in range(n % 60)) + rf"\end{{pmatrix}}^{{{a}}}",
        rf"\sqrt{{x^{{{a}}}+\sqrt{{y^9+\sqrt{{z^8+1}}}}}} < \frac{{x+y^7}}{{\sin(z)+\cos(y)}}",
        "x = " * n + "7",
        r"\pm" * n + "3",
    ][index % 24]


@pytest.mark.slow
def test_a_thousand_hostile_answers_are_graded_and_none_is_right():
    rng = Random(0)
    labels = ["60", r"2 \sqrt { 3 }", "x=8", "2x+3", r"x \le 3", "1,200", "x^2+y^2=1", "[1,2)", "acute", "y=2x+3"]
    for index in range(1000):
        before = r"\boxed{" * 100_000 if index % 50 == 0 else ""
        verdict = reward_function(f"{before}\\boxed{{{hostile(index, rng)}}}", rng.choice(labels))
        assert verdict.outcome == "wrong" or index % 24 == 21, index  # that one may take longer than its limit


@pytest.mark.slow
def test_a_comparison_over_its_limit_is_a_timeout_and_the_next_one_works():
    assert is_modest(SLOW)
    assert reward_function(rf"\boxed{{{SLOW}}}", "60", limit_s=0.05).outcome == "timeout"
    assert reward_function(r"\boxed{x \geq -1 + 0}", r"[-1,\infty)", limit_s=30.0).outcome == "right"


def test_a_text_of_spaces_or_of_brackets_costs_nothing():
    started = time.process_time()
    for text in ("^" + " " * 1_000_000, "{" * 100_000, r"\text{" * 100_000, "1," * 100_000):
        assert label_problem(text)
        assert grade(rf"\boxed{{{text}}}", "60") == 0.0
    assert time.process_time() - started < 2.0


USABLE = ["60", r"5 \sqrt { 3 }", r"x \le 3", r"\frac {2} {3}", "60 cm", "acute", "x+y=1", r"1 \pm \sqrt{2}", "(1,2)"]
UNUSABLE = [r"\frac{1}{", " ", 7, "x" * 700, "1 +"]


@pytest.mark.parametrize("label", [*USABLE, *UNUSABLE])
def test_labels_that_cannot_be_compared_with_are_named_and_no_others(label):
    assert bool(label_problem(label)) == (label in UNUSABLE)


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Makes a pool of one process that runs a given source as its module."""
    pools = []

    def make(body):
        name = f"worker_{tmp_path.name}_{len(pools)}"
        (tmp_path / f"{name}.py").write_text(body, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        pools.append(WorkerPool(name, size=1))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_a_hanging_call_is_killed_in_time_and_leaves_no_process(worker):
    body = "import os, time\ndef handle(request):\n    time.sleep(request)\n    return os.getpid()\n"
    pool = worker(body)
    pid = pool.call(0, 30.0)
    with pytest.raises(WorkerTimeout):
        pool.call(10_000, 0.2)
    assert not Path(f"/proc/{pid}").exists()
    pid = pool.call(0, 30.0)
    os.kill(pid, signal.SIGKILL)  # while it is idle: the next call does not notice
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert pool.call(0, 30.0) not in (pid, os.getpid())


@pytest.mark.slow
def test_a_computing_call_is_ended_by_its_processor_time(worker):
    pool = worker("def handle(request):\n    while request:\n        pass\n    return 'well'\n")
    with pytest.raises(WorkerTimeout):
        pool.call(1, 0.2)
    assert pool.call(0, 30.0) == "well"


def test_a_dying_worker_is_an_error_of_its_call_only(worker):
    body = "import os\ndef handle(request):\n    print('noise')\n    if request: os._exit(3)\n    return 'well'\n"
    pool = worker(body)
    with pytest.raises(WorkerFailed):
        pool.call(1, 30.0)
    assert pool.call(0, 30.0) == "well"
    with pytest.raises(RuntimeError, match="did not start"):  # never taken for a wrong answer
        worker("raise ImportError('broken')\n").call(0, 30.0)


def test_many_threads_share_a_few_workers(worker):
    pool = worker("def handle(request):\n    return request * 2\n")
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda number: pool.call(number, 30.0), range(8))) == list(range(0, 16, 2))
