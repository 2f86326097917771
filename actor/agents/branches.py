"""The token streams of an agent's episode, and which of them a conversation goes on with.

Each branch is a stream that the model reads by itself, from a prompt on, and becomes a segment of the episode. A
conversation that says what a branch says, and more, continues it: what is new is appended to the very tokens that were
read and sampled before. Any other conversation begins a branch: its tokens are rendered anew, but for answers of the
policy, which stay as they were sampled. Whatever is not sampled in a branch itself has mask 0 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from actor.agents.dialogues import Dialogue, Round
from actor.agents.said import ChatMessage, Said, Spoken
from actor.episode import Stream
from actor.history import after_answer
from actor.render import Fragment, Renderer
from shared.types import Image


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """A turn of the policy: its number in the order in which answers were asked for, its tokens [start, end) in its
    branch, its text, what was new before it, and when it was asked for, in seconds from the start of the episode."""

    number: int
    start: int
    end: int
    text: str
    observed: tuple[ChatMessage, ...]
    images: tuple[Image, ...]
    begin_s: float
    generate_s: float


@dataclass(slots=True, eq=False)
class Branch:
    """A stream and what it says: `opening`, then answers, each but the last followed by the messages in `after`. A
    branch is `busy` while an answer for it is being sampled."""

    tools_key: str
    opening: tuple[Said, ...]
    stream: Stream = field(default_factory=Stream)
    answers: list[Spoken | Said] = field(default_factory=list)
    after: list[tuple[Said, ...]] = field(default_factory=list)
    turns: list[AgentTurn] = field(default_factory=list)
    busy: bool = False

    def num_shared(self, dialogue: Dialogue) -> int:
        """Return how many answers the dialogue has in common with this branch from the start on; -1 if it begins in
        another way."""
        if (self.tools_key, self.opening) != (dialogue.tools_key, _said(dialogue.opening)):
            return -1
        shared = 0
        for number, (answer, each) in enumerate(zip(self.answers, dialogue.rounds, strict=False)):
            if number and self.after[number - 1] != _said(dialogue.rounds[number - 1].after):
                break
            if not _is_said(answer, each.answer.said):
                break
            shared = number + 1
        return shared

    def is_continued_by(self, dialogue: Dialogue) -> bool:
        """Tell whether the dialogue says all that this branch says, and goes on after it."""
        return self.num_shared(dialogue) == len(self.answers)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a conversation belongs: the branch that it continues or begins. The branch has the first `known` of the
    conversation's `answers`."""

    branch: Branch
    dialogue: Dialogue
    answers: tuple[Spoken | Said, ...]
    known: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as the model reads it. `stream` becomes the branch's when the answer is there, so that a call that
    fails leaves no trace. `observed` and `images` are new to the branch."""

    stream: Stream
    observed: tuple[ChatMessage, ...]
    images: tuple[Image, ...]


class Branches:
    """The branches of one episode, in the order in which their first answers came."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._branches: list[Branch] = []
        self._by_words: dict[Said, Spoken] = {}  # answers with nothing left out

    def __iter__(self) -> Iterator[Branch]:
        return iter(self._branches)

    def __len__(self) -> int:
        return len(self._branches)

    def place(self, dialogue: Dialogue) -> Place:
        """Return where a dialogue belongs. Of several branches that it continues that is the longest, then the latest;
        one that is busy goes on with the dialogue that came first."""
        continued = [each for each in self._branches if not each.busy and each.is_continued_by(dialogue)]
        if continued:
            branch = max(reversed(continued), key=lambda each: len(each.answers))
        else:
            branch = Branch(dialogue.tools_key, _said(dialogue.opening))
        known = len(branch.answers)
        return Place(branch, dialogue, (*branch.answers, *self._answers_of(dialogue)[known:]), known)

    def commit(self, place: Place, stream: Stream, answer: Spoken, turn: AgentTurn) -> None:
        """Make a stream, which ends with the answer, that of the place's branch."""
        branch = place.branch
        if not branch.answers:
            self._branches.append(branch)
        branch.answers = [*place.answers, answer]
        branch.after = [_said(each.after) for each in place.dialogue.rounds]
        branch.turns.append(turn)
        branch.stream = stream
        for said in (answer.whole, answer.given):
            self._by_words.setdefault(said, answer)

    def prompt(self, place: Place) -> Prompt:
        """Return a conversation as the model reads it. It may run in another thread, while the place's branch is busy.
        Raise ValueError for messages that the model's chat template leaves out."""
        dialogue, answers, known = place.dialogue, place.answers, place.known
        if known:
            parts = self._rendered(answers[known - 1 :], dialogue.rounds[known - 1 :])[1:]
            observed = _messages(dialogue.rounds[known - 1 :])[1:]
        elif any(isinstance(each, Spoken) for each in answers):
            parts = [self._start(dialogue, dialogue.opening), *self._rendered(answers, dialogue.rounds)]
            observed = dialogue.messages
        else:  # as the template writes a conversation of others
            parts, observed = [self._start(dialogue, dialogue.messages)], dialogue.messages
        stream = place.branch.stream.copy()
        for part in parts:
            stream.observe(part)
        images = tuple(image for part in parts for image in part.images)
        shown = tuple(ChatMessage(message.said, self._shown(message)) for message in observed)
        return Prompt(stream, shown, images)

    def _answers_of(self, dialogue: Dialogue) -> list[Spoken | Said]:
        """Return the answers in a dialogue: those of the policy as they were sampled, in whatever branch. One whose
        thoughts the client has dropped is the policy's only where the dialogue before it is a branch's, too."""
        shared = {each.num_shared(dialogue): each for each in self._branches}
        most = max(shared, default=0)
        found = [*shared[most].answers[:most]] if most > 0 else []
        others = [each.answer.said for each in dialogue.rounds[len(found) :]]
        return [*found, *(self._by_words.get(said, said) for said in others)]

    def _start(self, dialogue: Dialogue, messages: Sequence[ChatMessage]) -> Fragment:
        return self._renderer.start([self._shown(message) for message in messages], (), dialogue.tools)

    def _shown(self, message: ChatMessage) -> dict[str, Any]:
        """Return what the renderer is given: of a message with tool calls, these as the model writes them."""
        if not message.said.calls:
            return message.shown
        calls = [(call.name, call.arguments) for call in message.said.calls]
        return {**message.shown, "content": self._renderer.called(message.shown["content"], calls)}

    def _rendered(self, answers: Sequence[Spoken | Said], rounds: Sequence[Round]) -> list[Fragment]:
        """Return two parts for each round: the answer, and what is shown after it."""
        parts = []
        for answer, each in zip(answers, rounds, strict=True):
            shown = self._renderer.observation(*(message.shown for message in each.after))
            if isinstance(answer, Spoken):
                spoken = Fragment(answer.token_ids)
            else:
                spoken = self._renderer.foreign_answer(self._shown(each.answer)["content"], shown.end_id)
            parts += [spoken, after_answer(spoken.token_ids, shown)]
        return parts


def _said(messages: Sequence[ChatMessage]) -> tuple[Said, ...]:
    return tuple(message.said for message in messages)


def _messages(rounds: Sequence[Round]) -> list[ChatMessage]:
    return [message for each in rounds for message in (each.answer, *each.after)]


def _is_said(answer: Spoken | Said, said: Said) -> bool:
    return said in answer.forms if isinstance(answer, Spoken) else said == answer
