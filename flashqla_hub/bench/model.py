"""`python -m flashqla_hub bench-model`: prefill and generation of a Qwen3.5 model in transformers, with and without the kernel.

The model has random weights. Implementations are those of `bench-layer`, each in a process of its own. `prefill` is one forward
over the prompt with an empty cache; the others are milliseconds a generated token behind that prompt: `dynamic` and `static` by
`model.generate` with that cache, from the difference between many new tokens and few; `captured` the step on a static cache
replayed as a CUDA graph; `compiled` as `static`, by the step that transformers compiles.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from . import command
from .layer import (
    IMPLEMENTATIONS,
    PATH,
    SECONDS,
    SHAPES,
    TIME_LIMIT,
    WARM,
    Shape,
    check_handed_over,
    compare,
    known,
    milliseconds,
    put_in_fla,
    serve_with,
)

if TYPE_CHECKING:
    import torch

OPERATIONS = ("prefill", "dynamic", "static", "captured", "compiled")
FEW, MANY = 4, 36  # new tokens of the two generations whose difference counts
REPEATS = 3
VOCABULARY = 248_320
LAYERS = 24  # of Qwen3.5-2B; every fourth has attention


def bench_model_command(
    shape: Annotated[list[str] | None, typer.Option(help=f"Layers of the model: {', '.join(SHAPES)}.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8192,
    impl: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(IMPLEMENTATIONS)}; all if left out.")] = None,
    operation: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(OPERATIONS)}; all but the last if left out.")
    ] = None,
    path: Annotated[list[str] | None, typer.Option(help=PATH)] = None,
    warm: Annotated[bool, typer.Option("--warm", help=WARM)] = False,
    seconds: Annotated[int, typer.Option(help=TIME_LIMIT)] = SECONDS,
    source: command.Source = command.ROOT,
    output: command.Output = None,
    commit: command.Commit = None,
) -> None:
    """Time prefill and generated tokens of a model of random weights, with and without the kernel; write one JSON line each."""
    try:
        shapes = known("shape", shape or ["2b"], tuple(SHAPES))
        names = known("impl", impl, IMPLEMENTATIONS)
        operations = known("operation", operation or list(OPERATIONS[:-1]), OPERATIONS)
        folders = command.parse_paths(path or (), IMPLEMENTATIONS)
        common, record_file = command.begin(commit, output, "-model")
    except ValueError as error:
        Console().print(str(error))
        raise typer.Exit(2) from None
    arguments = [",".join(operations), str(tokens), str(source)]
    compare("model", names, shapes, arguments, folders, warm, seconds, common, record_file)


def make_model(shape: Shape, device: str, dtype: "torch.dtype", **sizes: int) -> "torch.nn.Module":
    """A Qwen3.5 model of these layers with random weights; `sizes` replace others of its config."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": shape.hidden,
            "intermediate_size": 3 * shape.hidden,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": shape.hidden // 256,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": shape.hk,
            "linear_num_value_heads": shape.hv,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "dtype": dtype,
            "tie_word_embeddings": True,
            **sizes,
        }
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3_5ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def serve(model: "torch.nn.Module", name: str, source: Path) -> str:
    """Let the implementation serve every layer of the model; what it is made of, in words."""
    from ..models import gated_delta_nets

    nets = [net.module for net in gated_delta_nets(model)]
    return serve_with(model, name, source, lambda raw_gates: [put_in_fla(net, raw_gates) for net in nets])


def seconds_of(call: Callable[[], object]) -> float:
    """Of a call and all that it puts on the GPU, by the host's clock."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def token_ms(model: "torch.nn.Module", ids: "torch.Tensor", **options) -> float:
    """Milliseconds a token of `generate`, the median of some differences between many new tokens and few."""

    def generate(count: int) -> Callable[[], object]:
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        return lambda: model.generate(ids, do_sample=False, **lengths, **options)

    for count in (FEW, MANY):
        generate(count)()
    differences = (seconds_of(generate(MANY)) - seconds_of(generate(FEW)) for _ in range(REPEATS))
    return 1e3 * statistics.median(differences) / (MANY - FEW)


def captured_ms(model: "torch.nn.Module", ids: "torch.Tensor") -> float:
    """Milliseconds a token of a CUDA graph of one step on a static cache, which moves on by itself."""
    import torch
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + 200)
    model(ids, past_key_values=cache, logits_to_keep=1)
    token = ids[:, :1].clone()

    def step():
        token.copy_(model(token, past_key_values=cache).logits.argmax(-1))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return milliseconds(graph.replay)


def measure(model: "torch.nn.Module", operation: str, tokens: int) -> dict:
    """Figures of one operation."""
    import torch
    from transformers import DynamicCache

    ids = torch.randint(1, model.config.vocab_size, (1, tokens), device=model.device)
    with torch.inference_mode():
        if operation == "prefill":
            return {
                "ms": milliseconds(
                    lambda: model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
                )
            }
        if operation == "captured":
            return {"ms": captured_ms(model, ids)}
        if operation == "dynamic":
            return {"ms": token_ms(model, ids)}
        return {"ms": token_ms(model, ids, cache_implementation="static", disable_compile=operation == "static")}


def main(arguments: list[str]) -> None:
    """The process of one implementation: a JSON line for each operation on each model."""
    import torch

    name, shapes, operations, tokens, source = arguments
    for shape in shapes.split(","):
        sizes = SHAPES[shape]
        common = {"layer": shape, "impl": name, "hk": sizes.hk, "hv": sizes.hv, "seqs": f"1x{tokens}"}
        model = make_model(sizes, "cuda", torch.bfloat16)
        served = serve(model, name, Path(source))
        for operation in operations.split(","):
            try:
                figures = {**measure(model, operation, int(tokens)), "served": served}
                check_handed_over(name)
            except Exception as failure:  # one that fails is a line with its reason
                reason = (str(failure).splitlines() or [""])[0]
                figures = {"skipped": f"{type(failure).__name__}: {reason}"[:300]}
            print(json.dumps({"op": f"model-{operation}", **common, **figures}), flush=True)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
