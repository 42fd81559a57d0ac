"""A model's vocabulary: tokenizing through llama.cpp, detokenizing through a table built once."""

from __future__ import annotations

import ctypes
from functools import cached_property
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.library import check_pointer

ATTR_UNKNOWN, ATTR_CONTROL = 1 << 0, 1 << 3


class LlamaVocabulary:
    """Loads the vocabulary of a GGUF file and not its weights, so a process without an engine can have one.

    Tokenizing changes nothing in it, so several threads may.
    A Python string can never encode the one kind of text that makes
    llama.cpp's tokenizer abort (code points above U+10FFFF); lone surrogates must be refused before.
    """

    def __init__(self, path: Path) -> None:
        params = lib.llama_model_default_params()
        params.vocab_only = True
        self._model = check_pointer(lib.llama_model_load_from_file(str(path).encode(), params), f"cannot load {path}")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.size = int(lib.llama_vocab_n_tokens(self._vocab))

    @cached_property
    def pieces(self) -> list[bytes]:
        return [self._piece(token, special=False) for token in range(self.size)]

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        length = lib.llama_token_to_piece(self._vocab, token, buffer, 64, 0, special)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = lib.llama_token_to_piece(self._vocab, token, buffer, -length, 0, special)
        return buffer.raw[: max(length, 0)]

    @cached_property
    def control_tokens(self) -> list[str]:
        tokens = [
            t for t in range(self.size) if lib.llama_vocab_get_attr(self._vocab, t) & (ATTR_UNKNOWN | ATTR_CONTROL)
        ]
        texts = {self._piece(token, special=True).decode("utf-8", "replace") for token in tokens}
        return sorted(texts - {""}, key=len, reverse=True)

    @cached_property
    def chat_template(self) -> str | None:
        template = lib.llama_model_chat_template(self._model, None)
        return template.decode("utf-8", "replace") if template else None

    @cached_property
    def rerank_template(self) -> str | None:
        template = lib.llama_model_chat_template(self._model, b"rerank")
        return template.decode("utf-8", "replace") if template else None

    @cached_property
    def pair_tokens(self) -> tuple[list[int], list[int], list[int]]:
        bos, eos, sep = (int(of(self._vocab)) for of in (lib.llama_vocab_bos, lib.llama_vocab_eos, lib.llama_vocab_sep))
        end = [eos if eos >= 0 else sep] if lib.llama_vocab_get_add_eos(self._vocab) else []
        begin = [bos] if lib.llama_vocab_get_add_bos(self._vocab) else []
        between = [*end, sep] if lib.llama_vocab_get_add_sep(self._vocab) else end
        return begin, between, end

    @cached_property
    def special_texts(self) -> dict[str, Any]:
        names = {"bos_token": lib.llama_vocab_bos(self._vocab), "eos_token": lib.llama_vocab_eos(self._vocab)}
        return {
            name: self._piece(token, special=True).decode("utf-8", "replace") if self._is_control(token) else ""
            for name, token in names.items()
        }

    def _is_control(self, token: int) -> bool:
        # without a begin token in the file llama.cpp still names one, which is then an ordinary token
        return token >= 0 and bool(lib.llama_vocab_is_control(self._vocab, token))

    def text_of(self, token: int) -> bytes:
        return self._piece(token, special=True)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        encoded = text.encode()
        room = len(encoded) + 16
        tokens = (ctypes.c_int32 * room)()
        count = lib.llama_tokenize(self._vocab, encoded, len(encoded), tokens, room, add_special, parse_special)
        if count < 0:
            tokens = (ctypes.c_int32 * -count)()
            count = lib.llama_tokenize(self._vocab, encoded, len(encoded), tokens, -count, add_special, parse_special)
        return list(tokens[:count])

    def close(self) -> None:
        lib.llama_model_free(self._model)
