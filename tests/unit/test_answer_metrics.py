"""Figures of an answer beside the wanted one; ROUGE is rouge-score 0.1.2's without stemming."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from swiftfp8.answer_metrics import METRICS, compare_answers
from swiftfp8.evaluate import Answer, Evaluation, print_evaluation

# answer, wanted, ROUGE-1, -2 and -L that `rouge_score.rouge_scorer` gives
KNOWN = [
    ("the cat sat on the mat", "the cat lay on a mat", 2 / 3, 0.2, 2 / 3),
    ("The quick brown fox!", "a quick, brown dog jumps", 4 / 9, 2 / 7, 4 / 9),
    ("b a", "a b", 1.0, 0.0, 0.5),
    ("yes", "no", 0.0, 0.0, 0.0),
    ("a a a b", "a b b", 4 / 7, 0.4, 4 / 7),
]


@pytest.mark.parametrize(("answer", "wanted", "one", "two", "longest"), KNOWN)
def test_rouge(answer, wanted, one, two, longest):
    found = compare_answers(answer, wanted)
    assert [found[name] for name in ("rouge1", "rouge2", "rougeL")] == pytest.approx(
        [one, two, longest]
    )


def test_blanks_and_reasoning_do_not_count():
    found = compare_answers("<think>\nHm, no.\n</think>\n\nYes,  it is.\n", "Yes, it is.")
    assert found == dict.fromkeys(METRICS, 1.0)
    cut = compare_answers("<think>\nHm, it is", "it is")  # it never came to an answer
    assert cut["exact_match"] == cut["contains"] == cut["rouge1"] == 0.0


def test_an_answer_in_more_words_contains_the_wanted_one():
    found = compare_answers("It is Paris, of course", "Paris")
    assert found["contains"] == 1.0 and found["exact_match"] == 0.0


def test_a_single_word_has_no_pairs_and_is_right_or_wrong():
    assert compare_answers("Paris", "Paris")["rouge2"] == 1.0
    assert compare_answers("Rome", "Paris")["rouge2"] == 0.0


def test_characters_are_words_where_no_blanks_part_them():
    found = compare_answers("我喜欢猫", "我喜欢狗")
    assert found["rouge1"] == pytest.approx(0.75)
    assert found["rouge2"] == pytest.approx(2 / 3)


def test_a_language_of_letters_with_marks():
    assert compare_answers("Grüße aus Köln", "grüße aus Bonn")["rouge1"] == pytest.approx(2 / 3)


def test_answers_that_are_furthest_off_are_shown_first() -> None:
    pairs = [("yes", "yes"), ("it says moo", "it says meow"), ("no", "no"), ("a bell", "a cat")]
    pairs += [("dogs", "it rings")]
    answers = tuple(
        Answer(prompt="?", wanted=wanted, answer=said, metrics=compare_answers(said, wanted))
        for said, wanted in pairs
    )
    means = dict.fromkeys(METRICS, 0.0)
    found = Evaluation(
        source="evaluation rows", rows=5, left_out=0, loss=1.0, metrics=means, answers=answers
    )
    shown = io.StringIO()
    print_evaluation(found, Console(file=shown, width=100))
    said = [line.split(maxsplit=1)[1].strip() for line in shown.getvalue().splitlines()
            if line.startswith("answer")]  # fmt: skip
    assert said == ["dogs", "a bell", "it says moo"]
