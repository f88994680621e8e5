"""How every numba kernel of the project is compiled: without the GIL, and cached on disk.

Four decorators, so that what is given up is visible at each kernel: `kernel` gives up nothing (anything that tests
for NaN or infinity needs that), `kernel_fast` lets the compiler reorder sums, which is what makes dot products use the
whole vector unit, `kernel_hot` and `kernel_inner` also leave out numba's reference counts.

Numba's cache looks only at the file of the kernel that is called, not at those whose kernels it inlines. So the cache
lies in a directory named by the content of all files that kernels are made of: an edit or an upgrade never runs an old
one.
"""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import config, njit

# A file with this imports the decorators below, or numba itself.
HOLDS_KERNELS = re.compile(rb"^from (trainer\.kernel|numba[.\w]*) import |^from trainer import .*kernels", re.MULTILINE)
IMPORTED = re.compile(rb"^from trainer\.(\w+) import ", re.MULTILINE)

F = TypeVar("F", bound=Callable[..., object])


def _cache_directory() -> Path:
    """Beside this file, or in the user's cache where that cannot be written (an installation of root's)."""
    package = Path(__file__).parent
    sources = {path.stem: path.read_bytes() for path in sorted(package.glob("*.py"))}
    kernels = {name for name, source in sources.items() if HOLDS_KERNELS.search(source)}
    # Kernels keep the constants that they import, so the files they come from count too.
    used = {name.decode() for holder in kernels for name in IMPORTED.findall(sources[holder])}
    digest = hashlib.sha256(b"".join(sources[name] for name in sorted(kernels | used & set(sources))))
    beside = package / "__pycache__"
    writable = os.access(beside if beside.is_dir() else package, os.W_OK)
    root = beside if writable else Path.home() / ".cache" / "livebed"
    return root / f"kernels-{digest.hexdigest()[:16]}"


CACHE = Path(config.CACHE_DIR or _cache_directory())  # type: ignore[attr-defined]  # numba sets it at run time
config.CACHE_DIR = str(CACHE)  # type: ignore[attr-defined]


def kernel(function: F) -> F:
    """Compile to machine code with exact IEEE arithmetic; runs without the GIL."""
    return cast("F", njit(nogil=True, cache=True, error_model="numpy")(function))


def kernel_fast(function: F) -> F:
    """Compile to machine code with reordered float sums; must not be asked about NaN."""
    return cast("F", njit(nogil=True, cache=True, error_model="numpy", fastmath=True)(function))


def kernel_hot(function: F) -> F:
    """`kernel_fast` without numba's reference counts, for code that works in scratch and allocates nothing.

    An array slice costs two atomic counts otherwise, and a tuple of arrays two for each: they were 60 % of the time of
    learning an event. Allocating inside (or `a[:] = b`, which may copy) is an error when it is compiled.
    """
    options: dict[str, Any] = {"_nrt": False, "no_cfunc_wrapper": True}  # options that numba leaves out of its types
    return cast("F", njit(nogil=True, cache=True, error_model="numpy", fastmath=True, **options)(function))


def kernel_inner(function: F) -> F:
    """`kernel_hot` for functions of tuples of arrays that only other kernels call.

    They get no entry from Python, which took half of the compiler's time: calling one from Python crashes the process.
    """
    options: dict[str, Any] = {"_nrt": False, "no_cfunc_wrapper": True, "no_cpython_wrapper": True}
    return cast("F", njit(nogil=True, cache=True, error_model="numpy", fastmath=True, **options)(function))
