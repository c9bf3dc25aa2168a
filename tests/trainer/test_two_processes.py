"""Two processes that share a model over gloo do what one does: DDP and FSDP2 in training, tensor parallelism in inference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.transformers.comparison import assert_close
from tests.transformers.families import tiny_model, token_ids

from .two_processes import FAMILY, TRAINED, WORLD, alone, logits_of, save_divisible_model

ROOT = Path(__file__).parents[2]


def run_together(kind: str, folder: Path, source: Path) -> dict[str, torch.Tensor]:
    command = [sys.executable, "-m", "tests.trainer.two_processes", kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder), str(source)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * WORLD, "\n".join(said)
    return torch.load(folder / f"{kind}.pt", weights_only=True)


@pytest.mark.parametrize("kind", TRAINED)
def test_sharded_steps_equal_those_of_one_process(kernelize, kernel_folder, tmp_path, kind):
    """I8: every parameter is gathered before it is read, gets a gradient, and moves as in one process."""
    expected = alone(kernelize)
    actual = run_together(kind, tmp_path, kernel_folder)
    before = dict(tiny_model(FAMILY).named_parameters())
    assert actual.keys() == expected.keys()
    for name, parameter in expected.items():
        assert not torch.equal(parameter, before[name]), f"{name} did not move"
        assert_close(actual[name], parameter, 1e-5)


def test_split_heads_give_the_logits_of_one_process(kernel_folder, tmp_path):
    """D5: tensor parallelism by the plan of transformers, the kernel in each rank."""
    expected = logits_of(save_divisible_model(tmp_path))["logits"]
    assert_close(run_together("tp", tmp_path, kernel_folder)["logits"], expected)


def test_parameter_that_is_not_gathered_is_named(kernelize):
    """I8: as ZeRO-3 leaves the weight of a convolution whose module nobody enters."""
    model = kernelize(tiny_model(FAMILY))
    convolution = model.model.layers[0].linear_attn.conv1d
    convolution.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(ValueError, match=r"conv1d\.weight has shape \[0\]; it must be \[channels, 1, width\]"):
        model(token_ids(1, 9), use_cache=False)
