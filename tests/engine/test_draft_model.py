"""Speculation with a draft model: its drafts, and the text, which stays the model's own."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import is_right

from cllm import LLM, SamplingParams
from cllm.backends.fake.backend import FakeBackend
from cllm.backends.llama_cpp.loader import measure
from cllm.backends.params import ModelSize
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.core.vocabulary import Pieces
from cllm.engine.build import are_compatible, build_draft_model, build_engine, fit_memory
from cllm.engine.commands import Add
from cllm.engine.draft_model import DraftModel
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.models import memory
from cllm.scheduler.report import collect_stats


def make_drafter(**options) -> DraftModel:
    return DraftModel(
        FakeBackend(**{"context_length": 64, "max_num_seqs": 2, "length": 60, **options})
    )


def make_sequence(tokens: list[int]) -> Sequence:
    return Sequence(Request("A", tokens, SamplingParams()), 0, 0, 64)


def test_draft_continues_each_sequence():
    """The fake backend counts on. Each sequence gets as many draft tokens as requested."""
    a, b = make_sequence([1, 2, 3]), make_sequence([50])
    model = make_drafter()
    assert model.draft({a: 3, b: 1}) == {a: (4, 5, 6), b: (51,)}


@pytest.mark.parametrize("max_taken_back", [None, 0])
def test_rejected_draft_tokens_are_undone(max_taken_back):
    """Cells of accepted tokens remain, and the tokens sampled instead of others are computed. The
    cells of rejected ones are trimmed, or a recurrent model's state before them is loaded.
    """
    seq, model = make_sequence([1, 2, 3]), make_drafter(max_taken_back=max_taken_back)
    model.draft({seq: 3})
    for token in (4, 9):
        seq.append(token)
    assert model.draft({seq: 2}) == {seq: (10, 11)}
    seq.append(30)
    assert model.draft({seq: 1}) == {seq: (31,)}
    seq.append(31)
    assert model.draft({seq: 4}) == {seq: (32, 33, 34, 35)}
    for token in (32, 33, 34, 35, 36):
        seq.append(token)
    assert model.draft({seq: 2}) == {seq: (37, 38)}


def test_recurrent_draft_model_never_begins_again():
    """Its prompt is computed once, although draft tokens are rejected."""
    seq, model = make_sequence([*range(30)]), make_drafter(max_taken_back=0)
    backend, computed = model._backend, []

    def forward(batch):
        computed.append(sum(row.size for row in batch.rows))
        return FakeBackend.forward(backend, batch)

    backend.forward = forward
    for _ in range(5):
        assert len(model.draft({seq: 4})[seq]) == 4
        seq.append(7)
    assert computed[0] == 30
    assert max(computed[1:]) == 1


def test_long_prompt_is_computed_over_several_drafts():
    """A prompt longer than a batch is computed one batch per draft, after what others lack."""
    long, short = make_sequence(list(range(40))), make_sequence([7])
    model = make_drafter(max_num_batched_tokens=16)
    assert model.draft({long: 2, short: 2}) == {short: (8, 9)}
    short.append(8)
    assert model.draft({long: 2, short: 1}) == {short: (9,)}
    assert model.draft({long: 2}) == {long: (40, 41)}


@pytest.mark.parametrize("max_taken_back", [None, 0])
def test_draft_model_keeps_most_recent_sequences(max_taken_back):
    """It keeps cells for the sequences drafted for last, and forgets those that have ended."""
    seqs = [make_sequence([i * 10]) for i in range(5)]
    model = make_drafter(max_taken_back=max_taken_back)
    for seq in seqs:
        assert model.draft({seq: 2}) == {seq: (seq.tokens[-1] + 1, seq.tokens[-1] + 2)}
    assert len(model.draft(dict.fromkeys(seqs, 1))) == 2
    for seq in seqs:
        model.forget(seq)
    assert model.draft({seqs[0]: 1}) == {seqs[0]: (1,)}


def test_no_draft_beyond_context_length():
    """There is no room for guesses at the end."""
    seq, model = make_sequence(list(range(63))), make_drafter()
    assert model.draft({seq: 5}) == {seq: (63,)}
    seq.append(63)
    assert model.draft({seq: 5}) == {}


def test_speculation_keeps_tokens_of_model(fake_engine):
    """The tokens are those without speculation."""
    params = {
        "backend": "fake",
        "speculation": "draft_model",
        "draft_path": "fake",
        "context_length": 1024,
    }
    engine = build_engine(FakeBackend(length=40), EngineParams(**params, check=True))
    engine.handle(Add(Request("A", [1, 2, 3], SamplingParams(temperature=0, max_tokens=30))))
    outputs = []
    while engine.scheduler.sequences.has_work():
        outputs += engine.step()
    assert [output.token for output in outputs] == list(range(4, 34))
    assert engine.scheduler.statistics.num_guesses > 0


def test_missing_draft_path_raises_startup_error():
    """One line at the start."""
    with pytest.raises(StartupError, match=r"model\.draft_path is not set"):
        build_engine(FakeBackend(), EngineParams(speculation="draft_model"))


@pytest.mark.llama
def test_draft_model_takes_half_of_the_kv_memory(builtin_path):
    """Its sequences are as short as that requires."""
    with LLM(str(builtin_path), kv_max_memory_mb=64) as llm:
        info = llm.info
    params = EngineParams(
        path=str(builtin_path), draft_path=str(builtin_path), kv_memory=64_000_000
    )
    draft = build_draft_model(params, info)._backend.info
    num_bytes = draft.max_num_seqs * draft.context_length * draft.kv_bytes_per_token
    assert 0.95 * 32_000_000 < num_bytes <= 32_000_000
    assert draft.layout == info.layout
    assert draft.context_length < info.context_length


@pytest.mark.llama
def test_draft_model_of_unknown_kv_size_takes_half_of_the_kv_memory(tiny_model):
    path = str(tiny_model("deepseek2"))
    assert measure(EngineParams(path=path)).kv_bytes_per_token == 0
    params = EngineParams(path=path, draft_path=path, kv_memory=2_000_000)
    draft = build_draft_model(params, FakeBackend(context_length=4096).info)._backend.info
    assert 0 < draft.max_num_seqs * draft.context_length <= draft.num_cells
    assert draft.num_cells * draft.kv_bytes_per_token <= 1_000_000


@pytest.mark.llama
@pytest.mark.parametrize(
    ("wanted", "room", "ram_cache", "least"),
    [(0, 300_000_000, 37_500_000, 768_000), (100_000_000, 150_000_000, 0, 150_000_000)],
)
def test_memory_of_both_models_is_checked(
    builtin_path, monkeypatch, wanted, room, ram_cache, least
):
    """Their KV caches divide the memory for one. A size that is set is that of the model."""
    path, without_kv = str(builtin_path), memory.weigh(2 * 1_000_000, 0, 2000)
    size = ModelSize(weight_bytes=1_000_000, kv_bytes_per_token=2000)
    monkeypatch.setattr("cllm.backends.llama_cpp.loader.measure", lambda _: size)
    params = EngineParams(
        path=path,
        weight_bytes=size.weight_bytes,
        kv_bytes_per_token=size.kv_bytes_per_token,
        kv_memory=wanted,
        ram_cache_bytes=None,
        speculation="draft_model",
        draft_path=path,
    )
    monkeypatch.setattr(memory, "measure_available_bytes", lambda: without_kv + room)
    fitted = fit_memory(params)
    assert (fitted.kv_memory, fitted.ram_cache_bytes) == (100_000_000, ram_cache)
    monkeypatch.setattr(memory, "measure_available_bytes", lambda: without_kv + least)
    fit_memory(params)
    monkeypatch.setattr(memory, "measure_available_bytes", lambda: without_kv + least - 1)
    with pytest.raises(StartupError, match=r"weights of both models .* KV cache.* of both models"):
        fit_memory(params)


@pytest.mark.llama
def test_built_in_model_drafts_for_itself(builtin_model, known_questions):
    """Nearly every draft token is accepted, so there are few steps, and the answers are correct."""
    llm = LLM(
        builtin_model,
        scheduler_speculation="draft_model",
        model_draft_path=builtin_model,
        model_max_context_length=512,
        scheduler_max_num_seqs=2,
    )
    for question in known_questions(6, seed=11):
        done = llm.chat(question.messages, SamplingParams(temperature=0), question.tools)
        assert is_right(done, question)
    stats = collect_stats(llm._engine.scheduler)
    assert stats.num_accepted > 0.7 * stats.num_guesses > 0


@pytest.mark.torch
@pytest.mark.llama
@pytest.mark.parametrize("is_checkpoint", [True, False])
def test_draft_model_may_have_another_backend(
    builtin_path, builtin_checkpoint, known_questions, is_checkpoint
):
    """The draft model's files choose it, also if the settings name the model's. Texts stay the
    model's own, and drafts are accepted.
    """
    paths = [str(builtin_checkpoint), str(builtin_path)]
    model, draft = paths if is_checkpoint else reversed(paths)
    settings: dict[str, Any] = {"model_max_context_length": 512, "scheduler_max_num_seqs": 2}
    params = SamplingParams(temperature=0, max_tokens=24)
    prompts = ["Question: What is 12 plus 30?", "The red fox"]
    with LLM(model, scheduler_speculation="off", **settings) as llm:
        expected = [done.outputs[0].tokens for done in llm.generate(prompts, params)]
    settings |= {"backend_name": "torch" if is_checkpoint else "llama_cpp"}
    with LLM(model, scheduler_speculation="draft_model", model_draft_path=draft, **settings) as llm:
        assert llm.info.system.startswith("PyTorch") == is_checkpoint
        assert [done.outputs[0].tokens for done in llm.generate(prompts, params)] == expected
        for question in known_questions(4, seed=12):
            done = llm.chat(question.messages, SamplingParams(temperature=0), question.tools)
            assert is_right(done.outputs[0], question)
        stats = collect_stats(llm._engine.scheduler)
    assert stats.num_accepted > 0.5 * stats.num_guesses > 0


@pytest.mark.torch
@pytest.mark.llama
def test_draft_model_with_another_vocabulary_is_rejected(builtin_checkpoint, tiny_model):
    path = str(tiny_model("gemma3"))
    settings = {"model_max_context_length": 512, "scheduler_speculation": "draft_model"}
    with pytest.raises(StartupError, match=r"^model\.draft_path: .* same vocabulary") as raised:
        LLM(str(builtin_checkpoint), model_draft_path=path, **settings)
    assert "\n" not in str(raised.value)


def test_vocabularies_may_differ_in_ids_that_one_leaves_empty():
    whole = Pieces.of([b"a", b"b", b"<|end|>"])
    assert are_compatible(whole, Pieces.of([b"a", b"b", b""]))
    assert not are_compatible(whole, Pieces.of([b"a", b"c", b""]))
    assert not are_compatible(whole, Pieces.of([b"a", b"b"]))
