"""Drafts tokens from the text so far: what followed the last n-gram, or the rest of a copy."""

from __future__ import annotations

from typing import NamedTuple

from cllm.core.sequence import Sequence

SIZES = (4, 2)  # tokens of an n-gram; the longer one is tried first
MIN_COPIED = 4  # tokens after which a text counts as a copy
MAX_GUESSED = 2  # changed tokens of a copy that are taken as replacements of equally many
MAX_REPLACED = 8  # tokens on either side of a replacement that is drafted again
FORGOTTEN = 16  # tokens after a change within which a copy may go on


class PromptLookup:
    """Drafts the tokens that followed the previous occurrence of the last n-gram.

    Works well for copies and edits. A copy of at least MIN_COPIED tokens is followed, even if an
    n-gram of it also occurs elsewhere. Where the copy changes, up to MAX_GUESSED tokens are taken
    as replacements of equally many, and the tokens after those are drafted. Once the copy
    continues, the same replacement is drafted wherever the original has the same tokens, for
    example when a name is changed.

    Saxena, "Prompt Lookup Decoding", 2023, without copies. Indexing the n-grams of a sequence costs
    O(1) per token.
    """

    seconds = token_seconds = 0.0  # hardly any

    def __init__(self) -> None:
        self._texts: dict[Sequence, IndexedText] = {}

    def draft(self, wanted: dict[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        drafts = {}
        for seq, count in wanted.items():
            text = self._texts.get(seq)
            if text is None:
                text = self._texts[seq] = IndexedText()
            if draft := text.draft(seq.tokens, count):
                drafts[seq] = draft
        return drafts

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq, None)


class Replacement(NamedTuple):
    """The tokens ``old`` of an original became ``new`` in its copy."""

    old: list[int]
    new: list[int]


class Change(NamedTuple):
    """The place where a copy left its original: the index of the first different token in both."""

    source: int
    end: int


class IndexedText:
    """The n-grams of a text, and the earlier part that its end copies."""

    def __init__(self) -> None:
        self._size = 0  # tokens of the text at the last call
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram to the index of the token after it
        self._source: int | None = None  # index of the token that the next one may be a copy of
        self._num_replacing = 0  # tokens so far of the replacement for those at the source
        self._num_copied = 0
        self._change: Change | None = None  # set until the copy continues
        self._replacements: dict[int, Replacement] = {}  # by the first of the old tokens

    def draft(self, tokens: list[int], count: int) -> tuple[int, ...]:
        """Return at most ``count`` tokens that may follow the text ``tokens``, which may have grown
        since the last call.
        """
        for end in range(max(self._size, 1), len(tokens)):
            self._follow(tokens, end)
            for size in SIZES:
                if end >= size:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._size = len(tokens)
        source = self._find_source(tokens)
        if source is None:
            return ()
        draft: list[int] = []
        skipped = self._num_replacing
        while len(draft) < count and source < len(tokens):
            replacement = self._find_replacement(tokens, source)
            if replacement is None:
                draft.append(tokens[source])
                source += 1
            else:
                draft += replacement.new[skipped:]
                source += len(replacement.old)
                skipped = 0
        return tuple(draft[:count])

    def _follow(self, tokens: list[int], end: int) -> None:
        """Compare the token at ``end`` with the one it may be a copy of."""
        source = self._source
        if source is None:
            return
        if source >= end:  # the replaced tokens were longer than the distance to the original
            self._source = None
            return
        token = tokens[end]
        if self._change is not None:
            if token == tokens[source]:
                self._resume(tokens, source, end)
                self._num_copied += 1
            self._source = source + 1
            return
        replacement = self._find_replacement(tokens, source)
        if replacement is not None:
            if token == replacement.new[self._num_replacing]:
                self._num_copied += 1
                self._num_replacing += 1
                if self._num_replacing == len(replacement.new):
                    self._move(source + len(replacement.old))
                return
            if not self._num_replacing:
                del self._replacements[tokens[source]]
        if token == tokens[source] and not self._num_replacing:
            self._num_copied += 1
        else:
            self._change = Change(source, end - self._num_replacing)
        self._move(source + self._num_replacing + 1)

    def _move(self, source: int) -> None:
        self._source, self._num_replacing = source, 0

    def _find_replacement(self, tokens: list[int], source: int) -> Replacement | None:
        replacement = self._replacements.get(tokens[source])
        if replacement is None or tokens[source : source + len(replacement.old)] != replacement.old:
            return None
        return replacement

    def _resume(self, tokens: list[int], source: int, end: int) -> None:
        """Note that the copy continues at ``end`` with the token at ``source``, and record the
        replacement before that.
        """
        assert self._change is not None
        start, changed = self._change
        self._change = None
        while source > start and end > changed and tokens[source - 1] == tokens[end - 1]:
            source -= 1
            end -= 1
        if 0 < source - start <= MAX_REPLACED and 0 < end - changed <= MAX_REPLACED:
            replacement = Replacement(tokens[start:source], tokens[changed:end])
            self._replacements[tokens[start]] = replacement

    def _find_source(self, tokens: list[int]) -> int | None:
        """Return the index of the tokens that may follow once more; None if there is none."""
        end, change = len(tokens), self._change
        is_copy = self._source is not None and self._num_copied >= MIN_COPIED
        if is_copy and change is None:
            return self._source
        is_guess = is_copy and change is not None and end - change.end <= MAX_GUESSED
        for size in SIZES:
            source = self._ends.get(tuple(tokens[-size:])) if end >= size else None
            if source is None:
                continue
            if is_copy and change and change.source < source <= change.source + FORGOTTEN:
                self._resume(tokens, source, end)
            elif is_guess and size < MIN_COPIED:  # the copy is the better guide
                break
            elif source != self._source or change:
                self._num_copied = 0
                self._change = None
            self._move(source)
            return source
        if is_guess:
            return self._source
        if not is_copy or change is None or end - change.end > FORGOTTEN:
            self._source = self._change = None
        return None
