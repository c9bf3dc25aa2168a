"""Layouts of a tensor [B, T, heads, 128], as functions of its heads: those that tiles can be loaded from, and the others."""

import torch


def rows(heads, batch=2, tokens=70, dim=128):
    return torch.zeros(batch, tokens, heads, dim, dtype=torch.bfloat16)


def at_an_odd_address(x):
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


LOADABLE = {
    "contiguous": lambda heads: rows(heads),
    "a part of a packed projection": lambda heads: rows(3 * heads)[:, :, heads : 2 * heads],
    "one token": lambda heads: rows(heads, batch=1, tokens=1),
    "one token a row, of any stride": lambda heads: rows(1, tokens=heads).transpose(1, 2),
    "the last token of each row": lambda heads: rows(heads)[:, -1:],
    "heads before tokens": lambda heads: rows(70, batch=1, tokens=heads).transpose(1, 2),
    "rows with gaps": lambda heads: rows(heads, dim=136)[..., :128],
}
COPIED = {
    "an unaligned start": lambda heads: at_an_odd_address(rows(heads)),
    "rows of odd length": lambda heads: rows(heads, dim=129)[..., :128],
    "dimensions turned": lambda heads: rows(heads, tokens=128, dim=70).transpose(1, 3),
    "a batch with gaps": lambda heads: rows(heads, tokens=100)[:, :70],
    "one row for all heads": lambda heads: rows(1).expand(2, 70, heads, 128),
    "one token for all": lambda heads: rows(heads, batch=1, tokens=1).expand(1, 70, heads, 128),
    "one row for the batch": lambda heads: rows(heads, batch=1).expand(2, 70, heads, 128),
    "one token for the batch": lambda heads: rows(heads, batch=1, tokens=1).expand(2, 1, heads, 128),
    "every second number": lambda heads: rows(heads, dim=256)[..., ::2],
}


def strides_of_a_map(x):
    """Of heads and tokens, in bytes and in the order of a tensor map of x: tokens before heads; the one of many rows counts."""
    token = x.stride(0) if x.shape[1] == 1 else x.stride(1)
    return tuple(2 * stride for stride in (token, x.stride(2)))


def assert_map(layout, found, address, shape, strides):
    """The map is of the tensor at `address`, walked by its strides, or of a contiguous copy where it has to be."""
    batch, tokens, heads, _ = shape
    assert found.dims == (128, batch * tokens, heads)
    if layout in COPIED:
        assert (found.strides, found.address % 16) == ((256 * heads, 256), 0)
        assert found.address != address
    else:
        walked = [i for i, size in enumerate((batch * tokens, heads)) if size > 1]
        assert found.address == address
        assert [found.strides[i] for i in walked] == [strides[i] for i in walked]
