"""The text of a base model, which the model continues."""

import pytest
from playwright.sync_api import expect
from server.conftest import running
from tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.llama]


@pytest.fixture(scope="module")
def base_server(tmp_path_factory):
    """A server with a base model."""
    path = tmp_path_factory.mktemp("models") / "base.gguf"
    write_tiny_model("gemma3", path)
    yield from running("--model", str(path))


class Completion:
    """The view of a base model, and the prompts that it sent."""

    def __init__(self, chat) -> None:
        self.page, self.prompts = chat.page, []
        self.box = chat.page.get_by_label("Text", exact=True)
        self.page.on("request", self._note)

    def _note(self, request) -> None:
        if "/v1/completions" in request.url:
            assert "messages" not in request.post_data_json
            self.prompts.append(request.post_data_json["prompt"])

    def click(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).click()

    def wait(self) -> str:
        """Wait until the continuation is complete, and return the whole text."""
        expect(self.page.get_by_role("button", name="Complete", exact=True)).to_be_visible()
        expect(self.page.locator(".stats")).to_contain_text("tokens")
        return self.box.input_value()


def test_base_model_continues_and_repeats_a_text(visit, base_server):
    chat = visit(base_server)
    chat.set(Max_tokens="4", System_prompt="Be brief.")
    view = Completion(chat)
    expect(chat.page.get_by_role("heading", name="Continue a text with base")).to_be_visible()
    view.box.fill("Once upon")
    view.click("Complete")
    first = view.wait()
    assert first.startswith("Once upon")
    view.box.fill(f"{first} a time")
    chat.page.keyboard.press("ControlOrMeta+Enter")
    second = view.wait()
    view.click("Try again")
    view.wait()
    assert view.prompts == ["Once upon", f"{first} a time", f"{first} a time"]
    view.click("Undo")
    expect(view.box).to_have_value(second)
    view.click("Undo")
    expect(view.box).to_have_value(first)
    view.box.fill("Another beginning")
    view.click("Complete")
    assert view.wait().startswith("Another beginning")
    assert view.prompts[-1] == "Another beginning"
    view.click("Undo")
    expect(view.box).to_have_value(first)
    chat.reload()
    expect(view.box).to_have_value(first)


def test_completion_can_be_stopped(visit, base_server):
    chat = visit(base_server)
    view = Completion(chat)
    chat.page.get_by_role("button", name="The capital of France is").click()
    expect(view.box).to_have_value("The capital of France is")
    chat.page.route("**/v1/completions", lambda route: None)  # an answer that never comes
    view.click("Complete")
    expect(view.box).to_have_attribute("readonly", "")
    chat.page.keyboard.press("Escape")
    expect(chat.page.locator(".stats")).to_have_text("stopped")
    expect(view.box).to_have_value("The capital of France is")


def test_models_view_offers_a_continuation(visit, base_server):
    page = visit(base_server).page
    page.get_by_role("link", name="Models").click()
    expect(page.get_by_role("button", name="Chat with it")).to_have_count(0)
    page.get_by_role("button", name="Continue a text with it").click()
    expect(page.get_by_label("Text", exact=True)).to_be_focused()
