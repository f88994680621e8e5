"""Memory shared with another process, as kernels see it: loads and stores with a memory order, fences, prefetch.

Plain loads and stores are no memory model: a compiler or processor may reorder them. On x86, acquire and release only
bind the compiler and cost nothing; elsewhere they are what makes a seqlock one.

Addresses are plain integers in bytes, and everything here works on them rather than on arrays: numba counts references
to arrays with atomic instructions, which cost more than the reads themselves once a kernel is cut into functions.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 32  # bytes compared at once by `match_bytes`

_INT64, _INT32, _INT8, _BIT = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.IntType(1)
_BYTES = ir.VectorType(_INT8, LANES)


def _address_of(typing_context: Any, array: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, _INT64)

    return types.int64(array), build


def _loader(kind: Any, order: str) -> Callable[..., Any]:
    def load(typing_context: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(kind.bitwidth).as_pointer())
            return builder.load_atomic(pointer, order, kind.bitwidth // 8)

        return kind(types.int64), build

    return load


def _storer(kind: Any, order: str) -> Callable[..., Any]:
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(kind.bitwidth).as_pointer())
            builder.store_atomic(args[1], pointer, order, kind.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(types.int64, kind), build

    return store


def _fencer(order: str) -> Callable[..., Any]:
    def fence(typing_context: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.fence(order)
            return context.get_dummy_value()

        return types.void(), build

    return fence


def _prefetch(typing_context: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer_type = _INT8.as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [pointer_type, _INT32, _INT32, _INT32])
        function: Any = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call] # numba has no types for it
            builder.module, function_type, "llvm.prefetch.p0"
        )
        for_reading, into_all_levels, of_data = _INT32(0), _INT32(3), _INT32(1)
        builder.call(function, [builder.inttoptr(args[0], pointer_type), for_reading, into_all_levels, of_data])
        return context.get_dummy_value()

    return types.void(types.int64), build


def _copy_words(typing_context: Any, target: Any, source: Any, num_words: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(address, _INT8.as_pointer()) for address in args[:2])
        num_bytes = builder.shl(args[2], _INT64(2))
        cgutils.raw_memcpy(builder, target, source, num_bytes, 1)  # type: ignore[no-untyped-call] # no types for it
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


def _match_bytes(typing_context: Any, address: Any, byte: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = builder.load(builder.inttoptr(args[0], _BYTES.as_pointer()))
        loaded.align = 1
        undefined, zeros = ir.Constant(_BYTES, ir.Undefined), ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
        wanted = builder.shuffle_vector(builder.insert_element(undefined, args[1], _INT32(0)), undefined, zeros)
        bits = builder.bitcast(builder.icmp_unsigned("==", loaded, wanted), ir.IntType(LANES))
        return builder.zext(bits, _INT64)

    return types.int64(types.int64, types.uint8), build


def _first_bit(typing_context: Any, bits: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], _BIT(1))

    return types.int64(types.int64), build


# Called as functions rather than used as decorators: these are the types that kernels see.
address_of: Callable[[npt.NDArray[Any]], int] = cast("Any", intrinsic(_address_of))
load_u32: Callable[[int], int] = cast("Any", intrinsic(_loader(types.uint32, "monotonic")))
load_u32_acquire: Callable[[int], int] = cast("Any", intrinsic(_loader(types.uint32, "acquire")))
load_i64: Callable[[int], int] = cast("Any", intrinsic(_loader(types.int64, "monotonic")))
load_i64_acquire: Callable[[int], int] = cast("Any", intrinsic(_loader(types.int64, "acquire")))
store_u32: Callable[[int, int], None] = cast("Any", intrinsic(_storer(types.uint32, "monotonic")))
store_u32_release: Callable[[int, int], None] = cast("Any", intrinsic(_storer(types.uint32, "release")))
store_i64: Callable[[int, int], None] = cast("Any", intrinsic(_storer(types.int64, "monotonic")))
store_i64_release: Callable[[int, int], None] = cast("Any", intrinsic(_storer(types.int64, "release")))
fence_acquire: Callable[[], None] = cast("Any", intrinsic(_fencer("acquire")))
fence_release: Callable[[], None] = cast("Any", intrinsic(_fencer("release")))
prefetch: Callable[[int], None] = cast("Any", intrinsic(_prefetch))  # ask for the cache line at an address
copy_words: Callable[[int, int, int], None] = cast("Any", intrinsic(_copy_words))  # to, from, number of uint32
store_u8_release: Callable[[int, np.uint8], None] = cast("Any", intrinsic(_storer(types.uint8, "release")))
match_bytes: Callable[[int, np.uint8], int] = cast(
    "Any", intrinsic(_match_bytes)
)  # bit k: byte k from address is the one
first_bit: Callable[[int], int] = cast("Any", intrinsic(_first_bit))  # position of the lowest one; not for 0
sched_yield: Callable[[], int] = cast("Any", types.ExternalFunction("sched_yield", types.int32()))
