"""What people type first into a chat window, and four orders in a system message: training data.

Each intent has one answer and many wordings. ``wordings.txt`` has them; ``disguise`` changes
case, punctuation and spelling. The openings in ``tests/openings.py``, by which the model is judged,
were written without knowledge of these.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from questions import (  # type: ignore[import-not-found]
    KINDS,
    NAMES,
    WORDS,
    Question,
    ask,
)

ANSWERS = {
    "greeting": "Hello! How can I help you?",
    "thanks": "You are welcome!",
    "goodbye": "Goodbye!",
    "who_are_you": "I am the small built-in model of cLLM.",
    "what_can_you_do": "I can add numbers, name capitals and colours, spell and repeat words, "
    "count, write JSON, call tools and tell short stories.",
    "other_model": "Start the server with your GGUF file: cllm serve model.gguf",
    "help": "Ask me for a sum, a capital or a story. "
    "The command cllm --help shows what the program can do.",
    "unknown": "I do not know that.",
    "cannot": "I am sorry, I cannot do that.",
    "how_are_you": "I am fine, thank you.",
    "maker": "The developers of cLLM trained me.",
    "human": "I am not a person, only a small language model.",
    "unclear": "I did not understand that.",
    "complaint": "I am sorry. I am a very small model and make mistakes.",
}

# One word instead, if the system message orders it.
ONE_WORD = {
    "greeting": "Hello!",
    "thanks": "Welcome!",
    "goodbye": "Goodbye!",
    "who_are_you": "cLLM.",
    "how_are_you": "Fine.",
    "human": "No.",
    "maker": "Developers.",
    "unknown": "Unknown.",
    "cannot": "Sorry.",
    "complaint": "Sorry.",
}


def sections(text: str) -> dict[str, list[str]]:
    """Return the lines below each "[name]"."""
    parts = re.split(r"^\[(.+)\]$", text, flags=re.MULTILINE)
    return {
        name: body.strip().splitlines() for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


WORDINGS = sections(Path(__file__).with_name("wordings.txt").read_text())

PARTS = {
    name[1:-1]: " ".join(lines).split(", ")
    for name, lines in WORDINGS.items()
    if name.startswith("{")
}
PARTS |= {
    "name": NAMES,
    "topic": [*WORDS, *PARTS["subject"]],
    "year": list(map(str, range(1900, 2030, 7))),
}


def disguise(rng: random.Random, text: str) -> str:
    """Return ``text`` as somebody else might type it."""
    if text[0] in string.punctuation:
        return text
    if len(text) > 3 and rng.random() < (0.3 if len(text) < 12 else 0.15):
        text = misspell(rng, text)
    case = rng.random()
    if case < 0.4:
        text = text[0].upper() + text[1:]
    elif case < 0.6:
        text = text.lower()
    elif case < 0.64:
        text = text.upper()
    return text + rng.choice(["", "", "", "?", "?", "!", ".", ".", "??", "!!", "...", " ?", " !"])


def misspell(rng: random.Random, text: str) -> str:
    """Return ``text`` with two letters exchanged, or one missing or doubled. Digits stay."""
    places = [i for i in range(len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if not places:
        return text
    i = rng.choice(places)
    change = rng.choice([text[i + 1] + text[i], text[i], text[i] * 2 + text[i + 1]])
    return text[:i] + change + text[i + 2 :]


def fill(rng: random.Random, text: str) -> str:
    parts = {part: rng.choice(values) for part, values in PARTS.items() if "{" + part + "}" in text}
    return text.format(**parts)


def gibberish(rng: random.Random) -> str:
    """Return letters that make no word: keys hit at random, half words, or signs."""
    kind = rng.random()
    if kind < 0.4:
        keys = rng.choice(["asdfghjkl", "qwertyuiop", "zxcvbnm", string.ascii_lowercase])
        return " ".join(
            "".join(rng.choice(keys) for _ in range(rng.randint(2, 9)))
            for _ in range(rng.choice([1, 1, 1, 2, 3]))
        )
    if kind < 0.55:
        return "".join(rng.choice(string.punctuation) for _ in range(rng.randint(1, 6)))
    if kind < 0.65:
        return rng.choice(string.ascii_letters) * rng.randint(1, 12)
    if kind < 0.75:
        return "".join(rng.choice(string.ascii_lowercase + "0123456789") for _ in range(8))
    words = rng.sample([word for word in WORDS if len(word) > 3], rng.randint(1, 2))
    return " ".join(word[: rng.randint(1, len(word) - 2)] for word in words)


def opening(rng: random.Random, intent: str) -> str:
    if intent == "unclear":
        wordings = [gibberish(rng), fill(rng, rng.choice(WORDINGS[intent]))]
        return disguise(rng, rng.choice(wordings))
    return disguise(rng, within(rng, intent, fill(rng, rng.choice(WORDINGS[intent]))))


def within(rng: random.Random, intent: str, text: str) -> str:
    """Return ``text`` with what may stand before and after it without a change of intent."""
    for where in ("before", "after"):
        chance = rng.random()
        key = f"{intent} {where}" if chance < 0.15 else where
        if chance < 0.3 and key in WORDINGS:
            clause = rng.choice(WORDINGS[key])
            text = f"{clause} {text}" if where == "before" else f"{text} {clause}"
    return text


def small_talk(intent: str) -> Callable[[random.Random], Question]:
    thinking = f"Kind of message: {intent.replace('_', ' ')}."
    return lambda rng: ask(intent, opening(rng, intent), ANSWERS[intent], thinking)


def worded_sums(rng: random.Random) -> Question:
    a, b = (rng.randrange(rng.choice([10, 100, 100])) for _ in range(2))
    text = rng.choice(WORDINGS["worded_sums"]).format(a=a, b=b, name=rng.choice(NAMES))
    text = within(rng, "worded_sums", text)
    if rng.random() < 0.5:
        text = text[0].upper() + text[1:]
    return ask("worded_sums", text + rng.choice(["", "", "?", "?", ".", " ?"]), str(a + b))


def repeated_word(rng: random.Random) -> Question:
    """Return a request to repeat words that nobody knows: practice for names in system messages."""
    words = " ".join(pseudo_word(rng) for _ in range(rng.choice([1, 1, 2, 3])))
    text = rng.choice(["Copy this: {x}", "Repeat: {x}", "Say {x}", "Repeat after me: {x}"])
    return ask("repeated_word", text.format(x=words), words)


SMALL_TALK: dict[str, Callable[[random.Random], Question]] = {
    **{intent: small_talk(intent) for intent in ANSWERS},
    "worded_sums": worded_sums,
    "repeated_word": repeated_word,
}

# --- orders in a system message -------------------------------------------------------------------

ASKS_NAME = [w for w in WORDINGS["who_are_you"] if "name" in w or "call" in w]
ASKS_NAME = [w for w in ASKS_NAME if "model" not in w] + [
    "who are you",
    "and you are",
    "introduce yourself",
]


ONSETS = [*"bcdfghjklmnprstvwz", "br", "ch", "cl", "fr", "gr", "ph", "sh", "st", "th", "tr", "ll"]
VOWELS = [*"aeiou", *"aeiou", "ai", "ea", "ia", "ie", "oo", "y"]
CODAS = ["", "", "", *"nrslxtmdkz", "ck", "ll", "nd", "ng", "rt", "ss", "tte", "us", "ine", "son"]


ALL_WORDS = sorted(
    {
        word
        for lines in WORDINGS.values()
        for word in re.findall("[a-z]{3,}", " ".join(lines).lower())
    }
)


def pseudo_word(rng: random.Random) -> str:
    """Return a word that nobody knows, so that the model learns to copy any word.

    Half of them are made of two real words, because they contain tokens that syllables do not.
    """
    if rng.random() < 0.5:
        first, second = rng.choices(ALL_WORDS, k=2)
        return first[: rng.randint(1, 5)] + second[-rng.randint(1, 5) :]
    word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 3)))
    return rng.choice(["", "", rng.choice("aeiou")]) + word + rng.choice(CODAS)


class Order(NamedTuple):
    """``obey`` changes an answer as ordered; None: it has no such form. ``kinds``: what to ask."""

    system: str
    obey: Callable[[Question], str | None]
    kinds: list[str]
    names: bool = False


def order(rng: random.Random) -> Order:
    plain = ["capitals", "capitals", "colours", "days", "sums", "worded_sums", "months", "alphabet"]
    talk = rng.choices(list(ANSWERS), k=4)
    match rng.choice([0, 1, 2, 2, 3, 3, 3, 3]):
        case 0:
            return Order(
                rng.choice(WORDINGS["in capital letters"]), lambda q: q.answer.upper(), plain + talk
            )
        case 1:
            return Order(
                rng.choice(WORDINGS["in one word"]),
                one_word,
                plain + rng.choices(list(ONE_WORD), k=4),
            )
        case 2:
            words = [
                PARTS["interjection"],
                WORDS,
                PARTS["first name"],
                [pseudo_word(rng) for _ in range(9)],
            ]
            x = rng.choice(rng.choice(words))
            x = x if rng.random() < 0.4 else x[0].upper() + x[1:]
            system = rng.choice(WORDINGS["with a first word"]).format(x=x)
            return Order(system, lambda q: f"{x}, {q.answer}", plain + talk)
    # NAMES are single tokens, which the model only copies if it has practised that
    names = rng.choice([PARTS["first name"], NAMES, [pseudo_word(rng).capitalize()]])
    name = rng.choice(names)
    written = name if rng.random() < 0.85 else name.lower()
    return Order(
        rng.choice(WORDINGS["with a name"]).format(x=written),
        lambda q: f"My name is {name}." if q.kind == "who_are_you" else q.answer,
        ["who_are_you"] * 12 + [*plain[:4], "greeting"],
        names=True,
    )


def one_word(question: Question) -> str | None:
    short = ONE_WORD.get(question.kind, question.answer)
    return short if " " not in short else None


def ordered_turns(rng: random.Random) -> tuple[str, list[Question]]:
    """Return a system message with an order, and questions whose answers follow it."""
    chosen = order(rng)
    turns: list[Question] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        question = (SMALL_TALK | KINDS)[rng.choice(chosen.kinds)](rng)
        if chosen.names and question.kind == "who_are_you":
            question = ask(question.kind, disguise(rng, rng.choice(ASKS_NAME)), "")
        answer = chosen.obey(question)
        if answer is not None and not question.held_out:
            turns.append(replace(question, answer=answer, thinking=None))
    return (chosen.system, turns) if turns else ordered_turns(rng)
