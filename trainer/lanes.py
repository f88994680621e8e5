"""Sums over vectors of which every lane is another row: how a net is evaluated for `LANES` rows at once.

The rows lie column by column, so that what all of them have as input k is one vector. A lane's sum is made of its own
row alone, by the same operations in the same order in every lane and every group of units: a row's bits depend neither
on its neighbours nor on its place.

Addresses are plain integers in bytes, as in `live_atomics`.
"""
# ruff: noqa: PLR0917 -- kernels take addresses and numbers one by one: numba unpacks no objects.

from collections.abc import Callable
from typing import Any, cast

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

LANES = 16  # one vector of AVX-512, two of AVX2, four of NEON
VECTOR_BYTES = 4 * LANES
# Sums that are kept in registers at once: fewer wait for their own last multiply-add, more would not fit and be spilled
# (first layer of a 128-64-32 net, 112 rows, us: with AVX-512 4 units 28, 8 units 20; with AVX2 36 and 51).
UNITS = 8 if llvm.get_host_cpu_features().get("avx512f") else 4

_INT64, _INT32, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_ZEROS, _UNDEFINED = ir.Constant(_VECTOR, [0.0] * LANES), ir.Constant(_VECTOR, ir.Undefined)
_FIRST = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
_FLAGS = ("contract",)  # one instruction for a product and its sum, where there is one; no other order of sums


def _load(builder: Any, address: Any, kind: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 4
    return loaded


def _add_products(builder: Any, sums: list[Any], weights: Any, unit: Any, x: Any) -> list[Any]:
    """The sums, each with its unit's weight times the vector at x added."""
    inputs, added = _load(builder, x, _VECTOR), []
    for j, total in enumerate(sums):
        weight = _load(builder, builder.add(weights, builder.mul(unit, _INT64(j))), _FLOAT)
        spread = builder.shuffle_vector(builder.insert_element(_UNDEFINED, weight, _INT32(0)), _UNDEFINED, _FIRST)
        added.append(builder.fadd(total, builder.fmul(spread, inputs, flags=_FLAGS), flags=_FLAGS))
    return added


def _dotter(num_units: int) -> Callable[..., Any]:
    def dot(typing_context: Any, weights: Any, unit: Any, step: Any, num: Any, x: Any, out: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, unit, step, num, x, out = args
            before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.cbranch(builder.icmp_signed(">", num, _INT64(0)), loop, after)
            builder.position_at_end(loop)
            k, sums = builder.phi(_INT64), [builder.phi(_VECTOR) for _ in range(num_units)]
            at, x_at = builder.add(weights, builder.mul(k, step)), builder.add(x, builder.mul(k, _INT64(VECTOR_BYTES)))
            added, following = _add_products(builder, sums, at, unit, x_at), builder.add(k, _INT64(1))
            builder.cbranch(builder.icmp_signed("<", following, num), loop, after)
            builder.position_at_end(after)
            ends = [builder.phi(_VECTOR) for _ in range(num_units)]
            k.add_incoming(_INT64(0), before)
            k.add_incoming(following, loop)
            for j, (total, new, end) in enumerate(zip(sums, added, ends, strict=True)):
                for phi in (total, end):
                    phi.add_incoming(_ZEROS, before)
                    phi.add_incoming(new, loop)
                target = builder.add(out, _INT64(VECTOR_BYTES * j))
                builder.store(end, builder.inttoptr(target, _VECTOR.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), build

    return dot


# out[j] = sum over k of weight(j, k) * x[k], for one unit j or UNITS of them. Takes where the weights lie, the way from
# a unit's weight to the next one's and from an input's to the next one's, the number of inputs, where x and out lie.
dot_one: Callable[[int, int, int, int, int, int], None] = cast("Any", intrinsic(_dotter(1)))
dot_units: Callable[[int, int, int, int, int, int], None] = cast("Any", intrinsic(_dotter(UNITS)))
