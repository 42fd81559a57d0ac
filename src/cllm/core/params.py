"""Sampling parameters of a request."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

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
INTEGERS = (
    *("n", "max_tokens", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs"),
    *("mirostat", "dry_allowed_length", "dry_penalty_last_n"),
)
MAX_LEXER_STATES = 50_000  # per grammar; 1 to 2 kB each


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """A limit on reasoning: after ``num_tokens`` of it, the tokens ``force`` are written instead of
    sampled ones.

    open: the token that starts the reasoning if it is among the first tokens of the output; None if
    the output starts inside the reasoning. close: the token that ends it. closes_once: forbids
    sampling ``close`` again after ``force``.
    """

    num_tokens: int
    open: int | None
    close: int
    force: tuple[int, ...]
    closes_once: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling of one request. The steps apply in this order: penalties, DRY, bias, top-n-sigma,
    top-k, typical, top-p, min-p, XTC, temperature. sampling/extensions.py explains the less common
    ones.

    temperature: 0 takes the most probable token. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off,
    else it removes tokens less probable than ``min_p`` times the best. repetition_penalty: divides
    positive logits (multiplies negative ones) of tokens in the prompt or the output (Keskar et al.
    2019). presence_penalty and frequency_penalty: as in OpenAI's API, for tokens of the output
    only. seed: the same seed gives the same text, whatever else is being computed. stop: one or
    several strings; the text ends before them. max_tokens: None means up to the end of the context,
    0 computes only the prompt. min_tokens: until the output has this many tokens, end tokens and
    stop_token_ids are not sampled and stop strings are ignored. grammar: what the text must follow,
    in llguidance's Lark; "" allows anything. grammar_is_loose: the grammar allows any text and
    constrains only parts of it, such as tool calls. A token is then sampled without the grammar,
    and is sampled again only if the grammar refuses it. A loose grammar that fails constrains
    nothing. thinking: a limit on reasoning, or None.

    logprobs: how many of the most probable tokens to report with each sampled one. Logprobs are
    natural logarithms of the probabilities before all of these steps, including temperature. None
    reports nothing. prompt_logprobs: the same for the prompt's tokens from the second on; the whole
    prompt is then computed, even if it is cached.

    mirostat: 2, or 0 for off. It replaces all steps from top-n-sigma to XTC and comes after
    temperature. dry_breakers: token ids that interrupt DRY's search for repetitions; see
    text/dry_breakers.py.

    Raises BadRequest, naming the field and the limit, for values out of range.
    """

    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    grammar_is_loose: bool = False
    thinking: ThinkingBudget | None = None
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_breakers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in INTEGERS:
            value = getattr(self, field)
            if value.__class__ is not int and value is not None:
                raise BadRequest(
                    f"Invalid '{field}': it must be an integer, not {repr(value)[:40]}.",
                    param=field,
                )
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
                raise BadRequest(f"Invalid '{field}': token ids are integers.", param=field)
        within("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            within("max_tokens", self.max_tokens, 0, LARGEST)
        within("temperature", self.temperature, 0, 100)
        within("top_k", self.top_k, 0, LARGEST)
        within("top_p", self.top_p, 0, 1)
        within("min_p", self.min_p, 0, 1)
        within("repetition_penalty", self.repetition_penalty, 0.01, 100)
        within("presence_penalty", self.presence_penalty, -2, 2)
        within("frequency_penalty", self.frequency_penalty, -2, 2)
        within("logit_bias", len(self.logit_bias), 0, MAX_LOGIT_BIAS, what="the number of entries")
        for token, bias in self.logit_bias.items():
            within("logit_bias", token, 0, LARGEST, what="a token id")
            within("logit_bias", bias, -100, 100, what="a bias")
        if self.seed is not None:
            within("seed", self.seed, -(2**63), 2**63 - 1)
        if not (
            isinstance(self.stop, Sequence)
            and all(isinstance(text, str) for text in self.stop_strings)
        ):
            raise BadRequest(
                "Invalid 'stop': it must be text or a sequence of texts.", param="stop"
            )
        within("stop", len(self.stop_strings), 0, MAX_STOP_STRINGS, what="the number of strings")
        for text in self.stop_strings:
            within("stop", len(text), 1, MAX_STOP_LENGTH, what="the length of a string")
        self._check_extensions()

    def _check_extensions(self) -> None:
        within(
            "min_tokens",
            self.min_tokens,
            0,
            LARGEST if self.max_tokens is None else self.max_tokens,
        )
        for field, number in (
            ("logprobs", self.logprobs),
            ("prompt_logprobs", self.prompt_logprobs),
        ):
            within(field, number or 0, 0, MAX_LOGPROBS)
        within("typical_p", self.typical_p, 0, 1)
        within("top_n_sigma", self.top_n_sigma, -1, 100)
        within("xtc_probability", self.xtc_probability, 0, 1)
        within("xtc_threshold", self.xtc_threshold, 0, 1)
        if self.mirostat not in (0, 2):
            message = (
                f"Invalid 'mirostat': 0 (off) and version 2 can be had, not "
                f"{str(self.mirostat)[:20]}."
            )
            raise BadRequest(message, param="mirostat", code="unsupported_value")
        within("mirostat_tau", self.mirostat_tau, 0, 100)
        within("mirostat_eta", self.mirostat_eta, 0, 1)
        within("dry_multiplier", self.dry_multiplier, 0, 100)
        within("dry_base", self.dry_base, 0, 100)
        within("dry_allowed_length", self.dry_allowed_length, 1, LARGEST)
        within("dry_penalty_last_n", self.dry_penalty_last_n, -1, LARGEST)
        within(
            "dry_sequence_breakers",
            len(self.dry_breakers),
            0,
            MAX_DRY_BREAKERS,
            what="the number of tokens",
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, even if it is a single string."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST or self.top_k == 1

    @property
    def penalized(self) -> bool:
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
        return self.penalized or self.uses_dry

    @property
    def is_bound(self) -> bool:
        """True if a grammar restricts every token."""
        return bool(self.grammar) and not self.grammar_is_loose

    @property
    def edits_logits(self) -> bool:
        """True if logits are changed before the steps that remove tokens."""
        return self.looks_back or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def extended(self) -> bool:
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
            and not (self.edits_logits or self.extended)
        )

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Raise BadRequest if a token id is outside the vocabulary."""
        for field, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("dry_breakers", self.dry_breakers),
        ):
            for token in ids:
                within(field, token, 0, vocabulary_size - 1, what="a token id")


def within(field: str, value: float, low: float, high: float, what: str = "the value") -> None:
    """Raise BadRequest unless ``value`` is a number and ``low <= value <= high``; NaN is never
    within.
    """
    try:
        if low <= value <= high:
            return
    except TypeError:
        shown = repr(value)[:40]
        raise BadRequest(
            f"Invalid '{field}': {what} must be a number, not {shown}.", param=field
        ) from None
    code = "integer_above_max_value" if value > high else "integer_below_min_value"
    if isinstance(value, float):
        code = code.replace("integer", "decimal")
    shown = str(value) if abs(value) < 1e20 or value != value else "that"  # noqa: PLR0124  # NaN
    raise BadRequest(
        f"Invalid '{field}': {what} must be between {low} and {high}, not {shown}.",
        param=field,
        code=code,
    )
