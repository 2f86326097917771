"""Reads answers to multiple-choice questions: the letter of an option, its text, or both."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from string import ascii_uppercase

from envs.math_grading.plain_values import values_of

_LEAD = (
    r"(?:(?:the )?(?:correct |right |final )?(?:option|choice|answer)s? ?(?:is|are)?:? ?"
    r"|(?:故|应)?(?:正确)?(?:答案|选项?|选择)(?:应?[是为])?:? ?)?"
)
_LETTER = re.compile(rf"{_LEAD}(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Za-z])[.:)]?)", re.IGNORECASE)
_WITH_TEXT = re.compile(
    rf"{_LEAD}(?:\(([A-J])\)|\[([A-J])\]|([A-J])(?: ?[.:)、,](?! ?[A-J]\b)| -(?= )| (?=[-\d\\]))) *(?![.:)])(.*\S)",
    re.IGNORECASE | re.DOTALL,
)
_SEVERAL = re.compile(rf"{_LEAD}((?:(?:\([A-J]\)|\[[A-J]\]|[A-J]\.?)(?: ?(?:,|;|&|、|and|和) ?)* ?)+)", re.IGNORECASE)
_WRITTEN_LIST = re.compile(r"\[ ?(['\"])[A-J]\1(?:, ?(['\"])[A-J]\2)* ?\]")


def option_of(text: str) -> tuple[str, str]:
    """Return the letter that a normalized text chooses, in upper case, and the text after it, such as ("B", "30") for
    "(B) 30"; ("", text) if it has no such form."""
    if match := _LETTER.fullmatch(text):
        return "".join(filter(None, match.groups())).upper(), ""
    if match := _WITH_TEXT.fullmatch(text):
        return "".join(filter(None, match.groups()[:3])).upper(), match[4]
    return "", text


def letters_of(text: str) -> frozenset[str]:
    """Return the letters of a text that chooses two or more options, such as "A, C", "(A) and (C)" or "AC"; empty if it
    does not. Letters without a separator must be capitals, each once."""
    match = _SEVERAL.fullmatch(text)
    if match is None:
        return frozenset()
    letters = re.findall(r"[A-J]", match[1].replace("and", ","), re.IGNORECASE)
    if len(letters) < 2 or len(set(letters)) < len(letters) or not (has_separators(text) or match[1].isupper()):
        return frozenset()
    return frozenset(letter.upper() for letter in letters)


def has_chosen(answer: str, label: str, choices: Sequence[str], equal: Callable[[str, str], bool]) -> bool | None:
    """Tell whether an answer chooses the option that the label means; None if the label means no option.

    `answer`, `label` and the texts of the options, `choices`, are normalized; `equal(answer, text)` compares two of
    them. An option is chosen by its letter, by its text, or by both. Without `choices`, a label means an option if it
    is one or several capital letters from A to J, or such a letter and the option's text.
    """
    label = re.sub(r"['\"]", "", label[1:-1]) if _WRITTEN_LIST.fullmatch(label) else label
    texts = [option_of(choice)[1] or choice for choice in choices]
    letters = ascii_uppercase[: len(texts)] if texts else "ABCDEFGHIJ"
    several = letters_of(label)
    if several and several <= set(letters) and all(letter in label for letter in several):
        if texts and not letters_of(answer):
            return _options_of(answer, texts, equal) == several
        if texts or has_separators(label) or has_separators(answer):
            return letters_of(answer) == several
        return None  # AC may be a segment's name, too
    if texts:
        return _among(answer, label, texts, letters, equal)
    (letter, rest), (wanted, text) = option_of(answer), option_of(label)
    if not wanted or wanted not in letters or wanted not in label:
        return True if letter and rest and equal(rest, label) else None
    if not letter:
        return equal(answer, text) if text else None
    return letter == wanted and (not rest or not text or equal(rest, text))


def _among(
    answer: str, label: str, texts: Sequence[str], letters: str, equal: Callable[[str, str], bool]
) -> bool | None:
    """Do as `has_chosen` with known options. A letter with another option's text is wrong."""
    (letter, rest), (wanted, _) = option_of(answer), option_of(label)
    if not wanted or wanted not in letters:
        matches = [i for i, text in enumerate(texts) if text == label]
        matches = matches or [i for i, text in enumerate(texts) if equal(label, text)]
        if not matches or matches[0] >= len(letters):
            return None
        wanted = letters[matches[0]]
    meant = texts[letters.index(wanted)]
    if not letter or letter not in letters:
        others = [text for text in texts if text not in (meant, answer)]
        if not equal(answer, meant):
            return False
        return answer == meant or not any(map(partial(_is_another, answer, meant, equal), others))
    is_contradiction = bool(rest) and not equal(rest, meant) and any(equal(rest, text) for text in texts)
    return letter == wanted and not is_contradiction


def _is_another(answer: str, meant: str, equal: Callable[[str, str], bool], text: str) -> bool:
    """Tell whether an answer fits another option as well: 3, if 3 cm and 3 m can be chosen."""
    return equal(answer, text) and not equal(text, meant)


def _options_of(answer: str, texts: Sequence[str], equal: Callable[[str, str], bool]) -> frozenset[str]:
    """Return the letters of the options that an answer lists by their texts, or by letters and texts; empty if an item
    is no option."""
    chosen = set()
    for item in values_of(re.sub(r" (?:and|&) (?=\(?[A-J\d])", ", ", answer)):
        letter, rest = option_of(item)
        matches = [ascii_uppercase[index] for index, text in enumerate(texts) if equal(rest, text)]
        matches = matches if rest else [letter]
        if not matches or (letter and letter not in matches):
            return frozenset()
        chosen.add(letter or matches[0])
    return frozenset(chosen)


def has_separators(text: str) -> bool:
    return bool(re.search(r"[,;&)\]]|\band\b", text))
