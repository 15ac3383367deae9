"""What a collective accepts: contiguous numpy arrays and CPU tensors, seen as an address and a size.

Tensors are known by their methods and not by their class: nothing here imports torch.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


class TensorLike(Protocol):
    """The part of `torch.Tensor` that is used."""

    @property
    def dtype(self) -> Any: ...

    @property
    def device(self) -> Any: ...

    @property
    def nbytes(self) -> int: ...

    def data_ptr(self) -> int: ...

    def is_contiguous(self) -> bool: ...


Array: TypeAlias = NDArray[Any] | TensorLike


SumType: TypeAlias = Literal["float32", "bfloat16"]
_SUM_TYPES: dict[Any, SumType] = {np.float32: "float32", ml_dtypes.bfloat16: "bfloat16"}
_TENSOR_SUM_TYPES: dict[str, SumType] = {"torch.float32": "float32", "torch.bfloat16": "bfloat16"}


class Flat(NamedTuple):
    """Contiguous memory of one array."""

    address: int
    nbytes: int


def flatten(array: Array, *, write: bool = False) -> Flat:
    """The memory of `array`, which the caller keeps alive. `write` demands a writable one.

    Raises `TypeError` for what is neither an array nor a tensor, `ValueError` for one that is not
    contiguous, not writable or not in CPU memory.
    """
    if isinstance(array, np.ndarray):
        if not (array.flags.c_contiguous and array.flags.aligned):
            raise ValueError("a collective needs a contiguous, aligned array; pass np.ascontiguousarray(...)")
        if write and not array.flags.writeable:
            raise ValueError("this collective writes its array, which is read-only")
        return Flat(array.__array_interface__["data"][0], array.nbytes)
    if not hasattr(array, "data_ptr"):
        raise TypeError(f"a collective takes numpy arrays and CPU tensors, not {type(array).__name__}")
    if array.device.type != "cpu":
        raise ValueError(f"a shared-memory collective needs a CPU tensor, this one is on {array.device}")
    if not array.is_contiguous():
        raise ValueError("a collective needs a contiguous tensor; pass tensor.contiguous()")
    return Flat(array.data_ptr(), array.nbytes)


def reducible(array: Array) -> tuple[Flat, SumType]:
    """`flatten` for a sum in place. Raises `ValueError` unless the elements are fp32 or bf16."""
    flat = flatten(array, write=True)
    if isinstance(array, np.ndarray):
        kind = _SUM_TYPES.get(array.dtype.type)
    else:
        kind = _TENSOR_SUM_TYPES.get(str(array.dtype))
    if kind is None:
        raise ValueError(f"all_reduce sums float32 and bfloat16, not {array.dtype}")
    return flat, kind


def bytes_of(flat: Flat) -> NDArray[np.uint8]:
    """A writable view of the memory: uint8 [nbytes]."""
    if flat.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * flat.nbytes).from_address(flat.address))
