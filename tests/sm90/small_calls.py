"""Runs an op on small inputs, for tools that watch every access: `python -m tests.sm90.small_calls backward 3`.

Ops are forward, backward, decode and step. Without numbers it lists the calls. The library is that of `shipped_library`; results
must be finite.
"""

import sys

import torch

from . import test_backward_op, test_decode, test_forward_op, test_step
from .shipped_library import find_library, load_ops
from .test_backward_op import make_gradients
from .test_forward_op import Case, make_call

ONE_HEAD = (1, 1)
HALF = torch.float16
EMPTY = (0,) * 800  # behind a few short sequences: enough of them for the kernel for short sequences

CASES = (
    Case("T1", tokens=1, heads=ONE_HEAD),
    Case("T64", tokens=64, heads=ONE_HEAD, gates="mild"),
    Case("T65-l2norm", tokens=65, heads=ONE_HEAD, gates="mild", l2norm=True),
    Case("T130", tokens=130, heads=ONE_HEAD),
    Case("T130-strong", tokens=130, heads=ONE_HEAD, gates="huge-among-mild"),
    Case("T130-fp16", tokens=130, heads=ONE_HEAD, gates="mild", dtype=HALF),
    Case("T130-VK-from-zero", tokens=130, heads=ONE_HEAD, gates="mild", v_first=True, initial=None),
    Case("T130-two-heads", tokens=130, heads=(1, 2), gates="steep", l2norm=True),
    Case("packed-with-tails", lengths=(0, 1, 64, 65), heads=(1, 2), unused=3, l2norm=True, offsets=torch.int64),
    Case("packed-with-tails-fp16", lengths=(0, 1, 64, 65), heads=(1, 2), unused=3, gates="mild", dtype=HALF),
    Case("split-links", lengths=(130, 65), heads=ONE_HEAD, gates="none", segment=1),
    Case("split-replays", lengths=(130, 65), heads=ONE_HEAD, gates="one", segment=1),
    Case("split-links-fp16", lengths=(130,), heads=ONE_HEAD, gates="mild", segment=1, dtype=HALF),
    Case("short-with-tails", lengths=(1, 33, 64, 65, *EMPTY), heads=(1, 2), unused=3, l2norm=True),
    Case("short-strong-VK", lengths=(20, 130, 0, 17, *EMPTY), heads=(1, 3), gates="huge-among-mild", v_first=True),
    Case("short-from-zero", lengths=(32, 31, 64, *EMPTY), heads=(1, 2), gates="mild", initial=None),
    Case("short-fp16", lengths=(7, 32, 65, *EMPTY), heads=(1, 2), gates="mild", dtype=HALF),
)
MANY = 17  # sequences of four heads: more than the kernel for few heads takes
DECODE_CASES = (
    test_decode.Case("few-T1"),
    test_decode.Case("few-T3", tokens=3),
    *(
        test_decode.Case(f"{'VK' if v_first else 'KV'}-T{tokens}", batch=MANY, tokens=tokens, v_first=v_first)
        for v_first in (False, True)
        for tokens in (1, 3)
    ),
    test_decode.Case("KV-fp16", batch=MANY, dtype="fp16"),
    test_decode.Case("KV-from-zero", batch=MANY, tokens=2, initial=None),
    test_decode.Case("KV-packed", lengths=(1, 0, 3) * 6, unused=2),
    *(
        test_decode.Case(f"{'VK' if v_first else 'KV'}-pool-bf16", batch=MANY, initial=torch.bfloat16, v_first=v_first)
        for v_first in (False, True)
    ),
)
STEP_CASES = (
    test_step.Case(2, (2, 4), id="few"),
    test_step.Case(3, (1, 1), "fp16", has_bias=True, together=True, id="few-fp16-of-a-projection"),
    test_step.Case(2, (1, 4), id="four-values-a-key"),
    test_step.Case(MANY, (2, 4), norm_silu=False, id="many"),
    test_step.Case(MANY, (2, 6), parameters=torch.float32, id="many-three-values-a-key"),
    test_step.Case(33, (2, 2), "fp16", id="many-fp16"),
)
CALLS = {"forward": CASES, "backward": CASES, "decode": DECODE_CASES, "step": STEP_CASES}


def call_decode(ops, case: test_decode.Case):
    """Outputs and states; states of 16 bits are a pool that is moved on in place."""
    call = test_decode.make_call(case)
    options = call.options
    inputs = [*call.inputs, *(options.get(name) for name in ("g", "beta", "A_log", "dt_bias")), call.initial]
    offsets, common = options.get("cu_seqlens"), (test_decode.DIM**-0.5, 1.0, case.l2norm, case.v_first)
    if case.initial == torch.bfloat16:
        indices = torch.arange(case.batch, dtype=torch.int32, device="cuda").flip(0)
        return ops.sm90_fused_recurrent_update(*inputs, indices, offsets, *common), call.initial
    return ops.sm90_fused_recurrent_fwd(*inputs, offsets, *common, True)


def call_step(ops, case: test_step.Case):
    """Output and both states, which are moved on in place."""
    layer = test_step.make_layer(case)
    y = ops.sm90_gated_delta_net_step(*test_step.arguments_of(case, test_step.make_token(case), layer))
    return y, layer.conv, layer.states


def call_op(op: str, case):
    """All results of one call."""
    ops = load_ops(find_library())
    if op == "decode":
        return call_decode(ops, case)
    if op == "step":
        return call_step(ops, case)
    call = make_call(case)
    if op == "forward":
        found = test_forward_op.run(ops.sm90_gated_delta_rule_fwd, case, call)
        if case.initial is None:  # short sequences take another way where nobody wants states
            options = (case.scale, case.l2norm, case.v_first, False, case.segment)
            found += (ops.sm90_gated_delta_rule_fwd(*call.inputs, None, call.cu_seqlens, *options)[0],)
        return found
    return test_backward_op.run(ops.sm90_gated_delta_rule_bwd, case, call, make_gradients(call))


def main(op: str, *numbers: str) -> None:
    for number in map(int, numbers):
        results = call_op(op, CALLS[op][number])
        torch.cuda.synchronize()
        assert all(x.isfinite().all() for x in results), f"{op} {CALLS[op][number].id} is not finite"
        print(f"ran {op} {CALLS[op][number].id}", flush=True)
    if not numbers:
        print("\n".join(f"{number} {case.id}" for number, case in enumerate(CALLS[op])))


if __name__ == "__main__":
    main(*sys.argv[1:])
