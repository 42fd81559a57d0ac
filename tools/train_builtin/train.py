"""Train the built-in model and write it as GGUF.

    python tools/train_builtin/train.py --out src/cllm/models/builtin/builtin.gguf

Needs an environment of its own (see README.md in this folder): torch, tokenizers, gguf, jinja2,
numpy. Takes about 70 minutes on two cores. The training text is generated, so there is nothing to
download.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import gguf
import jinja2
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
BUILTIN = ROOT / "src/cllm/models/builtin"
sys.path.insert(0, str(BUILTIN))
from questions import KINDS, SYSTEM_PROMPTS, Question  # type: ignore[import-not-found]  # noqa: E402
from small_talk import SMALL_TALK, ordered_turns  # noqa: E402

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, FEED_FORWARD = 256, 4, 4, 2, 64, 640
VOCABULARY, ROPE_BASE, EPSILON, CONTEXT = 1024, 100_000.0, 1e-6, 4096
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
]
MARKS += ["<think>", "</think>"]
# The pre-tokenizer that llama.cpp knows as "qwen2": single digits, words with their leading space.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
THINK = "<think>\n"  # ends the prompt if the model is to think
PROMPT_WEIGHT = 0.05  # loss mostly on the answers
LONG_ROWS = (4, 1920)  # rows and tokens of the last steps of a phase, so that long histories work


class Phase(NamedTuple):
    """AdamW with ``rate`` after a warm-up, falling to 0.

    ``mix``: weights of the kinds of questions, 1 by default. ``talk``: share of small talk among
    the turns. Shares of conversations: ``orders`` with an order in the system message, ``raw``
    stories without the chat template, ``idle_tools`` with tools that the question does not need.
    """

    steps: int
    rate: float
    rows: tuple[int, int]
    long_share: float
    mix: dict[str, int]
    talk: float = 0.0
    orders: float = 0.0
    raw: float = 0.0
    idle_tools: float = 0.0


PHASES = [  # the last three add small talk to a model trained by the ones before
    Phase(
        1500, 3e-3, (40, 192), 0.2, {"sums": 3, "copying": 2, "spelling": 2, "tools": 2, "json": 2}
    ),
    # the kinds that the first phase learns last; rows long enough for declared tools, a call and
    # its result
    Phase(750, 1.5e-3, (20, 384), 0.08, {"sums": 6, "tools": 6, "copying": 2, "counting": 2}),
    Phase(240, 1.2e-3, (20, 384), 0.06, {"sums": 4, "tools": 10, "capitals": 3}),
    Phase(290, 1.2e-3, (30, 256), 0.05, {"sums": 9, "counting": 4, "capitals": 3, "tools": 2}),
    Phase(
        190,
        1.0e-3,
        (50, 128),
        0.03,
        {"sums": 14, "counting": 3, "capitals": 5, "json": 2, "tools": 2},
    ),
    Phase(
        1500,
        1.2e-3,
        (40, 160),
        0.04,
        {"sums": 5, "tools": 5, "capitals": 2, "counting": 2, "unknown": 4, "cannot": 4}
        | {"worded_sums": 4, "unclear": 2, "other_model": 2},
        talk=0.55,
        orders=0.2,
        raw=0.02,
    ),
    # what was still weak after that: names to copy, short greetings, results of tools
    Phase(
        1200,
        1.0e-3,
        (40, 160),
        0.04,
        {"sums": 5, "tools": 9, "capitals": 2, "counting": 2, "unknown": 3, "cannot": 3}
        | {"worded_sums": 4, "unclear": 2, "other_model": 2, "greeting": 2, "thanks": 2}
        | {"goodbye": 2, "human": 2, "complaint": 2, "how_are_you": 2},
        talk=0.6,
        orders=0.3,
        raw=0.02,
    ),
    # until then, declared tools were always called, and names were remembered instead of copied
    Phase(
        1500,
        1.0e-3,
        (40, 160),
        0.04,
        {"sums": 5, "tools": 6, "capitals": 2, "counting": 2, "unknown": 3, "cannot": 3}
        | {"worded_sums": 4, "unclear": 3, "other_model": 2, "help": 3, "what_can_you_do": 2}
        | {"greeting": 2, "goodbye": 3, "maker": 2, "human": 2, "complaint": 2}
        | {"repeated_word": 4},
        talk=0.55,
        orders=0.4,
        raw=0.02,
        idle_tools=0.15,
    ),
    # names were copied, except tokens that no practised name contained
    Phase(
        600,
        1.0e-3,
        (40, 160),
        0.04,
        {"sums": 6, "tools": 6, "capitals": 2, "counting": 2, "unknown": 3, "cannot": 3}
        | {"worded_sums": 4, "unclear": 3, "other_model": 3, "help": 3, "what_can_you_do": 3}
        | {"greeting": 2, "goodbye": 3, "maker": 2, "human": 2, "complaint": 2, "how_are_you": 2}
        | {"repeated_word": 3},
        talk=0.65,
        orders=0.3,
        raw=0.02,
        idle_tools=0.15,
    ),
    # mostly what people type first
    Phase(
        400,
        6e-4,
        (40, 160),
        0.04,
        {"sums": 6, "tools": 6, "capitals": 2, "counting": 2, "json": 2, "unknown": 4, "cannot": 4}
        | {"worded_sums": 4, "unclear": 3, "other_model": 4, "help": 4, "what_can_you_do": 3}
        | {"greeting": 4, "goodbye": 4, "maker": 2, "human": 3, "complaint": 3, "how_are_you": 3}
        | {"repeated_word": 2},
        talk=0.7,
        orders=0.25,
        raw=0.02,
        idle_tools=0.15,
    ),
]


def template() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((BUILTIN / "chat_template.jinja").read_text())


TEMPLATE = template()


def train_question(rng: random.Random, kinds: list[str]) -> Question:
    while True:
        question = (KINDS | SMALL_TALK)[rng.choice(kinds)](rng)
        if not question.held_out:
            return question


def dialogue(rng: random.Random, phase: Phase) -> list[tuple[str, float]]:
    """Return one conversation as pieces (text, weight of its loss)."""
    kinds = [kind for kind in KINDS for _ in range(phase.mix.get(kind, 1))]
    talk = [kind for kind in SMALL_TALK for _ in range(phase.mix.get(kind, 1))]
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else ""
    if rng.random() < phase.orders:
        system, turns = ordered_turns(rng)
    elif rng.random() < phase.raw:
        story = KINDS["stories"](rng).answer
        at = story.index(" ", rng.randrange(4, 60))
        return [(story[:at], PROMPT_WEIGHT), (story[at:] + "<|im_end|>", 1.0), ("\n", 0.0)]
    else:
        turns = [train_question(rng, talk if rng.random() < phase.talk else kinds)]
        for _ in range(0 if turns[0].tools else rng.choice([0, 0, 0, 1, 1, 2, 3])):
            plain = [kind for kind in kinds if kind != "tools"]
            turns.append(train_question(rng, talk if rng.random() < phase.talk else plain))
        if not turns[0].tools and rng.random() < phase.idle_tools:
            turns = [replace(turns[0], tools=train_question(rng, ["tools"]).tools)]
    history = [{"role": "system", "content": system}] if system else []
    pieces: list[tuple[str, float]] = []
    done = ""
    for question in turns:
        history += question.messages
        think = question.thinking is not None and rng.random() < 0.2
        prompt = TEMPLATE.render(
            messages=history,
            tools=question.tools,
            add_generation_prompt=True,
            enable_thinking=think,
        )
        if not prompt.startswith(done):  # the last turn had thoughts, which the template drops
            break
        answer = f"{question.thinking}\n</think>\n\n{question.answer}" if think else question.answer
        asked = prompt[len(done) :].removesuffix(THINK)
        pieces += [(asked, PROMPT_WEIGHT), (THINK if think else "", 0.0)]  # ours, not the model's
        pieces += [(answer + "<|im_end|>", 1.0), ("\n", 0.0)]
        done = prompt + answer + "<|im_end|>\n"
        history.append({"role": "assistant", "content": question.answer})
    return pieces


def byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_marks(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.add_tokens(MARKS)
    return tokenizer


def train_tokenizer() -> Tokenizer:
    rng = random.Random(1)
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL) - len(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    marks = CONTROL + MARKS

    def texts() -> Iterator[str]:
        for _ in range(20_000):
            text = "".join(piece for piece, _ in dialogue(rng, PHASES[0]))
            for mark in marks:
                text = text.replace(mark, "\n")
            # emoji stay bytes: a token may split a character
            yield "".join(c for c in text if ord(c) < 128)

    tokenizer.train_from_iterator(texts(), trainer)
    return with_marks(tokenizer)


def packed(
    tokenizer: Tokenizer, draw: Callable[[], list[tuple[str, float]]], rows: int, length: int
) -> tuple[Tensor, Tensor]:
    """Return rows filled with what ``draw`` returns, texts with the weight of their loss: token ids
    (rows, length + 1), and weights of the same shape.
    """
    ids = np.zeros((rows, length + 1), np.int64)
    weights = np.zeros((rows, length + 1), np.float32)
    for row in range(rows):
        at = 0
        while at <= length:
            for text, weight in draw():
                tokens = tokenizer.encode(text).ids[: length + 1 - at]
                ids[row, at : at + len(tokens)] = tokens
                weights[row, at : at + len(tokens)] = weight
                at += len(tokens)
    return torch.from_numpy(ids), torch.from_numpy(weights)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPSILON)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class Layer(nn.Module):
    """One Qwen3 block: grouped attention with normed queries and keys, then SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = Norm(WIDTH), Norm(WIDTH)
        self.attn_q_norm, self.attn_k_norm = Norm(HEAD), Norm(HEAD)
        self.attn_q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.attn_k = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.attn_v = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.attn_output = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.ffn_gate = nn.Linear(WIDTH, FEED_FORWARD, bias=False)
        self.ffn_up = nn.Linear(WIDTH, FEED_FORWARD, bias=False)
        self.ffn_down = nn.Linear(FEED_FORWARD, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = self.attn_norm(x)
        q = self.attn_q_norm(self.attn_q(h).view(rows, length, HEADS, HEAD)).transpose(1, 2)
        k = self.attn_k_norm(self.attn_k(h).view(rows, length, KV_HEADS, HEAD)).transpose(1, 2)
        v = self.attn_v(h).view(rows, length, KV_HEADS, HEAD).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attn_output(mixed.transpose(1, 2).reshape(rows, length, HEADS * HEAD))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(VOCABULARY, WIDTH)
        self.blk = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.output_norm = Norm(WIDTH)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = (
                    1 / math.sqrt(2 * LAYERS)
                    if name.endswith(("output.weight", "down.weight"))
                    else 1
                )
                nn.init.normal_(
                    weight,
                    std=0.02 * scale if "embd" in name else scale / math.sqrt(weight.shape[1]),
                )

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        frequency = ROPE_BASE ** (-torch.arange(0, HEAD, 2) / HEAD)
        angle = torch.arange(length)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        x = self.token_embd(ids)
        for layer in self.blk:
            x = layer(x, cos, sin)
        return self.output_norm(x) @ self.token_embd.weight.T


def train(model: Model, tokenizer: Tokenizer, phase: Phase, seed: int, save: Path) -> None:
    """Train ``model`` in place. Save it every 200 steps and at the end."""
    rng = random.Random(seed)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=phase.rate, betas=(0.9, 0.98))
    begun, mean = time.time(), 0.0
    for step in range(phase.steps):
        rate = phase.rate * min(1.0, (step + 1) / 50) * (1 - step / phase.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows, length = phase.rows if step < phase.steps * (1 - phase.long_share) else LONG_ROWS
        ids, weights = packed(tokenizer, lambda: dialogue(rng, phase), rows, length)
        logits = model(ids[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weight = weights[:, 1:].flatten()
        loss = (losses * weight).sum() / weight.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.item() if step == 0 else 0.95 * mean + 0.05 * loss.item()
        last = step == phase.steps - 1
        if step % 20 == 19 or last:
            spent = time.time() - begun
            left = spent / (step + 1) * (phase.steps - step - 1)
            print(
                f"step {step + 1}/{phase.steps} loss {mean:.4f} {spent:.0f} s, {left:.0f} s left",
                flush=True,
            )
        if step % 200 == 199 or last:
            torch.save({"model": model.state_dict(), "tokenizer": tokenizer.to_str()}, save)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Add the tokenizer and the chat template."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [token for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])]
    assert len(tokens) == VOCABULARY, len(tokens)
    kinds = dict.fromkeys(CONTROL, gguf.TokenType.CONTROL) | dict.fromkeys(
        MARKS, gguf.TokenType.USER_DEFINED
    )
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    )
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_bos_token_id(vocabulary["<|endoftext|>"])
    writer.add_pad_token_id(vocabulary["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((BUILTIN / "chat_template.jinja").read_text())


def write_gguf(model: Model, tokenizer: Tokenizer, path: Path) -> None:
    """Write weights (matrices Q8_0, vectors F32), tokenizer and chat template."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name("cLLM built-in")
    writer.add_description(
        "Answers questions that a program can check; trained by tools/train_builtin"
    )
    writer.add_license("mit")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)

    add_tokenizer(writer, tokenizer)
    for name, weight in model.state_dict().items():
        values = weight.detach().numpy().astype(np.float32)
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(model: Model, path: Path) -> Tokenizer:
    """Load the weights of a checkpoint, or of a GGUF file that this script wrote."""
    if path.suffix != ".gguf":
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        return Tokenizer.from_str(checkpoint["tokenizer"])
    reader = gguf.GGUFReader(path)
    model.load_state_dict(read_weights(reader))
    return read_tokenizer(reader)


def read_weights(reader: gguf.GGUFReader) -> dict[str, Tensor]:
    return {
        tensor.name: torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in reader.tensors
    }


def read_tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    special = set(CONTROL + MARKS)
    vocabulary = {token: i for i, token in enumerate(tokens) if token not in special}
    return with_marks(byte_level(models.BPE(vocabulary, [tuple(m.split(" ")) for m in merges])))


def load_mean(model: Model, paths: list[Path]) -> Tokenizer:
    """Load the mean of the weights of several checkpoints of one training.

    Wortsman et al., "Model soups", 2022.
    """
    states = []
    for path in paths:
        tokenizer = load(model, path)
        states.append({name: weight.clone() for name, weight in model.state_dict().items()})
    model.load_state_dict({n: sum(s[n] for s in states) / len(states) for n in states[0]})
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=BUILTIN / "builtin.gguf")
    parser.add_argument(
        "--resume", type=Path, help="begin with the last phase, from this checkpoint"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("builtin.pt"), help="written every 200 steps"
    )
    parser.add_argument(
        "--average", type=Path, nargs="+", help="write the mean of these checkpoints instead"
    )
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = Model()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    if options.average:
        tokenizer = load_mean(model, options.average)
    elif options.resume:
        tokenizer = load(model, options.resume)
    else:
        tokenizer = train_tokenizer()
    for i, phase in enumerate([] if options.average else PHASES):
        if not options.resume or i == len(PHASES) - 1:
            train(model, tokenizer, phase, options.seed + i, options.checkpoint)
    write_gguf(model, tokenizer, options.out)
    print(f"wrote {options.out}, {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
