"""The benchmark of norm, gates and decode step: its gate, its bytes and what it refuses; no GPU."""

import pytest
import torch
from typer.testing import CliRunner

from flashqla_hub.__main__ import build_app
from flashqla_hub.bench import around


def ours(kernel, part, op):
    """The operation by the kernel's PyTorch path, as an implementation of the benchmark."""
    gates = part("gated_delta_rule.gates")

    def activate(a, b, A_log, dt_bias, **_):
        return gates.log_decay(a, A_log, dt_bias), gates.writing_strength(b, False)

    def backward(function, inputs, names, grads):
        leaves = {name: inputs[name].detach().requires_grad_() for name in names}
        outputs = function(**{**inputs, **leaves})
        return torch.autograd.grad(outputs, list(leaves.values()), grads)

    def norm(x, g, weight, **_):
        return [kernel.rms_norm_gated(x, g, weight, eps=around.EPS)]

    def decode(q, k, v, a, b, A_log, dt_bias, state):
        return kernel.fused_recurrent_gated_delta_rule(
            q,
            k,
            v,
            g=a,
            beta=b,
            A_log=A_log,
            dt_bias=dt_bias,
            initial_state=state,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            output_final_state=True,
        )

    return {
        "norm-forward": norm,
        "norm-backward": lambda **d: backward(norm, d, ("x", "g", "weight"), [d["dy"]]),
        "gates-forward": activate,
        "gates-backward": lambda **d: backward(activate, d, ("a", "b", "A_log", "dt_bias"), [d["dg"], d["dbeta"]]),
        "decode": decode,
    }[op]


@pytest.mark.parametrize("op", around.SHAPES)
def test_the_gate_takes_what_is_right_and_refuses_what_is_wrong(kernel, part, op):
    call = ours(kernel, part, op)
    error = around.error_of(op, call, "cpu")
    assert error <= around.MAX_ERROR[op]
    spoilt = around.error_of(op, lambda **inputs: [1.02 * x for x in call(**inputs)], "cpu")
    assert spoilt > around.MAX_ERROR[op]


def test_a_result_that_an_implementation_has_not_is_left_out(kernel, part):
    call = ours(kernel, part, "gates-forward")
    assert (
        around.error_of("gates-forward", lambda **d: (call(**d)[0], None), "cpu") <= around.MAX_ERROR["gates-forward"]
    )


@pytest.mark.parametrize(
    ("op", "shape", "expected"),
    [
        ("norm-forward", "524288", 3 * 524288 * 256),
        ("norm-backward", "524288", 5 * 524288 * 256),
        ("gates-forward", "32768x32", 32768 * 32 * 12),
        ("decode", "32", 2 * 32 * 32 * 65536),
    ],
)
def test_bytes_that_have_to_move(op, shape, expected):
    assert around.moved_bytes(op, shape) == expected


def test_records_say_what_was_skipped_and_why():
    records = [{"op": "decode", "layer": "1", "impl": "fla", "io_mb": 4.2, "skipped": "not installed"}]
    table = around.as_table(records)
    assert [list(column.cells) for column in table.columns][3] == ["not installed"]


def run(*arguments):
    return CliRunner().invoke(build_app("bench-around"), ["bench-around", *arguments])


def test_an_unknown_operation_is_one_sentence():
    result = run("--op", "convolution")
    assert result.exit_code == 2 and "--op is 'convolution'; it must be one of decode, norm-forward" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    result = run()
    assert result.exit_code == 2 and "needs a CUDA GPU" in result.output
