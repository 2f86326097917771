"""From what a model writes to what it means: find the box, clean the LaTeX, set units, names and lists apart."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from envs.math_grading.units import UNIT_NAMES, unit_of

MAX_CHARS = 300
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
           "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}  # fmt: skip
_CHARACTERS = {"π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/",
               "−": "-", "–": "-", "—": "-", "°": "°", "º": "°", "˚": "°", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
               "≈": r"\approx ", "±": r"\pm ", "∠": r"\angle ", "∪": r"\cup ", "θ": r"\theta ", "α": r"\alpha ",
               "β": r"\beta ", "²": "^{2}", "³": "^{3}", "⁴": "^{4}", "⁻": "^-", "∣": "|", "′": "'"}  # fmt: skip
_CHARACTERS |= {mark: r" \frac{%s}{%s}" % tuple(value.split("/")) for mark, value in _VULGAR.items()}  # noqa: UP031
_TABLE = str.maketrans(_CHARACTERS)
_REPLACED = [
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|rm|bf|it|quad|qquad|checkmark)(?![a-zA-Z])"), " "),
    (re.compile(r"\\(?:tiny|small|large|Large|LARGE|huge|Huge|bold)(?![a-zA-Z])"), " "),
    (re.compile(r"\\[ ,;:!~]|~|\\\\|&(?!\w)"), " "),
    (re.compile(r"\\(?:text)?color\s*\{\w*\}"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\\$|\$|[€£]|\\(?:pounds|euro)(?![a-zA-Z])"), " "),
    (re.compile(r"\\%|\\?\bpercent\b"), "%"),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:cdot|times|ast)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\(?:leq|leqslant)(?![a-zA-Z])|<="), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant)(?![a-zA-Z])|>="), r"\\ge "),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"\\(?:lvert|rvert|vert|mid)(?![a-zA-Z])"), "|"),
    (re.compile(r"\\(?:simeq|sim)(?![a-zA-Z])"), r"\\approx "),
    (re.compile(r"\\degrees?(?![a-zA-Z])|\\circ(?![a-zA-Z])"), "°"),
    (re.compile(r"\^\s*\{?\s*°\s*\}?|\^\s*\{?\s*o\s*\}?(?!\w)"), "°"),
    (re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"(?<![a-zA-Z\\])(sqrt|sin|cos|tan|arcsin|arccos|arctan|ln|log)(?![a-z])"), r"\\\1"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d)"), r"\1{\2}"),
]
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)?|math(?:rm|bf|it|sf|tt|bb)|operatorname|underline|boldsymbol|bm|mbox|hbox)"
    r"\*?\s*\{([^{}]*)\}"
)
_MIXED = re.compile(r"(?<![\d.^_}/*])(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_MIXED_PLAIN = re.compile(r"(?<![\d.^_}/*])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?!\d)")
_SQUARED = r"(\^\s*\{?\s*[23]\s*\}?)?"
_VALUE_END = r"(?:[\d)}°\]!]|\\pi|(?<=[\d\s)}])[a-z])"


@dataclass(frozen=True, slots=True)
class Phrase:
    """One value as written: `name` is what stands before its '=' (or ""), `unit` what follows the value (or "")."""

    body: str
    name: str = ""
    unit: str = ""


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{…} or \fbox{…}; None if there is none or its braces do not close."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        return None
    position = start + (6 if text.startswith(r"\boxed", start) else 5)
    while position < len(text) and text[position].isspace():
        position += 1
    if position >= len(text):
        return None
    if text[position] != "{":
        token = re.compile(r"\d+(?:\.\d+)?|[A-Za-z]").match(text, position)
        return token.group() if token else None
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, position):
        index = brace.start()
        if not _escaped(text, index):
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                return text[position + 1 : index]
    return None


def _escaped(text: str, index: int) -> bool:
    start = index
    while text[start - 1] == "\\" and start > index - 20:
        start -= 1
    return (index - start) % 2 == 1


def clean(text: str) -> str:
    """Plain LaTeX: one spelling for each sign, no layout. Texts stand between double quotes."""
    text = _no_comment(text.strip().strip("*").translate(_TABLE))
    text = unicodedata.normalize("NFKC", text).translate(_TABLE).replace("\u2044", "/").replace("\u200b", "")
    for _ in range(4):
        shorter = _TEXT.sub(_unwrapped, text)
        if shorter == text:
            break
        text = shorter
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    text = _MIXED.sub(_mixed, text)
    text = _MIXED_PLAIN.sub(_mixed, text)
    text = _SPACED.sub(lambda match: match.group().replace(" ", ""), text)
    return " ".join(text.split()).strip().rstrip(".,;: ").lstrip("=: ").strip()


def _no_comment(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").replace("\x08oxed", "\\boxed")


def _unwrapped(match: re.Match[str]) -> str:
    inner = match.group(1).replace('"', "")
    if re.search(r"[\d\\]", inner):
        return f" {inner} "
    if inner.strip().lower() in ("or", "and"):
        return " , "
    if len(inner.strip()) <= 2 and inner.strip() not in UNIT_NAMES:
        return f" {inner.strip()} "
    return f' "{inner.strip()}" '


def _mixed(match: re.Match[str]) -> str:
    whole, top, bottom = match.groups()
    if len(top) > 6 or len(bottom) > 6 or not 0 < int(top) < int(bottom):
        return match.group()
    return rf"({whole}+\frac{{{top}}}{{{bottom}}})"


def ascending(text: str) -> str:
    """A chain such as 5 > x > 2 the other way round; any other text unchanged."""
    parts = re.split(r"(<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z]))", text)
    if len(parts) < 3 or not all(sign.strip() in (">", "\\ge") for sign in parts[1::2]):
        return text
    turned = {">": "<", "\\ge": "\\le "}
    return "".join(turned.get(part.strip(), part.strip()) for part in reversed(parts))


def without_thousands(text: str) -> str:
    """`text` with the commas of 1,200 taken out."""
    return _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)


def words_of(text: str) -> str | None:
    """The words of an answer that is only words, such as "acute" or "(B)", in lower case; None if it is mathematics."""
    plain = text.replace('"', "").strip()
    if re.fullmatch(r"\(?[A-Za-z]\)?\.?", plain):
        return plain.strip("().")
    if re.fullmatch(r"[A-Za-z][A-Za-z\s'-]*[A-Za-z]", plain) and ('"' in text or " " in plain or len(plain) > 3):
        return " ".join(plain.lower().split())
    return None


def phrase(text: str, letter_units: bool = True) -> Phrase:
    """Split off the name before the first '=' and the unit; without `letter_units` a last letter is a variable."""
    body = re.sub(
        r'^.*"[^"]*\b(?:is|are|equals|answer):?"\s*:?|^"[^"]*"\s*(?=[-+\d\\(.])', "", text, flags=re.IGNORECASE
    )
    parts = [part.strip() for part in re.split(r"(?<![<>!\\])=|\\in(?![a-zA-Z])", body)]
    if len(parts) == 2 and is_name(parts[1]) and not is_name(parts[0]):
        parts.reverse()
    name = ""
    while len(parts) > 1 and all(parts) and is_name(parts[0]):
        name = name or re.sub(r"\s+", "", parts[0].replace('"', ""))
        parts.pop(0)
    if len(parts) > 1 or name:
        body = "=".join(parts)
    elif ":" in body and re.fullmatch(r'[A-Za-z" ]{2,}', body.split(":")[0]):
        body = body.split(":", 1)[1].strip()
    if not letter_units and re.search(r"[\d)}\s][A-Za-z]$", body):
        return Phrase(body, name)
    body, unit = _without_unit(body)
    return Phrase(body, name, unit)


def is_name(text: str) -> bool:
    r"""Whether `text` names a quantity: x, AB, (x,y), m\angle A, \overline{AB}, f(x), "Area of ABC"."""
    plain = re.sub(r"\\(?:angle|triangle|overline|widehat|overarc|odot|measuredangle)|[\"{}\s_']", "", text)
    if re.fullmatch(r"(?:m\s*)?\\angle\s*\d|\\(?:sin|cos|tan)\s*\(?\s*(?:[A-Za-z]{1,3}|\\theta)\s*\)?", text.strip()):
        return True
    if plain.startswith(("\\frac", "\\sqrt", "\\pi")):
        return False
    return bool(re.fullmatch(r"\\[a-z]+|[A-Za-z]{1,30}\d{0,2}|[a-zA-Z]\(\w\)|\(\w(,\w)+\)", plain))


def _without_unit(text: str) -> tuple[str, str]:
    text = re.sub(r'^"[^"]*"\s*(?=[-+\d\\(.])|^[A-Za-z\s"]*\b(?:is|are|equals)\b\s*:?', "", text.strip()).strip()
    quoted = re.fullmatch(rf'(.*{_VALUE_END})\s*"([^"]*)"\s*{_SQUARED}[\s.]*', text)
    if quoted:
        return _without_unit(quoted.group(1))[0], unit_of(quoted.group(2), quoted.group(3)) or "?"
    plain = re.fullmatch(rf"(.*?{_VALUE_END})\s*((?:[a-z] )?[A-Za-z][A-Za-z/. ]*?)\s*{_SQUARED}\.?", text)
    if plain:
        value, words, power = plain.groups()
        if re.match(r"[a-z] ", words) and words[0] not in UNIT_NAMES:  # a variable in front of the unit
            value, words = value + words[0], words[2:]
        unit = unit_of(words, power)
        if unit:
            return _without_unit(value)[0], unit
    degrees = re.fullmatch(r"([^°]*[\d)}]|[^°]*\\pi)\s*°", text)
    if degrees and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        return degrees.group(1).strip(), "deg"
    return text, ""


def split_list(text: str) -> list[str]:
    """Parts between commas, semicolons and the words and/or that stand outside brackets."""
    text = re.sub(r'(?<=[\s\d)}°"])(?:and|or)(?=[\s\d(\\"])', ",", text)
    parts, depth, current = [], 0, ""
    for index, character in enumerate(text):
        escaped = index > 0 and text[index - 1] == "\\"
        if character in "([{" and not (escaped and character != "{"):
            depth += 1
        elif character in ")]}":
            depth -= 1
        if character in ",;" and depth <= 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    parts.append(current.strip())
    return [part for part in parts if part]
