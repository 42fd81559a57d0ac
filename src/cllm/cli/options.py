"""Options that several commands take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

Positive = Number(gte=1)
AboveZero = Number(gt=0)
NotNegative = Number(gte=0)

ModelFile = Annotated[Path | None, Parameter(help="A GGUF file. [default: the built-in model]")]
PromptWords = Annotated[int, Parameter(validator=Positive, help="Words of a prompt.")]
AnswerTokens = Annotated[int, Parameter(validator=Number(gte=2), help="Tokens of an answer.")]
Json = Annotated[bool, Parameter(help="Print one JSON object.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GoodputLimits:
    """The limits within which a request counts as good."""

    ttft: Annotated[
        float | None,
        Parameter(validator=AboveZero, help="Goodput limit: milliseconds to the first token."),
    ] = None
    tpot: Annotated[
        float | None,
        Parameter(
            validator=AboveZero, help="Goodput limit: milliseconds for each token after the first."
        ),
    ] = None
