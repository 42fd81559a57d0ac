"""Random tests of the KV caches: in any order of events, a cache's records match what its
operations do to the cells.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from naive_cache import NaiveCache

from cllm.backends.fake.backend import FakeBackend
from cllm.core.batch import Batch, Copy, Drop, Load, Operation, Row, Save, Swap, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.kv_cache import cache, checkpoints
from cllm.kv_cache.cache import KVCache
from cllm.kv_cache.checkpoints import Checkpoints
from cllm.kv_cache.holding import Holding
from cllm.kv_cache.layouts import Layout, Paged, Partitioned, Unified
from cllm.kv_cache.matching import MIN_SHARED_TOKENS, Match
from cllm.kv_cache.model_state import Recurrent
from cllm.kv_cache.snapshots import Snapshot, Snapshots, StorageTier


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


ACTIONS = [
    *["admit"] * 5,
    *["checkpoint", "compute"] * 2,
    "release",
    "save_one_idle",
    "written",
    "swap",
]
COUNTS = st.sampled_from([1, 3, 17, 35, 60, 70, 90, 119])


@pytest.fixture(autouse=True)
def save_and_evict_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "MIN_SAVED_TOKENS", 10)
    monkeypatch.setattr(cache, "MIN_EVICTED_TOKENS", 4)


class CacheMachine(RuleBasedStateMachine):
    """Does at random what a scheduler and a disk thread may do, and performs each operation on a
    fake backend.
    """

    make_cache: Callable[..., KVCache] = KVCache
    layout: Layout = Partitioned()
    max_num_seqs = 3
    cells_per_seq = 120
    num_cells = 360
    ram_bytes = 200
    disk_bytes = 300
    max_num_checkpoints = 0

    def __init__(self) -> None:
        super().__init__()
        snapshots = Snapshots(
            self.ram_bytes, self.disk_bytes, bytes_per_token=1, bytes_per_snapshot=10
        )
        self.cache = type(self).make_cache(
            self.num_cells,
            self.cells_per_seq,
            self.max_num_seqs,
            self.layout,
            snapshots,
            Checkpoints(self.max_num_checkpoints, bytes_each=1),
        )
        self.backend = FakeBackend(
            context_length=self.cells_per_seq,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_seqs * self.cells_per_seq,
            num_cells=self.num_cells,
            layout=type(self.layout).__name__.lower(),
            num_spare_ids=self.layout.num_spare_ids,
            max_taken_back=None if self.can_trim else 0,
            checkpoint_bytes=min(1, self.max_num_checkpoints),
        )
        self.operations: list[Operation] = []
        self.rows: dict[int, Row] = {}
        self.running: dict[int, Sequence] = {}
        self.admitted: dict[int, list[int]] = {}  # tokens of running sequences in the tree
        self.known: list[list[int]] = []  # prefixes with which later prompts may begin
        self.unwritten: set[int] = set()
        self.files: dict[int, list[int]] = {}

    @property
    def can_trim(self) -> bool:
        return not isinstance(self.layout.state, Recurrent)

    # --- a turn

    @rule(data=st.data(), actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=8))
    def turn(self, data: st.DataObject, actions: list[str]) -> None:
        for action in actions:
            getattr(self, action)(data)
            self.cache.check()
        if self.rows and data.draw(st.integers(0, 9)) == 9:
            self.fail(data)
        else:
            self.succeed(data)

    def admit(self, data: st.DataObject) -> None:
        prompt = self.draw_prompt(data)
        match = self.cache.find(Sequence(Request("A", prompt, SamplingParams()), 0, 0, 1024))
        self.check_match(prompt, match)
        seq = Sequence(Request("A", prompt, SamplingParams()), 0, 0, 1024)
        if not self.cache.seq_ids.num_free:
            with pytest.raises(IndexError):
                self.cache.lease(seq, match)
            return
        if isinstance(match.source, Snapshot) and match.source.tier is not StorageTier.RAM:
            self.fetch(match.source)
            return
        before, idle = str(self.cache), self.list_idle()
        leased = self.cache.lease(seq, match)
        if leased is None:
            assert isinstance(match.source, Snapshot)
            assert len(match.source.tokens) > self.cache.num_available
            assert str(self.cache) == before
            return
        seq.seq_id, seq.num_computed_tokens, operations = leased
        left = idle.get(seq.seq_id, []) if match.source is None else []
        self.check_lease(match.num_tokens, common(left, prompt[:-1]), len(left), seq)
        assert seq.seq_id not in self.running
        self.operations += operations
        self.running[seq.seq_id] = seq
        self.admitted[seq.seq_id] = prompt
        self.remember(prompt)
        self.compute_tokens(seq, min(seq.num_lacking_tokens, data.draw(COUNTS)), [])

    def swap(self, data: st.DataObject) -> None:
        """Exchange two seq_ids, running or not, in a step that has no rows yet."""
        if not self.layout.can_swap or self.rows:
            return
        first, second = data.draw(st.permutations(range(self.max_num_seqs)))[:2]
        self.operations.append(self.cache.swap(first, second))
        places = {first: second, second: first}
        for records in (self.running, self.admitted):
            moved = {places.get(i, i): value for i, value in records.items()}
            records.clear()
            records.update(moved)
        for seq_id, seq in self.running.items():
            seq.seq_id = seq_id

    def check_lease(self, num_matched: int, num_common: int, num_idle: int, seq: Sequence) -> None:
        """Check that tokens which the seq_id happens to have are reused, too."""
        in_place = num_common if self.can_trim or num_common == num_idle else 0
        assert seq.num_computed_tokens == max(num_matched, in_place)

    def draw_prompt(self, data: st.DataObject) -> list[int]:
        """Return a prompt that often begins with all or part of another one. It leaves at least
        one cell.
        """
        begin: list[int] = []
        if self.known and data.draw(st.integers(0, 3)):
            begin = data.draw(st.sampled_from(self.known))[: self.cells_per_seq - 2]
            begin = begin[: data.draw(st.one_of(st.just(len(begin)), st.integers(1, len(begin))))]
        count = min(data.draw(COUNTS), self.cells_per_seq - 1 - len(begin))
        return begin + [data.draw(st.integers(1, 3))] * count

    def remember(self, tokens: list[int]) -> None:
        """Let later prompts begin with ``tokens``."""
        self.known = [*self.known[-7:], tokens]

    def check_match(self, prompt: list[int], match: Match) -> None:
        """Check that the offered tokens exist, that they are nearly as many as possible, and that
        the prefix in flight will be computed.
        """
        wanted = prompt[:-1]
        offers = [list(snapshot.tokens) for snapshot in self.snapshots()]
        offers += self.list_idle().values()
        running = [self.admitted[i][: seq.num_computed_tokens] for i, seq in self.running.items()]
        if self.can_trim:
            shared = [(common(offer, wanted), len(offer)) for offer in offers + running]
        else:
            shared = [(len(offer), len(offer)) for offer in offers if offer == wanted[: len(offer)]]
            shared += [
                (len(saved), len(base))
                for saved in self.checkpoints().values()
                if saved == wanted[: len(saved)]
                for base in offers + running
                if saved == base[: len(saved)]
            ]
        worth = max((count - 4 - length // 16 for count, length in shared), default=0)
        source = match.source
        if source is None:
            assert match.num_tokens == 0
        else:
            seq = source.seq if isinstance(source, Holding) else None
            there = source.tokens if isinstance(source, Snapshot) else source.path
            there = list(there) if seq is None else seq.tokens[: seq.num_computed_tokens]
            assert there[: match.num_tokens] == wanted[: match.num_tokens]
            assert match.num_tokens >= MIN_SHARED_TOKENS
        assert match.num_tokens >= (worth if worth >= MIN_SHARED_TOKENS else 0)
        leader = match.leader
        assert (match.num_inflight_tokens > 0) == (leader is not None)
        if leader is not None:
            assert self.running[leader.seq_id] is leader
            assert (
                leader.num_computed_tokens
                < match.num_inflight_tokens
                >= match.num_tokens + MIN_SHARED_TOKENS
            )
            assert (
                self.admitted[leader.seq_id][: match.num_inflight_tokens]
                == wanted[: match.num_inflight_tokens]
            )

    def list_idle(self) -> dict[int, list[int]]:
        return {i: tokens.tolist() for i, (tokens, _) in self.cache.list_idle().items()}

    def idle_rows(self) -> list[int]:
        return sorted(self.running.keys() - self.rows.keys())

    def compute(self, data: st.DataObject) -> None:
        for seq_id in self.idle_rows():
            seq = self.running[seq_id]
            can_guess = self.can_trim and seq.num_lacking_tokens == 1
            draft = data.draw(st.lists(st.integers(1, 3), max_size=3)) if can_guess else []
            self.compute_tokens(seq, min(seq.num_lacking_tokens, data.draw(COUNTS)), draft)

    def compute_tokens(self, seq: Sequence, count: int, draft: list[int]) -> None:
        if seq.num_computed_tokens + count + len(draft) > self.cells_per_seq:
            return
        held = self.cache.cells.num_held
        operations = self.cache.make_room(count + len(draft))
        assert (operations is None) == (held + count + len(draft) > self.num_cells)
        if operations is not None:
            self.operations += operations
            self.cache.hold(seq.seq_id, count + len(draft))
            num_samples = 1 + len(draft) if count == seq.num_lacking_tokens else 0
            self.rows[seq.seq_id] = Row(
                seq, seq.num_computed_tokens, count, num_samples, tuple(draft)
            )

    def release(self, data: st.DataObject) -> None:
        if self.idle_rows():
            self.give_back(
                self.running[data.draw(st.sampled_from(self.idle_rows()))],
                soon=data.draw(st.booleans()),
            )

    def give_back(self, seq: Sequence, *, soon: bool = False) -> None:
        tokens = seq.tokens[: seq.num_computed_tokens]
        self.cache.release(seq.seq_id, tokens, soon=soon)
        del self.running[seq.seq_id]
        if tokens:
            self.remember(tokens)

    def checkpoint(self, data: st.DataObject) -> None:
        for seq_id in () if self.can_trim else self.idle_rows():
            self.operations += self.cache.checkpoint(self.running[seq_id])

    def succeed(self, data: st.DataObject) -> None:
        rows, operations = self.run_operations(len(self.operations), len(self.rows))
        self.unwritten |= {
            op.snapshot for op in operations if isinstance(op, Save) and not op.is_checkpoint
        }
        taken_back = False
        for row in rows:
            seq = row.seq
            right = data.draw(st.integers(0, len(row.draft))) if row.draft else 0
            keep = seq.num_computed_tokens = row.start + row.num_tokens + right
            seq.tokens += row.draft[:right]
            if row.num_samples:
                seq.tokens.append(data.draw(st.integers(1, 3)))
            taken_back = taken_back or right < len(row.draft)
            if seq.num_tokens >= self.cells_per_seq or data.draw(st.booleans()):
                self.operations += [Trim(seq.seq_id, keep)] if row.draft else []
                self.give_back(seq)
            elif right < len(row.draft):
                self.operations += self.cache.rewind(seq.seq_id, keep)
        if not taken_back:
            self.matches_backend()

    def run_operations(
        self, num_operations: int, num_rows: int
    ) -> tuple[list[Row], list[Operation]]:
        """Let the backend perform the first of the collected operations and rows; return all."""
        rows, operations = [self.rows[i] for i in sorted(self.rows)], self.operations
        self.rows, self.operations = {}, []
        self.backend.forward(Batch(rows[:num_rows], operations[:num_operations]))
        return rows, operations

    def fail(self, data: st.DataObject) -> None:
        """Fail a step somewhere, and invalidate what it affected."""
        num_operations = data.draw(st.integers(0, len(self.operations)))
        whole = num_operations == len(self.operations)
        num_rows = data.draw(st.integers(0, len(self.rows))) if whole else 0
        rows, operations = self.run_operations(num_operations, num_rows)
        touched = {row.seq.seq_id for row in rows}
        for operation in operations:
            match operation:
                case Trim(seq_id) | Copy(_, seq_id) | Load(_, seq_id):
                    touched.add(seq_id)
                case Swap(first, second):
                    touched |= {first, second}
                case Save(_, key):
                    self.operations += self.cache.snapshots.drop(key)
                case Drop():
                    self.operations.append(operation)
        for seq in [seq for seq in self.running.values() if seq.seq_id in touched]:
            seq.num_computed_tokens = 0
            self.give_back(seq)
        self.operations += self.cache.checkpoints.invalidate(operations)
        self.operations += self.cache.invalidate_seq_ids(touched)

    def checkpoints(self) -> dict[int, list[int]]:
        by_key = self.cache.checkpoints._by_key
        return {key: checkpoint.tokens.tolist() for key, checkpoint in by_key.items()}

    # --- the disk

    def snapshots(self) -> list[Snapshot]:
        snapshots = self.cache.snapshots
        return list({**snapshots.ram, **snapshots.files}.values())

    def fetch(self, snapshot: Snapshot) -> None:
        if snapshot.tier is StorageTier.DISK:
            self.operations += self.cache.snapshots.read(snapshot) or []
            if self.cache.snapshots.find(snapshot.key) is None:  # larger than all RAM
                self.files.pop(snapshot.key)

    @precondition(
        lambda self: any(snapshot.tier is StorageTier.READING for snapshot in self.snapshots())
    )
    @rule(data=st.data(), succeeded=st.booleans())
    def was_read(self, data: st.DataObject, succeeded: bool) -> None:
        self.run_operations(len(self.operations), 0)
        reading = [
            snapshot for snapshot in self.snapshots() if snapshot.tier is StorageTier.READING
        ]
        snapshot = data.draw(st.sampled_from(reading))
        if succeeded:
            saved = msgspec.msgpack.encode((snapshot.tokens.tolist(), []))
            buffer = self.backend.new_state_buffer(len(saved))
            buffer.data[:] = saved
            self.backend.install_snapshot(snapshot.key, buffer, len(snapshot.tokens))
            snapshot.tier = StorageTier.RAM
        else:
            assert self.cache.snapshots.drop(snapshot.key) == []
            self.files.pop(snapshot.key, None)

    def written(self, data: st.DataObject) -> None:
        if not self.unwritten:
            return
        key = data.draw(st.sampled_from(sorted(self.unwritten)))
        self.unwritten.remove(key)
        snapshot = self.cache.snapshots.find(key)
        self.files[key] = [] if snapshot is None else snapshot.tokens.tolist()
        self.cache.snapshots.record_written(key)
        for old in self.files.keys() - self.cache.snapshots.files.keys():
            del self.files[old]
        assert sum(10 + len(tokens) for tokens in self.files.values()) <= self.disk_bytes

    def save_one_idle(self, data: st.DataObject) -> None:
        self.operations += self.cache.save_one_idle()

    @precondition(lambda self: len(self.files) < 2)
    @rule(data=st.data())
    def add_from_file(self, data: st.DataObject) -> None:
        tokens = self.draw_prompt(data)
        if 10 + len(tokens) + self.cache.snapshots.num_disk_bytes <= self.disk_bytes:
            self.files[self.cache.snapshots.add_from_file(np.array(tokens, np.int32)).key] = tokens
            self.remember(tokens)

    # --- the invariants

    @invariant()
    def keeps_invariants(self) -> None:
        self.cache.check()
        assert self.files == {
            key: old.tokens.tolist() for key, old in self.cache.snapshots.files.items()
        }

    def matches_backend(self) -> None:
        """Compare the records of the cache with the cells of the backend."""
        cells = {seq_id: held for seq_id, held in self.backend._cells.items() if held}
        believed = self.list_idle()
        believed |= {
            i: seq.tokens[: seq.num_computed_tokens]
            for i, seq in self.running.items()
            if seq.num_computed_tokens
        }
        assert {seq_id: [cell.token for cell in held] for seq_id, held in cells.items()} == believed
        assert self.cache.cells.num_used == len(
            {id(cell) for held in cells.values() for cell in held}
        )
        held = {id(cell) for seq_id in self.running for cell in cells.get(seq_id, ())}
        assert self.cache.cells.num_held == len(held)
        in_ram = {
            old.key: old.tokens.tolist() for old in self.snapshots() if old.tier is StorageTier.RAM
        }
        in_ram |= self.checkpoints()
        assert {key: self.backend._saved(key)[0] for key in self.backend._snapshots} == in_ram
        if not self.can_trim:
            assert {seq_id: self.backend._states[seq_id] for seq_id in cells} == {
                seq_id: len(held) for seq_id, held in cells.items()
            }

    def teardown(self) -> None:
        self.run_operations(len(self.operations), 0)
        self.matches_backend()


class UnifiedMachine(CacheMachine):
    """All sequences draw on one pool that is too small for them, and share cells; idle ones have
    seq_ids to spare.
    """

    layout = Unified(num_spare_ids=2)
    num_cells = 220


class PagedMachine(CacheMachine):
    """Cells are shared, and seq_ids exchanged."""

    layout = Paged()
    num_cells = 200


class UnifiedStateMachine(CacheMachine):
    """Sequences share cells, but none can be trimmed."""

    layout = Unified(Recurrent())
    num_cells = 220


class StateMachine(CacheMachine):
    """Each sequence has cells of its own, and none can be trimmed."""

    layout = Partitioned(Recurrent())


class UnifiedHybridMachine(UnifiedStateMachine):
    """Sequences share cells, and can be cut where their states were saved."""

    num_cells = 130
    max_num_checkpoints = 4


class HybridMachine(StateMachine):
    """Each sequence has cells of its own, and can be cut where its state was saved. No files."""

    disk_bytes = 0
    max_num_checkpoints = 4


class NaiveMachine(CacheMachine):
    """The smallest cache: it finds nothing, and must keep all other invariants."""

    make_cache = NaiveCache
    layout = Unified()
    num_cells = 220

    def check_match(self, prompt: list[int], match: Match) -> None:
        assert match == Match()

    def swap(self, data: st.DataObject) -> None:
        """Exchange two seq_ids, running or not, in a step that has no rows yet."""
        if not self.layout.can_swap or self.rows:
            return
        first, second = data.draw(st.permutations(range(self.max_num_seqs)))[:2]
        self.operations.append(self.cache.swap(first, second))
        places = {first: second, second: first}
        for records in (self.running, self.admitted):
            moved = {places.get(i, i): value for i, value in records.items()}
            records.clear()
            records.update(moved)
        for seq_id, seq in self.running.items():
            seq.seq_id = seq_id

    def check_lease(self, num_matched: int, num_common: int, num_idle: int, seq: Sequence) -> None:
        assert seq.num_computed_tokens == 0


TestPartitioned = CacheMachine.TestCase
TestUnified = UnifiedMachine.TestCase
TestPaged = PagedMachine.TestCase
TestUnifiedState = UnifiedStateMachine.TestCase
TestState = StateMachine.TestCase
TestUnifiedHybrid = UnifiedHybridMachine.TestCase
TestHybrid = HybridMachine.TestCase
TestNaive = NaiveMachine.TestCase
