"""Speculation with models that have recurrent layers: it never changes a text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from cllm import LLM, AsyncLLM, Output, SamplingParams
from cllm.backends.llama_cpp.draft_head import DraftHead, Inputs
from cllm.cli.remarks import capacity
from cllm.errors import EngineError, StartupError
from cllm.local.completion import Completion
from cllm.scheduler.report import collect_stats
from cllm.scheduler.speculation import Choice, Prospects

pytestmark = pytest.mark.llama

KINDS = ["lfm2", "qwen35", "qwen35_mtp", "nemotron_h"]
SETTINGS = {"scheduler_max_num_seqs": 4, "model_max_context_length": 384}
# with few tokens to choose from, n-grams repeat
FEW_TOKENS = dict.fromkeys((70, 71, 72, 73), 60.0)
PROMPTS = [[70, 71, 72, 70, 71, 73, 70, 71, *range(10 * i, 10 * i + 3 * i)] for i in range(1, 5)]


def make_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9,
        seed=5,
        max_tokens=max_tokens,
        ignore_eos=True,
        logit_bias=FEW_TOKENS,
        logprobs=2,
    )


@pytest.fixture(autouse=True)
def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as possible, although most of them are rejected."""
    monkeypatch.setattr(Prospects, "choose", lambda self, *_: Choice(len(self.seconds) - 1, 1.0))


def assert_same(completions: list[Completion], expected: list[Completion]) -> None:
    """Each token and its logprobs, up to the order of summation, are those expected."""
    for done, other in zip(completions, expected, strict=True):
        one, two = done.outputs[0], other.outputs[0]
        assert one.tokens == two.tokens
        assert [each.logprob for each in one.logprobs] == pytest.approx(
            [each.logprob for each in two.logprobs], abs=1e-3
        )


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_lookup_keeps_texts(tiny_model: Callable[[str], Path], kind: str) -> None:
    """Of several sequences at once, which end at different times."""
    path = str(tiny_model(kind))
    params = [make_params(count) for count in (100, 20, 60, 100)]
    with LLM(path, **SETTINGS, scheduler_speculation="off") as llm:
        assert llm.info.max_taken_back == 0
        expected = llm.generate(PROMPTS, params)
    with LLM(path, **SETTINGS) as llm:
        assert llm.info.max_taken_back == 8
        assert_same(llm.generate(PROMPTS, params), expected)
        stats = collect_stats(llm._engine.scheduler)
        assert stats.num_guesses - 10 > stats.num_accepted > 20
        again = llm.generate(PROMPTS[:1], params[:1])
        assert_same(again, expected[:1])


@pytest.mark.parametrize(
    ("kind", "speculation"),
    [
        ("qwen35_mtp", "mtp"),
        ("qwen35_mtp", "auto"),
        ("qwen35moe_mtp", "mtp"),
        ("glm4moe_mtp", "mtp"),
    ],
)
def test_own_heads_keep_texts(
    tiny_model: Callable[[str], Path], kind: str, speculation: str
) -> None:
    """Some draft tokens are right. Prompts are longer than one call of the head, and than what it
    attends to.
    """
    path = str(tiny_model(kind))
    settings = {**SETTINGS, "model_max_context_length": 2048}
    params = [
        SamplingParams(temperature=0.15, seed=5, max_tokens=count, ignore_eos=True, logprobs=2)
        for count in (100, 20, 60, 560)
    ]
    prompts = [prompt * count for prompt, count in zip(PROMPTS, (1, 25, 60, 3), strict=True)]
    with LLM(path, **settings, scheduler_speculation="off") as llm:
        assert "draft tokens" not in capacity(llm.info)
        expected = llm.generate(prompts, params)
    with LLM(path, **settings, scheduler_speculation=speculation) as llm:
        assert capacity(llm.info).endswith("draft tokens by its own head")
        assert_same(llm.generate(prompts, params), expected)
        stats = collect_stats(llm._engine.scheduler)
        assert stats.num_guesses - 10 > stats.num_accepted > 100
        again = llm.generate(prompts[2:], params[2:])  # with reused prefixes
        assert_same(again, expected[2:])


@pytest.mark.parametrize("num_calls", [0, 30])
def test_requests_survive_a_failing_head(
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_calls: int,
) -> None:
    """It fails at the start or later, and is reported once."""
    path, params = str(tiny_model("qwen35_mtp")), make_params(40)
    with LLM(path, **SETTINGS, scheduler_speculation="off") as llm:
        expected = llm.generate(PROMPTS, params)
    calls, decode = iter(range(num_calls)), DraftHead._decode

    def fail(self: DraftHead, inputs: list[Inputs], *, logits: bool = True) -> None:
        if next(calls, None) is None:
            raise EngineError("a test lets it fail")
        decode(self, inputs, logits=logits)

    monkeypatch.setattr(DraftHead, "_decode", fail)
    with LLM(path, **SETTINGS) as llm:
        assert llm.info.drafts == (num_calls > 0)
        for _ in range(2):
            assert_same(llm.generate(PROMPTS, params), expected)
    [record] = [each for each in caplog.records if "a test lets it fail" in each.message]
    assert record.levelname == ("ERROR" if num_calls else "WARNING")


def test_model_without_head_cannot_use_one(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(StartupError, match=r"^scheduler\.speculation is mtp, but the model has no"):
        LLM(str(tiny_model("qwen35")), **SETTINGS, scheduler_speculation="mtp")


@pytest.mark.parametrize("kind", ["mamba", *KINDS])
def test_hybrid_drafts_for_itself(tiny_model: Callable[[str], Path], kind: str) -> None:
    """Its greedy drafts are all accepted if the sampling is greedy; else some are rejected. Mamba
    drafts for a model that can take back tokens.
    """
    path = str(tiny_model("qwen35" if kind == "mamba" else kind))
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    draft = {"scheduler_speculation": "draft_model", "model_draft_path": str(tiny_model(kind))}
    with LLM(path, **SETTINGS, scheduler_speculation="off") as llm:
        expected = [llm.generate(PROMPTS, params) for params in (make_params(80), greedy)]
    with LLM(path, **SETTINGS, **draft) as llm:
        assert_same(llm.generate(PROMPTS, make_params(80)), expected[0])
        before = collect_stats(llm._engine.scheduler)
        done = llm.generate(PROMPTS, greedy)
        assert [one.outputs[0].tokens for one in done] == [
            one.outputs[0].tokens for one in expected[1]
        ]
        stats = collect_stats(llm._engine.scheduler)
    assert before.num_guesses > before.num_accepted
    if kind != "mamba":
        rejected = stats.num_guesses - before.num_guesses - stats.num_accepted + before.num_accepted
        assert rejected < 0.1 * (stats.num_guesses - before.num_guesses)


@pytest.mark.parametrize("kind", KINDS)
def test_parked_sequences_continue(tiny_model: Callable[[str], Path], kind: str) -> None:
    """Two sequences have the only places when a request of a higher class comes."""
    path = str(tiny_model(kind))
    settings = {**SETTINGS, "scheduler_max_num_seqs": 2}
    with LLM(path, **settings, scheduler_speculation="off") as llm:
        expected = llm.generate(PROMPTS[:3], [make_params(80), make_params(80), make_params(20)])

    async def main() -> tuple[list[Output], int]:
        async with AsyncLLM(path, **settings) as llm:
            have_begun = asyncio.Event()

            async def ask(i: int) -> Output:
                output = Output()
                async with aclosing(
                    llm.stream([PROMPTS[i]], make_params(80), priority="batch")
                ) as pieces:
                    async for piece in pieces:
                        output.add(piece)
                        if i == 1 and len(output.tokens) > 10:
                            have_begun.set()
                return output

            slow = [asyncio.create_task(ask(i)) for i in range(2)]
            await have_begun.wait()
            urgent = await llm.generate(PROMPTS[2:3], make_params(20), priority="interactive")
            outputs = [*await asyncio.gather(*slow), urgent[0].outputs[0]]
            return outputs, llm._model._engine.scheduler.statistics.num_parked

    outputs, num_parked = asyncio.run(main())
    assert num_parked > 0
    assert [one.tokens for one in outputs] == [one.outputs[0].tokens for one in expected]
