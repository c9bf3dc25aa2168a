"""Tell the layers of a model where packed sequences begin, from whatever the caller of the model knows.

transformers passes `cu_seq_lens_q` and `seq_idx` down to the layers, but not `position_ids`, although a row whose
positions restart is how most collators pack, and its attention layers read it so. A hook on the module that runs the layers
closes the gap.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .mapping import names_for

ATTENTION_JOINS = (
    "position_ids restart within a row, so the gated delta rule starts anew there; the attention layers of transformers do so "
    "only without attention_mask and without a cache: leave both out (use_cache=False)."
)
POSITIONS_JUMP = (
    "position_ids jump forward within a row; the attention layers of transformers start a new sequence there, the gated delta "
    "rule does not: pass cu_seq_lens_q and seq_idx to say which is meant."
)
AXES_RESTART = (
    "position_ids of three axes restart at 0 within a row, but three axes carry no text positions, so neither attention nor the "
    "gated delta rule keeps sequences apart: pass cu_seq_lens_q and seq_idx, or four axes with text positions first."
)

# The first parameters of the backbones' forward, the same in every family.
POSITIONAL = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")

TEXT_AND_MROPE_AXES = 4
MROPE_AXES = 3


def pass_boundaries(backbone: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook: add `cu_seq_lens_q` and `seq_idx` to a call whose rows pack several sequences.

    - The caller passed `cu_seq_lens_q` or `seq_idx`: they are believed. A missing `seq_idx` is derived, since some
      convolutions know only that.
    - Text `position_ids`, [B, T] or the first of four axes [4, B, T]: a sequence begins wherever a position is not greater
      than the one before it, both tokens being real if there is an `attention_mask`. `seq_idx`, and for one row
      `cu_seq_lens_q`, are derived.
    - In both cases `use_cache` becomes False if the caller left it open: a cache of several sequences has no use, and the
      attention layers of transformers keep sequences apart only without one.
    - Three axes [3, B, T] are multimodal rotary positions, which repeat and fall back at images; they are never taken for
      packing.
    - One token per row, or a cache that already holds tokens: nothing to do.

    Ambiguous positions are warned of once. Looking at positions waits for the GPU, once in a forward, and once more for
    rows that are packed; it happens only if the caller, such as `generate` for a prompt, passed `position_ids` and no
    boundaries. While torch.compile traces, no value is looked at: `seq_idx` is derived unconditionally if the kernel's
    convolution serves the device, and nothing is derived otherwise.
    """
    call = {**dict(zip(POSITIONAL, args, strict=False)), **kwargs}
    if call.get("past_key_values") is None:
        call["past_key_values"] = call.get("cache")  # as transformers calls it from 5.24 on
    inputs = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
    if inputs is None or inputs.shape[1] == 1:
        return None
    if call.get("seq_idx") is not None:
        found = {"seq_idx": call["seq_idx"]}
    elif call.get("cu_seq_lens_q") is not None:
        found = {"seq_idx": _sequence_of_tokens(call["cu_seq_lens_q"], inputs)}
    else:
        found = _from_positions(call, inputs)
    if not found:
        return None
    if call.get("use_cache") is None and call.get("past_key_values") is None:
        args, found["use_cache"] = args[: POSITIONAL.index("use_cache")], False
    return args, {**kwargs, **found}


def install(backbone: nn.Module) -> None:
    """Hook `pass_boundaries` to the backbone unless it is."""
    if pass_boundaries not in backbone._forward_pre_hooks.values():
        backbone.register_forward_pre_hook(pass_boundaries, with_kwargs=True)


def uninstall(backbone: nn.Module) -> None:
    """Take the hook off. Its handle is not used: a deep copy of a model has the hook, but no handle of its own."""
    for key, hook in list(backbone._forward_pre_hooks.items()):
        if hook is pass_boundaries:
            del backbone._forward_pre_hooks[key]
            del backbone._forward_pre_hooks_with_kwargs[key]


def _from_positions(call: dict[str, Any], inputs: Tensor) -> dict[str, Tensor]:
    """Boundaries of a call without any, or nothing if its rows are single sequences."""
    positions, mask = call.get("position_ids"), call.get("attention_mask")
    if positions is None or isinstance(mask, dict) or _holds_tokens(call.get("past_key_values")):
        return {}
    text = _text_positions(positions, *inputs.shape[:2])
    if torch.compiler.is_compiling():
        traceable = text is not None and mask is None and "causal_conv1d_fn" in names_for(positions.device.type)
        return {"seq_idx": _begins(text, None).cumsum(-1, dtype=torch.int32)} if traceable else {}
    if text is None:
        _warn_of_restarting_axes(positions)
        return {}
    begins = _begins(text, mask)
    if not _packs(text, begins, call):
        return {}
    found = {"seq_idx": begins.cumsum(-1, dtype=torch.int32)}
    if begins.shape[0] == 1:
        found["cu_seq_lens_q"] = _bounds(begins)
    return found


def _packs(text: Tensor, begins: Tensor, call: dict[str, Any]) -> bool:
    """Whether any row holds several sequences; warns if attention will see other sequences than the layers."""
    restarts, jumps = torch.stack([begins.any(), (text.diff(dim=-1) > 1).any()]).tolist()
    mask = call.get("attention_mask")
    without_cache = call.get("past_key_values") is None and not call.get("use_cache")
    if restarts and not (without_cache and mask is None) and not (mask is not None and mask.dim() == 4):
        _warn_once(ATTENTION_JOINS)
    if jumps and without_cache and mask is None:
        _warn_once(POSITIONS_JUMP)
    return restarts


def _warn_of_restarting_axes(positions: Tensor) -> None:
    if positions.dim() == 3 and positions.shape[0] == MROPE_AXES and (positions[..., 1:] == 0).all(0).any():
        _warn_once(AXES_RESTART)


def _text_positions(positions: Tensor, batch: int, num_tokens: int) -> Tensor | None:
    """[B, T], or None if there are none: the positions are those of images alone, or not those of this batch."""
    if positions.dim() == 3 and positions.shape[0] in (1, TEXT_AND_MROPE_AXES):
        positions = positions[0]
    fits = positions.dim() == 2 and positions.shape[0] in (1, batch) and positions.shape[1] == num_tokens
    return positions.expand(batch, -1) if fits else None


def _begins(text: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T] bool: tokens at which a new sequence begins, the first of a row not counted."""
    begins = text.diff(dim=-1) <= 0
    if mask is not None and mask.dim() == 2:
        real = mask[:, -text.shape[1] :].to(device=text.device, dtype=torch.bool)
        begins = begins & real[:, 1:] & real[:, :-1]
    return nn.functional.pad(begins, (1, 0))


def _bounds(begins: Tensor) -> Tensor:
    """cu_seq_lens [N + 1] int32 of one row [1, T]."""
    inner = begins[0].nonzero()[:, 0]
    return nn.functional.pad(nn.functional.pad(inner, (1, 0)), (0, 1), value=begins.shape[1]).to(torch.int32)


def _sequence_of_tokens(cu_seq_lens: Tensor, inputs: Tensor) -> Tensor:
    """seq_idx [1, T] int32 of the bounds of one row; tokens behind the last bound get a sequence of their own."""
    token = torch.arange(inputs.shape[1], device=cu_seq_lens.device)
    return torch.searchsorted(cu_seq_lens[1:].to(token.dtype), token, right=True).to(torch.int32).unsqueeze(0)


def _holds_tokens(cache: Any) -> bool:
    """Whether a cache of transformers holds the state of earlier tokens; asked of its layers, so without a GPU value."""
    return cache is not None and len(cache.layers) > 0 and cache.has_previous_state()


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)
