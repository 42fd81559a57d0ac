"""Train a small hybrid model with a head that drafts tokens, and write it as GGUF.

    tools/setup.sh --torch true
    .venv/bin/python tools/train_hybrid/train.py --out hybrid-mtp.gguf

The model measures speculative decoding on a hybrid. It has Qwen3.5's architecture: gated delta
nets, full attention in each second layer, and a layer that predicts the next but one token (MTP).
It begins with the layers of the built-in model, and learns that model's dialogues, edits, copies
and diaries. Texts are generated, so there is nothing to download. The weights are F32.

Takes 27 minutes on half of a core (``--minutes``): 200 steps for the layers, then 430 for the head.
The file is also written every 5 minutes. The right first choices in held-out answers were:

    kind       next token  first draft  second draft
    dialogues       97.6%        78.0%         77.2%
    edits           97.9%        83.4%         83.7%
    copies          95.1%        55.7%         56.2%
    diaries         93.4%        93.1%         93.1%

All of 16 stories with another name were right to the last letter, as were 23 of 32 dialogues, 9 of
16 copies, and none of 16 texts with another word. The delta nets add little: without them, the
shares of the next token fall by 1 to 2 points. So compare logits, and not only texts, to check that
their states are kept right.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

# before this folder, which also has a train.py
sys.path.insert(0, str(Path(__file__).parents[1] / "train_builtin"))
import train as builtin  # type: ignore[import-not-found]
from model import (  # type: ignore[import-not-found]
    ATTENTION_INTERVAL,
    DELTA_HEADS,
    EPSILON,
    FEED_FORWARD,
    HEAD,
    HEADS,
    KERNEL,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Model,
    begin_with_builtin,
    is_head,
)
from texts import MIX, diary, draw  # type: ignore[import-not-found]

RATE, WARM_UP, DRAFTS = 1e-3, 20, 2
LAYERS_SHARE = 0.42  # of the time; then the layers are frozen, and the head learns
# The layers that are written are a mean with those of the beginning, which forgets less.
# Wortsman et al., "Robust fine-tuning of zero-shot models", 2022.
BEGUN_SHARE = 0.25
SHORT_ROWS, LONG_ROWS, LONG_SHARE = (4, 512), (2, 1024), 0.15
LLAMA_NAMES = {
    ".mixer": "",
    "log_a": "ssm_a",
    "ssm_dt": "ssm_dt.bias",
    "ssm_conv1d": "ssm_conv1d.weight",
    "nextn": f"blk.{LAYERS}.nextn",
}


def train(
    model: Model,
    tokenizer: Tokenizer,
    minutes: float,
    rng: random.Random,
    save: Callable[[], None],
    *,
    head: bool,
) -> None:
    """Train the layers of ``model``, or the head that drafts. Save it every 5 minutes."""
    for name, weight in model.named_parameters():
        weight.requires_grad_(is_head(name) == head)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98))
    begun = saved = time.time()
    step = 0
    while (done := (time.time() - begun) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * (1 - done)
        rows, length = SHORT_ROWS if done < 1 - LONG_SHARE else LONG_ROWS
        ids, weights = builtin.packed(
            tokenizer,
            lambda: draw(rng, rng.choices(list(MIX), list(MIX.values()))[0]),
            rows,
            length,
        )
        with torch.autocast("cpu", torch.bfloat16):  # several times as fast with AMX
            logits = model.all_logits(ids[:, :-1], DRAFTS if head else 0)
        losses = []
        for i, each in enumerate(logits, 1):
            targets, weight = ids[:, i:].flatten(), weights[:, i:].flatten()
            loss = F.cross_entropy(each.flatten(0, 1), targets, reduction="none")
            losses.append((loss * weight).sum() / weight.sum())
        optimizer.zero_grad(set_to_none=True)
        sum(losses).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            text = " ".join(f"{loss:.4f}" for loss in losses)
            print(f"{'head' if head else 'layers'}: step {step}, {done:.0%}, {text}", flush=True)
        if time.time() - saved > 300:
            save()
            saved = time.time()


@torch.no_grad()
def evaluate(model: Model, tokenizer: Tokenizer) -> None:
    """Print loss and share of right first choices for the answers of held-out texts: of the next
    token, of the first and of the second draft.
    """
    for kind in MIX:
        rng = random.Random(2026)
        ids, weights = builtin.packed(
            tokenizer, lambda kind=kind, rng=rng: draw(rng, kind, held_out=True), 8, 512
        )
        figures = []
        for i, logits in enumerate(model.all_logits(ids[:, :-1], DRAFTS), 1):
            answer = weights[:, i:] == 1
            chosen, targets = logits[answer], ids[:, i:][answer]
            right = (chosen.argmax(-1) == targets).float().mean()
            figures.append(f"{F.cross_entropy(chosen, targets):.4f} {right:.1%}")
        print(f"{kind:10} {' | '.join(figures)}", flush=True)


def write_gguf(model: Model, tokenizer: Tokenizer, path: Path) -> None:
    """Write the model to ``path``, completely or not at all."""
    partial = path.with_name(f".{path.name}")
    writer = gguf.GGUFWriter(partial, "qwen35")
    writer.add_name("cLLM hybrid")
    writer.add_description("Measures speculative decoding; trained by tools/train_hybrid")
    writer.add_license("mit")
    writer.add_context_length(builtin.CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_freq_base(builtin.ROPE_BASE)
    writer.add_rope_dimension_count(HEAD)
    # how these are divided matters for images only
    writer.add_rope_dimension_sections([12, 10, 10, 0])
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_full_attention_interval(ATTENTION_INTERVAL)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(DELTA_HEADS * HEAD)
    writer.add_ssm_state_size(HEAD)
    writer.add_ssm_time_step_rank(DELTA_HEADS)
    writer.add_ssm_group_count(DELTA_HEADS)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    builtin.add_tokenizer(writer, tokenizer)
    for name, weight in model.state_dict().items():
        writer.add_tensor(*as_tensor(name, weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def as_tensor(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """Return a parameter's name and values as llama.cpp has them."""
    if name.endswith("log_a"):
        values = -np.exp(values)
    for ours, theirs in LLAMA_NAMES.items():
        name = name.replace(ours, theirs)
    return name, values


@torch.no_grad()
def largest_differences(model: Model, path: Path, ids: list[int]) -> tuple[float, float]:
    """Compare the logits of ``model`` with those that llama.cpp computes from the file: of the next
    tokens and of the first drafts.
    """
    from llama_cpp import llama_cpp as lib
    from llama_cpp import llama_cpp_ext as ext

    weights = lib.llama_model_default_params()
    weights.load_mtp = True
    loaded = lib.llama_model_load_from_file(str(path).encode(), weights)
    options = lib.llama_context_default_params()
    options.n_ctx = options.n_batch = 512
    options.type_k = options.type_v = lib.GGML_TYPE_F32
    options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it computes in F16
    context = lib.llama_init_from_model(loaded, options)
    options.ctx_type, options.ctx_other = 1, context
    drafter = lib.llama_init_from_model(loaded, options)
    ext.llama_set_embeddings_nextn(context, True, False)

    def compute(target: int, tokens: list[int], states: np.ndarray | None) -> Tensor:
        batch = lib.llama_batch_ext_init(target)
        for i, token in enumerate(tokens):
            lib.llama_batch_ext_add_token(batch, 0, token)
            if states is not None:
                row = states[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
                lib.llama_batch_ext_set_embd_token(batch, i, lib.llama_embd(row, 1, WIDTH))
            lib.llama_batch_ext_set_pos(batch, i, ctypes.byref(ctypes.c_int32(i)))
            lib.llama_batch_ext_set_output_logits(batch, i, True)
        assert lib.llama_process(target, lib.LLAMA_PROCESS_TYPE_DECODE, batch) == 0
        lib.llama_batch_ext_free(batch)
        logits = lib.llama_get_logits(target)
        return torch.from_numpy(np.ctypeslib.as_array(logits, (len(tokens), VOCABULARY)).copy())

    ours = model.all_logits(torch.tensor([ids]), 1)
    theirs = compute(context, ids, None)
    states = np.ctypeslib.as_array(ext.llama_get_embeddings_nextn(context), (len(ids), WIDTH))
    drafts = compute(drafter, ids[1:], states)
    found = [(a[0] - b).abs().max().item() for a, b in zip(ours, (theirs, drafts), strict=True)]
    for each in (drafter, context):
        lib.llama_free(each)
    lib.llama_model_free(loaded)
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("hybrid-mtp.gguf"))
    parser.add_argument("--minutes", type=float, default=27)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    reader = gguf.GGUFReader(builtin.BUILTIN / "builtin.gguf")
    tokenizer, model = builtin.read_tokenizer(reader), Model()
    begin_with_builtin(model, builtin.read_weights(reader))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)

    def save() -> None:
        write_gguf(model, tokenizer, options.out)
        ids = tokenizer.encode(diary(random.Random(3))).ids[:100]
        difference = max(largest_differences(model, options.out, ids))
        print(f"logits differ from llama.cpp's by at most {difference:.1e}", flush=True)

    begun = {name: weight.clone() for name, weight in model.state_dict().items()}
    rng = random.Random(options.seed)
    for head, share in ((False, LAYERS_SHARE), (True, 1 - LAYERS_SHARE)):
        train(model, tokenizer, share * options.minutes, rng, save, head=head)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if not is_head(name):
                weight.lerp_(begun[name], BEGUN_SHARE)
    save()
    evaluate(model, tokenizer)


if __name__ == "__main__":
    main()
