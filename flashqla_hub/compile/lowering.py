"""TileLang prim_func -> CUDA source and launch plan, without a GPU.

The plan is read from the lowered host program (TIR), never from source text:
  tensor maps          arguments of the packed calls `__tvm_tensormap_create_tiled`
  argument order       the packed call of the kernel beside the device function's parameters
  grid, block, cluster trailing arguments of that call, tagged by the attribute `tirx.kernel_launch_params`
  shapes and strides   the prim_func's buffer map
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Read when tilelang is imported; our own cache is keyed by content.
os.environ.setdefault("TILELANG_DISABLE_CACHE", "1")

import tilelang
from tilelang import tvm
from tvm import tirx
from tvm.ir.instrument import pass_instrument
from tvm.target import Target

from .errors import LoweringError
from .expressions import cpp_expression
from .launch_plan import Argument, LaunchPlan, Scalar, Symbol, Tensor, TensorMap

TARGET = {"kind": "cuda", "arch": "sm_90a"}
DTYPES = ("bfloat16", "float16", "float32", "int32", "int64")
SCALAR_DTYPES = ("float32", "int32", "int64")
OWN_FENCES = "flashqla.own_fences"
"""A pass config of ours: the kernel itself has each fence between plain and asynchronous accesses to shared memory.

TileLang would put one before every wgmma that follows any plain store, also of a tile that the wgmma does not read.
"""
CLUSTER = "flashqla.cluster"
"""A pass config of ours: how many blocks along the first axis form a cluster, or the name of the scalar that says so.

TileLang's own clusters are of a size that is fixed when the kernel is compiled, and change how it is compiled.
"""


@dataclass(frozen=True)
class Lowered:
    """CUDA source of one kernel and how to launch it."""

    source: str
    plan: LaunchPlan


@pass_instrument
class _Skip:
    """Leaves out one pass of TileLang."""

    def __init__(self, name: str) -> None:
        self.skipped = name

    def should_run(self, module: tvm.IRModule, info: tvm.transform.PassInfo) -> bool:
        return info.name != self.skipped


def lower(name: str, prim_func: tirx.PrimFunc, pass_configs: Mapping[str, Any]) -> Lowered:
    """Lowers one prim_func with named buffers for SM90 under the given name, which the kernel's symbol in the cubin carries too.

    Raises:
        LoweringError: TileLang cannot lower it, or more than one kernel, an unsupported dtype, host expression, tensor
            map or launch tag came out.
    """
    prim_func = prim_func.with_attr("global_symbol", name)
    target = Target(TARGET)
    configs = dict(pass_configs)
    skipped = [_Skip("tl.InjectFenceProxy")] if configs.pop(OWN_FENCES, False) else []
    cluster = configs.pop(CLUSTER, None)
    try:
        with tvm.transform.PassContext(opt_level=3, config=configs, instruments=skipped), target:
            artifact = tilelang.lower(prim_func, target=target)
    except Exception as error:  # TVM raises whatever type its C++ side names
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise LoweringError(f"TileLang cannot lower {name}: {type(error).__name__}: {reason}") from error
    return Lowered(artifact.kernel_source, _read_plan(name, prim_func, artifact, cluster))


def _read_plan(name: str, prim_func: tirx.PrimFunc, artifact: Any, cluster: str | int | None) -> LaunchPlan:
    functions = artifact.device_mod.functions_items()
    if len(functions) != 1:
        raise LoweringError(f"{name} lowers to {len(functions)} kernels; a spec builds exactly one, so split it.")
    (global_var, device_function), calls = functions[0], _packed_calls(artifact.host_mod)
    kernel_calls = [arguments for callee, arguments in calls if callee == global_var.name_hint]
    if len(kernel_calls) != 1:
        raise LoweringError(f"{name} launches its kernel {len(kernel_calls)} times; the launchers do one launch each.")
    arguments = kernel_calls[0]
    count = len(device_function.params)
    launch = _launch_parameters(name, device_function, arguments[count:])
    tensors, scalars = _parameters(name, prim_func)
    if cluster is not None:
        if isinstance(cluster, int) and cluster < 1:
            raise LoweringError(f"{name} has clusters of {cluster} blocks in {CLUSTER}; it must be 1 or more.")
        if isinstance(cluster, str) and cluster not in {scalar.name for scalar in scalars}:
            raise LoweringError(
                f"{name} takes no scalar {cluster}, which {CLUSTER} names; name one of its int32 arguments."
            )
        launch["cluster"] = (str(cluster), "1", "1")
    return LaunchPlan(
        name=name,
        kernel=global_var.name_hint,
        tensors=tensors,
        scalars=scalars,
        symbols=_symbols(name, prim_func, scalars),
        maps=tuple(_tensor_map(call) for callee, call in calls if _is_tensor_map(name, callee)),
        arguments=tuple(map(_argument, device_function.params, arguments[:count])),
        programmatic_launch="has_cuda_pdl_sync" in device_function.attrs,
        **launch,
    )


def _packed_calls(host_module: tvm.IRModule) -> list[tuple[str, list[Any]]]:
    """(callee, arguments) of every packed call in the host program, in program order."""
    calls = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Call) and getattr(node.op, "name", "") == "tirx.tvm_call_packed":
            calls.append((str(node.args[0].value), list(node.args[1:])))

    for _, function in host_module.functions_items():
        tirx.stmt_functor.post_order_visit(function.body, visit)
    return calls


def _launch_parameters(name: str, device_function: tirx.PrimFunc, values: list[Any]) -> dict[str, Any]:
    tags = [str(tag) for tag in device_function.attrs["tirx.kernel_launch_params"]]
    grid, block, cluster, shared_memory = ["1"] * 3, ["1"] * 3, ["1"] * 3, 0
    for tag, value in zip(tags, values, strict=True):
        axis = "xyz".find(tag[-1])
        if tag.startswith("blockIdx."):
            grid[axis] = cpp_expression(value)
        elif tag.startswith("threadIdx."):
            block[axis] = cpp_expression(value)
        elif tag.startswith("tir.cluster_dim_"):
            cluster[axis] = cpp_expression(value)
        elif tag.endswith("use_dyn_shared_memory"):
            shared_memory = int(value)
        else:
            raise LoweringError(f"{name} is launched with {tag}, which the launchers do not know.")
    return {
        "grid": tuple(grid),
        "block": tuple(block),
        "cluster": tuple(cluster),
        "dynamic_shared_memory": shared_memory,
    }


def _parameters(name: str, prim_func: tirx.PrimFunc) -> tuple[tuple[Tensor, ...], tuple[Scalar, ...]]:
    tensors, scalars = [], []
    for parameter in prim_func.params:
        buffer = prim_func.buffer_map.get(parameter)
        dtype = str(buffer.dtype if buffer is not None else parameter.dtype)
        if dtype not in (DTYPES if buffer is not None else SCALAR_DTYPES):
            raise LoweringError(
                f"{name} takes {parameter.name} of dtype {dtype}; the launchers know {', '.join(DTYPES)}."
            )
        if buffer is None:
            scalars.append(Scalar(parameter.name, dtype))
        else:
            if len(buffer.strides) != len(buffer.shape):
                raise LoweringError(f"{name}: {buffer.name} has no strides; declare it as T.Tensor or T.StridedTensor.")
            shape, strides = (tuple(map(cpp_expression, part)) for part in (buffer.shape, buffer.strides))
            tensors.append(Tensor(buffer.name, dtype, shape, strides))
    return tuple(tensors), tuple(scalars)


def _symbols(name: str, prim_func: tirx.PrimFunc, scalars: tuple[Scalar, ...]) -> tuple[Symbol, ...]:
    """Where each symbolic size or stride is read from: the first tensor that has it alone, else as symbol + constant."""
    found: dict[str, Symbol] = {}
    buffers = [prim_func.buffer_map[parameter] for parameter in prim_func.params if parameter in prim_func.buffer_map]
    places = [
        (expression, buffer.name, axis, kind)
        for buffer in buffers
        for kind, expressions in (("size", buffer.shape), ("stride", buffer.strides))
        for axis, expression in enumerate(expressions)
    ]
    for with_offset in (False, True):
        for expression, tensor, axis, kind in places:
            variable, offset = _variable_and_offset(expression) if with_offset else (expression, 0)
            if isinstance(variable, tirx.Var) and variable.name not in found:
                found[variable.name] = Symbol(variable.name, str(variable.dtype), tensor, axis, kind, offset)
    missing = {name for expression, *_ in places for name in _variables(expression)}
    missing -= found.keys() | {scalar.name for scalar in scalars}
    if missing:
        raise LoweringError(f"{name}: no tensor has {', '.join(sorted(missing))} as a size or stride of its own.")
    return tuple(found.values())


def _variable_and_offset(expression: Any) -> tuple[Any, int]:
    if isinstance(expression, tirx.Add) and isinstance(expression.b, tirx.IntImm):
        return expression.a, int(expression.b)
    return expression, 0


def _variables(expression: Any) -> set[str]:
    names: set[str] = set()
    tirx.stmt_functor.post_order_visit(
        expression, lambda node: names.add(node.name) if isinstance(node, tirx.Var) else None
    )
    return names


def _is_tensor_map(name: str, callee: str) -> bool:
    if callee == "__tvm_tensormap_create_im2col":
        raise LoweringError(f"{name} uses an im2col tensor map; the launchers encode tiled ones only.")
    return callee == "__tvm_tensormap_create_tiled"


def _tensor_map(call: list[Any]) -> TensorMap:
    descriptor, dtype, rank, base, *rest = call
    rank = int(rank)
    dims, strides, box, element_strides = (rest[i * rank : (i + 1) * rank] for i in range(4))
    interleave, swizzle, l2_promotion, out_of_bounds = map(int, rest[4 * rank :])
    return TensorMap(
        name=descriptor.name,
        tensor=base.name,
        dtype=int(dtype),
        dims=tuple(map(cpp_expression, dims)),
        strides=tuple(map(cpp_expression, strides)),
        box=tuple(map(int, box)),
        element_strides=tuple(map(int, element_strides)),
        interleave=interleave,
        swizzle=swizzle,
        l2_promotion=l2_promotion,
        out_of_bounds=out_of_bounds,
    )


def _argument(parameter: tirx.Var, value: Any) -> Argument:
    if str(parameter.dtype) != "handle":
        return Argument("value", cpp_expression(value), str(parameter.dtype))
    is_map = getattr(parameter.type_annotation, "storage_scope", "") == "grid_constant"
    return Argument("map" if is_map else "pointer", value.name, "handle")
