"""``python audited_serve.py REPORT ARGUMENT...``: ``cllm``, and what it connects to and writes.

REPORT gets a line for each connection, name lookup, process and file opened to write, as Python's
audit hooks report them (PEP 578). Child processes that are Python get the same hook.
"""

import os
import runpy
import sys

EVENTS = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND


def install(report: str) -> None:
    file = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
            os.write(file, f"write {arguments[0]!r}\n".encode())
        elif event in EVENTS:
            os.write(file, f"{event} {arguments[1:]!r}\n".encode())

    sys.addaudithook(hook)


if __name__ == "__main__":
    install(sys.argv[1])
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module("cllm", run_name="__main__", alter_sys=True)
