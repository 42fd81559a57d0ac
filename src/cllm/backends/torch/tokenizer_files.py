"""Read the files of a checkpoint about its vocabulary, without trusting them.

Formats: ``tokenizer.json`` belongs to the library tokenizers; the other files are described at
https://huggingface.co/docs/transformers/main_classes/tokenizer
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from cllm.errors import ModelFileError
from cllm.models.checkpoint import (
    TOKENIZER_FILES,
    explain_json,
    read_bytes,
    read_optional,
    read_templates,
)

log = logging.getLogger("cllm.models")

MAX_TOKENIZER = 1 << 26
MAX_GROWTH = 16  # of a text by its normalizer; usual ones replace a character by up to three
TOKENIZER, SETTINGS, NAMES, _ = TOKENIZER_FILES
NAMED = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
NAMED_LISTS = ("additional_special_tokens", "extra_special_tokens")
CONTROL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused\d+>|<pad>|<mask>", re.DOTALL)
"""The form of control tokens, which some files have as ordinary tokens; llama.cpp's converter
decides in the same way.
"""
NULL = msgspec.Raw(b"null")


@dataclass(frozen=True)
class Decoding:
    """How the text of a token becomes bytes. ``kind`` is "bytes" (one letter for each byte),
    "blanks" (``mark`` is a blank), "words" (``mark`` continues a word), or "suffixes" (``mark``
    ends a word). With ``byte_fallback``, texts such as <0x0A> are bytes.
    """

    kind: str
    mark: str = ""
    byte_fallback: bool = False


@dataclass(frozen=True)
class TokenizerFiles:
    """What the files say. ``definition`` is ``tokenizer.json`` for the library: without what
    happens to tokens later, and with control tokens marked as special. ``named`` has the tokens
    that have a role, such as eos_token. ``adds`` says whether these begin and end each text; if it
    is None, ``added`` has the tokens around one text and those around two. ``templates`` has chat
    templates by name.
    """

    path: Path
    definition: str
    decoding: Decoding
    unknown: str | int | None
    named: Mapping[str, str]
    adds: tuple[bool, bool] | None
    added: tuple[Parts, Parts]
    templates: Mapping[str, str]


Parts = list[list[int]]
"""The tokens before, between and after texts."""


class _Model(msgspec.Struct):
    """The part of ``model`` that is read here."""

    type: str = ""
    unk_token: str | None = None
    unk_id: int | None = None
    continuing_subword_prefix: str | None = None


def read_tokenizer_files(folder: Path, size: int) -> TokenizerFiles:
    """Read the files of a model with ``size`` logits. Raises ModelFileError if one is damaged."""
    path = folder / TOKENIZER
    if not path.exists():
        _fail(
            folder,
            f"has no {TOKENIZER}: write it with transformers' "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        )
    settings, names = (read_optional(folder / name) for name in (SETTINGS, NAMES))
    named = dict(_find_named({**names, **settings}))
    decode = _Decoder(path)
    parts = decode(read_bytes(path, MAX_TOKENIZER), dict[str, msgspec.Raw])
    model = decode(parts.get("model", NULL), _Model)
    if model.type == "BPE" and model.continuing_subword_prefix:
        _fail(path, "has a BPE with continuing_subword_prefix, which is not supported")
    _check_growth(path, decode(parts.get("normalizer", NULL), Any))
    special = {*named.values(), *_list_special({**names, **settings})}
    added = _check_added(path, decode(parts.get("added_tokens", NULL), list[dict[str, Any]] | None))
    added = _drop_unknown(path, added, size)
    for token in added:
        token["special"] |= token["content"] in special or bool(CONTROL.fullmatch(token["content"]))
    encoded = msgspec.Raw(msgspec.json.encode(added))
    parts |= {"truncation": NULL, "padding": NULL, "added_tokens": encoded}
    processor = decode(parts.pop("post_processor", NULL), Any)
    return TokenizerFiles(
        path=path,
        definition=msgspec.json.encode(parts).decode(),
        decoding=find_decoding(path, decode(parts.get("decoder", NULL), Any), model.type),
        unknown=model.unk_id if model.unk_id is not None else model.unk_token,
        named=named,
        adds=_find_adds(settings),
        added=_find_added(path, processor, size),
        templates=read_templates(folder),
    )


class _Decoder:
    """Decodes JSON of one file. Raises ModelFileError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, content: bytes | msgspec.Raw, form: Any) -> Any:
        try:
            return msgspec.json.decode(content, type=form)
        except (ValueError, RecursionError) as error:
            _fail(self._path, explain_json(bytes(memoryview(content)[:64]), error))


def _check_growth(path: Path, normalizer: Any) -> None:
    """Raise ModelFileError if a normalizer may make a text much longer."""
    growth, rest = 1.0, [normalizer]
    while rest:
        step = rest.pop()
        if not isinstance(step, dict):
            continue
        parts, pattern, content = (step.get(name) for name in ("normalizers", "pattern", "content"))
        rest += parts if isinstance(parts, list) else []
        if isinstance(pattern, dict) and isinstance(content, str):
            replaced = pattern.get("String")
            growth *= max(
                1, len(content) / max(1, len(replaced) if isinstance(replaced, str) else 1)
            )
    if growth > MAX_GROWTH:
        _fail(path, f"has a normalizer that makes texts {growth:.3g} times as long")


def _find_named(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in NAMED:
        if text := _get_text(settings.get(name)):
            yield name, text


def _get_text(token: Any) -> str:
    """Return the text of a token, which may be written as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _list_special(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of the tokens that the settings call special."""
    for name in NAMED_LISTS:
        listed = settings.get(name)
        values = listed.values() if isinstance(listed, dict) else listed
        yield from map(_get_text, values if isinstance(values, Iterable) else ())
    decoder = settings.get("added_tokens_decoder")
    for token in decoder.values() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and token.get("special") is True:
            yield _get_text(token)


def _find_adds(settings: Mapping[str, Any]) -> tuple[bool, bool] | None:
    """Return whether begin and end tokens are added, as transformers decides it; None leaves it to
    the post-processor in ``tokenizer.json``.
    """
    adds = [settings.get(name) for name in ("add_bos_token", "add_eos_token")]
    if not any(isinstance(one, bool) for one in adds):
        return None
    return adds[0] is True, adds[1] is True


def _find_added(path: Path, processor: Any, size: int) -> tuple[Parts, Parts]:
    """Return the tokens that ``post_processor`` adds to one text, and to two. Raises
    ModelFileError.
    """
    try:
        single, pair = _parse_processor(processor)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        _fail(path, "is damaged or not supported: its post_processor cannot be read")
    tokens = [token for parts in (single, pair) for part in parts for token in part]
    if (len(single), len(pair)) != (2, 3) or any(
        type(token) is not int or not 0 <= token < size for token in tokens
    ):
        _fail(path, "is damaged: its post_processor adds unknown tokens or texts")
    return single, pair


def _parse_processor(processor: Any) -> tuple[Parts, Parts]:
    added: tuple[Parts, Parts] = [[], []], [[], [], []]
    for step in _list_steps(processor, "processors"):
        match step["type"]:
            case "TemplateProcessing":
                known = {name: one["ids"] for name, one in step["special_tokens"].items()}
                added = _parse_template(step["single"], known), _parse_template(step["pair"], known)
            case "BertProcessing":
                begin, end = [step["cls"][1]], [step["sep"][1]]
                added = [begin, end], [begin, end, end]
            case "RobertaProcessing":
                begin, end = [step["cls"][1]], [step["sep"][1]]
                added = [begin, end], [begin, end * 2, end]
            case "ByteLevel":  # changes offsets only
                pass
            case _:
                raise ValueError
    return added


def _parse_template(template: list[dict[str, Any]], known: Mapping[str, list[int]]) -> Parts:
    """Return the ids before, between and after the texts of a template."""
    parts: Parts = [[]]
    for one in template:
        if "Sequence" in one:
            parts.append([])
        else:
            parts[-1].extend(known[one["SpecialToken"]["id"]])
    return parts


def _check_added(path: Path, added: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    for token in added or []:
        known = {"id": int, "content": str, "special": bool}
        if any(type(token.get(name)) is not form for name, form in known.items()):
            _fail(path, f"is damaged: it has the added token {str(token)[:100]}")
    return added or []


def _drop_unknown(path: Path, added: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return the tokens that the model knows. Some are added without training for them."""
    known = [token for token in added if 0 <= token["id"] < size]
    if len(known) < len(added):
        text = next(token["content"] for token in added if not 0 <= token["id"] < size)
        log.warning(
            "%s: %d added tokens such as %r are ignored, because the model has only %d tokens",
            path,
            len(added) - len(known),
            text[:50],
            size,
        )
    return known


def find_decoding(path: Path, decoder: Any, model: str) -> Decoding:
    """Return how the texts of tokens become bytes. Raises ModelFileError for an unknown decoder."""
    steps = {str(step.get("type")): step for step in _list_steps(decoder, "decoders")}
    if "ByteLevel" in steps:
        return Decoding("bytes")
    if "WordPiece" in steps or (not steps and model == "WordPiece"):
        return Decoding("words", _get_mark(steps.get("WordPiece", {}), "prefix", "##"))
    if "Metaspace" in steps or "Replace" in steps or "ByteFallback" in steps:
        mark = _get_mark(steps.get("Metaspace", {}), "replacement", "▁")
        return Decoding("blanks", mark, byte_fallback="ByteFallback" in steps)
    if "BPEDecoder" in steps:
        return Decoding("suffixes", _get_mark(steps["BPEDecoder"], "suffix", "</w>"))
    if steps:
        _fail(path, f"has the decoder {', '.join(steps)[:100]}, which is not supported")
    return Decoding("blanks", "▁")


def _list_steps(first: Any, key: str) -> list[dict[str, Any]]:
    """Return the steps of a definition; sequences of them, under ``key``, may be nested."""
    steps, waiting = list[dict[str, Any]](), deque([first])
    while waiting:
        step = waiting.popleft()
        if not isinstance(step, dict):
            continue
        if step.get("type") != "Sequence":
            steps.append(step)
        elif isinstance(step.get(key), list):
            waiting += step[key]
    return steps


def _get_mark(step: Mapping[str, Any], name: str, default: str) -> str:
    mark = step.get(name)
    return mark if isinstance(mark, str) and mark else default


def _fail(path: Path, problem: str) -> NoReturn:
    raise ModelFileError(f"{path} {problem}", path)
