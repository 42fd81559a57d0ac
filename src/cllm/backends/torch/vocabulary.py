"""A checkpoint's vocabulary: tokenizing with the library tokenizers, and the bytes of its tokens.

The library is written in Rust. It tokenizes without the GIL, in a time that is linear in the length
of the text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ahocorasick_rs import AhoCorasick, MatchKind

from cllm.backends.params import BackendParams
from cllm.backends.registry import import_loader
from cllm.backends.torch.gguf_checkpoint import GgufCheckpoint
from cllm.backends.torch.tokenizer_files import Decoding, TokenizerFiles, read_tokenizer_files
from cllm.core.vocabulary import Pieces
from cllm.errors import EngineError, ModelFileError
from cllm.models.checkpoint import CONFIG, Checkpoint

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time; no further threads

from tokenizers import AddedToken, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from cllm.backends.base import Vocabulary

EVERY_BYTE = "".join(
    map(chr, [*range(0x80), *range(0x80, 0xD800, 0x40), *range(0xE000, 0x110000, 0x1000)])
)
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
INVISIBLE = [byte for byte in range(0x100) if byte not in VISIBLE]
BYTE_OF_LETTER = {
    **{byte: byte for byte in VISIBLE},
    **dict(zip(range(0x100, 0x144), INVISIBLE, strict=True)),
}
"""The alphabet of byte-level vocabularies: other letters stand for the bytes that are not visible
characters of Latin-1.
"""

END_TEXTS = (
    *("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>"),
    *("<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<\uff5cend▁of▁sentence\uff5c>", "<end_of_utterance>"),
)
"""Control tokens that end a text or a turn in all known models; llama.cpp has the same list."""
INFILL_TEXTS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
REPOSITORY_TEXTS = (("<|repo_name|>", "<|file_sep|>"), ("<reponame>", "<file_sep>"))


def read_vocabulary(checkpoint: Checkpoint, size: int) -> Vocabulary:
    """Return the vocabulary of a checkpoint that says that it computes ``size`` logits. llama.cpp
    reads that of a GGUF file, so both backends have the same tokens.

    Raises ModelFileError if it cannot, or if the files are damaged or do not belong to the model.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        params = BackendParams(path=str(checkpoint.folder))
        return import_loader("llama_cpp").load_vocabulary(params)
    rows = (tensor.shape[0] for tensor in checkpoint.tensors.values() if tensor.shape)
    if size > max(rows, default=0):
        path = checkpoint.folder / CONFIG
        raise ModelFileError(f"{path}: vocab_size is {size}, but no tensor has so many rows", path)
    return HfVocabulary(checkpoint, size)


class HfVocabulary:
    """The vocabulary of a checkpoint that computes ``size`` logits, which may be more than it has
    tokens. Several threads may tokenize.

    Lone surrogates raise UnicodeEncodeError.
    """

    def __init__(self, checkpoint: Checkpoint, size: int) -> None:
        """Raises ModelFileError if the files are damaged or do not belong to the model."""
        self.size = size
        self._checkpoint = checkpoint
        self._files = read_tokenizer_files(checkpoint.folder, size)
        self._tokenizer = load_tokenizer(self._files)
        self._plain = make_plain(self._tokenizer)
        self.pieces = self._make_pieces()

    def _make_pieces(self) -> Pieces:
        decode, pieces = make_decoder(self._files.decoding), [b""] * self.size
        for text, token in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token >= self.size:
                raise ModelFileError(
                    f"{self._files.path} has the token {text[:50]!r} with the id {token}, but the "
                    f"model has only {self.size} tokens",
                    self._files.path,
                )
            pieces[token] = decode(text)
        for token, added in self._added_tokens.items():
            text = "" if added.special else added.content
            pieces[token] = text.replace("▁", " ").encode()
        return Pieces.of(pieces)

    @cached_property
    def _added_tokens(self) -> dict[int, AddedToken]:
        return dict(sorted(self._tokenizer.get_added_tokens_decoder().items()))

    @cached_property
    def _control(self) -> dict[int, str]:
        return {token: one.content for token, one in self._added_tokens.items() if one.special}

    @cached_property
    def control_tokens(self) -> list[str]:
        return sorted({*self._control.values()} - {""}, key=len, reverse=True)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        return {
            token: one.content
            for token, one in self._added_tokens.items()
            if one.special or (one.content.startswith("<") and one.content.endswith(">"))
        }

    @cached_property
    def end_tokens(self) -> list[int]:
        generation, config = self._checkpoint.generation, self._checkpoint.config
        ids = set[int]()
        for source in (generation, config, self._checkpoint.text_config):
            stored = source.get("eos_token_id")
            ids.update(one for one in as_list(stored) if type(one) is int and 0 <= one < self.size)
        ids.update(token for token in self.repository_tokens or () if token in self._control)
        texts = {*END_TEXTS, self._files.named.get("eos_token")}
        ids.update(token for token, text in self._control.items() if text in texts)
        names = {self._control.get(token) for token in ids}
        if {"<|return|>", "<|call|>", "<|end|>"} <= names:  # <|end|> ends only a part of an answer
            ids = {token for token in ids if self._control.get(token) != "<|end|>"}
        return sorted(ids)

    @cached_property
    def infill_tokens(self) -> tuple[int, int, int] | None:
        for texts in INFILL_TEXTS:
            prefix, suffix, middle = map(self._tokenizer.token_to_id, texts)
            if prefix is not None and suffix is not None and middle is not None:
                return prefix, suffix, middle
        return None

    @cached_property
    def repository_tokens(self) -> tuple[int, int] | None:
        for texts in REPOSITORY_TEXTS:
            repository, file = map(self._tokenizer.token_to_id, texts)
            if repository is not None and file is not None:
                return repository, file
        return None

    @property
    def chat_template(self) -> str | None:
        return self._files.templates.get("default")

    @property
    def tool_template(self) -> str | None:
        return self._files.templates.get("tool_use")

    @property
    def rerank_template(self) -> str | None:
        return self._files.templates.get("rerank")

    @cached_property
    def special_texts(self) -> dict[str, str]:
        known = {*self.control_tokens}
        texts = {name: self._files.named.get(name, "") for name in ("bos_token", "eos_token")}
        return {name: text if text in known else "" for name, text in texts.items()}

    @cached_property
    def pair_tokens(self) -> tuple[list[int], list[int], list[int]]:
        if self._files.adds is not None:
            begin, end = self._added
            return begin, [*end, *begin], end
        before, between, after = self._files.added[1]
        return before, between, after

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """The tokens that ``add_special`` adds before and after a text."""
        if self._files.adds is None:
            before, after = self._files.added[0]
            return before, after
        begin, end = (
            [token] if is_added and (token := self._find_named(name)) is not None else []
            for name, is_added in zip(("bos_token", "eos_token"), self._files.adds, strict=True)
        )
        return begin, end

    def _find_named(self, name: str) -> int | None:
        token: int | None = self._tokenizer.token_to_id(self._files.named.get(name, ""))
        return token

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        tokens = encode(self._tokenizer if parse_special else self._plain, text)
        if not parse_special and not self._forbidden.isdisjoint(tokens):
            tokens = self._tokenize_in_parts(text)
        if add_special:
            begin, end = self._added
            return [*begin, *tokens, *end]
        return tokens

    @cached_property
    def _forbidden(self) -> frozenset[int]:
        """The tokens that a text cannot spell out. The unknown token is not one of them."""
        unknown = self._files.unknown
        if isinstance(unknown, str):
            unknown = self._tokenizer.token_to_id(unknown)
        return frozenset(self._control) - {unknown}

    def _tokenize_in_parts(self, text: str) -> list[int]:
        """Tokenize a text whose plain words include names of control tokens that are also words of
        the model: cut each of these names in two.
        """
        tokens, begin = list[int](), 0
        names = {*self.control_tokens, *(name.replace("▁", " ") for name in self.control_tokens)}
        finder = AhoCorasick(names, matchkind=MatchKind.LeftmostLongest)
        for _, place, _ in finder.find_matches_as_indexes(text):
            tokens += encode(self._plain, text[begin : place + 1])
            begin = place + 1
        tokens += encode(self._plain, text[begin:])
        return [token for token in tokens if token not in self._forbidden]

    def grammar_tokenizer(self, end_tokens: list[int]) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        tokenizer: LLTokenizer = LLTokenizer(
            TokenizerWrapper(GrammarTokens(self, end_tokens)), eos_token=end_tokens, slices=[]
        )
        # two shorter steps, because each holds the GIL
        return tokenizer.with_slices(LLTokenizer.general_slices())


class GrammarTokens:
    """The vocabulary in the form that llguidance's wrapper expects."""

    bos_token_id = None

    def __init__(self, vocabulary: HfVocabulary, end_tokens: list[int]) -> None:
        special = vocabulary.special_tokens
        self._vocabulary = vocabulary
        self.eos_token_id = end_tokens[0]
        self.special_token_ids = list(special)
        self.tokens = list(vocabulary.pieces)
        for token, text in special.items():
            self.tokens[token] = text.encode()

    def __call__(self, data: bytes) -> list[int]:
        """Return tokens with exactly these bytes; some tokenizers add a blank."""
        pieces = self._vocabulary.pieces
        found = self._vocabulary.tokenize(data.decode(), add_special=False, parse_special=False)
        if b"".join(pieces[token] for token in found) == data:
            return found
        tokens, at = list[int](), 0
        while at < len(data):
            ends = range(min(len(data), at + pieces.longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._tokens), 0)
            if not end:
                return []
            tokens.append(self._tokens[data[at:end]])
            at = end
        return tokens

    @cached_property
    def _tokens(self) -> dict[bytes, int]:
        return {piece: token for token, piece in enumerate(self._vocabulary.pieces) if piece}


def load_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """Raises ModelFileError if the library cannot read the definition."""
    tokenizer: Tokenizer = call_library(files.path, Tokenizer.from_str, files.definition)
    known = {added.content for added in tokenizer.get_added_tokens_decoder().values()}
    for text in files.named.values():
        if text not in known and tokenizer.token_to_id(text) is not None:
            tokenizer.add_tokens([AddedToken(text, special=True, normalized=False)])
    call_library(files.path, tokenizer.encode, EVERY_BYTE)  # the steps may not fit each other
    return tokenizer


def call_library(path: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the library. Raises ModelFileError for whatever it raises."""
    try:
        return function(*arguments)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001  # a panic of Rust is not an Exception
        reason = " ".join(str(error).split())[:200]
        raise ModelFileError(f"{path} is damaged or not supported: {reason}", path) from None


def make_plain(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that does not recognize control tokens. It shares the large parts of the
    given one.
    """
    plain = Tokenizer(tokenizer.model)
    plain.normalizer, plain.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    added = tokenizer.get_added_tokens_decoder()
    plain.add_tokens([added[token] for token in sorted(added)])
    plain.encode_special_tokens = True
    return plain


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Raises EngineError if the library fails, for example because a regular expression of the
    model takes too many steps, and UnicodeEncodeError for lone surrogates.
    """
    try:
        # the function for batches releases the GIL
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001  # a panic of Rust is not an Exception
        text.encode()  # raises the error of lone surrogates
        reason = " ".join(str(error).split())[:200]
        raise EngineError(f"the text cannot be tokenized: {reason}") from None
    return ids


def make_decoder(decoding: Decoding) -> Callable[[str], bytes]:
    """Return the function from a token's text to its bytes."""
    mark = decoding.mark

    def decode_letters(text: str) -> bytes:
        try:
            return text.translate(BYTE_OF_LETTER).encode("latin-1")
        except UnicodeEncodeError:  # not written in this alphabet
            return text.encode()

    def decode_blanks(text: str) -> bytes:
        if decoding.byte_fallback and (byte := BYTE.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        return text.replace(mark, " ").encode()

    def decode_words(text: str) -> bytes:
        continues = text.startswith(mark) and text != mark
        return (text.removeprefix(mark) if continues else f" {text}").encode()

    def decode_suffixes(text: str) -> bytes:
        return text.replace(mark, " ").encode()

    return {
        "bytes": decode_letters,
        "blanks": decode_blanks,
        "words": decode_words,
        "suffixes": decode_suffixes,
    }[decoding.kind]


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
