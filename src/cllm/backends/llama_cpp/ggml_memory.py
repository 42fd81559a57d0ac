"""Gives llama.cpp's KV caches either reserved addresses without memory, or memory that is zero
already.

llama.cpp has no parameter for the memory of its KV cache. ``intercept`` therefore replaces, while a
context is being created, the function with which ggml allocates memory on CPUs.
It uses private structures of the version that library.py requires, and checks them.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.mappings import PAGE, libc, release, renew_pages, reserve
from cllm.backends.llama_cpp.paged_memory import NotPaged, Rows

# positions of pointers in ggml's private structures, see ggml-backend-impl.h
BUFT_GET_NAME, BUFT_ALLOC = 0, 1
BUFFER_GET_BASE, BUFFER_INIT, BUFFER_SET, BUFFER_CLEAR = 1, 2, 4, 9
BUFFER_CONTEXT, BUFFER_SIZE = 12, 13

Pointer = ctypes.c_void_p
AllocBuffer = ctypes.CFUNCTYPE(Pointer, Pointer, ctypes.c_size_t)
GetName = ctypes.CFUNCTYPE(ctypes.c_char_p, Pointer)
GetBase = ctypes.CFUNCTYPE(Pointer, Pointer)
InitTensor = ctypes.CFUNCTYPE(ctypes.c_int, Pointer, Pointer)
SetTensor = ctypes.CFUNCTYPE(None, Pointer, Pointer, Pointer, ctypes.c_size_t, ctypes.c_size_t)
Clear = ctypes.CFUNCTYPE(None, Pointer, ctypes.c_uint8)

CACHE = b"cache_"  # how names of tensors of caches begin
RECURRENT = (b"cache_r_l", b"cache_s_l")  # those of recurrent states
NEW_PAGES_BYTES = 32 << 20  # smaller buffers are filled in a few milliseconds
# An allocation of an unexpected size may be the KV cache, all of which llama.cpp would clear. It is
# refused if it is larger than this and than the memory that may be used.
MAX_UNEXPECTED_BYTES = 1 << 30


class GgmlTensor(ctypes.Structure):
    """The beginning of ggml_tensor of ggml.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", Pointer),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", Pointer * 10),
        ("view_src", Pointer),
        ("view_offs", ctypes.c_size_t),
        ("data", Pointer),
        ("name", ctypes.c_char * 64),
    )


class StateRows(NamedTuple):
    """A tensor of recurrent states, one in each row."""

    address: int
    row_bytes: int
    num_rows: int


class KVAddresses:
    """The addresses of a context's KV caches, to which nothing is mapped yet.

    llama.cpp's functions that clear a cache or write states to it have no effect on these. Their
    memory is zero when it is mapped.
    """

    def __init__(self, num_streams: int, sizes: list[int], max_bytes: int) -> None:
        """Reserve addresses for the caches, of ``sizes`` bytes, for which llama.cpp will ask.

        Memory of at most ``max_bytes`` may be used. Pass this object to ``intercept``, then call
        ``find_rows``.
        """
        self._num_streams = num_streams
        self._expected = [(cache, size) for cache, size in enumerate(sizes) if size]
        self._num_bytes = sum(sizes)
        self._max_bytes = max_bytes
        self._others = NewPages()
        self._base = 0
        self._caches: dict[int, int] = {}  # by the addresses of ggml's buffers
        self._rows: list[Rows] = []
        # kept as long as ggml's buffer has pointers to them
        self._callbacks = {
            BUFFER_INIT: InitTensor(self._register),
            BUFFER_SET: SetTensor(do_nothing),
            BUFFER_CLEAR: Clear(do_nothing),  # its memory is zero already
        }

    def allocate(self, buffer_type: int, size: int) -> int | None:
        """Return a buffer of ``size`` bytes for ggml; None if there is too little memory."""
        done = self._expected[: len(self._caches)]
        cache, expected = self._expected[len(done)] if done != self._expected else (0, 0)
        if size != expected:
            if size > max(self._max_bytes, MAX_UNEXPECTED_BYTES):  # another size than expected
                return None
            return self._others.allocate(buffer_type, size)
        try:
            self._base = self._base or reserve(self._num_bytes)
        except OSError:
            return None
        address = self._base + sum(taken for _, taken in done)
        buffer: int = ggml.ggml_backend_cpu_buffer_from_ptr(address, size)
        for at, callback in self._callbacks.items():
            functions_of(buffer)[at] = ctypes.cast(callback, Pointer).value
        self._caches[buffer] = cache
        return buffer

    def _register(self, buffer: int, address: int) -> int:
        tensor = GgmlTensor.from_address(address)
        if not tensor.view_src:
            offset = sum(rows.stream_bytes for rows in self._rows)
            _, row_bytes, stream_bytes, _ = tensor.nb
            place = tensor.name, tensor.data or 0, stream_bytes, row_bytes, tensor.type, offset
            self._rows.append(Rows(*place, self._caches[buffer]))
        return 0

    def find_rows(self) -> list[Rows]:
        """Return the rows of all tensors, after the context was created.

        Raises NotPaged if llama.cpp has put them elsewhere.
        """
        end = self._base
        for rows in self._rows:
            if rows.address != end or rows.stream_bytes % rows.row_bytes:
                raise NotPaged("llama.cpp arranges the KV cache in another way")
            end += rows.stream_bytes * self._num_streams
        if not self._rows or end != self._base + self._num_bytes:
            raise NotPaged("llama.cpp allocates another KV cache than expected")
        # ggml would also call it for views of the tensors, many in each step
        for buffer in self._caches:
            functions_of(buffer)[BUFFER_INIT] = None
        return self._rows

    def close(self) -> None:
        """Remove all mappings, after llama.cpp has freed the context."""
        if self._base:
            release(self._base, self._num_bytes)
        self._base = 0


class NewPages:
    """Memory that is already zero, so that llama.cpp need not clear it.

    The system provides a page when it is first used. So a KV cache takes memory only for the tokens
    that it has had, and a buffer for logits only for the rows that it has had. If an allocator
    returns memory that was used before, its pages are renewed.

    ``recurrent`` are the tensors in such memory with the recurrent states of the last context.
    """

    def __init__(self) -> None:
        self.recurrent: list[StateRows] = []
        # kept as long as ggml's buffers have pointers to them
        self._clear, self._init = Clear(self._stop), InitTensor(self._register)

    def allocate(self, buffer_type: int, size: int) -> int | None:
        """Return a buffer of ``size`` bytes for ggml; None if there is too little memory."""
        buffer = _allocate_with_ggml(buffer_type, size)
        if buffer is not None and size >= NEW_PAGES_BYTES:
            functions = functions_of(buffer)
            address = GetBase(functions[BUFFER_GET_BASE] or 0)(buffer)
            if renew_pages(address, size):
                functions[BUFFER_CLEAR] = ctypes.cast(self._clear, Pointer).value
                functions[BUFFER_INIT] = ctypes.cast(self._init, Pointer).value
        return buffer

    def _register(self, buffer: int, address: int) -> int:
        tensor = GgmlTensor.from_address(address)
        if tensor.name.startswith(RECURRENT) and not tensor.view_src:
            self.recurrent.append(StateRows(tensor.data or 0, tensor.nb[1], tensor.ne[1]))
        elif not tensor.name.startswith(CACHE):
            self._stop(buffer)  # it is no cache
        return 0

    def _stop(self, buffer: int, _: int = 0) -> None:
        """Register no more tensors; ggml would call it for many in each step. The cache is complete
        when llama.cpp clears it.
        """
        functions_of(buffer)[BUFFER_INIT] = None


def functions_of(buffer: int) -> ctypes.Array[Pointer]:
    """Return the functions of one of ggml's buffers, which can be replaced."""
    return (Pointer * 11).from_address(buffer)


def do_nothing(*_: object) -> None:
    pass


class Allocator(Protocol):
    def allocate(self, buffer_type: int, size: int) -> int | None:
        """Return a buffer of ``size`` bytes for ggml; None if there is too little memory."""
        ...


@contextmanager
def intercept(allocator: Allocator) -> Iterator[None]:
    """Make ggml take CPU memory for this thread from ``allocator`` inside the ``with`` block, if
    that is supported.
    """
    global _interceptor  # noqa: PLW0603  # ggml has one function for all threads
    if not is_supported():
        yield
        return
    with _lock:
        _interceptor = allocator, threading.get_ident()
        _functions[BUFT_ALLOC] = ctypes.cast(_hook, Pointer).value
        try:
            yield
        finally:
            _functions[BUFT_ALLOC] = _ggml_alloc
            _interceptor = None


def is_supported() -> bool:
    """Return whether this is Linux and ggml has the structures that this module expects."""
    return ggml is not None


def _load_ggml() -> Any:
    """Return ggml's functions; None if its structures are not those of ggml-backend-impl.h."""
    library = lib._lib  # noqa: SLF001  # these functions have no binding
    try:
        library.ggml_backend_cpu_buffer_type.restype = Pointer
        library.ggml_backend_cpu_buffer_from_ptr.restype = Pointer
        library.ggml_backend_cpu_buffer_from_ptr.argtypes = (Pointer, ctypes.c_size_t)
        library.ggml_backend_buffer_free.argtypes = (Pointer,)
        library.ggml_backend_buffer_free.restype = None
    except AttributeError:
        return None
    buffer_type = library.ggml_backend_cpu_buffer_type()
    functions = (Pointer * 6).from_address(buffer_type)
    if GetName(functions[BUFT_GET_NAME] or 0)(buffer_type) != b"CPU":
        return None
    memory = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    buffer = library.ggml_backend_cpu_buffer_from_ptr(address, PAGE)
    fields = (Pointer * 14).from_address(buffer)
    is_known = fields[BUFFER_CONTEXT] == address and fields[BUFFER_SIZE] == PAGE
    is_known = is_known and GetBase(fields[BUFFER_GET_BASE] or 0)(buffer) == address
    library.ggml_backend_buffer_free(buffer)
    return library if is_known else None


def _allocate_for_ggml(buffer_type: int, size: int) -> int | None:
    """Allocate memory for ggml. Threads that do not create this context also call this."""
    interceptor = _interceptor
    if interceptor is None or interceptor[1] != threading.get_ident():
        return _allocate_with_ggml(buffer_type, size)
    return interceptor[0].allocate(buffer_type, size)


def _allocate_with_ggml(buffer_type: int, size: int) -> int | None:
    buffer: int | None = AllocBuffer(_ggml_alloc)(buffer_type, size)
    return buffer


_lock = threading.Lock()
_interceptor: tuple[Allocator, int] | None = None
ggml: Any = None
if libc is not None and (ggml := _load_ggml()) is not None:
    _functions = (Pointer * 6).from_address(ggml.ggml_backend_cpu_buffer_type())
    _ggml_alloc = _functions[BUFT_ALLOC] or 0
    _hook = AllocBuffer(_allocate_for_ggml)  # takes the place of _ggml_alloc
