"""What is asked of a model that is to fill in."""

from __future__ import annotations

from cllm.answer import Terms
from cllm.errors import BadRequest
from cllm.service import Service


async def infill(service: Service, prefix: list[int], suffix: str, terms: Terms) -> list[int]:
    """Tokens that ask for what lies between ``prefix`` and ``suffix``. Raises BadRequest if the model knows no such."""
    if (marks := service.vocabulary.infill_tokens) is None:
        message = "This model cannot fill in: its vocabulary has no tokens to mark a prefix, a suffix and a middle."
        raise BadRequest(message, param="suffix", code="unsupported_parameter")
    begin = service.vocabulary.tokenize("", add_special=True, parse_special=False)
    behind = await service.encode(suffix, "suffix", terms, plain=True)
    return [*begin, marks[0], *prefix, marks[1], *behind, marks[2]]
