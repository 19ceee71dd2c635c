"""A hint to the memory system, for kernels that know their random reads ahead of time."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["prefetch"]


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetches array[index]; numba has no function for it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        offset = context.cast(builder, args[1], signature.args[1], types.intp)
        byte_pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [byte_pointer, i32, i32, i32])
        call = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], shape)
        address = builder.bitcast(builder.gep(data, [offset]), byte_pointer)
        builder.call(call, [address, i32(0), i32(3), i32(1)])  # read, keep in all caches, data
        return context.get_dummy_value()

    return types.void(array, index), build
