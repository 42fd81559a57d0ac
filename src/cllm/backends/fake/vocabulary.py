"""The vocabulary of the fake backend: bytes, the end, and two control tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cllm.core.vocabulary import Pieces

if TYPE_CHECKING:
    from llguidance import LLTokenizer

END = 256
CONTROL = {257: "<|im_start|>", 258: "<|im_end|>"}
CONTROL_IDS = {name: token for token, name in CONTROL.items()}
CONTROL_TEXTS = re.compile(f"({'|'.join(map(re.escape, CONTROL_IDS))})")
VOCABULARY_SIZE = 260


class FakeVocabulary:
    """One token per byte, and three control tokens."""

    size = VOCABULARY_SIZE
    infill_tokens: tuple[int, int, int] | None = None
    repository_tokens: tuple[int, int] | None = None
    special_tokens = CONTROL
    control_tokens = sorted(CONTROL.values(), key=len, reverse=True)
    chat_template = (
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
        "}}<|im_end|>{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    )

    tool_template: str | None = None
    rerank_template = None
    pair_tokens: tuple[list[int], list[int], list[int]] = ([], [END], [])

    def __init__(self) -> None:
        self.end_tokens = [END]
        bytes_only = [bytes([i]) for i in range(256)]
        self.pieces = Pieces.of([*bytes_only, *[b""] * (VOCABULARY_SIZE - 256)])
        self.special_texts = {"bos_token": "", "eos_token": ""}

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if not parse_special:
            return list(text.encode())
        parts = CONTROL_TEXTS.split(text)  # every second one is a control token
        return [
            token
            for i, part in enumerate(parts)
            for token in ([CONTROL_IDS[part]] if i % 2 else part.encode())
        ]

    def grammar_tokenizer(self, end_tokens: list[int]) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(ByteTokenizer(self)), eos_token=end_tokens)


class ByteTokenizer:
    """The vocabulary in the form that llguidance's wrapper expects."""

    bos_token_id = None

    def __init__(self, vocabulary: FakeVocabulary) -> None:
        self.eos_token_id = END
        self.special_token_ids = list(vocabulary.special_tokens)
        self.tokens = [
            vocabulary.special_tokens.get(i, "").encode() or piece
            for i, piece in enumerate(vocabulary.pieces)
        ]

    def __call__(self, data: bytes) -> list[int]:
        return list(data)
