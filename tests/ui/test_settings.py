"""The settings of conversations: all parameters of the server, and presets."""

import json
import re

import pytest
from playwright.sync_api import expect

from cllm.core.params import LARGEST, PARAMETERS
from cllm.server.page import FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.llama]

SUM = "What is 27 plus 45?"


def test_page_has_all_sampling_parameters_with_their_bounds():
    script = FOLDER.joinpath("parameters.js").read_text("utf-8")
    entries = {}
    for line in re.findall(r"\{ (name: .*) \},", script):
        fields = dict(re.findall(r'(\w+): ("[^"]*"|[-\w.]+)', line))
        entries[json.loads(fields.pop("name"))] = fields
    wanted = {name: one for name, one in PARAMETERS.items() if "openai" in one.dialects}
    assert set(entries) == {*wanted, "max_tokens"}
    for name, parameter in wanted.items():
        fields = entries[name]
        if parameter.type is bool:
            continue
        assert fields.get("isWhole", "false") == str(parameter.type is int).lower(), name
        low, high = parameter.bounds or (0, 2)  # mirostat
        assert float(fields.get("min", -LARGEST)) == max(low, -LARGEST), name
        assert float(fields.get("max", LARGEST)) == min(high, LARGEST), name


def read_bodies(chat) -> list[dict]:
    """Return a list that gets the bodies of the chat's requests."""
    bodies: list[dict] = []

    def note(request) -> None:
        if request.url.endswith("/v1/chat/completions"):
            bodies.append(request.post_data_json)

    chat.page.on("request", note)
    return bodies


def test_every_parameter_is_sent(visit, server):
    chat = visit(server)
    bodies = read_bodies(chat)
    chat.page.get_by_role("button", name="Settings").click()
    dialog = chat.page.get_by_role("dialog")
    dialog.get_by_text("More parameters").click()
    values = {
        "Temperature": "0.5",
        "Repetition penalty": "1.1",
        "Presence penalty": "-0.5",
        "Typical P": "0.9",
        "Top n sigma": "2",
        "XTC probability": "0.1",
        "Mirostat": "2",
        "Mirostat tau": "4",
        "DRY multiplier": "0.8",
        "DRY last n": "64",
        "Min tokens": "1",
        "Logit bias: tokens or texts, and what to add to their logits": '{" maybe": -100}',
        "Stop sequences, one per line": "END\nSTOP",
    }
    for label, value in values.items():
        dialog.get_by_label(label, exact=True).fill(value)
    dialog.get_by_label("Keep the stop sequence in the answer").check()
    expect(dialog.get_by_text("More parameters (12 set)")).to_be_visible()
    chat.page.get_by_role("button", name="Close", exact=True).click()
    chat.ask(SUM)
    chat.wait_until_answered()
    expect(chat.page.locator(".fault")).to_have_count(0)
    (body,) = bodies
    sent = {
        name: body[name] for name in body.keys() - {"model", "messages", "stream", "stream_options"}
    }
    assert sent == {
        "temperature": 0.5,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "typical_p": 0.9,
        "top_n_sigma": 2,
        "xtc_probability": 0.1,
        "mirostat": 2,
        "mirostat_tau": 4,
        "dry_multiplier": 0.8,
        "dry_penalty_last_n": 64,
        "min_tokens": 1,
        "logit_bias": {" maybe": -100},
        "stop": ["END", "STOP"],
        "include_stop_str_in_output": True,
        "reasoning_control": True,
    }


def test_presets_are_saved_applied_and_deleted(visit, server):
    chat = visit(server)
    chat.set(System_prompt="Be brief.", Temperature="0.2")
    chat.page.get_by_role("button", name="Settings").click()
    dialog = chat.page.get_by_role("dialog")
    preset = dialog.get_by_role("combobox", name="Preset", exact=True)
    expect(preset).to_have_value("")
    dialog.get_by_label("New preset").fill("Brief")
    dialog.get_by_role("button", name="Save these settings").click()
    expect(preset).to_have_value("Brief")
    preset.select_option("")
    expect(dialog.get_by_label("System prompt")).to_have_value("")
    expect(dialog.get_by_label("Temperature")).to_have_value("")
    chat.page.get_by_role("button", name="Close", exact=True).click()
    chat.page.reload()
    bodies = read_bodies(chat)
    chat.page.get_by_role("button", name="Settings").click()
    preset.select_option("Brief")
    chat.page.get_by_role("button", name="Close", exact=True).click()
    chat.ask(SUM)
    chat.wait_until_answered()
    assert bodies[0]["temperature"] == 0.2
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    chat.page.get_by_role("button", name="Settings").click()
    dialog.get_by_role("button", name="Delete the preset Brief").click()
    expect(preset.locator("option")).to_have_count(1)
    expect(dialog.get_by_label("System prompt")).to_have_value("Be brief.")
