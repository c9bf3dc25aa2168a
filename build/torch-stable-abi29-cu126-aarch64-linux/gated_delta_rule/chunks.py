"""Tokens into chunks and back, for dense rows and for a packed row, and the tables of states at the ends of sequences.

Both classes answer the same calls. A chunk tensor is [n, L, H, C, D] (or [n, L, H, C] for gates) for chunks
`start:stop`, L lanes (batch rows, or 1 for a packed row) and C rows a chunk; rows without a token are zero. A state is
[L * HV, K, V]. Nothing here reads a tensor back to the host unless that tensor is on the CPU, so a packed call can be
captured in a CUDA graph and replayed with other `cu_seqlens` of the same total.
"""

from typing import Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from . import plan


class DenseChunks:
    """Every batch row is one sequence of `num_tokens`."""

    def __init__(self, batch: int, num_tokens: int, length: int):
        self.lanes = batch
        self.num_tokens = num_tokens
        self.length = length
        self.count = plan.num_chunks(num_tokens, None, length)

    def load(self, x: Tensor, start: int, stop: int) -> Tensor:
        rows = x[:, start * self.length : stop * self.length]
        missing = (stop - start) * self.length - rows.shape[1]
        rows = F.pad(rows, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else rows
        return rows.unflatten(1, (stop - start, self.length)).movedim(1, 0).transpose(2, 3)

    def zeros_like(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    def store(self, out: Tensor, chunks: Tensor, start: int, stop: int) -> None:
        rows = out[:, start * self.length : stop * self.length]
        rows.copy_(chunks.transpose(2, 3).movedim(0, 1).flatten(1, 2)[:, : rows.shape[1]])

    def result(self, out: Tensor) -> Tensor:
        return out

    def state_table(self, state: Optional[Tensor], shape: tuple, like: Tensor) -> Tensor:
        """A fresh table that holds `state` [B, HV, K, V], or zeros."""
        table = like.new_zeros(self.lanes, *shape)
        return table if state is None else table.copy_(state)

    def states(self, table: Tensor) -> Tensor:
        return table

    def enter_first(self, chunk: int, state: Tensor, table: Tensor) -> Tensor:
        return table.flatten(0, 1) if chunk == 0 else state

    def leave_first(self, chunk: int, state: Tensor, table: Tensor) -> None:
        if chunk == 0:
            table.copy_(state.view_as(table))

    def enter_last(self, chunk: int, state: Tensor, table: Tensor) -> Tensor:
        return table.flatten(0, 1) if chunk == self.count - 1 else state

    def leave_last(self, chunk: int, state: Tensor, table: Tensor) -> None:
        if chunk == self.count - 1:
            table.copy_(state.view_as(table))


class PackedChunks:
    """One row holds the sequences `cu_seqlens[n]:cu_seqlens[n + 1]`; a chunk never spans two of them.

    `token` [NC * C] is the token of each chunk row, T where there is none. `first` and `last` [NC] name the sequence that
    starts or ends with the chunk, N where none does; row N of a state table takes what nobody reads.
    """

    lanes = 1

    def __init__(self, cu_seqlens: Tensor, num_tokens: int, length: int):
        cu = cu_seqlens.long()
        self.num_tokens, self.length, self.num_sequences = num_tokens, length, cu.numel() - 1
        bound = plan.num_chunks(num_tokens, self.num_sequences, length)
        ends = ((cu[1:] - cu[:-1] + length - 1) // length).cumsum(0)
        chunk = torch.arange(bound, device=cu.device)
        sequence = torch.searchsorted(ends, chunk, right=True)
        behind = sequence == self.num_sequences
        starts = F.pad(ends, (1, 0))
        within = chunk - starts[sequence]
        row = within[:, None] * length + torch.arange(length, device=cu.device)
        token = cu[sequence][:, None] + row
        stop = F.pad(cu[1:], (0, 1))[sequence][:, None]
        self.token = token.masked_fill((token >= stop) | behind[:, None], num_tokens).flatten()
        self.first = sequence.masked_fill(within > 0, self.num_sequences)
        self.last = sequence.masked_fill(F.pad(ends, (0, 1))[sequence] != chunk + 1, self.num_sequences)
        self.count = bound
        if cu.device.type == "cpu" and self.num_sequences:
            self.count = int(ends[-1])

    def load(self, x: Tensor, start: int, stop: int) -> Tensor:
        token = self.token[start * self.length : stop * self.length]
        rows = x[0].index_select(0, token.clamp(max=self.num_tokens - 1))
        absent = (token == self.num_tokens).view(-1, *(1,) * (rows.dim() - 1))
        rows = rows.masked_fill_(absent, 0)
        return rows.unflatten(0, (stop - start, 1, self.length)).transpose(2, 3)

    def zeros_like(self, x: Tensor) -> Tensor:
        return torch.zeros(1, self.num_tokens + 1, *x.shape[2:], dtype=x.dtype, device=x.device)

    def store(self, out: Tensor, chunks: Tensor, start: int, stop: int) -> None:
        token = self.token[start * self.length : stop * self.length]
        out[0].index_copy_(0, token, chunks.transpose(2, 3).flatten(0, 2).to(out.dtype))

    def result(self, out: Tensor) -> Tensor:
        return out[:, : self.num_tokens]

    def state_table(self, state: Optional[Tensor], shape: tuple, like: Tensor) -> Tensor:
        """A fresh table that holds `state` [N, HV, K, V], or zeros, and a row for what nobody reads."""
        table = like.new_zeros(self.num_sequences + 1, *shape)
        if state is not None:
            table[:-1].copy_(state)
        return table

    def states(self, table: Tensor) -> Tensor:
        return table[:-1]

    def enter_first(self, chunk: int, state: Tensor, table: Tensor) -> Tensor:
        return self._enter(self.first[chunk], state, table)

    def leave_first(self, chunk: int, state: Tensor, table: Tensor) -> None:
        table.index_copy_(0, self.first[chunk, None], state[None])

    def enter_last(self, chunk: int, state: Tensor, table: Tensor) -> Tensor:
        return self._enter(self.last[chunk], state, table)

    def leave_last(self, chunk: int, state: Tensor, table: Tensor) -> None:
        table.index_copy_(0, self.last[chunk, None], state[None])

    def _enter(self, sequence: Tensor, state: Tensor, table: Tensor) -> Tensor:
        entering = table.index_select(0, sequence[None])[0]
        return torch.where(sequence < self.num_sequences, entering, state)


Chunks = Union[DenseChunks, PackedChunks]


def make_chunks(batch: int, num_tokens: int, cu_seqlens: Optional[Tensor], chunk_size: int) -> Chunks:
    """The chunks of a call: dense rows, or the sequences of one packed row."""
    length = plan.chunk_length(num_tokens, chunk_size)
    if cu_seqlens is None:
        return DenseChunks(batch, num_tokens, length)
    return PackedChunks(cu_seqlens, num_tokens, length)
