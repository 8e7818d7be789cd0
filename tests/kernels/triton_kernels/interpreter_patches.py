"""Makes Triton's interpreter right for bfloat16, and quicker. For tests only; `install()` before the first launch.

The interpreter keeps bfloat16 as uint16 and computes on those: products are off by 1e11, and casts truncate. Here they
go through float32 and round to nearest even, as the hardware's do. Its nested calls patch `triton.language` again each
time, which is most of a small launch; once is enough.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_installed = False


def _to_float32(bits: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bfloat16(handle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widened(handle):
    return interpreter.TensorHandle(_to_float32(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _wrapped(values: np.ndarray):
    if values.dtype == bool:
        return interpreter.TensorHandle(values, tl.int1)
    return interpreter.TensorHandle(_to_bfloat16(values), tl.bfloat16)


def install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    builder = interpreter.InterpreterBuilder
    convert, dot, binary, unary = interpreter._convert_float, builder.create_dot, builder.binary_op, builder.unary_op
    nearest_even = (None, interpreter._ir.ROUNDING_MODE.RTNE)

    def convert_float(values, source, target, rounding):
        if (source, target) == (tl.bfloat16, tl.float32):
            return _to_float32(values).view(np.uint32)
        if (source, target) == (tl.float32, tl.bfloat16) and rounding in nearest_even:
            return _to_bfloat16(values)
        return convert(values, source, target, rounding)

    def create_dot(self, a, b, acc, *rest):
        return dot(self, _widened(a), _widened(b), acc, *rest)

    def binary_op(self, left, right, op):
        if not _is_bfloat16(left):
            return binary(self, left, right, op)
        return _wrapped(op(_to_float32(left.data), _to_float32(right.data)))

    def unary_op(self, value, op):
        return _wrapped(op(_to_float32(value.data))) if _is_bfloat16(value) else unary(self, value, op)

    interpreter._convert_float = convert_float
    builder.create_dot, builder.binary_op, builder.unary_op = create_dot, binary_op, unary_op
    _patch_language_once()


def _patch_language_once() -> None:
    patched = False

    def call(self, *args, **kwargs):
        nonlocal patched
        if not patched and not any(value is tl for value in self.fn.__globals__.values()):
            interpreter._patch_lang(self.fn)
            patched = True
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
