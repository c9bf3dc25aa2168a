"""What the operators share of torch.library and of the compiled ops: how one is defined and called, and what it can load."""

from typing import Callable, Optional

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix

BASE_ALIGNMENT = 16  # bytes of a vector load and of a tile's first address
NO_MEMORY = "could not allocate"  # how the library says that PyTorch's allocator failed


def define_op(
    name: str, function: Callable, fake: Callable, mutates_args=(), backward=None, setup_context=None
) -> None:
    """Define the op `name` of this build by `function`, with shapes by `fake`, and autograd if there is a `backward`.

    Not through `torch.library.custom_op`: its wrapper imports torch._dynamo at the first call, which takes seconds.
    """
    qualified = add_op_namespace_prefix(name)
    schema = torch.library.infer_schema(function, mutates_args=mutates_args)
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "default", function)
    torch.library.register_fake(qualified, fake)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context)


def call_op(op: Callable, *arguments):
    """What the compiled op returns. Lack of memory, of which its C interface cannot tell, is PyTorch's own error."""
    try:
        return op(*arguments)
    except RuntimeError as error:
        if NO_MEMORY in str(error):
            raise torch.OutOfMemoryError(str(error)) from None
        raise


def narrow_indices(indices: Optional[Tensor], rows: int) -> Optional[Tensor]:
    """Indices into `rows` rows as int32; what lies outside stays outside, where half of a 64-bit number may not."""
    if indices is None or indices.dtype == torch.int32:
        return aligned(indices)
    return indices.clamp(-1, rows).to(torch.int32)


def aligned(x: Optional[Tensor]) -> Optional[Tensor]:
    """x itself if it is contiguous at a 16-byte address, as a part of a flat buffer may not be; else a copy that is."""
    if x is None:
        return None
    copy = x.contiguous()
    return copy.clone() if copy.data_ptr() % BASE_ALIGNMENT else copy
