"""Prompts for models that fill in the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from cllm.core.segments import Segment
from cllm.errors import BadRequest
from cllm.server.body import Body
from cllm.serving.answer import SchedulingOptions
from cllm.serving.service import Service


class Snippet(Body):
    """A part of another file, as context."""

    filename: str = "file"
    text: str


async def build_suffix_prompts(
    service: Service,
    prefixes: Sequence[str | list[int]],
    suffix: str,
    scheduling: SchedulingOptions,
) -> list[list[int]]:
    """Return a prompt for the text between each of ``prefixes`` (texts or token ids) and
    ``suffix``, a field of completions in several dialects.

    Raises BadRequest if the model does not support infill, and what ``Service.encode`` raises.
    """
    marks = find_marks(service, "suffix")
    texts = [prefix for prefix in prefixes if isinstance(prefix, str)]
    for text in texts:
        service.check_text(text, "prompt", scheduling)
    service.check_text(suffix, "suffix", scheduling)
    begin, behind, *tokenized = await service.tokenize(
        [Segment("", add_special=True)],
        *([Segment(text)] for text in (suffix, *texts)),
        scheduling=scheduling,
    )
    of_texts = iter(tokenized)
    before = (next(of_texts) if isinstance(prefix, str) else prefix for prefix in prefixes)
    return [[*begin, marks[0], *prefix, marks[1], *behind, marks[2]] for prefix in before]


def find_marks(service: Service, param: str) -> tuple[int, int, int]:
    """Return the tokens that mark the prefix, the suffix and the middle.

    Raises BadRequest if the model has none.
    """
    if (marks := service.vocabulary.infill_tokens) is None:
        message = (
            "This model does not support infill: its vocabulary has no tokens to mark a prefix, a "
            "suffix and a middle."
        )
        raise BadRequest(message, param=param, code="unsupported_parameter")
    return marks


async def build_infill_prompt(
    service: Service,
    prefix: str,
    suffix: str,
    snippets: Sequence[Snippet],
    num_new_tokens: int | None,
    scheduling: SchedulingOptions | None = None,
) -> tuple[list[int], bool]:
    """Return the prompt of llama-server's /infill, with ``snippets`` of other files before the
    prefix, and whether it was shortened to fit.

    The prompt leaves room for ``num_new_tokens``, or for a quarter of the context if that is None.
    Snippets are dropped first, beginning with the first one. Then the beginning of the prefix and
    the end of the suffix are cut. If both are long, the prefix keeps three quarters of the room and
    the suffix one. Raises BadRequest if the model does not support infill.
    """
    marks, files = find_marks(service, "input_suffix"), service.vocabulary.repository_tokens
    context = service.info.context_length
    longest = context * service.vocabulary.longest_piece  # characters; a longer text cannot fit
    texts = ["project\n", "file\n", prefix[-longest:], suffix[:longest]]
    for snippet in reversed(snippets):
        text = (
            f"{snippet.filename}\n{snippet.text}\n"
            if files
            else f"--- {snippet.filename} ---\n{snippet.text}\n\n"
        )
        if (longest := longest - len(text)) < 0:
            break
        texts.append(text)

    begin, project, file, before, behind, *parts = await service.tokenize(
        [Segment("", add_special=True)],
        *([Segment(text)] for text in texts),
        scheduling=scheduling,
    )
    wanted = context // 4 if num_new_tokens is None else min(num_new_tokens, context // 2)
    room = context - 1 - wanted - len(begin) - len(marks)
    num_behind = min(len(behind), max(room // 4, room - len(before)))
    num_before = min(len(before), room - num_behind)
    middle = [
        marks[0],
        *before[len(before) - num_before :],
        marks[1],
        *behind[:num_behind],
        marks[2],
    ]
    head, tail = ([files[0], *project], [files[1], *file]) if files else ([], [])
    room -= num_before + num_behind + len(head) + len(tail)
    shown: list[list[int]] = []
    for part in parts:
        if (room := room - len(part) - (1 if files else 0)) < 0:
            break
        shown.insert(0, [files[1], *part] if files else part)
    others = [*head, *chain.from_iterable(shown), *tail] if shown else []
    is_whole = (num_before, num_behind, len(shown)) == (len(before), len(behind), len(snippets))
    return [*begin, *others, *middle], not is_whole
