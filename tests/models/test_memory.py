"""The memory budget of the KV cache."""

import pytest

from cllm.errors import StartupError
from cllm.models import memory
from cllm.models.gguf import format_size

GB = 1_000_000_000
CELL = 100_000
WORK = memory.weigh(0, 0, CELL)


@pytest.fixture
def room(monkeypatch):
    """10 GB of available memory."""
    monkeypatch.setattr(memory, "measure_available_bytes", lambda: 10 * GB)


@pytest.mark.usefixtures("room")
def test_default_is_half_of_the_remaining_memory_up_to_4_gib(monkeypatch):
    assert memory.compute_kv_budget(GB // 2, CELL, 0, None) == memory.USUAL_KV_BYTES
    monkeypatch.setattr(memory, "measure_available_bytes", lambda: 3 * GB)
    assert memory.compute_kv_budget(GB, CELL, 0, None) == (3 * GB - GB - WORK) // 2


@pytest.mark.usefixtures("room")
def test_budget_fits_one_sequence_of_the_requested_context():
    """80,000 tokens take 8 GB, which is more than the default, and fit."""
    assert memory.compute_kv_budget(GB, CELL, 0, 80_000) == 8 * GB


@pytest.mark.usefixtures("room")
def test_on_gpus_most_of_what_the_weights_leave_there_is_used():
    """More than 4 GiB too. If they do not fit, some layers will be elsewhere."""
    left = 50 * GB - 20 * GB - WORK
    budget = memory.compute_kv_budget(20 * GB, CELL, 0, None, gpu_bytes=50 * GB)
    assert budget == int(left * memory.GPU_SHARE)
    assert memory.compute_kv_budget(20 * GB, CELL, 7, None, gpu_bytes=50 * GB) == 7
    for free in (0, 10 * GB):
        budget = memory.compute_kv_budget(20 * GB, CELL, 0, None, gpu_bytes=free)
        assert budget == memory.USUAL_KV_BYTES
    both = memory.compute_kv_budget(
        19 * GB, CELL, 0, None, gpu_bytes=50 * GB, draft_weight_bytes=GB
    )
    assert both == int(left * memory.GPU_SHARE) * 2 // 3


@pytest.mark.usefixtures("room")
def test_requested_size_is_used_or_rejected():
    assert memory.compute_kv_budget(GB, CELL, 5 * GB, None) == 5 * GB
    with pytest.raises(StartupError, match=r"20\.0 GB.*10\.0 GB"):
        memory.compute_kv_budget(GB, CELL, 20 * GB, None)
    with pytest.raises(StartupError, match=r"100000 tokens"):
        memory.compute_kv_budget(GB, CELL, 0, 100_000)


@pytest.mark.parametrize(
    ("weights", "wanted", "context", "kv", "total", "cure"),
    [
        (3_200_000, 20 * GB, None, "KV cache 20.0 GB", "20.4 GB", "lower kv.max_memory_mb"),
        (
            GB,
            0,
            90_000,
            "KV cache of 90000 tokens 9.0 GB",
            "10.4 GB",
            "lower model.max_context_length",
        ),
        (
            9_700_000_000,
            0,
            None,
            "KV cache of 256 tokens 25.6 MB",
            "10.1 GB",
            "use a smaller model or quantization",
        ),
        (
            12 * GB,
            0,
            4000,
            "KV cache of 4000 tokens 400.0 MB",
            "12.8 GB",
            "use a smaller model or quantization",
        ),
    ],
)
@pytest.mark.usefixtures("room")
def test_memory_error_lists_each_part_of_the_sum(weights, wanted, context, kv, total, cure):
    """The size of the weights is that of the file. Work buffers and processes are listed
    separately.
    """
    with pytest.raises(StartupError) as caught:
        memory.compute_kv_budget(weights, CELL, wanted, context)
    assert str(caught.value) == (
        f"not enough memory: {total} are needed (weights {format_size(weights)}, {kv}, "
        f"work buffers and processes about 417.0 MB), but 10.0 GB are available: {cure}"
    )


def test_available_memory_is_plausible():
    """On an unknown system it may be None."""
    available = memory.measure_available_bytes()
    assert available is None or 10_000_000 < available < 10**14


def version_2(limit: object, used: int, cached: int = 0) -> dict[str, str]:
    stat = f"anon 5\nfile 7\ninactive_file {cached}\nactive_file 1\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def version_1(limit: int, used: int, cached: int = 0) -> dict[str, str]:
    stat = f"inactive_file 99\nactive_file 99\ntotal_inactive_file {cached}\ntotal_active_file 1\n"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    return dict(zip(names, (f"{limit}\n", f"{used}\n", stat), strict=True))


UNLIMITED = 9223372036854771712  # version 1's


@pytest.mark.parametrize(
    ("own", "files", "room"),
    [
        ("0::/system.slice/cllm.service\n", {}, None),
        ("0::/a\n", {"a": version_2("max", 100)}, None),
        ("0::/\n", {"": version_2(1000, 400, 99)}, 700),
        ("0::/a/b\n", {"a/b": version_2(1000, 400, 99)}, 700),
        ("0::/a/b\n", {"a": version_2(900, 700), "a/b": version_2(1000, 400)}, 201),
        ("0::/a/b\n", {"a": version_2(500, 600), "a/b": version_2("max", 400)}, 0),
        ("0::/of/the/host\n", {"": version_2(1000, 400)}, 601),
        ("5:cpu,memory:/a\n1:name=x:/\n", {"memory/a": version_1(1000, 400, 99)}, 700),
        ("5:memory:/a\n0::/\n", {"memory/a": version_1(UNLIMITED, 4)}, None),
        (
            "5:memory:/a\n0::/\n",
            {"memory": version_1(900, 300), "memory/a": version_1(UNLIMITED, 4)},
            601,
        ),
        ("2:cpu:/a\n", {"a": version_2(1000, 400)}, None),
    ],
)
def test_smallest_room_of_the_control_groups_counts(groups, own, files, room):
    """A service has a group of its own, and groups above may have limits, too."""
    groups(own, files)
    assert memory._measure_container_room() == room


def test_system_without_control_groups_has_no_limit_of_them(groups):
    assert memory._measure_container_room() is None


def test_later_engine_needs_what_the_earlier_one_took(groups, monkeypatch, tmp_path):
    """Not the estimates for both processes, one of which the group already counts. What the new
    process has taken so far is counted for it.
    """
    (tmp_path / "status").write_text("Name:\tpython\nRssAnon:\t 40000 kB\nRssFile:\t 9 kB\n")
    monkeypatch.setattr(memory, "OWN_STATUS", tmp_path / "status")
    assert memory.measure_resident_bytes() == 40_000 * 1024
    groups("0::/a\n", {"a": version_2(480 << 20, 80 << 20)})
    memory.check_room_again(149 << 20)
    memory.check_room_again((480 - 80 << 20) + 40_000 * 1024)
    groups("0::/a\n", {"a": version_2(480 << 20, 460 << 20)})
    with pytest.raises(StartupError, match=r"took 156\.2 MB before"):
        memory.check_room_again(149 << 20)


@pytest.mark.usefixtures("room")
def test_beside_other_models_a_limit_replaces_the_available_memory():
    """Weights that a backend has twice count. On GPUs, the cache of one model leaves room for those
    of others.
    """
    most = {"copied_bytes": GB // 2, "max_bytes": 3 * GB}
    budget = memory.compute_kv_budget(GB, CELL, 0, None, **most)
    assert budget == (3 * GB - GB - GB // 2 - WORK) // 2
    with pytest.raises(StartupError, match=r"3\.0 GB are available"):
        memory.compute_kv_budget(GB, CELL, 4 * GB, None, **most)
    assert memory.compute_ram_cache_budget(2 * GB, 3 * GB) == GB // 4
    budget = memory.compute_kv_budget(3 * GB, CELL, 0, None, max_bytes=100 * GB)
    assert budget == (10 * GB - 3 * GB - WORK) // 2, "no more than what is available"
    on_gpus = memory.compute_kv_budget(GB, CELL, 0, None, gpu_bytes=50 * GB, max_bytes=100 * GB)
    assert on_gpus == memory.USUAL_KV_BYTES


@pytest.mark.usefixtures("room")
def test_weights_that_are_there_twice_do_not_count_for_a_model_alone():
    """The system frees the pages of the file."""
    budget = memory.compute_kv_budget(9 * GB, CELL, 0, None, copied_bytes=4 * GB)
    assert budget == (10 * GB - 9 * GB - WORK) // 2


def test_model_is_weighed_with_what_its_backend_copies_and_cells_for_embeddings():
    work = memory.COMPUTE_BYTES + memory.EMBEDDING_CELLS * CELL
    assert memory.weigh(4 * GB, GB, CELL, 2 * GB) == 7 * GB + work
    assert memory.weigh(4 * GB, GB, CELL) == 5 * GB + work
