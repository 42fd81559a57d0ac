"""Puts small faults into a copy of the sources, one at a time, and reports what no test finds.

    python tools/seed_faults.py            # all faults; the exit code is 1 if one survives
    python tools/seed_faults.py sampling   # those in files whose path contains "sampling"

Each fault names the tests that should find it. The working tree is not changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 300  # seconds of one run; a fault that makes a test hang is found
MEMORY = 6 << 30  # bytes of one run; a fault may make a list grow without end


class Fault(NamedTuple):
    """``old`` occurs exactly once in ``file`` (below src/cllm) and is replaced by ``new``.

    tests: files below tests/, separated by spaces.
    """

    file: str
    old: str
    new: str
    tests: str


def faults_in(file: str, tests: str, *changes: tuple[str, str]) -> list[Fault]:
    return [Fault(file, old, new, tests) for old, new in changes]


FAULTS = [
    *faults_in(
        "process/suspects.py",
        "process/test_suspects.py",
        ("if name not in self._computed]", "if name]"),
        ("self._awaited.remove(name)", "self._awaited.clear()"),
    ),
    *faults_in(
        "process/in_flight_request.py",
        "process/test_pool.py",
        ("progress.tokens.append(output.token)", "progress.tokens.insert(0, output.token)"),
    ),
    *faults_in(
        "process/in_flight.py",
        "process/test_pool.py",
        ("entry.unfinished & entry.stopped", "set[int]()"),
    ),
    *faults_in(
        "scheduler/step_cost.py",
        "scheduler/test_step_cost.py",
        ("slope * (num_before - self._num_before)", "slope * num_before"),
        ("seconds - self._mean_seconds", "self._mean_seconds - seconds"),
        ("SHORTEST) / max(num_tokens, LEAST)", "SHORTEST) / num_tokens"),
        ("abs(n - num_rows)", "abs(n + num_rows)"),
        ("max(LEAST, int(num_tokens + 1e-9))", "max(0, int(num_tokens + 1e-9))"),
        ("left = seconds - rows - long", "left = seconds + rows + long"),
    ),
    *faults_in(
        "scheduler/policy.py",
        "scheduler/test_policy.py",
        (
            "num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens",
            "OUTPUT_WEIGHT * num_prompt_tokens + num_output_tokens",
        ),
        (
            "max(self._counter(group), self.floors[group[0]])",
            "min(self._counter(group), self.floors[group[0]])",
        ),
        ("counter + cost / self._weights", "counter + cost * self._weights"),
        ("2 * lacks < first.num_lacking_tokens", "2 * lacks > first.num_lacking_tokens"),
        ("max(self.floors[priority], counter)", "self.floors[priority]"),
    ),
    *faults_in(
        "scheduler/waiting.py",
        "scheduler/test_policy.py",
        ("now - oldest.waits_since > PATIENCE", "now - oldest.waits_since < PATIENCE"),
        ("        self._num_taken += 1\n", ""),
        ("seq.arrived + seq.request.deadline", "seq.arrived - seq.request.deadline"),
        ("self.num_tokens -= seq", "self.num_tokens += seq"),
    ),
    *faults_in(
        "scheduler/deferred.py",
        "scheduler/test_deferred.py",
        ("entry[0] > leader", "entry[0] >= leader"),
        ("self._readers.pop(key, [])", "self._readers.get(key, [])"),
        ("if self.discard(seq)]", "if self.discard(seq) or True]"),
    ),
    *faults_in(
        "kv_cache/cell_counts.py",
        "kv_cache/test_cell_counts.py",
        ("if chain.leaf is None or chain.leaf.refs > 1:", "if chain.leaf is None:"),
        ("        extent.length -= length\n", ""),
        ("self.num_used -= extent.length", "pass"),
        ("end - extent.length >= count", "end - extent.length > count"),
    ),
    *faults_in(
        "kv_cache/radix_tree.py",
        "kv_cache/test_radix_tree.py",
        ("dict(node.owners)", "{}"),
        ("first if length and differing[first] else length", "first"),
    ),
    *faults_in(
        "kv_cache/snapshots.py",
        "kv_cache/test_snapshots.py",
        ("self.num_ram_bytes + num_bytes - self.ram", "self.num_ram_bytes - num_bytes - self.ram"),
        ("            self.num_disk_bytes -= oldest.num_bytes\n", ""),
        (" and snapshot is not needed", ""),
    ),
    *faults_in(
        "kv_cache/seq_id_pool.py",
        "kv_cache/test_seq_id_pool.py",
        ("        self._leased.remove(seq_id)\n", ""),
    ),
    *faults_in(
        "kv_cache/snapshots.py",
        "kv_cache/test_cache.py",
        ("if not snapshot.in_file:", "if snapshot.in_file:"),
        ("shared == len(old.tokens)", "shared <= len(old.tokens)"),
    ),
    *faults_in(
        "routing/router.py",
        "routing/test_router.py",
        ("booked.num_tokens -= self.num_tokens", "pass"),
        ("if own == fewest]", "if own >= fewest]"),
        ("if paid >= request.ends[last]:", "if paid >= request.num_tokens * 2:"),
        ("(1 - least / places)", "(1 + least / places)"),
    ),
    *faults_in(
        "routing/prefix_table.py",
        "routing/test_router.py",
        ("blocks[num_known - 1], 0) & known:", "blocks[num_known - 1], 0):"),
        ("self._read_marks(marks) & ~seen", "self._read_marks(marks)"),
        ("popitem(last=False)", "popitem(last=True)"),
    ),
    *faults_in(
        "sampling/pipeline.py",
        "sampling/test_pipeline.py",
        ("if params.top_p < 1:", "if params.top_p > 1:"),
        ("weights >= params.min_p)", "weights <= params.min_p)"),
        ("shifted[:kept] / params.temperature", "shifted[:kept] * params.temperature"),
    ),
    *faults_in(
        "sampling/pipeline.py",
        "sampling/test_extensions.py",
        ("seq.num_prompt_tokens < params.min_tokens", "seq.num_prompt_tokens <= params.min_tokens"),
    ),
    *faults_in(
        "sampling/pipeline.py",
        "sampling/test_grammar.py",
        ("matcher.rollback(len(tokens) - 1)", "matcher.rollback(len(tokens))"),
    ),
    *faults_in(
        "sampling/pipeline.py",
        "engine/test_scores.py",
        ("row.num_tokens - row.num_samples + 1", "row.num_tokens - row.num_samples"),
    ),
    *faults_in(
        "engine/snapshot_files.py",
        "engine/test_disk.py",
        ("if checksums != head.checksums:", "if not checksums:"),
        ("+ num_bytes <= MAX_PENDING", "- num_bytes <= MAX_PENDING"),
        ("self._files.keys() - keys - self._writing", "self._files.keys() - keys"),
        ("            os.utime(path)\n", ""),
    ),
    *faults_in(
        "engine/settings.py",
        "engine/test_settings.py",
        ("scheduler.target_itl_ms / 1000", "scheduler.target_itl_ms * 1000"),
        ("None if kv.ram_cache_mb is None else", "None if not kv.ram_cache_mb else"),
    ),
    *faults_in(
        "process/results.py",
        "process/test_results.py",
        ("self.num_bytes -= len(result) + OVERHEAD", "self.num_bytes -= len(result)"),
        ("        self._results.move_to_end(key)\n", ""),
    ),
    *faults_in(
        "process/embeddings.py",
        "process/test_embeddings.py",
        ("known is not None and len", "known is not None or len"),
        ("min(1.0, turns / count)", "max(1.0, turns / count)"),
    ),
    *faults_in(
        "process/reservations.py",
        "process/test_reservations.py",
        ("add(reservation.load, -1)", "add(reservation.load, 1)"),
        ("self._clock() - EARLIEST_RETRY", "self._clock() + EARLIEST_RETRY"),
        ("self._groups_with_tickets.discard(group)", "pass"),
    ),
    *faults_in(
        "process/child.py",
        "process/test_child.py",
        ("if len(head) < LENGTH.size:", "if not head:"),
        ("rest = rest[os.write(descriptor, rest) :]", "os.write(descriptor, rest)\n        break"),
    ),
    *faults_in(
        "text/stop_strings.py",
        "text/test_stop_strings.py",
        ("self._longest - 1", "self._longest - 2"),
        ("min(ends)[0 if", "min(ends)[1 if"),
    ),
    *faults_in(
        "text/detokenizer.py",
        "text/test_detokenizer.py",
        ("bool(self._decoder.getstate()[0])", "False"),
    ),
    *faults_in(
        "text/tools/argument_readers.py",
        "text/tools/test_argument_readers.py",
        ("keep = count_begun(body, self._quote)", "keep = 0"),
        ("keep += 1", "keep += 0"),
        ("int(text[1:], 8)", "int(text[1:], 10)"),
    ),
    *faults_in(
        "serving/embedding.py",
        "serving/test_embedding.py",
        ("if waiter.done in done:", "if waiter.done not in done:"),
    ),
    *faults_in(
        "text/pairs.py",
        "serving/test_embedding.py",
        ("vectors[1:] @ vectors[0]", "vectors[:-1] @ vectors[-1]"),
    ),
    *faults_in(
        "server/http/sse.py",
        "server/test_sse.py",
        ("if self._writing is None and not self._is_last:", "if not self._is_last:"),
        ("if self._num_sent == sent:", "if self._num_sent != sent:"),
        ("        watching.cancel()\n        working.cancel()\n", "        watching.cancel()\n"),
    ),
    *faults_in(
        "server/queueing.py",
        "server/test_auth.py",
        ("self.deadline_ms / 1000", "self.deadline_ms"),
        ("self.user or user", "user or self.user"),
    ),
    *faults_in(
        "process/liveness.py",
        "process/test_liveness.py",
        ("> 2 * WATCH_SECONDS", "> 200 * WATCH_SECONDS"),
        ("num_read >= num_sent", "num_read > num_sent"),
        ("max(HANG_SECONDS, HANG_FACTOR", "min(HANG_SECONDS, HANG_FACTOR"),
    ),
    *faults_in(
        "process/step_record.py",
        "process/test_step_record.py",
        ("if version % 2:", "if not version:"),
        ("[: SIZE - HEAD.size - NUM_READ.size]", ""),
    ),
    *faults_in(
        "process/balancer.py",
        "process/test_balancer.py",
        ("-one.count_seqs(priority)", "one.count_seqs(priority)"),
        ("self._in_flight.note_begun([message.request_id])", "pass"),
        ("move.transfer(-1)  # it must not", "pass  # it must not"),
    ),
    *faults_in(
        "process/assignments.py",
        "process/test_assignments.py",
        ("request.prompt[: request.num_base_tokens or None]", "request.prompt"),
        ("num_seqs = 0 if", "num_seqs = 1 if"),
        ("hash((name, *prompt[begin:end:stride]))", "hash((*prompt[begin:end:stride],))"),
    ),
    *faults_in(
        "store/responses.py",
        "store/test_responses.py",
        (" and self._stored[name].account == account.name", ""),
        ("        self._stored.move_to_end(response_id)\n", ""),
        ("self._num_bytes -= stored.num_bytes", "pass"),
    ),
    *faults_in(
        "server/infill.py",
        "server/test_infill.py",
        ("before[len(before) - num_before :]", "before[:num_before]"),
        ("in reversed(snippets):", "in snippets:"),
    ),
    *faults_in(
        "bench/compare/workloads.py",
        "bench/compare/test_scheduling.py",
        ("[-ACCOUNT_SEQS - 1]", "[-1]"),
    ),
    *faults_in(
        "bench/compare/targets.py",
        "bench/compare/test_performance.py",
        ("settings not in failed}", "settings not in groups}"),
    ),
    *faults_in(
        "store/charges.py",
        "store/test_usage.py",
        ("min(num_tokens, self._left)", "num_tokens"),
        ("self.day[:7], UsageCounts()", "self.day[:7], self.of_month"),
    ),
    *faults_in(
        "store/batch_answers.py",
        "store/test_batch_answers.py store/test_batches.py",
        ("file.tell() > size", "file.tell() < size"),
        ("whole += len(line)", "whole = len(line)"),
    ),
    *faults_in(
        "server/ollama/schema.py",
        "server/test_durations.py",
        ('text += "s"', 'text += "m"'),
        ("return sign * sum(", "return sum("),
    ),
    *faults_in(
        "server/ollama/stream.py",
        "server/test_ollama_lines.py",
        ("if delta.call != self._call:", "if self._call < 0:"),
    ),
    *faults_in(
        "server/anthropic/stream.py",
        "server/test_anthropic_events.py",
        ("data = self._close() + self._open(delta)", "data = self._open(delta)"),
        ("        self._index += 1\n", ""),
    ),
    *faults_in(
        "config/file.py",
        "config/test_config.py",
        ("or peers[:1]", "or peers[1:]"),
    ),
]


def find_stale(faults: list[Fault]) -> list[Fault]:
    """Return faults whose old text does not occur exactly once, or whose tests do not exist."""
    return [
        fault
        for fault in faults
        if (ROOT / "src/cllm" / fault.file).read_text().count(fault.old) != 1
        or not all((ROOT / "tests" / name).exists() for name in fault.tests.split())
    ]


def limit_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def is_found(fault: Fault, sources: Path) -> bool:
    """Run the tests of ``fault`` on the copy of the sources, which is restored afterwards."""
    path = sources / "cllm" / fault.file
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    environment = {
        **os.environ,
        "PYTHONPATH": str(sources),
        "PYTHONPYCACHEPREFIX": str(sources / "bytecode"),
        "CLLM_FULL_TESTS": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(sources / "hypothesis"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-m", "not llama", *(f"tests/{name}" for name in fault.tests.split())]
    try:
        code = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
            preexec_fn=limit_memory if sys.platform == "linux" else None,
        ).returncode
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(text)
    if code > 1:
        sys.exit(f"pytest could not run the tests of {fault}")
    return code != 0  # negative: a signal ended it


def main(part: str = "") -> None:
    if stale := find_stale(FAULTS):
        sys.exit("these faults do not fit the sources any more:\n" + "\n".join(map(str, stale)))
    faults = [fault for fault in FAULTS if part in fault.file]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "src"
        shutil.copytree(ROOT / "src", sources, ignore=shutil.ignore_patterns("__pycache__"))
        for fault in faults:
            begun = time.monotonic()
            found = is_found(fault, sources)
            seconds = time.monotonic() - begun
            print("found" if found else "SURVIVES", f"{seconds:.0f} s", *fault[:3], flush=True)
            if not found:
                survivors.append(fault)
    print(f"{len(faults) - len(survivors)} of {len(faults)} faults were found")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main(*sys.argv[1:])
