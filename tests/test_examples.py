"""The programs in examples/, with the built-in model."""

import asyncio
import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import PATIENCE

FOLDER = Path(__file__).parents[1] / "examples"
pytestmark = [pytest.mark.llama, pytest.mark.slow, pytest.mark.usefixtures("builtin_path")]


def load(name: str, monkeypatch):
    """Return the module of an example, whose models are the built-in one."""
    for variable in ("MODEL", "EMBEDDING_MODEL", "RERANKER"):
        monkeypatch.delenv(variable, raising=False)
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # FastAPI looks for annotations there
    spec.loader.exec_module(module)
    return module


def test_all_examples_are_tested():
    names = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")}
    assert names == {
        *("rag.py", "agent.py", "label.py", "fastapi_app.py", "gradio_app.py"),
        "quickstart.ipynb",
    }


def test_rag_answers_from_the_right_documents(monkeypatch, capsys):
    load("rag", monkeypatch).main()
    assert capsys.readouterr().out.splitlines() == [
        "What is the capital of Norway? -> Oslo",
        "   from: Oslo is the capital of Norway.",
        "What colour is a banana? -> yellow",
        "   from: The colour of a banana is yellow.",
    ]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("How is the weather in Oslo?", "It is rainy in Oslo, 12 degrees."),
        ("How is the weather in Cairo?", "It is sunny in Cairo, 31 degrees."),
    ],
)
def test_agent_calls_tools_and_answers(monkeypatch, capsys, question, answer):
    load("agent", monkeypatch).main(question)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["user", "assistant", "tool", "assistant"]
    assert lines[-1] == f"assistant: {answer}"


def test_labels_are_right_and_counted(monkeypatch, capsys):
    load("label", monkeypatch).main()
    *labels, summary = capsys.readouterr().out.splitlines()
    colours = {"grass": "green", "snow": "white", "coal": "black", "the sky": "blue"}
    assert {f"{thing}: {colour}" for thing, colour in colours.items()} <= set(labels)
    assert summary.startswith("64 labels in ")


def test_fastapi_app_answers_and_streams(monkeypatch):
    from starlette.testclient import TestClient

    module = load("fastapi_app", monkeypatch)
    with TestClient(module.app, base_url="http://localhost") as client:
        question = {"question": "What is 27 plus 45?"}
        answer = client.post("/ask", json=question)
        assert (answer.status_code, answer.json()["answer"]) == (200, "72")
        assert client.post("/stream", json=question).text == "72"
        assert client.post("/ask", json={"question": ""}).status_code == 422
        too_long = client.post("/ask", json={"question": "😀" * 4000})
        assert too_long.status_code == 400
        assert "context length" in too_long.json()["detail"]


def test_gradio_app_answers_without_gradio(monkeypatch):
    """Its answer grows, and the history is sent."""
    module = load("gradio_app", monkeypatch)
    history = [
        {"role": "user", "content": "What is 27 plus 45?", "metadata": None},
        {"role": "assistant", "content": "72", "metadata": None},
    ]

    async def main():
        answers = [one async for one in module.respond("What is the capital of France?", history)]
        await module.llm.close()
        return answers

    answers = asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert answers[-1] == "Paris"
    assert all(after.startswith(before) for before, after in pairwise(answers))


def test_cells_of_the_notebook_run(capsys):
    notebook = json.loads((FOLDER / "quickstart.ipynb").read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    assert names["capitals"] == {"France": "Paris", "Norway": "Oslo", "Japan": "Tokyo"}
    assert names["person"].age == 30
    assert capsys.readouterr().out == "3 4 5 6 7 8 9"
