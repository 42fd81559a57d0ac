"""Finds the service of the model that a request names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from cllm.errors import UnknownModel
from cllm.service import Service

MAX_NAME = 300  # characters of a model's name


class Registry:
    """The served models; for now there is exactly one.

    ``services`` has one entry for each model. The first one is the default.
    """

    def __init__(self, service: Service, aliases: Sequence[str] = ()) -> None:
        """``aliases``: other names of the model, or patterns of names."""
        self.services = [service]
        self._aliases = tuple(aliases)

    @property
    def names(self) -> list[str]:
        """The model's name, and its aliases that are not patterns."""
        aliases = (alias for alias in self._aliases if not set("*?[") & set(alias))
        return list(dict.fromkeys([self.services[0].model_name, *aliases]))

    def get(self, name: str | None = None) -> Service:
        """Return the service of the model ``name``: its name with or without :latest, or an alias.

        None and "" mean the default model. Raises UnknownModel.
        """
        service = self.services[0]
        own = service.model_name.removesuffix(":latest")
        if not name or name.removesuffix(":latest") == own:
            return service
        if len(name) <= MAX_NAME and any(fnmatchcase(name, alias) for alias in self._aliases):
            return service
        raise UnknownModel(name, service.model_name)
