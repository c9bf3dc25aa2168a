"""`python -m flashqla_hub bench-model`: prefill and generation of a Qwen3.5 model in transformers, with and without the kernel.

The model has random weights. Implementations are those of `bench-layer`, each in a process of its own. `prefill` is one forward
over the prompt with an empty cache; the others are milliseconds a generated token behind that prompt: `dynamic` and `static` by
`model.generate` with that cache, from the difference between many new tokens and few; `captured` the step on a static cache
replayed as a CUDA graph; `compiled` as `static`, by the step that transformers compiles.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..called import watched
from . import command, side_by_side
from .fla_layer import put_in_fla
from .layer import SHAPES, Shape, check_handed_over, milliseconds, serve_with
from .side_by_side import IMPLEMENTATIONS, Limits, Work, known

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
    path: Annotated[list[str] | None, typer.Option(help=side_by_side.PATH)] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help=side_by_side.COMPILED)] = False,
    seconds: Annotated[float, typer.Option(help=side_by_side.TIME_LIMIT)] = side_by_side.SECONDS,
    row_seconds: Annotated[float, typer.Option(help=side_by_side.ROW_LIMIT)] = side_by_side.ROW_SECONDS,
    warm_seconds: Annotated[float, typer.Option(help=side_by_side.WARM_LIMIT)] = side_by_side.WARM_SECONDS,
    source: command.Source = command.ROOT,
    output: command.Output = None,
    commit: command.Commit = None,
) -> None:
    """Time prefill and generated tokens of a model of random weights, with and without the kernel.

    Writes a JSON line as soon as a row is measured: of this kernel all rows, then those of its peers, in the order of the
    options.
    """
    try:
        shapes = known("shape", shape or ["2b"], tuple(SHAPES))
        names = known("impl", impl, IMPLEMENTATIONS)
        operations = known("operation", operation or list(OPERATIONS[:-1]), OPERATIONS)
        folders = command.parse_paths(path or (), IMPLEMENTATIONS)
        common, record_file = command.begin(commit, output, "-model")
    except ValueError as error:
        Console().print(str(error))
        raise typer.Exit(2) from None
    work = Work("model", side_by_side.rows_of(shapes, operations), (str(tokens), str(source)), folders)
    limits = Limits(warm_seconds, row_seconds, seconds)
    side_by_side.compare(work, names, limits, compiled, common, record_file)


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


def generation(model: "torch.nn.Module", ids: "torch.Tensor", count: int, **options) -> Callable[[], object]:
    """`generate` of exactly so many new tokens."""
    lengths = {"max_new_tokens": count, "min_new_tokens": count}
    return lambda: model.generate(ids, do_sample=False, **lengths, **options)


def token_ms(model: "torch.nn.Module", ids: "torch.Tensor", **options) -> float:
    """Milliseconds a token of `generate`, the median of some differences between many new tokens and few."""
    few, many = (generation(model, ids, count, **options) for count in (FEW, MANY))
    for call in (few, many):
        call()
    differences = (seconds_of(many) - seconds_of(few) for _ in range(REPEATS))
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


def measure(model: "torch.nn.Module", name: str, operation: str, tokens: int, warm: Callable[[], None]) -> dict:
    """Figures of one operation, and the functions that serve a prefill, or a token behind it."""
    import torch
    from transformers import DynamicCache

    ids = torch.randint(1, model.config.vocab_size, (1, tokens), device=model.device)
    static = {"cache_implementation": "static", "disable_compile": operation != "compiled"}
    options = {} if operation == "dynamic" else static
    with torch.inference_mode():

        def prefill():
            cache = DynamicCache(config=model.config)
            model(ids, past_key_values=cache, logits_to_keep=1)
            return cache

        is_prefill = operation == "prefill"
        call = prefill if is_prefill else functools.partial(model, ids[:, :1], past_key_values=prefill())
        call()
        if not is_prefill:
            generation(model, ids, FEW, **options)()
        _, functions = watched(call)
        check_handed_over(name, "forward" if is_prefill else "decode", functions)
        del call
        torch.cuda.synchronize()
        warm()
        if is_prefill:
            figure = milliseconds(prefill)
        elif operation == "captured":
            figure = captured_ms(model, ids)
        else:
            figure = token_ms(model, ids, **options)
    return {"ms": figure, "functions": ", ".join(functions)}


def main(arguments: list[str]) -> None:
    """The process of one implementation: a JSON line for each row."""
    import torch

    name, rows, share, tokens, source = arguments

    @functools.lru_cache(maxsize=1)
    def model_of(shape: str) -> tuple["torch.nn.Module", str]:
        model = make_model(SHAPES[shape], "cuda", torch.bfloat16)
        return model, serve(model, name, Path(source))

    def common(shape: str, operation: str) -> dict:
        sizes = SHAPES[shape]
        return {
            "op": f"model-{operation}",
            "layer": shape,
            "impl": name,
            "hk": sizes.hk,
            "hv": sizes.hv,
            "seqs": f"1x{tokens}",
        }

    def figures(shape: str, operation: str, warm: Callable[[], None]) -> dict:
        model, served = model_of(shape)
        return {**measure(model, name, operation, int(tokens), warm), "served": served}

    side_by_side.run_rows(rows, share, common, figures)


if __name__ == "__main__":
    main(sys.argv[1:])
