"""The LoRA adapters with which a model computes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import NamedTuple

from cllm.core.request import AdapterFile, Adapters


class AdapterUse(NamedTuple):
    """The adapters with which a model computes.

    ``identity`` is a text that differs if the names, the scales or the files differ, and
    ``contents`` one that is the same on all servers with these files, whatever their names.
    ``invocation`` is that of AdapterFile.
    """

    adapters: Adapters = ()
    identity: str = ""
    contents: str = ""
    invocation: tuple[int, ...] = ()

    @classmethod
    def of(cls, scales: Mapping[str, float], files: Mapping[str, AdapterFile]) -> AdapterUse:
        """Return the use of adapters with these scales and files by name.

        Raises ValueError for an activated LoRA among several adapters.
        """
        adapters = tuple(sorted((name, scale) for name, scale in scales.items() if scale))
        identity = [f"{name}\0{scale!r}\0{files[name].hash}" for name, scale in adapters]
        contents = sorted(f"{files[name].hash} {scale!r}" for name, scale in adapters)
        invocations = [tokens for name, _ in adapters if (tokens := files[name].invocation)]
        if invocations and len(adapters) > 1:
            raise ValueError("an activated LoRA cannot be combined with other adapters")
        return cls(adapters, "\0".join(identity), "\0".join(contents), *invocations)

    def find_begin(self, prompt: list[int]) -> int | None:
        """Return the number of tokens of ``prompt`` that are computed without the adapters; None if
        all are, because the prompt does not invoke an activated LoRA.

        The last invocation counts, as in llama-server. See Greenewald et al., "Activated LoRA"
        (2025).
        """
        if not self.invocation:
            return 0
        tokens, wanted = array("i", prompt), array("i", self.invocation).tobytes()
        data, end = tokens.tobytes(), len(prompt) * tokens.itemsize
        while (at := data.rfind(wanted, 0, end)) > 0 and at % tokens.itemsize:
            end = at + len(wanted) - 1  # found in the middle of a token
        return at // tokens.itemsize if at >= 0 else None

    def salt(self, salt: str) -> str:
        """Return the cache salt of a request that asks for ``salt``. Only the salt of a tenant may
        begin with a zero byte.
        """
        return f"\0\0{self.identity}\0{salt}" if self.adapters else salt


NO_ADAPTERS = AdapterUse()
