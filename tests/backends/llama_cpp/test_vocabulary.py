"""Text to tokens and back with llama.cpp, with the built-in model's vocabulary."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.errors import StartupError

pytestmark = pytest.mark.llama

TEXTS = [
    "",
    "hello world",
    "  two spaces,\ttab\r\n\n\nnew lines  ",
    "a\0b\0\0",
    "\0",
    "naïve café, Straße, ﬁ ligature, e\u0301",
    "你好 世界。こんにちは 안녕하세요",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪",
    "\u202etfel ot thgir\u202c \u200b zero \ufeff width",
    "Z̷̢̛̹͉a̴l̵g̶o̸",
    "\U0010ffff \ufffe \ufdd0 \uffff",
    "<script>alert(1)</script> '; DROP TABLE users; -- ${jndi:ldap://x}",
    "1;2;3 0x7fffffff -0 NaN Infinity 1e999",
    "▁ Ġ Ċ <0x0A> [INST] <s> </s>",
    "x" * 5000,
]


@pytest.fixture(scope="module")
def vocabulary(builtin_path):
    from cllm.backends.llama_cpp.vocabulary import LlamaVocabulary

    made = LlamaVocabulary.load(builtin_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def module():
    from cllm.backends.llama_cpp import vocabulary

    return vocabulary


def text_of(vocabulary, tokens: list[int]) -> str:
    return b"".join(vocabulary.pieces[token] for token in tokens).decode()


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_bytes_of_the_tokens_are_the_text(vocabulary, text):
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)
    assert text_of(vocabulary, tokens) == text
    assert all(0 <= token < vocabulary.size for token in tokens)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_survives_tokenizing(vocabulary, text):
    assert (
        text_of(vocabulary, vocabulary.tokenize(text, add_special=False, parse_special=False))
        == text
    )


def test_control_tokens_are_parsed_on_request_only(vocabulary):
    """The text of a control token is one token for a template, and several plain tokens for a user."""
    assert vocabulary.control_tokens
    for control in vocabulary.control_tokens:
        parsed = vocabulary.tokenize(f"a{control}b", add_special=False, parse_special=True)
        plain = vocabulary.tokenize(f"a{control}b", add_special=False, parse_special=False)
        assert [token for token in parsed if not vocabulary.pieces[token]] == parsed[1:2]
        assert text_of(vocabulary, parsed) == "ab"
        assert text_of(vocabulary, plain) == f"a{control}b"


def test_control_tokens_come_longest_first(vocabulary):
    """Replacing them one by one therefore never splits a longer one."""
    lengths = [len(control) for control in vocabulary.control_tokens]
    assert lengths == sorted(lengths, reverse=True)


def test_control_tokens_add_no_text(vocabulary):
    """Tokens that end a text and other control tokens have no piece; every other token has one."""
    silent = [token for token in range(vocabulary.size) if not vocabulary.pieces[token]]
    assert len(vocabulary.pieces) == vocabulary.size
    assert len(silent) == len(vocabulary.control_tokens)


def test_eos_token_of_templates_is_a_control_token(vocabulary):
    assert vocabulary.special_texts["eos_token"] in vocabulary.control_tokens


def test_bos_token_of_templates_is_a_control_token_or_empty(vocabulary):
    assert vocabulary.special_texts["bos_token"] in {"", *vocabulary.control_tokens}


def test_invalid_file_raises_startup_error(tmp_path):
    """It names the file."""
    pytest.importorskip("llama_cpp")
    from cllm.backends.llama_cpp.vocabulary import LlamaVocabulary

    path = tmp_path / "letter.gguf"
    path.write_text("Dear model, ...")
    with pytest.raises(StartupError, match=r"letter\.gguf"):
        LlamaVocabulary.load(path)


def test_infill_tokens_are_read_from_the_file(vocabulary, tiny_model):
    """The built-in model has none."""
    from tiny_models import INFILL

    assert vocabulary.infill_tokens is None
    with contextlib.closing(type(vocabulary).load(tiny_model("gemma3"))) as other:
        assert other.infill_tokens == INFILL


def write_spm(path, num_bytes):
    """Write a SentencePiece vocabulary with a token for each of the first ``num_bytes`` bytes."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(num_bytes)),
        "\u2581",
        "a",
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *([6] * num_bytes), 1, 1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


CHECK = """
import sys
from pathlib import Path
from cllm.backends.llama_cpp.vocabulary import LlamaVocabulary
vocabulary = LlamaVocabulary.load(Path(sys.argv[1]))
print("loaded", flush=True)
vocabulary.check()
"""


def test_check_tokenizes_every_byte_of_utf_8():
    """Some bytes occur in no valid text."""
    from cllm.backends.llama_cpp.vocabulary import EVERY_BYTE

    assert {*EVERY_BYTE.encode()} == {*range(0xC0), *range(0xC2, 0xF5)}


def test_check_aborts_on_a_vocabulary_without_byte_tokens(tmp_path):
    """The engine process runs the check, so it aborts there before any text is tokenized."""
    ends = {}
    for num_bytes in (0xF5, 0xF4):
        path = write_spm(tmp_path / f"{num_bytes}.gguf", num_bytes)
        done = subprocess.run(
            [sys.executable, "-c", CHECK, path], capture_output=True, text=True, check=False
        )
        ends[num_bytes] = done.returncode, done.stdout
    assert ends == {0xF5: (0, "loaded\n"), 0xF4: (-signal.SIGABRT, "loaded\n")}


PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<|im",
    "_end|>",
    "<",
    " ",
    "\n ",
    "a",
    "the cat",
    "é",
]


@given(texts=st.lists(st.sampled_from(PIECES), max_size=40), add=st.booleans(), parse=st.booleans())
def test_text_tokenized_in_parts_has_the_tokens_of_the_whole(vocabulary, module, texts, add, parse):
    text = "".join(texts)
    whole = vocabulary.tokenize(text, add_special=add, parse_special=parse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_SPECIAL", -1)
        patch.setattr(module, "PART", 8)
        assert vocabulary.tokenize(text, add_special=add, parse_special=parse) == whole


@pytest.mark.parametrize("kind", ["bert", "gemma3"])
def test_only_first_and_last_part_add_special_tokens(tiny_model, module, monkeypatch, kind):
    vocabulary = module.LlamaVocabulary.load(tiny_model(kind))
    text = "".join(f"{special} a" for special in vocabulary.special_tokens.values()) * 3
    whole = vocabulary.tokenize(text, add_special=True, parse_special=True)
    monkeypatch.setattr(module, "MAX_SPECIAL", -1)
    monkeypatch.setattr(module, "PART", 8)
    assert vocabulary.tokenize(text, add_special=True, parse_special=True) == whole
    vocabulary.close()


def test_counting_special_tokens_stops_at_the_limit(module):
    assert module.has_more_than(5, ["<a", "<b"], "<a><b>" * 3)
    assert not module.has_more_than(6, ["<a", "<b"], "<a><b>" * 3)


@pytest.mark.parametrize(
    ("text", "specials", "expected"),
    [
        ("ab<x>cd<x>ef", {"<x>": False}, ["ab", "<x>cd", "<x>ef"]),
        ("a<x> <x>", {"<x>": True}, ["a", "<x> <x>"]),  # the blank would be left over
        ("a<x><x>", {"<x>": True}, ["a", "<x>", "<x>"]),
        ("ab<<x>c<x>", {"b<<": False, "<x>": False}, ["ab<<x>c", "<x>"]),
        ("ab<x>c<x>", {"<x>": False, "x>c": False}, ["ab<x>c", "<x>"]),
        ("ab", {}, ["ab"]),
    ],
)
def test_parts_are_split_only_before_special_tokens_of_the_whole(
    monkeypatch, module, text, specials, expected
):
    monkeypatch.setattr(module, "PART", 1)
    assert list(module.split_before_specials(text, specials)) == expected


def test_many_special_tokens_tokenize_in_linear_time(vocabulary):
    """llama.cpp alone takes minutes."""
    begun = time.process_time()
    assert (
        len(vocabulary.tokenize("<|im_end|>" * 390_000, add_special=True, parse_special=True))
        == 390_000
    )
    assert time.process_time() - begun < 30
