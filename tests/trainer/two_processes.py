"""One of two processes that train, or run, a model together: `python -m tests.trainer.two_processes KIND RANK FOLDER SOURCE`.

Rank 0 writes what came out to FOLDER/KIND.pt.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import flashqla_hub
from tests.transformers import families
from tests.transformers.families import tiny_model, token_ids

WORLD = 2
STEPS = 2
RATE = 0.1
FAMILY = "qwen3_5"


def rows(step: int) -> list[Tensor]:
    """What each rank trains on: as many tokens each, so that the mean of their losses is that of all tokens.

    They are more than 64, so that projections are computed together.
    """
    return [token_ids(1, 70 + 2 * step).roll(7 * rank, dims=1) for rank in range(WORLD)]


def train(model: nn.Module, batches: Iterator[list[Tensor]], parameters: Callable[[], dict[str, Tensor]]) -> dict:
    """Plain gradient steps, so that a wrong gradient is not normalised away; {name: parameter} behind them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        for ids in batch:
            (model(input_ids=ids, labels=ids, use_cache=False).loss / len(batch)).backward()
        missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert not missing, f"no gradient reached {missing}"
        optimizer.step()
    return parameters()


def alone(kernelize: Callable) -> dict[str, Tensor]:
    """The same steps in one process, both rows in each."""
    model = kernelize(tiny_model(FAMILY))
    return train(model, map(rows, range(STEPS)), lambda: {k: v.detach() for k, v in model.named_parameters()})


def ddp(model: nn.Module, rank: int) -> dict[str, Tensor]:
    wrapped = DistributedDataParallel(model, find_unused_parameters=False)
    mine = ([rows(step)[rank]] for step in range(STEPS))
    return train(wrapped, mine, lambda: {k: v.detach() for k, v in model.named_parameters()})


def fsdp2(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Sharded by decoder layer, as the layers' parameters are read outside the modules that hold them."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine = ([rows(step)[rank]] for step in range(STEPS))
    return train(model, mine, lambda: {k: v.full_tensor().detach() for k, v in model.named_parameters()})


def logits_of(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"logits": model(token_ids(1, 70), use_cache=False).logits}


def save_divisible_model(folder: Path) -> nn.Module:
    """A model whose heads can be divided among two ranks."""
    with mock.patch.dict(families.SHARED, num_key_value_heads=WORLD):
        model = tiny_model(FAMILY)
    model.save_pretrained(folder)
    return model


def load_split(folder: Path) -> nn.Module:
    """The model of `save_divisible_model`, split by transformers' own plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the newer spelling, which the oldest version does not know
        return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")


TRAINED = {"ddp": ddp, "fsdp2": fsdp2}


def main(kind: str, rank: int, folder: Path, source: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", init_method=f"file://{folder}/{kind}.store", rank=rank, world_size=WORLD)
    model = flashqla_hub.kernelize(tiny_model(FAMILY) if kind in TRAINED else load_split(folder), source=source)
    assert flashqla_hub.is_active(model)
    found = TRAINED[kind](model, rank) if kind in TRAINED else logits_of(model)
    assert flashqla_hub.is_active(model)
    if rank == 0:
        torch.save(found, folder / f"{kind}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
