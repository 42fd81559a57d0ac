"""Text files that are attached to a message."""

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.llama]


def attach(chat, *files: tuple[str, bytes]) -> None:
    chat.page.locator("input.attach").set_input_files(
        [
            {"name": name, "mimeType": "application/octet-stream", "buffer": content}
            for name, content in files
        ]
    )


def test_attached_text_is_part_of_the_message(visit, server):
    chat = visit(server)
    sent = []
    chat.page.on("request", lambda request: sent.append((request.url, request.post_data_json)))
    chat.stream({"content": "I have read it."})
    attach(chat, ("a.md", "Grüße\n```\ncode\n```".encode()), ("b.txt", b"second"))
    drafts = chat.page.locator(".composer .attachments li")
    expect(drafts).to_have_count(2)
    chat.page.get_by_role("button", name="Remove b.txt").click()
    expect(drafts).to_have_count(1)
    chat.ask("Summarize it.")
    chat.wait_until_answered()
    expect(drafts).to_have_count(0)
    (body,) = [body for url, body in sent if url.endswith("/chat/completions")]
    text = "a.md:\n````\nGrüße\n```\ncode\n```\n````\n\nSummarize it."
    assert body["messages"] == [{"role": "user", "content": text}]
    shown = chat.page.locator(".message.user")
    expect(shown.locator(".text")).to_have_text("Summarize it.")
    expect(shown.locator("pre")).to_be_hidden()
    shown.locator("summary").click()
    expect(shown.locator("pre")).to_have_text("Grüße\n```\ncode\n```")
    chat.reload()
    expect(chat.page.locator(".message.user .file")).to_contain_text("a.md")


def test_file_alone_is_a_message(visit, server):
    chat = visit(server)
    chat.stream({"content": "A file."})
    attach(chat, ("notes.txt", b"some notes"))
    chat.page.get_by_role("button", name="Send", exact=True).click()
    chat.wait_until_answered()
    expect(chat.page).to_have_title("notes.txt · cLLM")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0", "a.bin is not a text file. Only text can be attached."),
        (b"zero\0byte", "a.bin is not a text file. Only text can be attached."),
        (b"x" * 600_000, "a.bin: more than 524 kB."),
    ],
    ids=["image", "zero byte", "too large"],
)
def test_other_files_are_refused(visit, server, content, fault):
    chat = visit(server)
    attach(chat, ("a.bin", content))
    expect(chat.page.get_by_role("alert")).to_contain_text(fault)
    expect(chat.page.locator(".composer .attachments")).to_have_count(0)


def test_files_are_dropped_and_pasted(visit, server):
    chat = visit(server)
    move = """(box, [kind, name]) => {
      const data = new DataTransfer();
      data.items.add(new File(["text"], name));
      const event = kind === "drop" ? new DragEvent(kind, {dataTransfer: data, bubbles: true})
        : new ClipboardEvent(kind, {clipboardData: data, bubbles: true});
      box.dispatchEvent(event);
    }"""
    box = chat.page.get_by_label("Message", exact=True)
    names = chat.page.locator(".composer .attachments .name")
    box.evaluate(move, ["drop", "dropped.txt"])
    expect(names).to_have_text(["dropped.txt"])
    box.evaluate(move, ["paste", "pasted.txt"])
    expect(names).to_have_text(["dropped.txt", "pasted.txt"])


def test_attachments_are_kept_in_a_markdown_export(visit, server):
    chat = visit(server)
    chat.stream({"content": "**Done.**"})
    chat.set(System_prompt="Be brief.")
    attach(chat, ("notes.txt", b"some notes"))
    chat.ask("Read: this / file?")
    chat.wait_until_answered()
    with chat.page.expect_download() as download:
        chat.choose("Export as Markdown")
    assert download.value.suggested_filename == "Read this file.md"
    model = chat.page.get_by_label("Model", exact=True).input_value()
    assert download.value.path().read_text("utf-8") == (
        "# Read: this / file?\n\n## System prompt\n\nBe brief.\n\n## You\n\n"
        "notes.txt:\n```\nsome notes\n```\n\nRead: this / file?\n\n"
        f"## {model}\n\n**Done.**\n"
    )


def test_wrong_files_of_imported_conversations_are_harmless(visit, server):
    chat = visit(server)
    hostile = "<img src=x onerror=window.hacked=1>"
    files = [None, 7, {"name": hostile, "content": hostile}]
    message = {"id": "a", "parent": None, "role": "user", "content": "x", "files": files}
    chat.import_conversations({"title": "t", "messages": [message]})
    expect(chat.page.locator(".message.user .file")).to_have_count(3)
    expect(chat.page.locator(".message.user .file").last).to_contain_text(hostile)
    assert chat.page.evaluate("window.hacked") is None


def test_two_drops_at_once_lose_no_file(visit, server):
    """The first file takes longer to read than the second one."""
    chat = visit(server)
    drop = """box => {
      let finish;
      const reading = new Promise((resolve) => (finish = resolve));
      const slow = new File(["first"], "slow.txt");
      slow.arrayBuffer = async () => {
        await reading;
        return new TextEncoder().encode("first").buffer;
      };
      const fast = new File(["second"], "fast.txt");
      for (const file of [slow, fast]) {
        const event = new Event("drop", { bubbles: true, cancelable: true });
        event.dataTransfer = { files: [file], types: ["Files"] };
        box.dispatchEvent(event);
      }
      window.finishReading = finish;
    }"""
    chat.page.get_by_label("Message", exact=True).evaluate(drop)
    names = chat.page.locator(".composer .attachments .name")
    expect(names).to_have_text(["fast.txt"])
    chat.page.evaluate("finishReading()")
    expect(names).to_have_text(["fast.txt", "slow.txt"])


def test_size_of_a_text_counts_its_bytes(visit, server):
    """200,000 letters of two bytes each fit once, but not twice."""
    chat = visit(server)
    text = ("é" * 200_000).encode()
    attach(chat, ("a.txt", text))
    size = chat.page.locator(".composer .attachments .size")
    expect(size).to_have_text(["400 kB"])
    attach(chat, ("b.txt", text))
    expect(chat.page.get_by_role("alert")).to_contain_text("b.txt: more than 524 kB.")
    expect(size).to_have_count(1)
