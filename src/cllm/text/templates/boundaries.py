"""Mark the places up to which later prompts will agree with this one.

The prompt of the next turn differs from this one at the latest where the answer begins, because
many templates omit its reasoning then; after another question, templates may also omit the
reasoning between the calls of this turn; and other conversations share what precedes the first
question. Templates decide this, so they are asked: other conversations are rendered, and a boundary
is where the message begins in which a prompt stops agreeing with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from cllm.errors import BadRequest
from cllm.text.templates.fences import BOUNDARY, Fences

MAX_SECONDS = 0.2  # of CPU time for one prompt; a slower template is not asked again
INSTRUCTIONS = ("system", "developer")  # roles

Messages = list[dict[str, Any]]


def render_with_boundaries(
    render: Callable[..., str],
    fences: Fences,
    messages: Messages,
    tools: list[dict[str, Any]],
    continued: str,
    variables: dict[str, Any],
) -> str:
    """Return what ``ChatTemplate.render`` returns, with BOUNDARY at each boundary.

    A boundary is the beginning of a control token, where a prompt can be divided without a change
    of its tokens. Raises BadRequest.
    """
    begun = time.process_time()
    text = render(messages, tools, continued, **variables)
    is_slow = time.process_time() - begun > MAX_SECONDS
    variables = variables | {"add_generation_prompt": False}
    places = {0, len(text)}
    if is_slow:  # at least where the last message begins, probably the answer
        places.add(fences.find_control_token(text, len(text)))
    for others in () if is_slow else list_relatives(messages[:-1] if continued else messages):
        try:
            other = render(others, tools, **variables)
        except BadRequest:  # not a conversation that this template accepts
            continue
        shared = count_shared(text, other)
        places.add(fences.find_control_token(text, shared))
    return BOUNDARY.join(text[begin:end] for begin, end in pairwise(sorted(places)))


def list_relatives(messages: Messages) -> Iterator[Messages]:
    """Yield conversations with which later prompts will agree as long as with ``messages``."""
    if messages:
        yield messages
    roles = [message["role"] for message in messages]
    if "user" in roles[:-1] and roles[-1] != "user":
        last = len(roles) - 1 - roles[::-1].index("user")
        yield messages[: last + 1]
    num_instructions = next((i for i, role in enumerate(roles) if role not in INSTRUCTIONS), 0)
    yield [*messages[:num_instructions], {"role": "user", "content": "?"}]


def count_shared(text: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
