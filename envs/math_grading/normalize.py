"""From what a model writes to plain LaTeX: finds the box, and brings each sign to one spelling."""

from __future__ import annotations

import re
import unicodedata

MAX_CHARS = 300
_SIGNS = str.maketrans(
    {"√": r"\sqrt ", "∞": r"\infty ", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "−": "-", "–": "-", "—": "-",
     "º": "°", "˚": "°", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", **dict.fromkeys("≈≃≊≋≎≏≐≑≒≓∼", r"\approx "),
     **dict.fromkeys("≔≕≖≗≟", "="), "≅": r"\cong ", **dict.fromkeys("≡≣", r"\equiv "), "±": r"\pm ",
     "∠": r"\angle ", "∪": r"\cup ", "⁄": "/", "\u200b": ""}
)  # fmt: skip
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_RAISED = re.compile("[²³¹⁰⁴-⁹⁻]+")
_STYLED = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)?|math(?:rm|bf|it|sf|tt)|operatorname|underline|boldsymbol|bold|bm|[mhf]box|"
    r"boxed)\*? ?\{([^{}]*)\}"
)
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),
        (r"\\(?:(?:display|text)style|rm|bf|it|q?quad|checkmark|small|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])", " "),
        (r"\\[ ,;:!~()]|~|\\\\$|\\?[$€£]", " "),
        (r"\\(?:text)?color ?\{\w*\}", ""),
        (r"\\%|\\?\bpercent\b", "%"),
        (r"\\div(?![a-zA-Z])|(?<=\d) ?: ?(?=\d)", "/"),
        (r"\\([lgn]e)q(?:slant)?(?![a-zA-Z])", r"\\\1 "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\\ast(?![a-zA-Z])", "*"),
        (r"\*\*", "^"),
        (r"\\(?:simeq|sim|doteq|approxeq|fallingdotseq)(?![a-zA-Z])|\b(?:approximately|about)\b", r"\\approx "),
        (r"\\degrees?(?![a-zA-Z])|\\circ(?![a-zA-Z])", "°"),
        (r"\^ ?\{? ?[°o] ?\}?(?!\w)|\{\}\^ ?°", "°"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![a-zA-Z\\])(sqrt|sin|cos|tan|arcsin|arccos|arctan|ln|log)(?![a-z])", r"\\\1"),
        (r"^[A-Za-z ]{2,40}: ", ""),
        (r"(\\pi|(?<![a-zA-Z\\])[a-eij-zA-Z]) ?\((?![a-zA-Z]\))", r"\1*("),
        (r"(\^|\\sqrt) ?\(([^()]*)\)", r"\1{\2}"),
        (r"\\sqrt ?(\d+)", r"\\sqrt{\1}"),
        (r"(?<![\d.^_}/*])(\d+) (\d+) ?/ ?(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
        (r"(?<![\w.\\^{])((?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,3})(?!\w)", r"\1*10^{\2}"),
        (r"(?<![\d.])(\d{1,3}(?: \d{3})+)(?!\d)", lambda found: found[0].replace(" ", "")),
        (r"\b(\d*)\.(\d*)\\overline ?\{ ?(\d{1,9}) ?\}", lambda found: _periodic(*found.groups())),
        (r"(?<=[\s\d)}°])(?:and|or)(?=[\s\d(\\])", ","),
        (r" ?\b(?:is|are|equals)\b ?:?(?= ?[-+\d\\(.])", " = "),
        (r"\((degrees?|units?|[a-z]{2,}(?:\^ ?\{?\d\}?)?)\)$", r"\1"),
    )
]
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{…} or \fbox{…}; None if there is none or its braces do not close."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        return None
    position = start + (6 if text.startswith(r"\boxed", start) else 5)
    bare = re.compile(r"\s*(\d+(?:\.\d+)?|[A-Za-z])").match(text, position)
    if bare:
        return bare[1]
    opening = re.compile(r"\s*\{").match(text, position)
    if opening is None:
        return None
    depth = 0
    for brace in re.compile("[{}]").finditer(text, opening.end() - 1):
        before = text[max(0, brace.start() - 20) : brace.start()]
        if (len(before) - len(before.rstrip("\\"))) % 2 == 0:  # not escaped
            depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[opening.end() : brace.start()]
    return None


def normalize(text: str) -> str:
    """Plain LaTeX in one spelling, on one line and without layout; "" for a text longer than any answer."""
    text = " ".join(text.replace("\x08oxed", "\\boxed").split()).strip("* ")
    if len(text) > MAX_CHARS:
        return ""
    text = _VULGAR.sub(lambda found: r" \frac{{{}}}{{{}}}".format(*_plain(found[0]).split("⁄")), text)
    text = _plain(_RAISED.sub(lambda found: f"^{{{_plain(found[0])}}}", text).translate(_SIGNS))
    for _ in range(4):
        text = _STYLED.sub(r" \1 ", text)
    text = " ".join(text.split())
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split()).rstrip(".,;: ").lstrip("=: ")
    return text if len(text) <= MAX_CHARS else ""


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("−", "-")


def _periodic(whole: str, places: str, period: str) -> str:
    """The fraction that a decimal with an overlined period means."""
    scale = 10 ** len(places)
    return (
        rf"(\frac{{{int(f'0{whole}{places}')}}}{{{scale}}}+\frac{{{int(period)}}}{{{(10 ** len(period) - 1) * scale}}})"
    )


def without_thousands(text: str) -> str:
    """`text` with the commas of 1,200 taken out."""
    return _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)


def words_of(text: str) -> str | None:
    """The words of an answer that is only words, such as "acute" or "(B)"; None if it is mathematics."""
    text = re.sub(r"\\(?:triangle|angle|overline|widehat|odot)(?![a-zA-Z])|[{}]", "", text).strip()
    if re.fullmatch(r"\(?[A-Za-z]\)?\.?", text):
        return text.strip("().")
    words = re.fullmatch(r"[A-Za-z][A-Za-z '-]*[A-Za-z]", text)
    return " ".join(text.lower().split()) if words else None
