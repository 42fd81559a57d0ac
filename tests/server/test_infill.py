"""Prompts for filling in the middle, and how they are shortened."""

import asyncio
from types import SimpleNamespace

import pytest

from cllm.backends.fake.vocabulary import FakeVocabulary
from cllm.core.segments import tokenize_segments
from cllm.core.vocabulary import VocabularyTable
from cllm.errors import BadRequest
from cllm.server.infill import Snippet, build_infill_prompt, build_suffix_prompts
from cllm.serving.answer import SchedulingOptions

PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE = range(1, 6)  # bytes that no text here has


def service(context_length=1000, infill=(PREFIX, SUFFIX, MIDDLE), repository=None):
    vocabulary = FakeVocabulary()
    vocabulary.infill_tokens, vocabulary.repository_tokens = infill, repository

    async def tokenize(*texts, **_):
        return [tokenize_segments(vocabulary, text) for text in texts]

    return SimpleNamespace(
        vocabulary=VocabularyTable.of(vocabulary),
        tokenize=tokenize,
        info=SimpleNamespace(context_length=context_length),
    )


def prompt(service, prefix, suffix, snippets=(), num_new_tokens=10):
    tokens, is_short = asyncio.run(
        build_infill_prompt(service, prefix, suffix, snippets, num_new_tokens)
    )
    assert len(tokens) + num_new_tokens < service.info.context_length
    return bytes(tokens), is_short


def test_prefix_and_suffix_follow_their_tokens():
    assert prompt(service(), "a = ", "\n") == (b"\x01a = \x02\n\x03", False)
    assert prompt(service(), "", "") == (b"\x01\x02\x03", False)


def test_several_prefixes_are_tokenized_in_one_call():
    calls, one = [], service()
    tokenize = one.tokenize
    one.tokenize = lambda *texts, **_: calls.append(texts) or tokenize(*texts)
    one.check_text = lambda *_: None
    for prefixes in (["a", "bc"], [[97], [98, 99]]):
        prompts = asyncio.run(build_suffix_prompts(one, prefixes, "d", SchedulingOptions()))
        assert [*map(bytes, prompts)] == [b"\x01a\x02d\x03", b"\x01bc\x02d\x03"]
    assert len(calls) == 2


def test_snippets_of_other_files_come_first():
    snippets = [Snippet(filename="b.py", text="b = 1"), Snippet(filename="c.py", text="c = 2")]
    text, is_short = prompt(service(), "a = ", "\n", snippets)
    assert (text, is_short) == (
        b"--- b.py ---\nb = 1\n\n--- c.py ---\nc = 2\n\n\x01a = \x02\n\x03",
        False,
    )
    text, is_short = prompt(service(repository=(REPOSITORY, FILE)), "a = ", "\n", snippets)
    assert (text, is_short) == (
        b"\x04project\n\x05b.py\nb = 1\n\x05c.py\nc = 2\n\x05file\n\x01a = \x02\n\x03",
        False,
    )


@pytest.mark.parametrize("repository", [None, (REPOSITORY, FILE)])
def test_first_snippets_are_dropped_if_the_prompt_is_too_long(repository):
    snippets = [Snippet(filename=f"{i}.py", text="x" * 100) for i in range(20)]
    text, is_short = prompt(service(repository=repository), "a = ", "\n", snippets)
    assert is_short
    assert b"19.py" in text
    assert b"0.py\n" not in text.replace(b"10.py", b"")
    assert text.endswith(b"\x01a = \x02\n\x03")
    assert len(text) > 800


@pytest.mark.parametrize(
    ("num_prefix", "num_suffix", "kept"),
    [(5000, 5000, (740, 246)), (5000, 10, (976, 10)), (10, 5000, (10, 976))],
)
def test_long_prefix_and_suffix_are_truncated_far_from_the_cursor(num_prefix, num_suffix, kept):
    text, is_short = prompt(
        service(), "p" * num_prefix + "P", "S" + "s" * num_suffix, [Snippet(filename="a", text="b")]
    )
    before, behind = text.removeprefix(b"\x01").removesuffix(b"\x03").split(b"\x02")
    assert is_short
    assert (before[-1:], behind[:1]) == (b"P", b"S")
    assert abs(len(before) - kept[0]) <= 2
    assert abs(len(behind) - kept[1]) <= 2


@pytest.mark.parametrize("wanted", [None, 10**9])
def test_prompt_leaves_room_for_the_answer(wanted):
    tokens, _ = asyncio.run(build_infill_prompt(service(), "p" * 5000, "", (), wanted))
    assert 400 <= len(tokens) <= 750


def test_model_without_infill_tokens_is_rejected():
    with pytest.raises(BadRequest, match="does not support infill") as refused:
        prompt(service(infill=None), "a", "b")
    assert refused.value.param == "input_suffix"
