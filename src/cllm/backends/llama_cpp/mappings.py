"""Mappings of a file in memory, by functions of Linux that Python lacks or has in another form."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Any

PAGE = mmap.PAGESIZE
PROT_NONE = 0
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
MADV_DONTNEED, MADV_NOHUGEPAGE = 4, 15
PUNCH_HOLE, KEEP_SIZE = 2, 1
MFD_CLOEXEC = 1
FAILED = ctypes.c_void_p(-1).value
MANY_MAPPINGS = 65530  # Linux's usual limit
LARGEST_FILE = 1 << 62  # bytes
SETTINGS = Path("/proc/sys/vm")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def reserve(size: int) -> int:
    """Return the first of ``size`` addresses to which nothing is mapped. Raises OSError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return _map(None, size, PROT_NONE, flags, -1, 0)


def release(address: int, size: int) -> None:
    """Remove all mappings from a range of addresses."""
    libc.munmap(address, size)


def create_file() -> int:
    """Return a file in memory that has no pages yet, and no limit of size. Raises OSError."""
    # os.memfd_create is missing in a Python that was built with an old glibc
    file: int = libc.memfd_create(b"cllm-kv", MFD_CLOEXEC)
    if file < 0:
        raise _error()
    try:
        os.ftruncate(file, LARGEST_FILE)
        punch(file, 0, PAGE)
    except OSError:
        os.close(file)
        raise
    return file


def map_file(address: int, size: int, file: int, offset: int, *, huge_pages: bool) -> None:
    """Map a part of ``file`` to ``address``, instead of what was there. Raises OSError.

    With ``huge_pages``, the system might use huge pages, and is asked not to.
    """
    flags = mmap.MAP_SHARED | MAP_FIXED | MAP_NORESERVE
    _map(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset)
    if huge_pages:
        libc.madvise(address, size, MADV_NOHUGEPAGE)


def punch(file: int, begin: int, size: int) -> None:
    """Free the pages of a part of ``file``; it reads as zeros afterwards. Raises OSError."""
    if libc.fallocate(file, PUNCH_HOLE | KEEP_SIZE, begin, size):
        raise _error()


def renew_pages(address: int, size: int) -> bool:
    """Fill private memory with zeros by giving its pages back to the system, which provides new
    ones when they are used. Return False if the system refuses that, as for locked memory.
    """
    end = address + size
    first, last = -(-address // PAGE) * PAGE, end // PAGE * PAGE  # whole pages
    if libc.madvise(first, last - first, MADV_DONTNEED):
        return False
    ctypes.memset(address, 0, first - address)
    ctypes.memset(last, 0, end - last)
    return True


def max_mappings() -> int:
    """Return how many mappings the system allows a process to have."""
    return int(_read_setting("max_map_count") or MANY_MAPPINGS)


def must_reserve() -> bool:
    """Return whether the system provides no more memory than it has, so that a page that is
    written may be refused.
    """
    return _read_setting("overcommit_memory") == "2"


def may_get_huge_pages() -> bool:
    """Return whether the system may provide 2 MB when a page of a file in memory is written."""
    for path in [HUGE_PAGES / "shmem_enabled", *HUGE_PAGES.glob("*/shmem_enabled")]:
        try:
            chosen = path.read_text().partition("[")[2].partition("]")[0]
        except OSError:
            continue
        if chosen in ("always", "within_size", "force"):
            return True
    return False


def _read_setting(name: str) -> str:
    try:
        return (SETTINGS / name).read_text().strip()
    except OSError:
        return ""


def _map(
    address: int | None, size: int, protection: int, flags: int, file: int, offset: int
) -> int:
    mapped = libc.mmap(address, size, protection, flags, file, offset)
    if mapped == FAILED:
        raise _error()
    return int(mapped)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _load_libc() -> Any:
    """Return the C library; None on systems other than 64-bit Linux, and if it is too old."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return None
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "memfd_create"):
        return None
    size, offset, pointer = ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p
    library.mmap.argtypes = (pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset)
    library.mmap.restype = pointer
    library.munmap.argtypes = (pointer, size)
    library.madvise.argtypes = (pointer, size, ctypes.c_int)
    library.memfd_create.argtypes = (ctypes.c_char_p, ctypes.c_uint)
    library.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, offset, offset)
    return library


libc = _load_libc()
