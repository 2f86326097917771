"""Hides secrets in what is shown, written or shared: keys, tokens and passwords by their names, what URLs carry besides
their address, and values that are secrets by their form.

A value is hidden by its name or by its form. Names that speak of tokens of text (`max_tokens`, `token_ids`,
`tokenizer`), of files (`api_key_file`) or of people (`author`) hide nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

HIDDEN = "(not shown)"
IN_URL = "***"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SURE = re.compile(
    r"apikey|accesskey|privatekey|secretkey|signingkey|encryptionkey|sshkey|licen[cs]ekey|accountkey|masterkey|authkey"
    r"|passw|passphrase|secret|credential|webhook|connectionstring"
)
_SURE_WORDS = {"auth", "oauth", "authorization", "authorisation", "authentication", "bearer", "cookie", "cookies"} | {
    *("dsn", "jwt", "pwd", "pin", "pass", "creds")
}
_OWNERS = {"anthropic", "aws", "azure", "client", "gemini", "google", "gpt", "hf", "judge", "openai", "openrouter"} | {
    *("provider", "server", "service", "shared", "subscription", "user", "wandb")
}
"""Words before `key` that make it a secret one."""
_OF_TEXT = {
    *("added", "answer", "audio", "batch", "begin", "bos", "byte", "cls", "completion", "control", "cut"),
    *("end", "eos", "extra", "first", "forced", "generated", "image", "input", "last", "mask", "max", "mean"),
    *("microbatch", "min", "model", "n", "new", "newline", "next", "num", "output", "overlong", "pad"),
    *("padding", "per", "prompt", "reasoning", "response", "sampled", "sep", "special", "start", "stop"),
    *("think", "thinking", "thought", "tool", "total", "turn", "unk", "user", "assistant", "system", "video"),
    *("vision", "word", "text"),
}
"""Words before `token` that make it one of a text."""
_NO_VALUE = {"chars", "cost", "count", "dir", "directory", "enabled", "env", "expiry", "file", "files", "folder"} | {
    *("hours", "id", "ids", "index", "kind", "len", "length", "level", "limit", "method", "minutes", "mode", "name"),
    *("names", "num", "path", "paths", "policy", "price", "prompt", "question", "rate", "required", "s", "scheme"),
    *("seconds", "size", "step", "timeout", "ttl", "type", "url", "var", "variable"),
}
"""Last words of a name that tell something about a secret, and not the secret."""
_SPECIAL_TOKEN = re.compile(r"\s*|<[^<>]*>|\[[A-Z_]+\]")
_RANDOM = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])[^\s/\\.]{12,}")
_ONLY_HOST = re.compile(r"https?://[^\s/@?#]+/?")
_NUMBER = re.compile(r"[-+]?[\d._]+(e[-+]?\d+)?", re.IGNORECASE)

_URL = re.compile(
    r"""((?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://)([^\s/?\#"'<>]*@)?([^\s?\#"'<>]*)(\?[^\s\#"'<>]+)?(\#[^\s"'<>]*=[^\s"'<>]*)?"""
)
_FORMS = re.compile(
    r"\bsk-[A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bxox[abeprs]-[\w-]{10,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"
    r"|\bAIza[\w-]{30,}|\bglpat-[\w-]{16,}|\bnvapi-[\w-]{16,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_BEARER = re.compile(
    r"\b(Bearer\s+)(?!\(not shown\))[^\s\"',;]+|\b(bearer\s+)(?=[^\s\"',;]*\d)[^\s\"',;]{8,}"
    r"|\b([Bb]asic\s+)(?=[^\s\"',;]*[\d=])[A-Za-z0-9+/=_-]{8,}"
)
_VALUE = r"""(\(not\ shown\)|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;&"'{}\[\]()]+)"""
_NAME = r"(?i:key|token|secret|pass|cred|auth|webhook|pwd|cookie|jwt|pin|dsn|bearer|connection)"
_ASSIGNMENT = re.compile(
    r"(?<![\w.-])(\\?[\"']?)(-{0,2}[\w.]?[\w.-]{0,80}?" + _NAME + r"[\w.-]{0,80})(\1)(\s*[=:]\s*)" + _VALUE
)
_OPTION = re.compile(r"(?<!\S)(--?[A-Za-z][\w-]*)(\s+)(?![-=])" + _VALUE)
Sureness = Literal["", "perhaps", "sure"]


def redact(value: Any, name: str = "") -> Any:
    """Return a JSON value without its secrets: `HIDDEN` in their place, in containers of any depth. `name`: of the
    value. Values without secrets are returned as they are."""
    sureness = secrecy(name)
    if sureness == "sure" and _is_content(value) and not (isinstance(value, str) and _ONLY_HOST.fullmatch(value)):
        return HIDDEN
    if isinstance(value, Mapping):
        return _without_named_values(
            {key: redact(each, _inner(name, sureness, str(key))) for key, each in value.items()}
        )
    if isinstance(value, list | tuple):
        return _redacted_list(value, name)
    if sureness == "perhaps" and _is_secret(value, name):
        return HIDDEN
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Return a text without the secrets in it: of URLs, of headers, of `NAME=VALUE` and `--name VALUE`, and those that
    their form tells."""
    if "://" in text:
        text = _URL.sub(_redacted_url, text)
    text = _BEARER.sub(lambda match: f"{match[1] or match[2] or match[3]}{HIDDEN}", text)
    text = _FORMS.sub(HIDDEN, text)
    text = _ASSIGNMENT.sub(_redacted_assignment, text)
    return _OPTION.sub(_redacted_option, text) if "-" in text else text


def holds_secrets(value: Any) -> bool:
    """Tell whether `redact` would hide, or has hidden, something of a JSON value."""
    if isinstance(value, Mapping):
        return redact(value) != value or any(holds_secrets(each) for each in value.values())
    if isinstance(value, list | tuple):
        return redact(value) != value or any(holds_secrets(each) for each in value)
    return isinstance(value, str) and (redact_text(value) != value or HIDDEN in value or f"{IN_URL}@" in value)


def write_private(path: Path, text: str) -> None:
    """Write a text that only its owner may read. Raise OSError if the disk refuses."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def secrecy(name: str) -> Sureness:
    """Return whether the value of this name is a secret: "sure", "perhaps" (the value tells), or ""."""
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2] or name)]
    if not words or words[-1] in _NO_VALUE:
        return ""
    if _SURE.search("".join(words)) or _SURE_WORDS & {*words}:
        return "sure"
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in ("key", "keys"):
        return "sure" if before in _OWNERS else "perhaps"
    for index, word in enumerate(words):
        if word.endswith(("token", "tokens")) and not {*words[:index]} & _OF_TEXT:
            return "perhaps"
    return ""


def _is_secret(value: object, name: str) -> bool:
    """Tell whether a value whose name leaves it open is a secret."""
    last = _WORD.findall(name)[-1].lower()
    if isinstance(value, bool):
        return False
    if isinstance(value, int | float) or (isinstance(value, str) and _NUMBER.fullmatch(value)):
        return last.endswith("token")  # a number of tokens has a name in the plural
    if not isinstance(value, str) or _SPECIAL_TOKEN.fullmatch(value):
        return False
    return bool(_RANDOM.fullmatch(value)) if last in ("key", "keys") else True


def _is_content(value: object) -> bool:
    """Tell whether there is something to hide: an empty value and a switch are shown."""
    return not isinstance(value, bool) and value not in (None, "", [], {}, ())


def _inner(name: str, sureness: Sureness, key: str) -> str:
    """Return the name by which a value in a mapping is judged: its own, or the mapping's if only that one speaks of a
    secret."""
    return key if not sureness or secrecy(key) else f"{key} {name}"


def _without_named_values(values: dict[Any, Any]) -> dict[Any, Any]:
    """Hide the value of a pair such as {"name": "API_KEY", "value": "..."}."""
    for naming in ("name", "key", "header"):
        name = values.get(naming)
        if isinstance(name, str) and "value" in values and secrecy(name) and _is_content(values["value"]):
            return {**values, "value": HIDDEN}
    return values


def _redacted_list(values: list[Any] | tuple[Any, ...], name: str) -> list[Any] | tuple[Any, ...]:
    """Redact the items of a list; an item is also hidden after an option such as `--api-key`, or after a name in a
    pair."""
    items = []
    for index, value in enumerate(values):
        before = values[index - 1] if index else ""
        is_option = isinstance(before, str) and before.startswith("-") and "=" not in before
        is_pair = index == 1 and len(values) == 2 and isinstance(before, str)
        hides = (is_option or is_pair) and secrecy(before.lstrip("-"))
        if (hides == "sure" or (hides and is_option and _is_secret(value, before))) and _is_content(value):
            items.append(HIDDEN)
        else:
            items.append(redact(value, name))
    return tuple(items) if isinstance(values, tuple) else items


def _redacted_url(match: re.Match[str]) -> str:
    scheme, user, rest, query, fragment = match.groups()
    user = f"{IN_URL}@" if user and user != "@" else ""
    return f"{scheme}{user}{rest}{f'?{IN_URL}' if query else ''}{f'#{IN_URL}' if fragment else ''}"


def _redacted_assignment(match: re.Match[str]) -> str:
    quote, name, closing, sign, value = match.groups()
    bare = value.strip("\"'")
    sureness, is_header = secrecy(name), sign.strip() == ":" and not quote
    if not sureness or value == HIDDEN or not bare or bare in ("null", "None", "true", "false", "True", "False"):
        return match[0]
    if is_header and (sureness != "sure" or not name[0].isupper() or (bare.istitle() and bare.isalpha())):
        return match[0]  # prose, such as "secret: it is not there"
    if sureness == "perhaps" and (_NUMBER.fullmatch(bare) or " " in sign or not _is_secret(bare, name)):
        return match[0]
    ends = value[0] if value[0] in "\"'" else ""
    return f"{quote}{name}{closing}{sign}{ends}{HIDDEN}{ends}"


def _redacted_option(match: re.Match[str]) -> str:
    option, space, value = match.groups()
    name = option.lstrip("-")
    sureness = secrecy(name)
    hides = sureness == "sure" or (sureness and not _NUMBER.fullmatch(value) and _is_secret(value.strip("\"'"), name))
    return f"{option}{space}{HIDDEN}" if hides else match[0]
