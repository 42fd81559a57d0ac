"""The texts that the hybrid model learns: chats, edits, copies and diaries."""

from __future__ import annotations

import random

import train as builtin  # type: ignore[import-not-found]

from cllm.bench.load.scenarios import replace_name
from cllm.models.builtin.questions import ANIMALS, DAYS, KINDS, NAMES, PLACES, WORDS

MIX = {"dialogues": 4, "edits": 3, "copies": 2, "diaries": 1}  # shares

Pieces = list[tuple[str, float]]


def chat(turns: list[tuple[str, str]]) -> Pieces:
    """Return a conversation of (question, answer) as pieces (text, weight of its loss)."""
    pieces: Pieces = []
    for question, answer in turns:
        asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        pieces += [(asked, builtin.PROMPT_WEIGHT), (f"{answer}<|im_end|>", 1.0), ("\n", 0.0)]
    return pieces


def edits(rng: random.Random, held_out: bool) -> Pieces:
    """Return a story and the same one with another name, as in the scenario "edit" of the load
    client, or a text to repeat with another word.
    """
    if rng.random() < 0.4:
        text, new = copied_text(rng), rng.choice(NAMES + WORDS)
        old = rng.choice([word for word in text.split() if word.isalpha()] or ["none"])
        question = f"Repeat this text, but write {new} instead of {old}: {text}"
        return chat([(question, replace_name(text, old, new))])
    while True:
        story, name = KINDS["stories"](rng), rng.choice(NAMES)
        question = story.messages[0]["content"]
        old = question.split(" named ")[1].split()[0]
        if story.held_out == held_out and name != old:
            return chat(
                [
                    (question, story.answer),
                    (replace_name(question, old, name), replace_name(story.answer, old, name)),
                ]
            )


def copies(rng: random.Random) -> Pieces:
    text = copied_text(rng)
    return chat([(rng.choice(["Repeat: {}", "Repeat this text: {}"]).format(text), text)])


def copied_text(rng: random.Random) -> str:
    match rng.randrange(3):
        case 0:
            return diary(rng)
        case 1:
            return " ".join(rng.choice(WORDS + NAMES) for _ in range(rng.randint(4, 60)))
        case _:
            return " ".join(invented_word(rng) for _ in range(rng.randint(2, 20)))


def invented_word(rng: random.Random) -> str:
    syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(4))
    return "".join(list(syllables)[: rng.randint(1, 4)])


def diaries(rng: random.Random) -> Pieces:
    name = rng.choice(NAMES)
    return chat([(f"Write the diary of {name}.", diary(rng, name))])


def diary(rng: random.Random, name: str | None = None) -> str:
    """Return days in order. The place decides what is found there, the animal whom it meets."""
    name, first, lines = name or rng.choice(NAMES), rng.randrange(len(DAYS)), []
    for i in range(rng.randint(1, 6)):
        place, animal = rng.choice(list(PLACES)), rng.choice(list(ANIMALS))
        nature, friend = ANIMALS[animal]
        lines.append(
            f"On {DAYS[(first + i) % len(DAYS)]} {name} went to the {place} and found "
            f"{PLACES[place]}. There {name} saw a {nature} {animal}, who was a friend of the "
            f"{friend}."
        )
    return " ".join(lines)


def draw(rng: random.Random, kind: str, held_out: bool = False) -> Pieces:
    match kind:
        case "dialogues" if held_out:
            while not (question := KINDS[rng.choice(list(KINDS))](rng)).held_out or question.tools:
                pass
            return chat([(question.messages[0]["content"], question.answer)])
        case "dialogues":
            return builtin.dialogue(rng, builtin.PHASES[-1])
        case "edits":
            return edits(rng, held_out)
        case "copies":
            return copies(rng)
        case _:
            return diaries(rng)
