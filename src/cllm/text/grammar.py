"""Convert clients' constraints on a text to the grammar that the engine enforces.

A grammar is in llguidance's dialect of Lark, which embeds JSON schemas. Only llguidance runs
clients' regular expressions, and it never backtracks.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cllm.errors import BadRequest
from cllm.text.schema.lark import Rules, explain_error, regex_term, text_term
from cllm.text.schema.repetitions import LARK, MAX_EXPANSION, expands_too_far
from cllm.text.schema.rules import json_rule

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from cllm.text.worker import Work

MAX_TEXT = 100_000  # characters of a regular expression or a grammar, and of all choices together
MAX_CHOICES = 4096
NUM_TRIED = 32  # random tokens that test a compiled grammar
TOO_FAR = f"its nested repetitions multiply to more than {MAX_EXPANSION}"

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "message"]


class Constraint(NamedTuple):
    """A constraint on a text. ``kind`` determines the type of ``value``.

    It is None for a json_object, a schema (dict or bool) for a json_schema, a pattern that the
    whole text matches for a regex, a list of texts for a choice, a client's Lark or GBNF for a
    grammar, and a BoundMessage as plain types for a message. If ``strict``, keywords of the schema
    that cannot be enforced are refused; otherwise they are left out.
    """

    kind: Kind
    value: Any = None
    strict: bool = True


class CheckedGrammar(NamedTuple):
    """A grammar that can be enforced ("" means none), and the schema keywords that it lacks."""

    grammar: str = ""
    unenforced: tuple[str, ...] = ()


FREE = CheckedGrammar()


class Special(NamedTuple):
    """The size of a vocabulary, and the texts of its special tokens by id."""

    vocabulary_size: int
    tokens: dict[int, str]


def to_lark(
    constraint: Constraint,
    param: str,
    unenforced: set[str] | None = None,
    special: Collection[int] = (),
    *,
    careful: bool = False,
) -> str:
    """Return the grammar, not compiled yet. Raises BadRequest, naming ``param``.

    If a schema is not strict, keywords that cannot be enforced are added to ``unenforced``; some of
    them are only found if ``careful``. A message needs ``special``,
    the ids of all special tokens.
    """
    value = constraint.value
    match constraint.kind:
        case "json_object" | "json_schema":
            schema = value if constraint.kind == "json_schema" else {"type": "object"}
            rules = Rules(careful=careful)
            dropped = None if constraint.strict else unenforced
            return f"start: {json_rule(schema, rules, param, dropped)}\n{rules}"
        case "regex":
            if expands_too_far(check_size(value, MAX_TEXT, param)):
                raise invalid(param, TOO_FAR)
            return f"start: {regex_term(value)}"
        case "choice":
            return f"start: {' | '.join(map(text_term, check_choices(value, param)))}"
        case "grammar":
            from llguidance.gbnf_to_lark import any_to_lark

            try:
                text = any_to_lark(check_size(value, MAX_TEXT, param))
            except BadRequest:
                raise
            except Exception as error:  # noqa: BLE001  # it raises Exception itself
                raise invalid(param, str(error)) from None
            if expands_too_far(text, LARK):
                raise invalid(param, TOO_FAR)
            return str(text)
        case "message":
            import msgspec

            from cllm.text.tools.call_grammar import BoundMessage, message_grammar

            return message_grammar(
                msgspec.convert(value, BoundMessage), special, unenforced, careful=careful
            )


def check_size(text: Any, limit: int, param: str) -> str:
    """Raises BadRequest, naming ``param``."""
    if not isinstance(text, str) or not text.strip():
        raise invalid(param, "it must be a non-empty string")
    if len(text) > limit:
        raise invalid(param, f"it is longer than {limit} characters")
    return text


def check_choices(choices: Any, param: str) -> list[str]:
    """Raises BadRequest, naming ``param``."""
    if not isinstance(choices, list) or not 1 <= len(choices) <= MAX_CHOICES:
        raise invalid(param, f"it must be a list of 1 to {MAX_CHOICES} strings")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise invalid(param, "every choice must be a non-empty string")
    check_size("".join(choices), MAX_TEXT, param)
    return choices


def invalid(param: str, why: str) -> BadRequest:
    return BadRequest(
        f"Invalid '{param}': {why.rstrip('.')[:300]}.", param=param, code="invalid_grammar"
    )


class Checker:
    """Compiles grammars without a model, to find out whether they can be enforced."""

    def __init__(self, special: Special, max_lexer_states: int) -> None:
        self._special = special
        self._max_lexer_states = max_lexer_states

    @cached_property
    def _clients(self) -> LLTokenizer:
        return bytes_tokenizer({}, 257)

    @cached_property
    def _ours(self) -> LLTokenizer:
        return bytes_tokenizer(self._special.tokens, self._special.vocabulary_size)

    def check(self, constraint: Constraint, param: str) -> CheckedGrammar:
        """Return a grammar that compiles and allows some text.

        Raises BadRequest, naming ``param``.
        """
        from llguidance import LLMatcher, LLParserLimits

        unenforced: set[str] = set()
        text = to_lark(constraint, param, unenforced, self._special.tokens)
        limits = LLParserLimits(max_lexer_states=self._max_lexer_states, verbose_errors=False)
        tokenizer = self._ours if constraint.kind == "message" else self._clients
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        # retry without faulty leaves
        if matcher.is_error() and constraint.kind in ("json_schema", "message"):
            text = to_lark(constraint, param, unenforced, self._special.tokens, careful=True)
            matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if constraint.kind == "grammar":
            _, warnings = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
            if any("no tokenizer" in warning for warning in warnings):
                raise invalid(param, "it names special tokens, which only text may stand for")
        if allows_only_the_end(matcher.deep_copy(), tokenizer.eos_token):
            raise invalid(param, "it allows nothing but an empty text")
        self._try(matcher)
        if matcher.is_error():
            if (
                constraint.kind == "json_schema"
                and isinstance(constraint.value, dict)
                and not constraint.strict
            ):
                kind = {key: value for key, value in constraint.value.items() if key == "type"}
                return CheckedGrammar(to_lark(Constraint("json_schema", kind), param), ("schema",))
            raise invalid(param, explain_error(matcher.get_error()))
        return CheckedGrammar(text, tuple(sorted(unenforced)))

    def _try(self, matcher: LLMatcher) -> None:
        """Follow the grammar for some random tokens: some grammars exceed the limits only there."""
        rng = random.Random(0)
        for _ in range(NUM_TRIED):
            mask = matcher.compute_bitmask()
            if matcher.is_error() or matcher.is_stopped():
                return
            byte = rng.choice([at for at, bits in enumerate(mask) if bits])
            matcher.consume_token(
                rng.choice([8 * byte + bit for bit in range(8) if mask[byte] >> bit & 1])
            )


def allows_only_the_end(matcher: LLMatcher, end_token: int) -> bool:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return mask == 1 << end_token and not matcher.is_error()


def prepare(begin: list[Any]) -> Work:
    """Return the Work of a process that checks constraints.

    Its input is a constraint and its param; its reply is the fields of CheckedGrammar as JSON.
    ``begin`` has the size of the vocabulary, its special tokens as pairs, and max_lexer_states.
    """
    importlib.import_module("llguidance")  # now, or the first check would pay for it
    size, tokens, max_lexer_states = begin
    checker = Checker(Special(size, dict(tokens)), max_lexer_states)

    def check(asked: list[Any]) -> str:
        constraint, param = asked
        try:
            return json.dumps(checker.check(Constraint(*constraint), param))
        except (RecursionError, MemoryError):
            raise invalid(param, "it is too complex") from None
        except UnicodeError:
            raise invalid(param, "it has a lone surrogate") from None

    return check


def bytes_tokenizer(special: dict[int, str], size: int) -> LLTokenizer:
    """Return a tokenizer of ``size`` tokens: the special ones, and one for each byte while there is
    room.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    class Bytes:
        bos_token_id = None

        def __init__(self) -> None:
            free = [token for token in range(size) if token not in special]
            self.ids = dict(enumerate(free[:256]))
            self.eos_token_id = free[256] if len(free) > 256 else size
            self.special_token_ids = list(special)
            self.tokens = [b""] * max(size, self.eos_token_id + 1)
            for byte, token in self.ids.items():
                self.tokens[token] = bytes([byte])
            for token, text in special.items():
                self.tokens[token] = text.encode()

        def __call__(self, data: bytes) -> list[int]:
            return [self.ids[byte] for byte in data]

    return LLTokenizer(TokenizerWrapper(Bytes()), slices=[])
