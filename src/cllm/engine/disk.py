"""Keeps saved prefixes in files, while the engine goes on with its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from cllm.backends.base import Backend, StateBuffer
from cllm.core.output import TokenOutput
from cllm.engine.side_jobs import WAIT, SideJob, run_operations
from cllm.engine.snapshot_files import File, Read, SnapshotFiles, Written
from cllm.errors import EngineError
from cllm.kv_cache.radix_tree import Tokens
from cllm.kv_cache.snapshots import Snapshot
from cllm.scheduler.scheduler import Scheduler

log = logging.getLogger("cllm.disk")


class DiskTier(SideJob):
    """Writes saved prefixes to files, and reads them when a sequence needs them.

    While there is nothing to compute, it saves idle prefixes.
    """

    def __init__(
        self,
        files: SnapshotFiles,
        backend: Backend,
        scheduler: Scheduler,
        clock: Callable[[], float],
    ) -> None:
        self._files = files
        self._backend = backend
        self._scheduler = scheduler
        self._sequences = scheduler.sequences
        self._clock = clock
        self._buffers: dict[int, StateBuffer] = {}  # by snapshot key, being filled
        self._num_steps = 0  # when ``after`` was last called
        self._snapshots = self._sequences.kv_cache.snapshots
        self._register(files.find())

    def _register(self, files: Iterable[tuple[File, Tokens, str]]) -> None:
        """Use files that other processes have written, least recently used first."""
        for file, tokens, salt in files:
            self._files.register(self._snapshots.add_from_file(tokens, salt).key, file)
        self._snapshots.evict_files()
        self._files.delete_all_except(self._snapshots.files.keys())

    def add(self, name: str) -> None:
        """Use a file that another process has put into the folder."""
        if (found := self._files.find_new(name)) is not None:
            self._register([found])

    def write(self, snapshot: Snapshot) -> None:
        if not self._files.has_room(snapshot.num_bytes):
            return  # before a paged backend copies the snapshot
        try:
            data = self._backend.snapshot(snapshot.key)
            self._files.write(snapshot.key, snapshot.tokens, data, snapshot.salt)
        except Exception:
            log.exception("cannot write a prefix to disk")

    def read(self, snapshot: Snapshot) -> None:
        try:
            buffer = self._backend.new_state_buffer(self._files.size(snapshot.key))
            self._files.read(snapshot.key, buffer.data)
            self._buffers[snapshot.key] = buffer
        except Exception:
            log.exception("cannot read a prefix from disk")
            self._files.fail_read(snapshot.key)

    def after(self, now: float) -> list[TokenOutput]:
        num_steps, self._num_steps = self._num_steps, self._scheduler.statistics.num_steps
        is_waiting = num_steps == self._num_steps and self._sequences.has_work()
        failure: Exception | None = None
        for result in self._files.results(WAIT if is_waiting else 0.0):
            try:
                self._finish(result)
            except Exception as error:  # noqa: BLE001  # raised below, after the other results
                failure = error
        self._files.delete_all_except(self._snapshots.files.keys())
        if failure is not None:
            raise failure
        return []

    def _finish(self, result: Written | Read) -> None:
        if isinstance(result, Read):
            self._finish_read(result)
        else:
            self._sequences.finish_write(result.key, succeeded=result.succeeded)

    def _finish_read(self, result: Read) -> None:
        """Install a snapshot, after the batch's operations: one may drop its old copy."""
        filled, succeeded = self._buffers.pop(result.key, None), result.succeeded
        try:
            snapshot = self._snapshots.find(result.key)
            if filled is not None and succeeded and snapshot is not None:
                self._backend.install_snapshot(result.key, filled, snapshot.num_computed)
        except Exception as error:
            is_expected = isinstance(error, EngineError)
            log.error(
                "cannot use a prefix that was read from disk: %s",
                error,
                exc_info=None if is_expected else error,
            )
            succeeded = False
        self._sequences.finish_read(result.key, succeeded=succeeded)

    def idle(self) -> bool:
        """Save an idle prefix that is in no file; return whether there was one."""
        operations = self._sequences.kv_cache.save_one_idle()
        if operations:
            operations = [*self._sequences.drain_pending_operations(), *operations]
        return bool(operations) and run_operations(self._backend, self._scheduler, operations)

    def close(self, seconds: float) -> None:
        """Save the idle prefixes and write them to files, each for up to ``seconds``."""
        until = self._clock() + seconds
        try:
            while self._clock() < until and self.idle():
                pass
        finally:
            self._files.flush(seconds)
            self._files.note_use(self._sequences.kv_cache.list_idle().values())
