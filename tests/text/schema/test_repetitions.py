"""Nested counted repetitions, whose counts multiply when compiled."""

import time

import pytest

from cllm.text.schema.repetitions import (
    LARK,
    MAX_EXPANSION,
    REGEX,
    expands_too_far,
    repetition_products,
)


@pytest.mark.parametrize(
    ("pattern", "nested"),
    [
        ("", 1),
        ("a{1,500}", 1),
        ("a{9}b{1,500}", 1),
        ("(a{1,20}){3}", 60),
        ("(a{2}|b{1,7}){3,}", 21),
        ("((a{1,5})+x){1,4}", 20),
        ("(?:a{5}){6}{7}", 210),
        (r"(\{9\}[(]{4}){5}", 20),
        (r"(a{3}\)){2}", 6),
        ("(a{1,10}){0,10000000000000}", 10 * 10**9),
        (")){3}(", 1),
    ],
)
def test_counts_of_nested_repetitions_multiply(pattern: str, nested: int) -> None:
    assert repetition_products(pattern, REGEX)[1] == nested


@pytest.mark.parametrize(
    ("grammar", "nested"),
    [
        ('start: "a"{1,500} /b{1,500}/', 1),
        ("start: /(a{4}){5}/ x{6}", 20),
        ("start: /a{4}/{5}", 20),
        ('start: ("(" /[/)]{3}/){2} # {9}\nx: "{9}" // (a{9}){9}', 6),
        ('start: ["a"{2}]{3}', 6),
    ],
)
def test_only_counts_outside_texts_and_comments_multiply(grammar: str, nested: int) -> None:
    assert repetition_products(grammar, LARK)[1] == nested


def test_limit_applies_to_nested_counts() -> None:
    assert not expands_too_far(f"(a{{1,{MAX_EXPANSION // 10}}}){{10}}")
    assert expands_too_far(f"(a{{1,{MAX_EXPANSION // 10}}}){{11}}")


@pytest.mark.parametrize(
    "text",
    [
        "(" * 15_000 + "a" + "){2}" * 15_000,
        "a{9}" * 15_000,
        "[" * 100_000,
        '"/' * 50_000,
        "/[" * 50_000,
        '"\n' * 50_000,
    ],
)
def test_counting_takes_linear_time(text: str) -> None:
    begun = time.process_time()
    for parts in (REGEX, LARK):
        expands_too_far(text, parts)
    assert time.process_time() - begun < 2
