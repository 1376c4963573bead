# mypy: disable-error-code="untyped-decorator,no-any-return,no-untyped-def"
"""What Numba lacks for kernels over raw memory: loads and stores at addresses, bfloat16, atomics, a vectorisable exp.

Addresses are int64; indices count elements. All of these compile to a few instructions, most of them vectorised by LLVM.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import float32, int32, int64, njit, types
from numba.extending import intrinsic

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _at(builder: Any, element: Any, address: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [index])


@intrinsic
def address_of(typingctx: Any, pointer: Any) -> Any:
    """A void pointer as an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], _I64)

    return int64(types.voidptr), codegen


@intrinsic
def load_i64(typingctx: Any, address: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(builder, _I64, *args))

    return int64(int64, int64), codegen


@intrinsic
def load_i32(typingctx: Any, address: Any, index: Any) -> Any:
    """An int32, as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(_at(builder, _I32, *args)), _I64)

    return int64(int64, int64), codegen


@intrinsic
def load_f32(typingctx: Any, address: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(builder, _F32, *args))

    return float32(int64, int64), codegen


@intrinsic
def store_f32(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _at(builder, _F32, args[0], args[1]))
        return context.get_dummy_value()

    return types.void(int64, int64, float32), codegen


@intrinsic
def _load_bf16(typingctx: Any, address: Any, index: Any) -> Any:
    """A bfloat16 is the upper half of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = builder.zext(builder.load(_at(builder, _I16, *args)), _I32)
        return builder.bitcast(builder.shl(half, ir.Constant(_I32, 16)), _F32)

    return float32(int64, int64), codegen


@intrinsic
def _store_bf16(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Rounds to nearest, ties to even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[2], _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
        half = builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)
        builder.store(half, _at(builder, _I16, args[0], args[1]))
        return context.get_dummy_value()

    return types.void(int64, int64, float32), codegen


@njit(inline="always")
def load(address: int, index: int, is_bf16: bool) -> float:
    """Element `index` of an array of bfloat16 or float32, as float32."""
    if is_bf16:
        return _load_bf16(address, index)
    return load_f32(address, index)


@njit(inline="always")
def store(address: int, index: int, value: float, is_bf16: bool) -> None:
    """Write a float32 into an array of bfloat16 or float32."""
    if is_bf16:
        _store_bf16(address, index, value)
    else:
        store_f32(address, index, value)


def _move_16(builder: Any, element: Any, args: Any, convert: Any = None) -> None:
    """Load 16 elements at (args[0], args[1]), store them, converted or not, at (args[2], args[3]).

    Explicit vectors: LLVM sees no relation between two addresses and would copy a short run number by number.
    """
    align = 2 if element is _I16 else 4
    source = builder.bitcast(_at(builder, element, args[0], args[1]), ir.VectorType(element, 16).as_pointer())
    values = builder.load(source, align=align)
    if convert is not None:
        element, align, values = _F32, 4, convert(builder, values)
    target = builder.bitcast(_at(builder, element, args[2], args[3]), ir.VectorType(element, 16).as_pointer())
    builder.store(values, target, align=align)


def _widen(builder: Any, halves: Any) -> Any:
    wide = builder.zext(halves, ir.VectorType(_I32, 16))
    shift = ir.Constant(ir.VectorType(_I32, 16), [16] * 16)
    return builder.bitcast(builder.shl(wide, shift), ir.VectorType(_F32, 16))


@intrinsic
def _copy_16_f32(typingctx: Any, source: Any, index: Any, target: Any, target_index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _move_16(builder, _F32, args)
        return context.get_dummy_value()

    return types.void(int64, int64, int64, int64), codegen


@intrinsic
def _copy_16_bf16(typingctx: Any, source: Any, index: Any, target: Any, target_index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _move_16(builder, _I16, args)
        return context.get_dummy_value()

    return types.void(int64, int64, int64, int64), codegen


@intrinsic
def _widen_16_bf16(typingctx: Any, source: Any, index: Any, target: Any, target_index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _move_16(builder, _I16, args, _widen)
        return context.get_dummy_value()

    return types.void(int64, int64, int64, int64), codegen


@njit(inline="always")
def copy_16(source, index, target, target_index, is_bf16):
    """16 elements from one array to another of the same kind."""
    if is_bf16:
        _copy_16_bf16(source, index, target, target_index)
    else:
        _copy_16_f32(source, index, target, target_index)


@njit(inline="always")
def widen_16(source, index, target, target_index, is_bf16):
    """16 elements of bfloat16 or float32 into an array of float32."""
    if is_bf16:
        _widen_16_bf16(source, index, target, target_index)
    else:
        _copy_16_f32(source, index, target, target_index)


@intrinsic
def fetch_add(typingctx: Any, address: Any, index: Any, amount: Any) -> Any:
    """Add atomically to an int64; the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _at(builder, _I64, args[0], args[1]), args[2], "acq_rel")

    return int64(int64, int64, int64), codegen


@intrinsic
def _load_acquire(typingctx: Any, address: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_at(builder, _I64, *args), "acquire", 8)

    return int64(int64, int64), codegen


_sched_yield = types.ExternalFunction("sched_yield", int32())
_SPINS = 2000  # some microseconds: as long as items take when every thread has a core to itself


@njit
def wait_until(address: int, index: int, target: int) -> None:
    """Wait until the int64 has reached `target`: others have finished the items that they claimed."""
    spins = 0
    while _load_acquire(address, index) < target:
        spins += 1
        if spins > _SPINS:
            _sched_yield()  # the other thread may be waiting for this core


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at `address`; any address is harmless."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        read, keep, data = (ir.Constant(_I32, value) for value in (0, 2, 1))
        builder.call(function, [pointer, read, keep, data])
        return context.get_dummy_value()

    return types.void(int64), codegen


@intrinsic
def sum_of(typingctx: Any, a: Any, b: Any) -> Any:
    """a + b in a sum whose order is left to the compiler: what lets a reduction run in vector lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args, flags=["reassoc", "contract"])

    return float32(float32, float32), codegen


@intrinsic
def _nearest(typingctx: Any, value: Any) -> Any:
    """The nearest integer, as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [_F32]), args)

    return float32(float32), codegen


@intrinsic
def _power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2 ** exponent for a float32 that holds an integer in [-126, 127]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(builder.fptosi(args[0], _I32), ir.Constant(_I32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(_I32, 23)), _F32)

    return float32(float32), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return float32(float32, float32, float32), codegen


_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has so few bits that its product with the exponent is exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LIMIT = np.float32(87.0)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / math.factorial(k)) for k in range(2, 8))


@njit(inline="always")
def exp_f32(x):
    """e ** x within 2e-7 relative, clamped beyond |x| = 87: 2 ** n * e ** r, the latter by its Taylor series."""
    x = x if x > -_LIMIT else -_LIMIT  # not max(): its care for NaN would keep the loop from being vectorised
    x = x if x < _LIMIT else _LIMIT
    n = _nearest(x * _LOG2_E)
    r = fma(n, -_LN2_HIGH, x)
    r = fma(n, -_LN2_LOW, r)
    p = fma(_C7, r, _C6)
    p = fma(p, r, _C5)
    p = fma(p, r, _C4)
    p = fma(p, r, _C3)
    p = fma(p, r, _C2)
    p = fma(p, r, float32(1.0))
    p = fma(p, r, float32(1.0))
    return p * _power_of_two(n)
