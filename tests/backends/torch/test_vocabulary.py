"""Text to tokens and back with the vocabularies of checkpoints."""

from __future__ import annotations

import contextlib
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import add_tokens, make_tokenizer, write_tokenizer
from conftest import repeat
from hypothesis import given
from hypothesis import strategies as st

from cllm.errors import EngineError, ModelFileError
from cllm.models.catalog import BUILTIN
from cllm.models.checkpoint import Checkpoint

BUILTIN_SIZE = 1024
CODE = Path(__file__).parents[3] / "src"
TEXTS = [
    "",
    "hello world",
    "  two spaces,\ttab\r\n\n\nnew lines  ",
    "a\0b\0\0",
    "naïve café, Straße, ﬁ ligature, e\u0301",
    "你好 世界。こんにちは 안녕하세요",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪",
    "\u202etfel ot thgir\u202c \u200b zero \ufeff width",
    "\U0010ffff \ufffe \ufdd0 \uffff",
    "▁ Ġ Ċ <0x0A> [INST] <s> </s>",
    "def f(x):\n    return x + 1  # don't\n",
    "<|im_start|>user\nhi<|im_end|>",
    "<tool_call> <think>",
]


def make(folder: Path, tokenizer: Any, size: int, **files: Any) -> Any:
    """Return a vocabulary from ``tokenizer.json`` and other files, which are named without .json;
    ``config`` and ``generation`` are not written.
    """
    from cllm.backends.torch.vocabulary import HfVocabulary

    config, generation = files.pop("config", {}), files.pop("generation", {})
    for name, content in (files | {"tokenizer": tokenizer}).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return HfVocabulary(Checkpoint(folder, config, generation, {}), size)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """The built-in model's."""
    from cllm.backends.torch.vocabulary import HfVocabulary

    folder = tmp_path_factory.mktemp("builtin")
    write_tokenizer(folder, BUILTIN)
    return HfVocabulary(Checkpoint(folder, {}, {}, {}), BUILTIN_SIZE)


@pytest.fixture(scope="module")
def reference():
    """The same vocabulary by llama.cpp."""
    pytest.importorskip("llama_cpp")
    from cllm.backends.llama_cpp.vocabulary import LlamaVocabulary

    made = LlamaVocabulary.load(BUILTIN)
    yield made
    made.close()


def text_of(vocabulary: Any, tokens: list[int]) -> str:
    return b"".join(vocabulary.pieces[token] for token in tokens).decode()


def plain(vocabulary: Any, text: str) -> list[int]:
    return vocabulary.tokenize(text, add_special=False, parse_special=False)


def tiny_bpe(**parts: Any) -> dict[str, Any]:
    """Return a vocabulary of the kind of Llama 2: blanks are ▁, and bytes have tokens."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    model = {
        "type": "BPE",
        "vocab": {text: token for token, text in enumerate(texts)},
        "merges": [["▁", "a"]],
        "unk_token": "<unk>",
        "byte_fallback": True,
        "fuse_unk": True,
    }
    blanks = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    return make_tokenizer(
        model,
        **{
            "added_tokens": add_tokens("<unk>", "<s>", "</s>"),
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "decoder": {"type": "Sequence", "decoders": [*blanks, {"type": "ByteFallback"}]},
            "post_processor": template("<s>"),
        }
        | parts,
    )


def template(begin: str = "", end: str = "", ids: tuple[int, int] = (1, 2)) -> dict[str, Any]:
    around = [{"SpecialToken": {"id": text, "type_id": 0}} for text in (begin, end) if text]
    first, last = around[: bool(begin)], around[bool(begin) :]
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": [*first, texts[0], *last],
        "pair": [*first, texts[0], *last, *last, texts[1], *last],
        "special_tokens": {
            text: {"id": text, "ids": [token], "tokens": [text]}
            for text, token in zip((begin, end), ids, strict=True)
            if text
        },
    }


def tiny_unigram() -> dict[str, Any]:
    """Return a vocabulary of the kind of XLM-RoBERTa, whose control tokens are words of the
    model.
    """
    control = ["<s>", "<pad>", "</s>", "<unk>"]
    words = [("▁", -4.0), ("a", -3.0), ("▁a", -2.0), *((one, -5.0) for one in "</s>b")]
    blanks = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return make_tokenizer(
        {"type": "Unigram", "unk_id": 3, "vocab": [*((text, 0.0) for text in control), *words]},
        added_tokens=add_tokens(*control),
        pre_tokenizer=blanks,
        decoder=blanks,
        post_processor={"type": "RobertaProcessing", "cls": ["<s>", 0], "sep": ["</s>", 2]}
        | {"trim_offsets": True, "add_prefix_space": False},
    )


def tiny_words() -> dict[str, Any]:
    """Return a vocabulary of the kind of BERT."""
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "##s", "world", "[", "]", "cls"]
    return make_tokenizer(
        {
            "type": "WordPiece",
            "vocab": {text: token for token, text in enumerate(texts)},
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        added_tokens=add_tokens("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
        normalizer={"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
        | {"strip_accents": None, "lowercase": True},
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        post_processor=template("[CLS]", "[SEP]", (2, 3)),
        truncation={"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        padding={"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
        | {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
    )


@pytest.mark.llama
@pytest.mark.parametrize(
    "fact",
    [
        *("size", "pieces", "control_tokens", "special_tokens", "special_texts", "pair_tokens"),
        *("chat_template", "tool_template", "rerank_template"),
        *("infill_tokens", "repository_tokens"),
    ],
)
def test_facts_are_those_of_llama_cpp(vocabulary, reference, fact):
    ours, theirs = getattr(vocabulary, fact), getattr(reference, fact)
    assert ours == theirs or sorted(ours) == sorted(theirs)


@pytest.mark.llama
def test_end_tokens_are_those_of_llama_cpp(vocabulary, reference):
    from llama_cpp import llama_cpp as lib

    ends = [one for one in range(BUILTIN_SIZE) if lib.llama_vocab_is_eog(reference._vocab, one)]
    assert vocabulary.end_tokens == ends


@pytest.mark.llama
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("parse", [False, True])
def test_tokens_are_those_of_llama_cpp(vocabulary, reference, text, parse):
    ours, theirs = (
        one.tokenize(text, add_special=True, parse_special=parse) for one in (vocabulary, reference)
    )
    assert ours == theirs


@pytest.mark.llama
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
        | st.sampled_from(["<|im_end|>", "<think>", " ", "\n", "\r\n", "12", "don't", "<|im"]),
        max_size=8,
    ),
    st.booleans(),
)
def test_tokens_of_any_text_are_those_of_llama_cpp(vocabulary, reference, parts, parse):
    text = "".join(parts)
    ours, theirs = (
        one.tokenize(text, add_special=False, parse_special=parse)
        for one in (vocabulary, reference)
    )
    assert ours == theirs


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_bytes_of_the_tokens_are_the_text(vocabulary, tmp_path, text):
    assert text_of(vocabulary, plain(vocabulary, text)) == text
    blanks = make(tmp_path, tiny_bpe(), 262)
    assert text_of(blanks, plain(blanks, text)) == text.replace("▁", " ")


def test_control_tokens_are_parsed_on_request_only(vocabulary, tmp_path):
    """Also in vocabularies whose control tokens are words of the model."""
    for one in (vocabulary, make(tmp_path, tiny_bpe(), 262)):
        assert one.control_tokens
        for control in one.control_tokens:
            parsed = one.tokenize(f"a{control}b", add_special=False, parse_special=True)
            assert [one.special_tokens.get(token) for token in parsed].count(control) == 1
            assert text_of(one, plain(one, f"a{control}b")) == f"a{control}b"


def test_words_of_the_model_do_not_spell_control_tokens(tmp_path):
    """The words of a Unigram model include </s>, which a user's text must not contain."""
    one = make(tmp_path, tiny_unigram(), 13)
    tokens = plain(one, "a</s> </s></s>a <s>")
    assert not {0, 1, 2} & {*tokens}
    assert text_of(one, tokens).replace(" ", "") == "a</s></s></s>a<s>"
    assert one.tokenize("</s>", add_special=False, parse_special=True) == [2]
    assert 3 in plain(one, "?")  # the unknown token may be in any text


def test_words_are_pieces_with_a_blank(tmp_path):
    """Truncation and padding in the file do not apply."""
    one = make(tmp_path, tiny_words(), 10)
    tokens = one.tokenize("Hellos world hello hellos", add_special=True, parse_special=False)
    assert tokens == [2, 4, 5, 6, 4, 4, 5, 3]
    assert text_of(one, tokens) == " hellos world hello hellos"
    assert plain(one, "[CLS]") == [7, 9, 8]


def test_more_logits_than_tokens(tmp_path):
    one = make(tmp_path, tiny_bpe(), 300)
    assert one.size == len(one.pieces) == 300
    assert one.pieces[299] == b""
    assert one.grammar_tokenizer([2]).vocab_size == 300


def test_added_tokens_that_the_model_does_not_know(tmp_path, caplog):
    """Such as a padding token that was added without training."""
    added = add_tokens("<unk>", "<s>", "</s>") + add_tokens("<pad>", first=262)
    one = make(tmp_path, tiny_bpe(added_tokens=added), 262)
    assert "1 added tokens such as '<pad>' are ignored" in caplog.text
    assert max(one.tokenize("a<pad>", add_special=False, parse_special=True)) < 262


def test_tokens_beyond_the_logits(tmp_path):
    with pytest.raises(ModelFileError, match="but the model has only 200 tokens"):
        make(tmp_path, tiny_bpe(), 200)


@pytest.mark.parametrize(
    ("tokenizer", "size", "single", "pair"),
    [
        (tiny_bpe(), 262, ([1], []), ([1], [], [])),
        (tiny_bpe(post_processor=None), 262, ([], []), ([], [], [])),
        (tiny_words(), 10, ([2], [3]), ([2], [3, 3], [3])),
        (tiny_unigram(), 13, ([0], [2]), ([0], [2, 2], [2])),
        (
            tiny_bpe(
                post_processor={
                    "type": "Sequence",
                    "processors": [{"type": "ByteLevel"}, template("<s>", "</s>")],
                }
            ),
            262,
            ([1], [2]),
            ([1], [2, 2], [2]),
        ),
        (
            tiny_bpe(
                post_processor={"type": "BertProcessing", "cls": ["<s>", 1], "sep": ["</s>", 2]}
            ),
            262,
            ([1], [2]),
            ([1], [2], [2]),
        ),
    ],
)
def test_added_begin_and_end(tmp_path, tokenizer, size, single, pair):
    one = make(tmp_path, tokenizer, size)
    bare = plain(one, "a")
    for text, tokens in (("a", bare), ("", [])):
        whole = one.tokenize(text, add_special=True, parse_special=True)
        assert whole == [*single[0], *tokens, *single[1]]
    assert one.pair_tokens == pair


def test_settings_say_what_is_added(tmp_path):
    """As in transformers, they take precedence over the post-processor."""
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_eos_token": True}
    one = make(tmp_path, tiny_bpe(), 262, tokenizer_config=settings)
    assert one.tokenize("", add_special=True, parse_special=False) == [2]
    assert one.pair_tokens == ([], [2], [2])
    settings["add_bos_token"] = True
    one = make(tmp_path, tiny_bpe(), 262, tokenizer_config=settings)
    assert one.tokenize("", add_special=True, parse_special=False) == [1, 2]
    assert one.special_texts == {"bos_token": "<s>", "eos_token": "</s>"}


def test_control_tokens_by_role_list_and_form(tmp_path):
    """Some files have them as ordinary tokens, or in other files only."""
    added = add_tokens("<|im_end|>", "<plain>", "<listed>", "<decoded>", special=False)
    tokenizer = tiny_bpe(
        added_tokens=add_tokens("<unk>")
        + [entry | {"id": token} for token, entry in enumerate(added, 262)]
    )
    settings = {
        "additional_special_tokens": ["<listed>"],
        "added_tokens_decoder": {"265": {"content": "<decoded>", "special": True}},
    }
    names = {"eos_token": "</s>"}
    one = make(tmp_path, tokenizer, 270, tokenizer_config=settings, special_tokens_map=names)
    assert {*one.control_tokens} == {"<unk>", "</s>", "<|im_end|>", "<listed>", "<decoded>"}
    assert one.special_tokens[263] == "<plain>"
    assert one.pieces[263] == b"<plain>"
    assert one.end_tokens == [2, 262]


def test_end_tokens_from_all_files(tmp_path):
    added = add_tokens("<unk>", "<s>", "</s>")
    one = make(
        tmp_path,
        tiny_bpe(added_tokens=added),
        262,
        generation={"eos_token_id": [5, 999, True, "x", None]},
        config={"eos_token_id": 6, "text_config": {"eos_token_id": [7]}},
    )
    assert one.end_tokens == [2, 5, 6, 7]


def test_infill_and_repository_tokens(tmp_path):
    names = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<reponame>", "<file_sep>"]
    added = add_tokens("<unk>") + add_tokens(*names, first=262)
    one = make(tmp_path, tiny_bpe(added_tokens=added), 267)
    assert one.infill_tokens == (262, 264, 263)
    assert one.repository_tokens == (265, 266)
    assert {265, 266} <= {*one.end_tokens}


def test_templates(tmp_path):
    listed = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
        {"name": "rerank", "template": "{query} {document}"},
        {"name": 5},
        "x",
    ]
    one = make(tmp_path, tiny_bpe(), 262, tokenizer_config={"chat_template": listed})
    assert (one.chat_template, one.tool_template) == ("plain", "tools")
    assert one.rerank_template == "{query} {document}"
    (tmp_path / "chat_template.jinja").write_text("file ▁")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("more tools")
    one = make(tmp_path, tiny_bpe(), 262, tokenizer_config={"chat_template": "plain"})
    assert (one.chat_template, one.tool_template) == ("file ▁", "more tools")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja is not UTF-8"):
        make(tmp_path, tiny_bpe(), 262)


def allowed(grammar: str, tokenizer: Any) -> set[int]:
    from cllm.sampling.grammar import Grammar

    mask = Grammar(grammar, tokenizer).matcher().compute_mask()
    return {*np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()}


@pytest.mark.llama
@pytest.mark.parametrize(
    "text",
    [
        *('"<tool_call>"', '"hello world"', "/[0-9]+/", '"<" /[a-z]+/', "/[a-z ]{3,9}/ <|im_end|>"),
        *("<think>", '"<|im_end|>"', '"é"', "/(?s:.*)/"),
    ],
)
def test_grammars_allow_what_they_allow_with_llama_cpp(vocabulary, reference, text):
    ours, theirs = (
        allowed(f"start: {text}", one.grammar_tokenizer(vocabulary.end_tokens))
        for one in (vocabulary, reference)
    )
    assert ours == theirs


def test_forced_text_is_not_begun_with_a_blank(tmp_path):
    """Although the tokenizer begins each text with one."""
    one = make(tmp_path, tiny_unigram(), 13)
    tokens = allowed('start: "ab" "a"', one.grammar_tokenizer([2]))
    assert {one.pieces[token] for token in tokens} == {b"a"}


def test_grammar_allows_special_tokens_by_name_only(vocabulary):
    tokenizer = vocabulary.grammar_tokenizer(vocabulary.end_tokens)
    ids = {text: token for token, text in vocabulary.special_tokens.items()}
    assert allowed("start: <|im_start|>", tokenizer) == {ids["<|im_start|>"]}
    anything = allowed("start: /(?s:.*)/", tokenizer)
    assert anything & {*ids.values()} == {*vocabulary.end_tokens}


def test_regular_expression_that_takes_too_long(tmp_path):
    """The library panics then, which would end the thread that tokenizes."""
    slow = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    one = make(tmp_path, tiny_bpe(pre_tokenizer=slow), 262)
    assert plain(one, "aaa")
    with pytest.raises(EngineError, match=r"cannot be tokenized: .*retry-limit"):
        plain(one, "a" * 50 + "b")
    assert plain(one, "aaa")


def test_lone_surrogates(vocabulary):
    for parse in (False, True):
        with pytest.raises(UnicodeEncodeError):
            vocabulary.tokenize("a\ud800", add_special=True, parse_special=parse)


@pytest.mark.real
@pytest.mark.llama
@pytest.mark.slow
def test_real_vocabulary_is_that_of_llama_cpp(real_model, tmp_path):
    """That of SmolLM2, on the sources of cLLM and on random texts."""
    from cllm.backends.llama_cpp.vocabulary import LlamaVocabulary
    from cllm.backends.torch.vocabulary import HfVocabulary

    path = real_model("smollm2-135m.gguf")
    write_tokenizer(tmp_path, path)
    with contextlib.closing(LlamaVocabulary.load(path)) as reference:
        one = HfVocabulary(Checkpoint(tmp_path, {}, {}, {}), reference.size)
        assert one.pieces == reference.pieces
        assert one.special_tokens == reference.special_tokens
        assert one.chat_template == reference.chat_template
        choose = random.Random(1)
        letters = [
            *"aé1 \n\t'.<|>",
            " ",
            "don't",
            "你",
            "👍🏽",
            "\u0301",
            "\r\n",
            *one.control_tokens,
        ]
        texts = [file.read_text() for file in sorted(CODE.rglob("*.py"))[:40]]
        texts += ["".join(choose.choices(letters, k=12)) for _ in range(repeat(10_000, 500))]
        for text in texts:
            for parse in (False, True):
                ours, theirs = (
                    vocabulary.tokenize(text, add_special=False, parse_special=parse)
                    for vocabulary in (one, reference)
                )
                assert ours == theirs, text[:200]


def damaged(change: Any) -> dict[str, Any]:
    tokenizer = tiny_bpe()
    change(tokenizer)
    return tokenizer


DOUBLE = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}
BOMB = {"type": "Sequence", "normalizers": [DOUBLE] * 30}


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        ({}, "is damaged: Expected `object`"),
        ([], "Expected `object`"),
        ({"model": 5}, "is damaged: Expected"),
        (damaged(lambda one: one.update(added_tokens=5)), "is damaged: Expected"),
        (damaged(lambda one: one.update(added_tokens=[5])), "is damaged: Expected"),
        (damaged(lambda one: one.update(added_tokens=[{"id": "x"}])), "has the added token"),
        (damaged(lambda one: one.update(decoder={"type": "CTC"})), "the decoder CTC"),
        (damaged(lambda one: one.update(post_processor={"type": 5})), "post_processor"),
        (damaged(lambda one: one["post_processor"].update(single=5)), "post_processor"),
        (damaged(lambda one: one["post_processor"].update(pair=[])), "post_processor"),
        (damaged(lambda one: one["post_processor"].update(special_tokens={})), "post_processor"),
        (damaged(lambda one: one["model"].update(vocab={"a": -1})), "is damaged"),
        (damaged(lambda one: one["model"].update(merges=[["q", "q"]])), "is damaged"),
        (damaged(lambda one: one["model"].update(continuing_subword_prefix="é")), "BPE with"),
        (damaged(lambda one: one.update(normalizer={"type": "Prepend"})), "is damaged"),
        (damaged(lambda one: one.update(normalizer=BOMB)), "1.07e+09 times as long"),
    ],
)
def test_damaged_definition_is_one_line(tmp_path, tokenizer, reason):
    with pytest.raises(ModelFileError, match=r"tokenizer\.json") as caught:
        make(tmp_path, tokenizer, 262)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"[" * 100_000, "is damaged: Expected"),
        (b'{"model":' * 100_000, "nested too deeply"),
        (b"\xff", "is not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_damaged_file_is_one_line(tmp_path, content, reason):
    from cllm.backends.torch.vocabulary import HfVocabulary

    checkpoint = Checkpoint(tmp_path, {}, {}, {})
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json: write it with"):
        HfVocabulary(checkpoint, 9)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        HfVocabulary(checkpoint, 9)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_huge_file_is_not_read(tmp_path):
    from cllm.backends.torch.vocabulary import HfVocabulary

    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelFileError, match=r"at most 67\.1 MB are read"):
        HfVocabulary(Checkpoint(tmp_path, {}, {}, {}), 9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["<|im_end|>", "a", " ", "\n", "1", "é", "ab ", "!?", " x", "\u0301"],
)
def test_long_texts_take_linear_time(vocabulary, text):
    """Time that grows with the square of the length would be hours."""
    begun = time.process_time()
    for parse in (False, True):
        assert vocabulary.tokenize(
            text * (300_000 // len(text)), add_special=True, parse_special=parse
        )
    assert time.process_time() - begun < 20


def test_long_list_of_decoders_is_read_in_linear_time():
    from cllm.backends.torch.tokenizer_files import find_decoding

    empty = {"type": "Sequence", "decoders": []}
    decoders = [*([empty] * 300_000), {"type": "ByteLevel"}]
    begun = time.process_time()
    decoding = find_decoding(Path("tokenizer.json"), {**empty, "decoders": decoders}, "BPE")
    assert decoding.kind == "bytes"
    assert time.process_time() - begun < 3  # with a quadratic time, 20
