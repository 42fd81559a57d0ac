"""Asks the built-in model one question in a child process, so that a broken build of llama.cpp
kills only the child.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass

TIMEOUT = 120  # seconds
QUESTION, ANSWER = "What is 27 plus 45?", "72"


@dataclass(frozen=True)
class Probe:
    """The result. See Compiled for ``compiler`` and ``switches``. ``error`` is "" if there was an
    answer, and ``died_of`` names the signal that killed the process. ``variant`` names the CPU
    kernels, "" if the build has only one set. See ModelInfo for ``attention``. ``gpus`` describes
    each GPU that llama.cpp can use.
    """

    answer: str = ""
    system: str = ""
    compiler: str = ""
    switches: str = ""
    variant: str = ""
    attention: str = ""
    gpu_offload: bool = False
    gpus: tuple[str, ...] = ()
    gpu_free_bytes: int = 0
    error: str = ""
    died_of: str = ""

    @property
    def passed(self) -> bool:
        return self.answer == ANSWER


def probe() -> Probe:
    """Run the child process and return its result. Failures of the child raise no exception."""
    command = [sys.executable, "-P", "-m", "cllm.cli.probe"]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe(error=f"no answer within {TIMEOUT} seconds")
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return Probe(error=f"the process was killed by {name} while decoding", died_of=name)
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines()
        return Probe(error=lines[-1] if lines else f"exit code {child.returncode}")
    return Probe(**json.loads(child.stdout.splitlines()[-1]))


def main() -> None:
    """Run as the child: load the model, answer the question, and print the result on stdout."""
    from cllm.backends.llama_cpp.devices import list_gpus
    from cllm.backends.llama_cpp.library import compiled, cpu_variant, supports_gpu_offload
    from cllm.core.params import SamplingParams
    from cllm.local.llm import LLM
    from cllm.models.gguf import format_size

    with LLM(scheduler_max_num_seqs=1) as llm:
        completion = llm.chat(
            [{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=8)
        )
        devices = list_gpus()
        result = Probe(
            answer=completion.text,
            system=llm.info.system,
            **compiled()._asdict(),
            variant=cpu_variant(),
            attention=llm.info.attention,
            gpu_offload=supports_gpu_offload(),
            gpus=tuple(
                f"{gpu.name} ({gpu.description}): {format_size(gpu.num_free_bytes)} of "
                f"{format_size(gpu.num_bytes)} free"
                for gpu in devices
            ),
            gpu_free_bytes=sum(gpu.num_free_bytes for gpu in devices),
        )
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
