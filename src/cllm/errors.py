"""Every error that cLLM raises on purpose.

A ``BadRequest`` is the client's fault and becomes a 4xx in the dialect's own form. A
``StartupError`` becomes one readable line and exit code 2. Any other exception that escapes is a
bug in cLLM.
"""

from __future__ import annotations

import os
from pathlib import Path

# Exit status of an engine that has lost an RPC worker: the failure is temporary (sysexits.h).
WORKER_LOST_STATUS = 75


class CLLMError(Exception):
    """Base of all errors below; ``str(error)`` is one line that people can read."""


class StartupError(CLLMError):
    """The program cannot start with these settings, files or libraries; the message says what to
    change.
    """


class ModelFileError(StartupError):
    """A model's file cannot be used. ``for_clients`` is the message without the file's folder."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        folder = str(path.parent).rstrip(os.sep) + os.sep
        self.for_clients = message.replace(folder, "")


class KilledWhileLoading(StartupError):
    """Something outside cLLM killed the engine while it loaded a model. A retry may succeed."""


class BadRequest(CLLMError, ValueError):
    """The request cannot be served as it is.

    ``param`` names the field, ``code`` is the machine-readable reason (OpenAI's vocabulary),
    ``status`` is HTTP's.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class UnknownModel(BadRequest):
    """No model is served under the name that a request asks for.

    ``asked`` is that name, cut to 100 characters, and ``served`` the name of the default model.
    ``message`` is a dialect's wording, with {asked!r} and {served!r} for the two names.
    """

    def __init__(
        self,
        asked: str,
        served: str,
        message: str = "The model {asked!r} does not exist; this server has {served!r}.",
    ) -> None:
        self.asked, self.served = asked[:100], served
        super().__init__(
            message.format(asked=self.asked, served=served),
            param="model",
            code="model_not_found",
            status=404,
        )


class EngineError(CLLMError):
    """The engine is not ready, failed, died or is overloaded; the client may retry in
    ``retry_after`` seconds.

    Metrics count rejections with this error under ``reason``.
    """

    def __init__(
        self, message: str, retry_after: float = 2.0, *, reason: str = "not_ready"
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason


class LoadFailed(CLLMError):
    """A model cannot be loaded. The log has the full reason; clients get it without folders."""


class FatalRequest(EngineError):
    """Computing this request has repeatedly killed the engine, so the client must not retry it."""


def describe_os_error(error: OSError) -> str:
    """Return an error of the system as one line: the file, if it names one, and the reason."""
    reason = error.strerror or str(error) or type(error).__name__
    named = [] if error.filename is None else [str(error.filename)]
    return ": ".join([*named, reason])


class PromptTooLong(BadRequest):
    """The prompt can never fit. At least one token must be left to generate."""

    def __init__(
        self, num_tokens: int, context_length: int, param: str, *, at_least: bool = False
    ) -> None:
        """``at_least`` says that the prompt was too long to be counted exactly."""
        super().__init__(
            f"This model's maximum context length is {context_length} tokens and one must be left "
            f"to generate, but the prompt has {'at least ' * at_least}{num_tokens} tokens.",
            param=param,
            code="context_length_exceeded",
        )
        self.num_tokens = num_tokens
        self.max_tokens = context_length - 1


class Unauthorized(CLLMError):
    """The request has no valid API key."""


class RateLimited(CLLMError):
    """An account would exceed one of its limits.

    ``limit`` is the limit's name, a field of AccountLimits. The limit may allow the request after
    ``retry_after`` seconds; None means in another month or never. ``is_final`` says that the
    request alone is larger than the limit.
    """

    def __init__(
        self, message: str, limit: str, retry_after: float | None, *, is_final: bool = False
    ) -> None:
        super().__init__(message)
        self.is_final = is_final
        self.limit = limit
        self.retry_after = retry_after
