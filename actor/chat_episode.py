"""Makes episodes of chats that are shown to the model: the tokens that it would have read and sampled, by the renderer
of rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from actor.agents.said import call_of
from actor.history import after_answer
from actor.render import Fragment, Renderer
from envs.chat_rows import Answer, Chat
from shared.families.marks import THOUGHT
from shared.types import Ending, Image, Trajectory, Turn


class TooLong(ValueError):
    """A chat has more tokens than the model's context."""


def shown_episode(parts: Iterable[tuple[Fragment, Sequence[int], bool]]) -> Trajectory:
    """Return the episode of what is shown and answered: (tokens shown, tokens of the answer, whether it is learned).

    The loss mask marks the answers that are learned. Nobody has sampled these tokens: behaviour logprobs, versions and
    rewards are 0.
    """
    token_ids: list[int] = []
    mask: list[int] = []
    images: list[Image] = []
    turns: list[Turn] = []
    for fragment, answer, is_learned in parts:
        token_ids += [*fragment.token_ids, *answer]
        mask += [0] * len(fragment.token_ids) + [int(is_learned)] * len(answer)
        images += fragment.images
        if is_learned:
            turns.append(Turn(len(token_ids) - len(answer), len(token_ids), 0.0))
    learned = np.array(mask, dtype=np.uint8)
    return Trajectory(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=learned,
        behaviour_logprobs=np.zeros(len(mask), dtype=np.float32),
        policy_versions=learned.astype(np.int32) - 1,
        turns=tuple(turns),
        reward=0.0,
        images=tuple(images),
        ending=Ending.COMPLETED,
    )


def chat_episode(chat: Chat, renderer: Renderer, max_context: int) -> Trajectory:
    """Return the episode of a demonstration. Raise TooLong if it does not fit into the context, ValueError for a
    message that the chat template leaves out and an image that the model cannot be shown."""
    first, *later = (each.messages for each in chat.exchanges)
    shown = [renderer.start(first, tools=chat.tools), *(renderer.observation(*messages) for messages in later)]
    ends = [*(fragment.end_id for fragment in shown[1:]), renderer.end_id]
    parts: list[tuple[Fragment, Sequence[int], bool]] = []
    for each, fragment, end_id in zip(chat.exchanges, shown, ends, strict=True):
        if parts:
            fragment = after_answer(parts[-1][1], fragment)
        parts.append((fragment, answer_tokens(each.answer, fragment, end_id, renderer), each.answer.is_learned))
    length = sum(fragment.num_expanded + len(answer) for fragment, answer, _ in parts)
    if length > max_context:
        raise TooLong(f"{length:,} of {max_context:,} tokens")
    return shown_episode(parts)


def answer_tokens(answer: Answer, shown: Fragment, end_id: int, renderer: Renderer) -> tuple[int, ...]:
    """Return an answer's tokens with the one that ends it: those that a model sampled, if they spell the text for this
    tokenizer too, else those of the text and `end_id`."""
    ids = answer.token_ids
    is_sampled = ids and max(ids) < len(renderer.tokenizer) and not {*ids} & {renderer.image_id, *renderer.banned_ids}
    if is_sampled and not answer.tool_calls and renderer.decode(ids) == answer.text:
        return ids
    calls = [call_of(*_named(call)) for call in answer.tool_calls]
    text = renderer.called(answer.text, [(call.name, call.arguments) for call in calls])
    think = THOUGHT.opening
    if text.startswith(think) and renderer.transcript(shown.token_ids[-4:]).rstrip().endswith(think):
        text = text.removeprefix(think).lstrip("\n")  # the template has begun the thoughts already
    return renderer.foreign_answer(text, end_id).token_ids


def _named(call: object) -> tuple[str, object]:
    """Return a tool call's name and arguments. Raise ValueError for one without a name."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"a tool call is {call!r:.60}, without the name of its function")
    return name, function.get("arguments", {})
