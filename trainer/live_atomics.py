"""Loads, stores and fences with a memory order, for kernels that share memory with another process; prefetch and yield.

Plain loads and stores are no memory model: a compiler or processor may reorder them. On x86, acquire and release only
bind the compiler and cost nothing; elsewhere they are what makes a seqlock one. Elements are of any integer type:

    load(array, index)    load_acquire(array, index)    store(array, index, value)    store_release(array, index, value)
"""

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Pointer to one element of a C-contiguous array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _loader(order: str) -> Callable[..., Any]:
    def load(typing_context: Any, array: Any, index: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = _element(context, builder, signature.args[0], args[0], args[1])
            return builder.load_atomic(pointer, order, array.dtype.bitwidth // 8)

        return array.dtype(array, types.int64), build

    return load


def _storer(order: str) -> Callable[..., Any]:
    def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = _element(context, builder, signature.args[0], args[0], args[1])
            builder.store_atomic(args[2], pointer, order, array.dtype.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(array, types.int64, array.dtype), build

    return store


def _fencer(order: str) -> Callable[..., Any]:
    def fence(typing_context: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.fence(order)
            return context.get_dummy_value()

        return types.void(), build

    return fence


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        int32, byte_pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        signature_llvm = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
        llvm_prefetch = cgutils.get_or_insert_function(builder.module, signature_llvm, "llvm.prefetch.p0")
        pointer = builder.bitcast(_element(context, builder, signature.args[0], args[0], args[1]), byte_pointer)
        for_reading, keep_in_all_levels, of_data = int32(0), int32(3), int32(1)
        builder.call(llvm_prefetch, [pointer, for_reading, keep_in_all_levels, of_data])
        return context.get_dummy_value()

    return types.void(array, types.int64), build


# Called as functions rather than used as decorators: numba is untyped, and these are the types that kernels see.
load: Callable[[npt.NDArray[Any], int], int] = intrinsic(_loader("monotonic"))
load_acquire: Callable[[npt.NDArray[Any], int], int] = intrinsic(_loader("acquire"))
store: Callable[[npt.NDArray[Any], int, Any], None] = intrinsic(_storer("monotonic"))
store_release: Callable[[npt.NDArray[Any], int, Any], None] = intrinsic(_storer("release"))
fence_acquire: Callable[[], None] = intrinsic(_fencer("acquire"))
fence_release: Callable[[], None] = intrinsic(_fencer("release"))
prefetch: Callable[[npt.NDArray[Any], int], None] = intrinsic(_prefetch)
sched_yield: Callable[[], int] = types.ExternalFunction("sched_yield", types.int32())
