"""A trained checkpoint computes what it computes with transformers, alone and in company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import convert_model
from conftest import repeat

torch = pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")
transformers = pytest.importorskip("transformers", reason="needs it as a reference")
pytestmark = [pytest.mark.llama, pytest.mark.torch, pytest.mark.real, pytest.mark.slow]

TOLERANCE = 1e-4  # of the largest logit
NUM_TOKENS = repeat(256, 32)
INTRODUCTION = (
    "The following is a conversation between a curious child and a patient teacher, who answers "
    "every question with a short story about animals that live in the forest near the school. "
)
QUESTIONS = [
    "Why is the sky blue?",
    "What is a prime number?",
    "How do birds find their way?",
    "Who wrote the first book?",
    "Why do leaves fall in autumn?",
    "What is the moon made of?",
    "How deep is the sea?",
    "Why do cats purr?",
]


@pytest.fixture(scope="module")
def smollm2(real_model, tmp_path_factory) -> Path:
    """Return SmolLM2-135M-Instruct as a checkpoint."""
    return convert_model(real_model("smollm2-135m.gguf"), tmp_path_factory.mktemp("a") / "smollm2")


@pytest.fixture(scope="module")
def reference(smollm2) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return model.eval()


def assert_greedy(reference: Any, prompt: list[int], output: Any) -> None:
    """Check that each token is the most probable one after the tokens before it, and that its
    logprob is the reference's.
    """
    tokens, first = output.tokens, len(prompt) - 1
    with torch.inference_mode():
        text = torch.tensor([[*prompt, *tokens[:-1]]])
        logits = reference(text).logits[0, first:]
    allowed = TOLERANCE * logits.abs().max()
    chosen = torch.tensor(tokens).unsqueeze(1)
    assert (logits.max(-1).values - logits.gather(1, chosen)[:, 0]).max() <= allowed
    expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
    logprobs = torch.tensor([each.logprob for each in output.logprobs])
    assert (logprobs - expected).abs().max() <= allowed


def test_greedy_texts_are_those_of_transformers(smollm2, reference):
    """Alone, and in a batch of eight that share the beginnings of their prompts."""
    from cllm import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    options = {"backend_torch_dtype": "float32", "backend_torch_device": "cpu"}
    with LLM(str(smollm2), model_max_context_length=512, **options) as llm:
        prompts = [llm.encode(f"{INTRODUCTION}\n\nChild: {each}\nTeacher:") for each in QUESTIONS]
        (alone,) = llm.generate(prompts[:1], params)
        together = llm.generate(prompts, params)
    assert all(done.cached_tokens > 30 for done in together)
    assert together[0].outputs[0].tokens == alone.outputs[0].tokens
    for prompt, done in zip(prompts, together, strict=True):
        assert len(done.outputs[0].tokens) == NUM_TOKENS
        assert_greedy(reference, prompt, done.outputs[0])
