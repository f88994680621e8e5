"""How every numba kernel of the project is compiled: without the GIL and cached on disk.

Two decorators, so that the one place where IEEE rules are given up is visible at each kernel:
`kernel` keeps them (anything that tests for NaN or infinity needs that), `kernel_fast` lets the
compiler reorder sums, which is what makes dot products use the whole vector unit.
"""

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile to machine code with exact IEEE arithmetic; runs without the GIL."""
    return cast("F", njit(nogil=True, cache=True, error_model="numpy")(function))


def kernel_fast(function: F) -> F:
    """Compile to machine code with reordered float sums; must not be asked about NaN."""
    return cast("F", njit(nogil=True, cache=True, error_model="numpy", fastmath=True)(function))
