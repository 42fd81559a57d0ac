"""The engines of a server's models, which share the memory and the cores of this machine.

It imports little, because the first engine is started before the rest of the server is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cllm.config.settings import Settings
from cllm.engine.params import EngineParams
from cllm.engine.shared_cores import create_cores_file
from cllm.models.memory import measure_available_bytes
from cllm.private_files import remove_shared_file
from cllm.process.backlog import QueueLimits
from cllm.process.launch import ANYWHERE, Popen, make_specs
from cllm.process.places import find_places
from cllm.process.pool import Pool
from cllm.process.results import ResultCache
from cllm.serving.sources import Source, is_growing


class Engines:
    """Makes the engines of one server. Close it after all of them have been closed."""

    def __init__(self) -> None:
        self._available_bytes = measure_available_bytes() or 0  # before any model is loaded
        self._cores_file = create_cores_file()

    def close(self) -> None:
        """Remove the file through which the engines share cores."""
        remove_shared_file(Path(self._cores_file))

    def limit_memory(self, settings: Settings, sources: Sequence[Source]) -> int:
        """Return the limit in bytes for all loaded models together; 0, which means no limit, if
        there is only one model.
        """
        if len(sources) < 2 and not is_growing(settings):
            return 0
        if settings.models.max_memory_mb is not None:
            return settings.models.max_memory_mb * 1_000_000
        return self._available_bytes

    def make_pool(
        self,
        settings: Settings,
        params: EngineParams,
        on_loading: Callable[[float], None] | None = None,
        launched: Popen[bytes] | None = None,
    ) -> Pool:
        """Return the pool for a model's engines.

        The process ``launched`` becomes the first one, or is ended if the first engine must compute
        in another place.
        """
        scheduler, cache = settings.scheduler, settings.cache
        limits = QueueLimits(
            scheduler.max_queue_requests, scheduler.max_queue_tokens, scheduler.max_queue_seconds
        )
        results = ResultCache(cache.max_results, cache.max_memory_mb * 1_000_000)
        places = find_places(params, settings.engine.count)
        if places[0] == ANYWHERE and params.options.get("n_threads") is None:
            params = msgspec.structs.replace(params, cores_file=self._cores_file)
        if launched is not None and places[0] != ANYWHERE:
            end_process(launched)
            launched = None
        return Pool(params, on_loading, limits, results, make_specs(places, launched))


def end_process(process: Popen[bytes]) -> None:
    """End an engine process that is no longer needed."""
    process.kill()
    process.wait()
