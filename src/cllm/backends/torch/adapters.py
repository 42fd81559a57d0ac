"""The LoRA adapters of a model: read from folders, and added to a decoder's matrix products."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cllm.backends.torch.decoder import AnyDecoder, Delta, Linear
from cllm.backends.torch.weights import Weights
from cllm.core.request import Adapters
from cllm.errors import EngineError, StartupError
from cllm.models.checkpoint import Checkpoint, read_tensors
from cllm.models.peft_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_peft_adapter

TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


class Change(NamedTuple):
    """What an adapter adds to the outputs of a product."""

    linear: Linear
    delta: Delta


class LoadedAdapters:
    """Adapters by name. One set of them is in use."""

    def __init__(self, decoder: AnyDecoder, folders: Mapping[str, str]) -> None:
        """Raises StartupError for a folder that is not an adapter of this model."""
        self._decoder = decoder
        self._modules = {
            get_end(name): (linear, name)
            for linear in find_linears(decoder.layers)
            for name in linear.outputs
        }
        self._loaded: dict[str, list[Change]] = {}
        self._in_use: Adapters = ()
        for name, folder in folders.items():
            self.load(name, folder)

    def load(self, name: str, folder: str) -> None:
        """Load one more adapter. Raises StartupError for one that is not of this model."""
        try:
            changes = self._read(Path(folder))
        except StartupError as error:
            raise StartupError(f"the adapter {name} cannot be loaded: {error}") from None
        self.use(())
        self._loaded[name] = changes

    def use(self, adapters: Adapters) -> None:
        """Compute with ``adapters`` from now on. Raises EngineError for an unknown one."""
        if adapters == self._in_use:
            return
        if unknown := [name for name, _ in adapters if name not in self._loaded]:
            raise EngineError(f"there is no adapter {unknown[0]}")
        for name, _ in self._in_use:
            for linear, _ in self._loaded[name]:
                linear.deltas = []
        for name, scale in adapters:
            for linear, (outputs, down, up) in self._loaded[name]:
                linear.deltas = [*linear.deltas, Delta(outputs, down, up * scale)]
        self._in_use = adapters

    def _read(self, folder: Path) -> list[Change]:
        if not folder.is_dir():
            problem = (
                f"is a file, and the torch backend reads folders with {ADAPTER_CONFIG} and "
                f"{ADAPTER_WEIGHTS}, as PEFT writes them"
                if folder.exists()
                else "does not exist"
            )
            raise StartupError(f"{folder} {problem}")
        settings, file = read_peft_adapter(folder), folder / ADAPTER_WEIGHTS
        if not file.exists():
            raise StartupError(f"{folder} has no {ADAPTER_WEIGHTS}; only safetensors are read")
        checkpoint = Checkpoint(folder, {}, {}, read_tensors(file))
        weights = Weights(checkpoint, self._decoder.embeddings.dtype, self._decoder.device)
        modules: dict[str, set[str]] = {}
        for name in checkpoint.tensors:
            match = TENSOR.fullmatch(name)
            if match is None:
                raise StartupError(f"{file} has the tensor {name[:100]!r}, which is not of LoRA")
            modules.setdefault(match["module"], set()).add(match["half"])
        if not modules:
            raise StartupError(f"{file} has no tensors")
        changes = []
        for module, halves in modules.items():
            linear, known = self._modules.get(get_end(module), (None, ""))
            if linear is None:
                raise StartupError(
                    f"{file} changes the module {module[:100]!r}, which is not a matrix product "
                    "in a layer of this model"
                )
            if len(halves) < 2:
                raise StartupError(f"{file} has only one of the matrices for {module[:100]!r}")
            outputs, rank = linear.outputs[known], settings.find_rank(module)
            shapes = (rank, linear.weight.shape[1]), (outputs.stop - outputs.start, rank)
            down, up = (
                read_finite(weights, f"base_model.model.{module}.lora_{half}.weight", shape)
                for half, shape in zip("AB", shapes, strict=True)
            )
            delta = Delta(outputs, down, up * settings.compute_scale(module))
            changes.append(Change(linear, delta))
        return changes


def get_end(module: str) -> str:
    """Return the part of a module's name that does not depend on how the model was saved."""
    return module[module.find("layers.") :] if "layers." in module else module


def find_linears(part: Any) -> Iterator[Linear]:
    """Yield the matrix products in layers, and in their parts."""
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, list):
        for each in part:
            yield from find_linears(each)
    elif type(part).__module__ == Linear.__module__ and hasattr(part, "__dict__"):
        for each in vars(part).values():
            yield from find_linears(each)


def read_finite(weights: Weights, name: str, shape: tuple[int, int]) -> Tensor:
    """Return a tensor of an adapter, in memory of its own. Raises StartupError."""
    tensor = weights.read(name, shape).clone()  # the file may be replaced
    if not bool(torch.isfinite(tensor).all()):
        raise StartupError(f"the tensor {name} has numbers that are not finite")
    return tensor
