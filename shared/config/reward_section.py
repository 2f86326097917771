"""The section reward of a recipe: a server or a judge that grades episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from shared.config.sections import Section

MAX_RUBRIC_CHARACTERS = 20_000
OF_FILES = (".md", ".txt")


class JudgeConfig(Section):
    """A language model that scores what was played."""

    url: str = Field(
        "", description="base URL of a server with OpenAI's API, such as http://host:8000/v1; empty = no judge"
    )
    model: str = Field("", description="the model's name at that server")
    rubric: str = Field("", description="what to score and how: a text, or the path of a .md or .txt file")
    per: Literal["episode", "turn"] = Field(
        "episode", description="one score for the episode, or one for each turn, of a request for each"
    )
    images: Literal["none", "first", "last", "all"] = Field(
        "none", description="which images the judge sees; of more than 16 the last"
    )
    weight: float = Field(
        1.0, ge=0, le=1, description="the judge's share of the reward; the rest is the environment's; 0 = only measured"
    )
    scale: tuple[float, float] = Field(
        (0.0, 1.0), description="lowest and highest score that it may give; they become 0 and 1"
    )
    max_tokens: int = Field(1024, gt=0, description="tokens of one answer of the judge")
    temperature: float = Field(0.0, ge=0, description="at which the judge is sampled")
    concurrency: int = Field(8, gt=0, description="requests that one actor process has open at once")
    cache_mb: int = Field(
        16, ge=0, description="MiB of memory in which an actor process remembers answers to the same request; 0 = none"
    )
    api_key_file: str = Field("", description="file with the server's API key (mode 0600); empty = no key")
    api_key_env: str = Field("", description="environment variable of the actors with that key, instead of a file")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not self.url:
            fields = JudgeConfig.model_fields
            if given := next((name for name in fields if getattr(self, name) != fields[name].default), ""):
                raise ValueError(
                    f"reward.judge.{given} without reward.judge.url: name the judge's server, as in http://host:8000/v1"
                )
            return self
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"reward.judge.url = {self.url!r}: write it as http://host:port/v1")
        for name, what in (("model", "the model's name at that server"), ("rubric", "what to score, or a file of it")):
            if not getattr(self, name).strip():
                raise ValueError(f"reward.judge.url without reward.judge.{name}: give {what}")
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"reward.judge.scale = {list(self.scale)}: the first is to be below the second")
        if self.api_key_file and self.api_key_env:
            raise ValueError("reward.judge.api_key_file and reward.judge.api_key_env: leave one of them out")
        return self

    def rubric_text(self) -> str:
        """Return the rubric, from its file if it names one. Raise ValueError for a file that cannot be read, or a text
        that is empty or too long."""
        text = self.rubric
        if text.endswith(OF_FILES) and "\n" not in text:
            try:
                text = Path(text).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                raise ValueError(f"reward.judge.rubric = {self.rubric!r}: the file cannot be read: {why}") from None
        if not 0 < len(text.strip()) <= MAX_RUBRIC_CHARACTERS:
            raise ValueError(
                f"reward.judge.rubric has {len(text.strip())} characters: give it 1 to {MAX_RUBRIC_CHARACTERS}"
            )
        return text.strip()


class RewardConfig(Section):
    url: str = Field("", description="server that is posted each episode as JSON and answers its reward; empty = none")
    send: tuple[Literal["observations", "images"], ...] = Field(
        (), description="what the server gets besides: what the model was shown, and its images"
    )
    timeout_s: float = Field(
        30.0, gt=0, description="time limit of env.reward, or of one request to the server or the judge"
    )
    isolation: Literal["thread", "process"] = Field(
        "thread", description="`process`: env.reward in a process that is ended when it overruns or crashes"
    )
    judge: JudgeConfig = JudgeConfig()
