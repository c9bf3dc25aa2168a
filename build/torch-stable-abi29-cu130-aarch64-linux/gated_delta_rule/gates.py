"""Gate activations of the GatedDeltaNet layer, in float32 (float64 for float64 inputs) whatever the parameters' dtype."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Optional[Tensor]) -> Tensor:
    """-exp(A_log) * softplus(a + dt_bias), the log decay g of [B, T, HV]; A_log = -inf gives 0, a head that never forgets."""
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    a = a.to(dtype)
    if dt_bias is not None:
        a = a + dt_bias.to(dtype)
    return -A_log.to(dtype).exp() * F.softplus(a)


def writing_strength(b: Tensor, allow_neg_eigval: bool) -> Tensor:
    """sigmoid(b), or 2 sigmoid(b) where negative eigenvalues of the transition are allowed."""
    dtype = torch.float64 if b.dtype == torch.float64 else torch.float32
    beta = b.to(dtype).sigmoid()
    return 2 * beta if allow_neg_eigval else beta
