"""Draw the terminal session of the README: run its commands and write their output as
docs/terminal.svg.

.venv/bin/python tools/terminal_picture.py
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

OUT = Path(__file__).resolve().parents[1] / "docs" / "terminal.svg"
PORT = 8000
# No font from the network: every viewer has a monospaced one.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)

QUESTIONS = """What is 27 plus 45?
Spell the word garden.
Tell a story about an owl named Leo in the forest.
"""


def main() -> None:
    console = Console(record=True, width=108, file=io.StringIO())

    def show(command: str, output: str) -> None:
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        console.print(Text(output.rstrip() + "\n"))

    cllm = [sys.executable, "-m", "cllm"]
    server = subprocess.Popen(
        [*cllm, "serve", "--port", str(PORT)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        show("make serve &", next(line for line in server.stderr if line.startswith("cLLM serves")))
        time.sleep(0.5)
        url = f"http://127.0.0.1:{PORT}"
        chat = [*cllm, "chat", "--url", url, "--temperature", "0"]
        answers = subprocess.run(chat, input=QUESTIONS, capture_output=True, text=True, check=True)
        turns = zip(QUESTIONS.splitlines(), answers.stdout.splitlines(), strict=True)
        show(
            f".venv/bin/cllm chat --url {url}",
            "\n".join(f">>> {question}\n{answer}" for question, answer in turns),
        )
        load = [
            "bench",
            "load",
            url,
            "--workload",
            "questions",
            "--requests",
            "64",
            "--concurrency",
            "16",
        ]
        report = subprocess.run([*cllm, *load], capture_output=True, text=True, check=False)
        show(".venv/bin/cllm " + " ".join(load), report.stdout)
    finally:
        server.terminate()
        server.wait()
    OUT.write_text(console.export_svg(title="cLLM", code_format=FORMAT))
    print(f"wrote {OUT.name}")


if __name__ == "__main__":
    main()
