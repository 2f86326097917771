"""Turns a model's answer into plain LaTeX: finds the box, and unifies the spelling of signs."""

from __future__ import annotations

import re
import unicodedata

from shared.families.marks import THOUGHT

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
_RELATED = r"[^,;]*(?:[<>]|\\[lg]e )[^,;]*"
_CJK_UNITS = {  # longer ones first
    "平方厘米": "cm^2", "平方毫米": "mm^2", "平方千米": "km^2", "平方公里": "km^2", "平方米": "m^2", "立方厘米": "cm^3",
    "立方米": "m^3", "厘米": "cm", "毫米": "mm", "千米": "km", "公里": "km", "米": "m", "小时": "hours",
    "分钟": "minutes", "秒钟": "seconds", "秒": "seconds", "千克": "kg", "公斤": "kg", "克": "g", "升": "liter",
    "平方センチメートル": "cm^2", "センチメートル": "cm", "メートル": "m", "時間": "hours",
    "度": "°", "도": "°",
}  # fmt: skip
_COUNTERS = "平方单位|单位|[个個只隻条條元円圆人名张張块塊件次棵辆輛支种種位道枚套倍岁歳개원명]"


def _latin_unit(match: re.Match[str]) -> str:
    unit = _CJK_UNITS[match[1]]
    return unit if unit[0] == "°" else f" {unit}" + (f"^{match[2]}" if match[2] else "")


def _european(match: re.Match[str]) -> str:
    """Return a number with points between its thousands, such as 1.234.567,8, with a decimal point alone."""
    return match[1].replace(".", "") + (f".{match[2]}" if match[2] else "")


def _periodic_in_brackets(match: re.Match[str]) -> str:
    return _periodic(*(match.groups()[:3] if match[3] else ("0", match[4], match[5])))


_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),
        (r"\\(?:(?:display|text)style|rm|bf|it|q?quad|checkmark|small|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])", " "),
        (r"(?<=\d,)(?:\\[!,;: ] ?|\{\})+(?=\d{3})|\\!", ""),
        (r"(?<!\\)\\[ ,;:~()]|~|\\\\$|\\?[$€£]", " "),
        (r"\\langle(?![a-zA-Z])", "⟨"),
        (r"\\rangle(?![a-zA-Z])", "⟩"),
        (r"\\(?:text)?color ?\{\w*\}", ""),
        (r"\\%|\\?\bpercent\b", "%"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\colon(?![a-zA-Z])", ":"),
        (r"\\lg(?![a-zA-Z]) ?", r"\\log_{10}"),
        (r"\{ ?(\w+) ?\\choose ?(\w+) ?\}", r"\\binom{\1}{\2}"),
        (r"^([A-Z]) ?(?=\([^()]*\d[^()]*,[^()]*\)$)", r"\1="),
        (r"\\varnothing(?![a-zA-Z])|∅|\\\{ ?\\\}|^[Nn]o (?:real )?solutions?\.?$", r"\\emptyset "),
        (r"\\([lgn]e)q(?:slant)?(?![a-zA-Z])", r"\\\1 "),
        (r"^[Aa]ll real(?: numbers?|s)?\.?$", r"\\mathbb{R}"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\\ast(?![a-zA-Z])", "*"),
        (r"\*\*", "^"),
        (r"\\(?:simeq|sim|doteq|approxeq|fallingdotseq)(?![a-zA-Z])|\b(?:approximately|about)\b", r"\\approx "),
        (r"\\degrees?(?![a-zA-Z])|\\circ(?![a-zA-Z])", "°"),
        (r"\^ ?\{? ?[°o] ?\}?(?!\w)|\{\}\^ ?°", "°"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"^([A-Za-z]) ?° ?=", r"\1="),
        (r"^[A-Za-z] ?\\in ?(?=\\\{)", ""),
        (r"(?<=\d) ?(?:remainder|rem\.?) ?(?=\d)", " R "),
        (r"(?<![a-zA-Z\\])(sqrt|sin|cos|tan|arcsin|arccos|arctan|ln|log)(?![a-z])", r"\\\1"),
        (r"^[A-Za-z ]{2,40}: ", ""),
        (r"(\\pi|(?<![a-zA-Z\\])[a-eij-zA-Z]) ?\((?![a-zA-Z]\))", r"\1*("),
        (r"(\^|\\sqrt) ?\(([^()]*)\)", r"\1{\2}"),
        (r"\\sqrt ?(\d+)", r"\\sqrt{\1}"),
        (r"(?<![\d.^_}/*])(\d+) (\d+) ?/ ?(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
        (r"(?<![\w.\\^{])((?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,3})(?!\w)", r"\1*10^{\2}"),
        (r"(?<![\d.])(\d{1,3}(?: \d{3})+)(?!\d)", lambda found: found[0].replace(" ", "")),
        (r"\\dot ?\{? ?(\d) ?\}?(\d*)\\dot ?\{? ?(\d) ?\}?", r"\\overline{\1\2\3}"),
        (r"\b(\d*)\.(\d*)\\overline ?\{ ?(\d{1,9}) ?\}", lambda found: _periodic(*found.groups())),
        (r"\b(\d*)\.(\d*)\\dot ?\{? ?(\d) ?\}?", lambda found: _periodic(*found.groups())),
        (r"^(\d*)\.()\((\d{1,9})\)$|^0\.(\d+)\((\d{1,9})\)$", _periodic_in_brackets),
        (r"^(\d*)\.(\d*?)(\d{1,6})\3{2,} ?(?:\.\.\.|\\[lc]?dots)$", lambda found: _periodic(*found.groups())),
        (r"(?<![\d.,])(\d{1,3}(?:\.\d{3}){2,})(?:,(\d+))?(?![\d.,])", _european),
        (rf"(?<=[\d)}}°]) ?({'|'.join(_CJK_UNITS)})(?: ?\^ ?\{{? ?([23]) ?\}}?)?$", _latin_unit),
        (rf"(?<=[\d)}}]) ?(?:{_COUNTERS})$", ""),
        (rf"^({_RELATED}?) ?(?:\band\b|\\(?:land|wedge)(?![a-zA-Z])|且) ?({_RELATED})$", r"\1\\land \2"),
        (r"(?<=[\s\d)}°])(?:and|or)(?=[\s\d(\\])", ","),
        (r" ?\b(?:is|are|equals)\b ?:?(?= ?[-+\d\\(.])", " = "),
        (r"\((degrees?|units?|[a-z]{2,}(?:\^ ?\{?\d\}?)?)\)$", r"\1"),
    )
]
_BOX_TOKENS = re.compile(
    r"\\+(?P<box>boxed|fbox)(?:\s*(?P<brace>\{)|\s*(?P<bare>\d+(?:\.\d+)?|[A-Za-z])(?![A-Za-z]))?|\\.|[{}]", re.DOTALL
)
_LETTERS = "A-Za-zÀ-ÖØ-öø-ɏЀ-ӿ\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORDS = re.compile(rf"[{_LETTERS}][{_LETTERS} '-]*[{_LETTERS}]|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")


def without_thoughts(text: str) -> str:
    """Return what follows the thoughts of a response: the text after the last </think>, without a thought that was
    begun and not ended. A second </think> at the very end, after an answer, ends no thought."""
    before, closed, rest = text.rpartition(THOUGHT.closing)
    if closed and not rest.strip():
        _, earlier, answer = before.rpartition(THOUGHT.closing)
        rest = answer if earlier and answer.strip() else rest
    return rest.partition(THOUGHT.opening)[0]


def boxes_of(text: str) -> list[tuple[int, int, str]]:
    r"""Return (start, end, content) of each \boxed{…} and \fbox{…} that closes and holds something, in the order of
    their starts. Linear in the length of the text."""
    boxes: list[tuple[int, int, str]] = []
    braces: list[tuple[int, int]] = []  # of each open brace: the start of its box or -1, and where its content starts
    start = -1  # of a box whose brace comes next
    for token in _BOX_TOKENS.finditer(text):
        if token["box"]:
            start = token.start()
            if token["bare"]:
                boxes.append((start, token.end(), token["bare"]))
            elif token["brace"]:
                braces.append((start, token.end()))
        elif token[0] == "{":
            braces.append((-1, token.end()))
        elif token[0] == "}" and braces:
            start, begin = braces.pop()
            if start >= 0 and (content := text[begin : token.start()]).strip():
                boxes.append((start, token.end(), content))
    return sorted(boxes)


def last_box(text: str) -> str | None:
    """Return the content of the last box that `boxes_of` finds; None if there is none."""
    boxes = boxes_of(text)
    return boxes[-1][2] if boxes else None


def normalize(text: str) -> str:
    """Return plain LaTeX in one spelling, on one line and without layout; "" for a text of more than MAX_CHARS."""
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
    text = " ".join(text.split()).rstrip(".,;:。 ").lstrip("=: ")
    return text if len(text) <= MAX_CHARS else ""


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("−", "-")


def _periodic(integer: str, decimals: str, period: str) -> str:
    """Return the fraction that equals a decimal with an overlined period."""
    scale = 10 ** len(decimals)
    first, nines = int(f"0{integer}{decimals}"), 10 ** len(period) - 1
    return rf"(\frac{{{first}}}{{{scale}}}+\frac{{{int(period)}}}{{{nines * scale}}})"


def without_thousands(text: str) -> str:
    """Remove the commas in numbers such as 1,200."""
    return _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)


def words_of(text: str) -> str | None:
    """Return the words of an answer that is only words, such as "acute", "(B)" or "是"; None if it is mathematics."""
    text = re.sub(r"\\(?:triangle|angle|overline|widehat|odot)(?![a-zA-Z])|[{}]", "", text).strip()
    if re.fullmatch(r"\(?[A-Za-z]\)?\.?", text):
        return text.strip("().")
    if re.fullmatch(r"[A-Za-z](?: ?- ?[A-Za-z]| [A-Za-z])+", text):
        return None  # a difference, or a product
    text = re.sub(r"^(?:the )?answer (?:is )?|^(?:an?|the) (?=\w{3})", "", text.lower())
    return " ".join(re.split(r"[ -]+", text)) if _WORDS.fullmatch(text) else None
