"""A model's vocabulary: tokenizing through llama.cpp, and a table of the tokens' bytes."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.library import check_pointer
from cllm.core.vocabulary import Pieces

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ATTR_UNKNOWN, ATTR_CONTROL, ATTR_USER_DEFINED, ATTR_LSTRIP = 1 << 0, 1 << 3, 1 << 4, 1 << 7
EVERY_BYTE = "".join(
    map(chr, [*range(0x80), *range(0x80, 0xD800, 0x40), *range(0xE000, 0x110000, 0x1000)])
)
MAX_SPECIAL = 4000  # a text with more special tokens is tokenized in parts
PART = 4096  # minimum number of characters of a part
USUAL_PIECE = 16  # bytes of a token; more than the average
MARK = b"\xff"  # before the text of a special token, for llguidance


class Specials(NamedTuple):
    """The texts of special tokens, at which llama.cpp splits a text before it tokenizes the rest.

    ``drop_blanks`` maps each text, the longest first, to whether llama.cpp drops blanks before it.
    ``beginnings`` has the first two characters of each text.
    """

    drop_blanks: dict[str, bool]
    beginnings: frozenset[str]


class LlamaVocabulary:
    """The vocabulary of a loaded model or, for a process without an engine, of a GGUF file whose
    weights are not loaded.

    Several threads may tokenize, because that changes no state. The only texts that make
    llama.cpp's tokenizer abort contain code points above U+10FFFF, which Python strings cannot. The
    caller must reject lone surrogates.
    """

    def __init__(self, model: Any) -> None:
        """``model`` is a pointer that must stay valid."""
        self._model = model
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.size = int(lib.llama_vocab_n_tokens(self._vocab))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the vocabulary of ``path``. Raises StartupError if it is not a model."""
        params = lib.llama_model_default_params()
        params.vocab_only = True
        return cls(
            check_pointer(
                lib.llama_model_load_from_file(str(path).encode(), params), f"cannot load {path}"
            )
        )

    def check(self) -> None:
        """Tokenize a text with every byte that a text can contain.

        This aborts the process if the file is damaged.
        """
        self.tokenize(EVERY_BYTE, add_special=True, parse_special=True)

    @cached_property
    def pieces(self) -> Pieces:
        read, vocab = read_piece(), self._vocab
        offsets, data = array("I", [0]), ctypes.create_string_buffer(self.size * USUAL_PIECE)
        end, room, address = 0, len(data), ctypes.addressof(data)
        for token in range(self.size):
            while (length := read(vocab, token, address + end, room - end, 0, False)) < 0:
                ctypes.resize(data, (room := 2 * room - length))
                address = ctypes.addressof(data)
            offsets.append(end := end + length)
        return Pieces(ctypes.string_at(address, end), offsets)

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        length = lib.llama_token_to_piece(self._vocab, token, buffer, 64, 0, special)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = lib.llama_token_to_piece(self._vocab, token, buffer, -length, 0, special)
        return buffer.raw[: max(length, 0)]

    @cached_property
    def infill_tokens(self) -> tuple[int, int, int] | None:
        prefix = int(lib.llama_vocab_fim_pre(self._vocab))
        suffix = int(lib.llama_vocab_fim_suf(self._vocab))
        middle = int(lib.llama_vocab_fim_mid(self._vocab))
        return None if min(prefix, suffix, middle) < 0 else (prefix, suffix, middle)

    @cached_property
    def repository_tokens(self) -> tuple[int, int] | None:
        repository, file = (
            int(lib.llama_vocab_fim_rep(self._vocab)),
            int(lib.llama_vocab_fim_sep(self._vocab)),
        )
        return None if min(repository, file) < 0 else (repository, file)

    @cached_property
    def end_tokens(self) -> list[int]:
        is_end = partial(lib.llama_vocab_is_eog, self._vocab)
        return [token for token in range(self.size) if is_end(token)]

    @cached_property
    def control_tokens(self) -> list[str]:
        texts = {self._text(token) for token in self._with(ATTR_UNKNOWN | ATTR_CONTROL)}
        return sorted(texts - {""}, key=len, reverse=True)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        added = {token: self._text(token) for token in self._with(ATTR_USER_DEFINED)}
        added = {
            token: text
            for token, text in added.items()
            if text.startswith("<") and text.endswith(">")
        }
        return {
            token: self._text(token) for token in self._with(ATTR_UNKNOWN | ATTR_CONTROL)
        } | added

    @cached_property
    def _attributes(self) -> array[int]:
        return array("H", map(partial(lib.llama_vocab_get_attr, self._vocab), range(self.size)))

    def _with(self, attributes: int) -> list[int]:
        return [token for token, has in enumerate(self._attributes) if has & attributes]

    def _text(self, token: int) -> str:
        return self._piece(token, special=True).decode("utf-8", "replace")

    @cached_property
    def chat_template(self) -> str | None:
        return self._template(None)

    @cached_property
    def tool_template(self) -> str | None:
        return self._template(b"tool_use")

    @cached_property
    def rerank_template(self) -> str | None:
        return self._template(b"rerank")

    def _template(self, name: bytes | None) -> str | None:
        template = lib.llama_model_chat_template(self._model, name)
        return template.decode("utf-8", "replace") if template else None

    @cached_property
    def pair_tokens(self) -> tuple[list[int], list[int], list[int]]:
        bos, eos, sep = (
            int(of(self._vocab))
            for of in (lib.llama_vocab_bos, lib.llama_vocab_eos, lib.llama_vocab_sep)
        )
        end = [eos if eos >= 0 else sep] if lib.llama_vocab_get_add_eos(self._vocab) else []
        begin = [bos] if lib.llama_vocab_get_add_bos(self._vocab) else []
        between = [*end, sep] if lib.llama_vocab_get_add_sep(self._vocab) else end
        return begin, between, end

    @cached_property
    def special_texts(self) -> dict[str, str]:
        names = {
            "bos_token": lib.llama_vocab_bos(self._vocab),
            "eos_token": lib.llama_vocab_eos(self._vocab),
        }
        return {
            name: self._piece(token, special=True).decode("utf-8", "replace")
            if self._is_control(token)
            else ""
            for name, token in names.items()
        }

    def _is_control(self, token: int) -> bool:
        # if the file has no begin token, llama.cpp still names one, which is then an ordinary token
        return token >= 0 and bool(lib.llama_vocab_is_control(self._vocab, token))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if len(text) > PART:
            specials = self._specials if parse_special else self._specials_always_split
            if has_more_than(MAX_SPECIAL, specials.beginnings, text):
                begin, end = self._added if add_special else ([], [])
                parts = split_before_specials(text, specials.drop_blanks)
                tokens = (
                    self._tokenize(part, add_special=False, parse_special=parse_special)
                    for part in parts
                )
                return [*begin, *chain.from_iterable(tokens), *end]
        return self._tokenize(text, add_special=add_special, parse_special=parse_special)

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """The tokens that ``add_special`` adds before and after a text."""
        bare = self._tokenize("a", add_special=False, parse_special=False)
        whole = self._tokenize("a", add_special=True, parse_special=False)
        at = next(at for at in range(len(whole) + 1) if whole[at : at + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    @cached_property
    def _specials(self) -> Specials:
        return self._specials_with(ATTR_UNKNOWN | ATTR_CONTROL | ATTR_USER_DEFINED)

    @cached_property
    def _specials_always_split(self) -> Specials:
        """The special tokens that llama.cpp recognizes even without ``parse_special``."""
        return self._specials_with(ATTR_USER_DEFINED)

    def _specials_with(self, attributes: int) -> Specials:
        read = partial(lib.llama_vocab_get_text, self._vocab)
        tokens = {read(token).decode("utf-8", "replace"): token for token in self._with(attributes)}
        texts = sorted(filter(None, tokens), key=len, reverse=True)
        drop_blanks = {text: bool(self._attributes[tokens[text]] & ATTR_LSTRIP) for text in texts}
        return Specials(drop_blanks, frozenset(text[:2] for text in texts))

    def _tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        encoded = text.encode()
        room = len(encoded) + 16
        tokens = (ctypes.c_int32 * room)()
        count = lib.llama_tokenize(
            self._vocab, encoded, len(encoded), tokens, room, add_special, parse_special
        )
        if count < 0:
            tokens = (ctypes.c_int32 * -count)()
            count = lib.llama_tokenize(
                self._vocab, encoded, len(encoded), tokens, -count, add_special, parse_special
            )
        return tokens[:count]

    def grammar_tokenizer(self, end_tokens: list[int]) -> LLTokenizer:
        from llguidance import LLTokenizer

        tokens = list(self.pieces)
        for token, text in self.special_tokens.items():
            tokens[token] = MARK + text.encode()
        function = ctypes.cast(lib._lib.llama_tokenize, ctypes.c_void_p).value  # noqa: SLF001  # as llguidance.llamacpp does
        tokenizer: LLTokenizer = LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]  # left out of its stubs
            tokens=tokens,
            vocab_ptr=self._vocab,
            tokenize_fptr=function,
            eos_token=end_tokens,
            slices=[],
        )
        # two shorter steps, because each holds the GIL
        return tokenizer.with_slices(LLTokenizer.general_slices())

    def close(self) -> None:
        """Free what ``load`` loaded."""
        lib.llama_model_free(self._model)


def read_piece() -> Callable[[int, int, int, int, int, bool], int]:
    """Return llama_token_to_piece in a form that takes the address of its buffer.

    This takes half the time of llama-cpp-python's binding.
    """
    types = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, *types, ctypes.c_bool)
    return prototype(("llama_token_to_piece", lib._lib))  # noqa: SLF001  # has no public name


def split_before_specials(text: str, specials: dict[str, bool]) -> Iterator[str]:
    """Split ``text`` into parts that give the same tokens as the whole.

    All parts but the first begin with a special token. Parts are faster, because llama.cpp's time
    grows with the square of the number of special tokens in a text. ``specials`` are like
    Specials.drop_blanks.
    """
    begin, at = 0, PART
    while at < len(text):
        matches = (
            (text.find(special, at, at + PART + len(special) - 1), -len(special), special)
            for special in specials
        )
        place, _, special = min((one for one in matches if one[0] >= 0), default=(at + PART, 0, ""))
        if not special:
            at = place
        elif (specials[special] and text[place - 1].isspace()) or any(
            is_inside(text, cut, specials) for cut in (place, place + len(special))
        ):
            at = place + 1 + PART // 8
        else:
            yield text[begin:place]
            begin, at = place, place + PART
    yield text[begin:]


def has_more_than(limit: int, beginnings: Iterable[str], text: str) -> bool:
    """Return whether ``beginnings`` occur more than ``limit`` times in ``text``.

    The loop lets other threads run: one call of ``sum`` would hold the GIL for seconds with large
    vocabularies.
    """
    count = 0
    for beginning in beginnings:
        count += text.count(beginning)
        if count > limit:
            return True
    return False


def is_inside(text: str, cut: int, specials: Iterable[str]) -> bool:
    """Return whether a special token may begin before ``cut`` and end after it."""
    return any(
        text.find(special, max(0, cut - len(special) + 1), cut + len(special) - 1) >= 0
        for special in specials
    )
