"""Every error that cLLM raises on purpose.

A ``BadRequest`` is the client's fault and becomes a 4xx in the dialect's own form; a ``StartupError`` becomes one
readable line and exit code 2. Anything else that escapes is our bug.
"""

from __future__ import annotations


class CLLMError(Exception):
    """Base of all errors below; ``str(error)`` is one line for a person."""


class StartupError(CLLMError):
    """The program cannot start with what it was given; the message says what to change."""


class BadRequest(CLLMError):
    """The request cannot be served as it is.

    ``param`` names the field, ``code`` is the machine-readable reason (OpenAI's vocabulary), ``status`` is HTTP's.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class EngineError(CLLMError):
    """The engine could not compute, or went away while it did; the client may try again in ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def context_length_exceeded(
    num_prompt_tokens: int, context_length: int, param: str, *, at_least: bool = False
) -> BadRequest:
    """A prompt that can never fit, with both numbers; ``at_least`` if it was too long to be counted."""
    return BadRequest(
        f"This model's maximum context length is {context_length} tokens and one must be left to generate, "
        f"but the prompt has {'at least ' if at_least else ''}{num_prompt_tokens} tokens.",
        param=param,
        code="context_length_exceeded",
    )
