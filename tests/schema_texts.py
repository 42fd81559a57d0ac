"""Random texts of a schema's grammar, and whether it allows a text."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np

from cllm.core.params import MAX_LEXER_STATES
from cllm.sampling.grammar import Grammar
from cllm.text.grammar import Checker, Constraint, Special, bytes_tokenizer

BYTES = bytes_tokenizer({}, 257)
CHECKER = Checker(Special(257, {}), MAX_LEXER_STATES)
VALIDATOR = jsonschema.Draft202012Validator
CLOSING = set(b'"]}')


def write(grammar: Grammar, rng: random.Random, limit: int = 2000) -> bytes | None:
    """A random text of the grammar that hurries to its end; None if it does not get there."""
    matcher, text = grammar.matcher(), bytearray()
    while not matcher.stopped and len(text) < limit:
        mask = matcher.allowed()
        assert mask is not None, bytes(text)
        ids = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
        if 256 in ids and (len(ids) == 1 or rng.random() < 0.5):
            return bytes(text)
        ids = [i for i in ids if i != 256]
        closing = [i for i in ids if i in CLOSING]
        matcher.consume(token := rng.choice(closing if closing and rng.random() < 0.4 else ids))
        text.append(token)
    return bytes(text) if matcher.stopped else None


def check(schema, num_texts: int = 8, seed: int = 0) -> list:
    """Values of random texts of ``schema``, all of them valid. Raises BadRequest if it is refused."""
    grammar = Grammar(CHECKER.check(Constraint("json_schema", schema), "schema"), BYTES)
    assert not grammar.error
    rng = random.Random(seed)
    texts = [write(grammar, rng) for _ in range(num_texts)]
    values = [json.loads(text) for text in texts if text is not None]
    values = [value for value in values if "Infinity" not in json.dumps(value)]  # a number too long for the validator
    for value in values:
        VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).validate(value)
    return values


def allows(schema, text: str) -> bool:
    """Whether ``text`` is all that the grammar of ``schema`` asks for."""
    matcher = Grammar(CHECKER.check(Constraint("json_schema", schema), "schema"), BYTES).matcher()
    for token in [*text.encode(), 256]:
        mask = matcher.allowed()
        if mask is None or not mask[token // 8] >> token % 8 & 1:
            return matcher.stopped and token == 256
        matcher.consume(token)
    return True
