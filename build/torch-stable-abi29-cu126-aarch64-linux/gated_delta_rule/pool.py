"""Pools of states on the PyTorch path: sequences take their states out, and put them back where they were."""

from typing import Callable, Optional

import torch
from torch import Tensor


@torch.no_grad()
def update(run: Callable, states: Tensor, state_indices: Optional[Tensor], cu_seqlens: Optional[Tensor]) -> Tensor:
    """o of all sequences, 0 for skipped ones; writes their final states back to the pool.

    Args:
        run: the chunk form with all arguments but `initial_state` and `output_final_state`.
        states: the pool [slots, ...], written in place.
        state_indices: [N]; a sequence whose index lies outside the pool is skipped. None: sequence n has the nth state.
        cu_seqlens: bounds of packed sequences, or None where each row of o is one.
    """
    if state_indices is None:
        o, final = run(initial_state=states, output_final_state=True)
        states.copy_(final)
        return o
    taken = (state_indices >= 0) & (state_indices < states.shape[0])
    if states.shape[0] == 0:
        initial = states.new_zeros(len(state_indices), *states.shape[1:])
    else:
        initial = states[torch.where(taken, state_indices, 0).long()]
    o, final = run(initial_state=initial, output_final_state=True)
    states[state_indices[taken].long()] = final[taken].to(states.dtype)
    return torch.where(_of_tokens(taken, o, cu_seqlens)[..., None, None], o, 0)


def _of_tokens(taken: Tensor, o: Tensor, cu_seqlens: Optional[Tensor]) -> Tensor:
    """Whether the token's sequence is taken, [B, T]; false for tokens that no sequence has."""
    if cu_seqlens is None:
        return taken[:, None].expand(o.shape[:2])
    tokens = torch.arange(o.shape[1], device=o.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    padded = torch.cat([taken, taken.new_zeros(1)])
    return padded[sequence.clamp(max=len(taken))][None]
