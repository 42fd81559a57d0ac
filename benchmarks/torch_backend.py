"""Compare the PyTorch backend with transformers' continuous batching, and with llama.cpp.

    uv run python -m benchmarks.torch_backend [CHECKPOINT] [--dtype float32] [--rounds 3]
        [--gguf FILE] [--only decode1,decode8,prefill8]

CHECKPOINT is a folder with safetensors; by default the one that transformers makes of
SmolLM2-135M-Instruct (make models fetches it). Needs the extra torch and the package transformers,
and to make the checkpoint also accelerate.

Each system runs in a process of its own, on the same prompts of random tokens, greedily; the second
of two calls is timed. decodeN: N sequences of 128 tokens get 64 more. prefill8: 8 prompts of 512
tokens get one token. Prints tokens per second, and our ratio to each of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cllm.cli.doctor import describe_cpu

SMOLLM2 = Path(".tools/models/smollm2-135m.gguf")
ROWS = {"decode1": (1, 128, 64), "decode8": (8, 128, 64), "prefill8": (8, 512, 1)}
Prompts = list[list[int]]


def make_prompts(count: int, length: int, seed: int) -> Prompts:
    chosen = random.Random(seed)
    return [[chosen.randrange(1000, 9000) for _ in range(length)] for _ in range(count)]


def open_cllm(path: str, dtype: str, backend: str) -> Callable[[Prompts, int], None]:
    from cllm import LLM, SamplingParams

    options: dict[str, Any] = {"backend_torch_dtype": dtype} if backend == "torch" else {}
    llm = LLM(path, backend_name=backend, kv_max_memory_mb=2000, **options)

    def generate(prompts: Prompts, count: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        done = llm.generate(prompts, params)
        assert all(len(each.outputs[0].tokens) == count for each in done)

    return generate


def open_transformers(path: str, dtype: str, _: str) -> Callable[[Prompts, int], None]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )

    def generate(prompts: Prompts, count: int) -> None:
        config = transformers.GenerationConfig(
            max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        done = model.generate_batch(prompts, generation_config=config, persistent_manager=True)
        assert all(len(each.generated_tokens) == count for each in done.values())

    return generate


OPENERS: dict[str, Callable[[str, str, str], Callable[[Prompts, int], None]]] = {
    "torch": open_cllm,
    "llama_cpp": open_cllm,
    "transformers": open_transformers,
}


def run_child(system: str, path: str, dtype: str, row: str) -> None:
    """Print the seconds of a call, as JSON."""
    count, length, new = ROWS[row]
    generate = OPENERS[system](path, dtype, system)
    generate(make_prompts(count, length, 1), new)
    begun = time.perf_counter()
    generate(make_prompts(count, length, 2), new)
    print(json.dumps(time.perf_counter() - begun), flush=True)
    os._exit(0)  # threads of the libraries may wait for more work


def measure(system: str, path: str, dtype: str, row: str) -> float:
    """Return tokens per second."""
    command = [sys.executable, "-m", "benchmarks.torch_backend", path, "--dtype", dtype]
    answer = subprocess.run(
        [*command, "--child", system, "--only", row],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=600,
        check=True,
    )
    count, length, new = ROWS[row]
    tokens = count * (new if new > 1 else length)
    return tokens / float(json.loads(answer.stdout.splitlines()[-1]))


def convert(gguf_path: Path, folder: Path) -> Path:
    """Write a GGUF file as a checkpoint in bfloat16, by transformers' own loader."""
    import torch
    import transformers

    where, name = str(gguf_path.parent), gguf_path.name
    model = transformers.AutoModelForCausalLM.from_pretrained(where, gguf_file=name)
    model.to(torch.bfloat16).hf_quantizer = None  # with it, the weights cannot be saved
    del model.config.quantization_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows = args.only.split(",")
    if args.child:
        run_child(args.child, str(args.checkpoint), args.dtype, rows[0])
    print(describe_cpu(), args.dtype)
    with tempfile.TemporaryDirectory() as folder:
        gguf_path = args.gguf or SMOLLM2
        path = args.checkpoint or convert(gguf_path, Path(folder) / "smollm2-135m")
        systems = {"torch": path, "transformers": path, "llama_cpp": gguf_path}
        for row in rows:
            rates: dict[str, list[float]] = {system: [] for system in systems}
            for _ in range(args.rounds):
                for system, file in systems.items():
                    rates[system].append(measure(system, str(file), args.dtype, row))
            print(row, *(f"{system} {statistics.median(r):.1f}" for system, r in rates.items()))
            for other in ("transformers", "llama_cpp"):
                ratios = [a / b for a, b in zip(rates["torch"], rates[other], strict=True)]
                spread = f"({min(ratios):.2f}-{max(ratios):.2f})"
                print(f"  over {other} {statistics.median(ratios):.2f} {spread}", flush=True)


if __name__ == "__main__":
    main()
