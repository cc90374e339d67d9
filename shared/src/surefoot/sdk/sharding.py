"""What a rank holds of a tensor: all of it, or the local chunk of a DTensor.

FSDP2, HSDP and tensor parallelism all keep DTensors, whose local chunk is a box of the whole tensor. Everything else
in the sdk sees local memory and boxes only.

torch.distributed.tensor takes half a second to import, which a restart of a job without it must not pay: it is looked
for among the modules that the script has imported, without which there can be no DTensor.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from surefoot.checkpoint.layout import TensorSpec
from surefoot.checkpoint.regions import Box
from surefoot.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether `fully_shard` (FSDP2) was applied to a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def local_part(tensor: Tensor) -> Tensor:
    """Return the memory that this rank holds of a tensor; no copy."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_box(name: str, tensor: Tensor) -> Box:
    """Return which region of the tensor `local_part` is.

    Raises:
        UsageError: it is a summand of the tensor and not a part of it; names it.
    """
    if not is_sharded(tensor):
        return Box.whole(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(name, f"is a DTensor placed as {tensor.placements}; a checkpoint takes Shard and Replicate")
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if len(offset) != len(shape):  # this rank is not in the tensor's mesh
        shape = offset = (0,) * tensor.dim()
    return Box(tuple(offset), tuple(shape))


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Describe what this rank holds of a tensor, as it would lie in a shard.

    Raises:
        UsageError: a dtype that safetensors does not know, or a DTensor that is neither sharded nor replicated.
    """
    if tensor.dtype not in DTYPE_NAMES:
        raise UsageError(name, f"has dtype {tensor.dtype}, which a checkpoint cannot hold")
    box, whole = local_box(name, tensor), tuple(tensor.shape)
    if box.shape == whole:
        return TensorSpec(name, DTYPE_NAMES[tensor.dtype], whole)
    return TensorSpec(name, DTYPE_NAMES[tensor.dtype], box.shape, whole, box.offset)


def tensor_over(view: memoryview, spec: TensorSpec) -> Tensor:
    """Return a tensor that lies in `view`, which must be writable memory; no copy."""
    dtype = DTYPES[spec.dtype]
    if not view.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype).view(spec.shape)
