"""Random texts that a schema's grammar allows, and whether it allows a given text."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np

from cllm.core.params import MAX_LEXER_STATES
from cllm.sampling.grammar import Grammar
from cllm.text.grammar import Checker, Constraint, Special, bytes_tokenizer
from cllm.text.schema.faults import BY_NAME

BYTES = bytes_tokenizer({}, 257)
CHECKER = Checker(Special(257, {}), MAX_LEXER_STATES)
VALIDATOR = jsonschema.Draft202012Validator
CLOSING = set(b'"]}')


def write(grammar: Grammar, rng: random.Random, limit: int = 2000) -> bytes | None:
    """Return a random text of the grammar that ends soon; None if it does not end."""
    matcher, text = grammar.matcher(), bytearray()
    while not matcher.is_stopped and len(text) < limit:
        mask = matcher.compute_mask()
        assert mask is not None, bytes(text)
        ids = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
        if 256 in ids and (len(ids) == 1 or rng.random() < 0.5):
            return bytes(text)
        ids = [i for i in ids if i != 256]
        closing = [i for i in ids if i in CLOSING]
        matcher.consume(token := rng.choice(closing if closing and rng.random() < 0.4 else ids))
        text.append(token)
    return bytes(text) if matcher.is_stopped else None


def texts_of(constraint: Constraint, num_texts: int = 8, seed: int = 0) -> list[str]:
    """Return random texts that the grammar allows from beginning to end."""
    grammar = Grammar(CHECKER.check(constraint, "schema").grammar, BYTES)
    assert not grammar.error
    rng = random.Random(seed)
    texts = [write(grammar, rng) for _ in range(num_texts)]
    return [text.decode() for text in texts if text is not None]


def check(schema, num_texts: int = 8, seed: int = 0) -> list:
    """Return the values of random texts of ``schema``, after checking that all are valid.

    Raises BadRequest if the schema is rejected.
    """
    return valid_values(texts_of(Constraint("json_schema", schema), num_texts, seed), schema)


def check_best_effort(schema, num_texts: int = 8, seed: int = 0) -> tuple[list, set[str]]:
    """Return the same, and the keywords left out; the values are valid without these."""
    constraint = Constraint("json_schema", schema, strict=False)
    unenforced = set(CHECKER.check(constraint, "schema").unenforced)
    return valid_values(
        texts_of(constraint, num_texts, seed), without(schema, unenforced)
    ), unenforced


def valid_values(texts: list[str], schema) -> list:
    values = [json.loads(text) for text in texts]
    # an exponent too large to be read
    values = [value for value in values if "Infinity" not in json.dumps(value)]
    for value in values:
        VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).validate(value)
    return values


def without(schema, keywords: set[str]):
    """Return ``schema`` without some keywords, anywhere in it. Without oneOf, at least one option
    must hold.
    """
    if isinstance(schema, list):
        return [without(part, keywords) for part in schema]
    if not isinstance(schema, dict):
        return schema
    names = {"oneOf": "anyOf"} if "oneOf" in keywords else {}
    gone = keywords - {"oneOf"} | ({"then", "else"} if "if" in keywords else set())
    return {
        names.get(key, key): {name: without(part, keywords) for name, part in value.items()}
        if key in BY_NAME and isinstance(value, dict)
        else without(value, keywords)
        for key, value in schema.items()
        if key not in gone
    }


def allows(schema, text: str) -> bool:
    """Return whether the grammar of ``schema`` allows ``text`` as a whole."""
    matcher = (
        Grammar(CHECKER.check(Constraint("json_schema", schema), "schema").grammar, BYTES)
        .matcher()
        ._at()
    )
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
