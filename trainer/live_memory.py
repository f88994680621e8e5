"""A file mapped at a huge page's boundary, so that Linux can back it with huge pages where it knows how (tmpfs does).

Rows are read at random: with pages of 4 KiB nearly every read also misses the TLB (35 ns a row, 30 with huge pages).
Python's mmap lets no one choose the address, hence the system calls.
"""

import ctypes
import mmap
import os
import weakref

HUGE_BYTES = 2 << 20
_MAP_FIXED = 0x10  # missing in Python's mmap; the same on all processors we know wheels for
_MADV_COLLAPSE = 25  # Linux 6.1: make these pages huge now, whatever the system's default

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(descriptor: int, num_bytes: int, *, writable: bool) -> memoryview:
    """Map the first `num_bytes` of an open file, shared; unmapped when nothing refers to it. Raises OSError.

    A writable mapping makes the file's pages huge, which must exist by then (`posix_fallocate`).
    """
    reserved = _mmap(None, num_bytes + HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-reserved // HUGE_BYTES) * HUGE_BYTES
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        _mmap(start, num_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(reserved, num_bytes + HUGE_BYTES)
        raise
    if writable:
        _libc.madvise(start, num_bytes, _MADV_COLLAPSE)  # where it fails, pages are small and reads slower
    memory = (ctypes.c_char * num_bytes).from_address(start)
    weakref.finalize(memory, _libc.munmap, reserved, num_bytes + HUGE_BYTES).atexit = False
    view = memoryview(memory).cast("B")
    return view if writable else view.toreadonly()


def _mmap(address: int | None, num_bytes: int, access: int, flags: int, descriptor: int) -> int:
    mapped: int = _libc.mmap(address, num_bytes, access, flags, descriptor, 0)
    if mapped == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return mapped
