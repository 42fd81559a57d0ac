"""Sampling parameters of a request."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from cllm.core.parameter import Parameter, check_bounds, find_parameters
from cllm.errors import BadRequest

MAX_N = 128
LARGEST = 2**31 - 1
# below this temperature, probabilities leave the range of floats and only the best token remains
COLDEST = 1e-4
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_DRY_BREAKERS = 1 << 16
MAX_LEXER_STATES = 50_000  # per grammar; 1 to 2 kB each

# The dialects that offer a parameter, see Parameter.dialects.
ALL = ("openai", "anthropic", "ollama", "native")
OPEN = ("openai", "ollama", "native")
LOCAL = ("openai", "ollama")
OPENAI = ("openai",)


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """A limit on reasoning: after ``num_tokens`` of it, the tokens ``force`` are written instead of
    sampled ones. With None, only the client can end it, which it may if it ``ends_on_request``.

    The tokens ``open`` begin reasoning ``anywhere`` or, without that, at the beginning of a line
    outside of code blocks. With ``inside``, the output begins in the middle of reasoning. The token
    ``close`` ends reasoning; with ``closes_once``, it is not sampled again after ``force``. The
    tokens ``calls`` end it too, because they begin calls of a family that forgets to close it.
    """

    num_tokens: int | None
    open: tuple[int, ...]
    close: int
    force: tuple[int, ...]
    closes_once: bool = False
    inside: bool = False
    anywhere: bool = False
    ends_on_request: bool = False
    calls: tuple[int, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling of one request. The steps apply in this order: penalties, DRY, bias, top-n-sigma,
    top-k, typical, top-p, min-p, XTC, temperature. sampling/extensions.py explains the less common
    ones. Mirostat replaces all steps from top-n-sigma to XTC and comes after temperature.

    The text ends before ``stop``, one or several strings. It must follow ``grammar``, in
    llguidance's Lark; "" allows anything. With ``grammar_is_loose``, the grammar allows any text
    and constrains only parts of it, such as tool calls. A token is then sampled without the
    grammar, and is sampled again only if the grammar refuses it. A loose grammar that fails
    constrains nothing. ``thinking`` limits the reasoning. The token ids ``dry_breakers`` interrupt
    DRY's search for repetitions; see text/dry_breakers.py.

    Logprobs are natural logarithms of the probabilities before all of these steps, including
    temperature. None reports nothing. Prompt logprobs are those of the prompt's tokens from the
    second on; the whole prompt is then computed, even if it is cached.

    Raises BadRequest, naming the field and the limit, for values out of range.
    """

    n: Annotated[int, Parameter("How many texts to generate.", (1, MAX_N))] = 1
    max_tokens: Annotated[
        int | None,
        Parameter(
            "Maximum number of tokens to generate. None means up to the end of the context; 0 "
            "computes only the prompt.",
            (0, LARGEST),
        ),
    ] = None
    temperature: Annotated[
        float,
        Parameter(
            "0 takes the most probable token; higher values vary more.", (0, 100), ALL, default=0.8
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            "Keep this many of the most probable tokens; 0 is off.", (0, LARGEST), ALL, default=40
        ),
    ] = 0
    top_p: Annotated[
        float,
        Parameter(
            "Keep the most probable tokens up to this total probability; 1 is off.",
            (0, 1),
            ALL,
            default=0.95,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Parameter(
            "Drop tokens with less than this share of the best token's probability; 0 is off.",
            (0, 1),
            OPEN,
            default=0.05,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,  # Keskar et al. 2019
        Parameter(
            "Divides positive logits of tokens in the prompt or the output, and multiplies "
            "negative ones; 1 is off.",
            (0.01, 100),
            OPEN,
            {"ollama": "repeat_penalty"},
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, Parameter("Subtracted from the logits of tokens in the output.", (-2, 2), LOCAL)
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            "Subtracted from the logits of tokens in the output, once for each occurrence.",
            (-2, 2),
            LOCAL,
        ),
    ] = 0.0
    logit_bias: dict[int, float] = {}
    seed: Annotated[
        int | None,
        Parameter(
            "The same seed draws the same random numbers, whatever else is being computed; -1 "
            "draws others for every request.",
            (-(2**63), 2**63 - 1),
            OPEN,
        ),
    ] = None
    stop: str | Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: Annotated[bool, Parameter("Do not end at an end token.", None, OPENAI)] = False
    grammar: str = ""
    grammar_is_loose: bool = False
    thinking: ThinkingBudget | None = None
    min_tokens: Annotated[
        int,
        Parameter(
            "Until the output has this many tokens, end tokens and stop_token_ids are not sampled "
            "and stop strings are ignored.",
            (0, LARGEST),
            OPENAI,
        ),
    ] = 0
    include_stop_str_in_output: Annotated[
        bool, Parameter("Keep the stop string at the end of the text.", None, OPENAI)
    ] = False
    logprobs: Annotated[
        int | None,
        Parameter(
            "How many of the most probable tokens to report with each sampled one.",
            (0, MAX_LOGPROBS),
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None, Parameter("The same for the prompt's tokens.", (0, MAX_LOGPROBS))
    ] = None
    typical_p: Annotated[
        float,
        Parameter(
            "Keep the tokens whose surprise is nearest to the expected one, up to this total "
            "probability; 1 is off.",
            (0, 1),
            LOCAL,
        ),
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        Parameter(
            "Keep logits within this many standard deviations of the largest; 0 and below is off.",
            (-1, 100),
            OPENAI,
        ),
    ] = 0.0
    xtc_probability: Annotated[
        float,
        Parameter(
            "With this probability, remove all tokens that reach xtc_threshold except the least "
            "probable of them; 0 is off.",
            (0, 1),
            OPENAI,
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float, Parameter("The probability from which XTC removes tokens.", (0, 1), OPENAI)
    ] = 0.1
    mirostat: Annotated[
        int,
        Parameter("0 is off; 2 keeps the text's surprise near mirostat_tau.", None, LOCAL),
    ] = 0
    mirostat_tau: Annotated[
        float, Parameter("The surprise, in bits, that mirostat aims at.", (0, 100), LOCAL)
    ] = 5.0
    mirostat_eta: Annotated[
        float, Parameter("How fast mirostat approaches mirostat_tau.", (0, 1), LOCAL)
    ] = 0.1
    dry_multiplier: Annotated[
        float,
        Parameter("Weight of DRY's penalty for repetitions; 0 is off.", (0, 100), OPENAI),
    ] = 0.0
    dry_base: Annotated[
        float,
        Parameter("How DRY's penalty grows with each repeated token.", (0, 100), OPENAI),
    ] = 1.75
    dry_allowed_length: Annotated[
        int,
        Parameter("The length of a repetition from which DRY applies.", (1, LARGEST), OPENAI),
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        Parameter(
            "How many of the last tokens DRY searches; -1 means all, 0 turns DRY off.",
            (-1, LARGEST),
            OPENAI,
        ),
    ] = -1
    dry_breakers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)
        for name, parameter in PARAMETERS.items():
            parameter.check(getattr(self, name))
        if self.max_tokens is not None:
            check_bounds("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.mirostat not in (0, 2):
            message = f"Invalid 'mirostat': it must be 0 (off) or 2, not {str(self.mirostat)[:20]}."
            raise BadRequest(message, param="mirostat", code="unsupported_value")
        if self.grammar.__class__ is not str:
            message = f"Invalid 'grammar': it must be text, not {repr(self.grammar)[:40]}."
            raise BadRequest(message, param="grammar")
        self._check_tokens()
        self._check_stop()

    def _check_tokens(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise BadRequest(
                "Invalid 'logit_bias': it must map token ids to biases.", param="logit_bias"
            )
        for field, tokens in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
        ):
            if not isinstance(tokens, Collection) or any(
                token.__class__ is not int for token in tokens
            ):
                raise BadRequest(f"Invalid '{field}': token ids must be integers.", param=field)
        count = len(self.logit_bias)
        check_bounds("logit_bias", count, 0, MAX_LOGIT_BIAS, what="the number of entries")
        for token, bias in self.logit_bias.items():
            check_bounds("logit_bias", token, 0, LARGEST, what="a token id")
            check_bounds("logit_bias", bias, -100, 100, what="a bias")
        count = len(self.dry_breakers)
        what = "the number of tokens"
        check_bounds("dry_sequence_breakers", count, 0, MAX_DRY_BREAKERS, what=what)

    def _check_stop(self) -> None:
        if not (
            isinstance(self.stop, Sequence)
            and all(isinstance(text, str) for text in self.stop_strings)
        ):
            raise BadRequest(
                "Invalid 'stop': it must be a string or a sequence of strings.", param="stop"
            )
        count = len(self.stop_strings)
        check_bounds("stop", count, 0, MAX_STOP_STRINGS, what="the number of strings")
        for text in self.stop_strings:
            check_bounds("stop", len(text), 1, MAX_STOP_LENGTH, what="the length of a string")

    def replace_unchecked(self, **values: Any) -> SamplingParams:
        """Return a copy with ``values``, which cLLM has chosen itself and which are not checked."""
        completed = copy.copy(self)
        for name, value in values.items():
            msgspec.structs.force_setattr(completed, name, value)
        return completed

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, even if it is a single string."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < COLDEST or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """True if a penalty changes the logits of tokens seen so far."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def uses_dry(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_base > 0 and self.dry_penalty_last_n != 0

    @property
    def looks_back(self) -> bool:
        """True if sampling depends on the preceding tokens in addition to the model's logits."""
        return self.has_penalties or self.uses_dry

    @property
    def is_bound(self) -> bool:
        """True if a grammar restricts every token."""
        return bool(self.grammar) and not self.grammar_is_loose

    @property
    def edits_logits(self) -> bool:
        """True if logits are changed before the steps that remove tokens."""
        return self.looks_back or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def uses_extensions(self) -> bool:
        """True if the request uses one of the less common steps: see sampling/extensions.py."""
        return (
            self.typical_p < 1
            or self.top_n_sigma > 0
            or self.xtc_probability > 0
            or self.mirostat > 0
        )

    @property
    def is_plain(self) -> bool:
        """True if only temperature, top-k, top-p, min-p and a grammar decide, and no logprobs are
        reported.
        """
        return (
            self.logprobs is None
            and self.thinking is None
            and not (self.edits_logits or self.uses_extensions)
        )

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Raise BadRequest if a token id is outside the vocabulary."""
        for field, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("dry_breakers", self.dry_breakers),
        ):
            for token in ids:
                check_bounds(field, token, 0, vocabulary_size - 1, what="a token id")


PARAMETERS = find_parameters(SamplingParams)
