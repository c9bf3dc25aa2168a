"""Launch plan -> C++: one function `launch_<kernel>` per kernel, with its cubin embedded, on top of csrc/runtime."""

import hashlib
from collections.abc import Iterable, Sequence

from .launch_plan import Argument, LaunchPlan, Symbol, Tensor, TensorMap

HEADER = "launchers.h"
STAGE_OP_PREFIX = "stage_"
CPP_TYPES = {"float32": "float", "int32": "int32_t", "int64": "int64_t"}
SCHEMA_TYPES = {"float32": "float", "int32": "int", "int64": "int"}


def header_source(plans: Iterable[LaunchPlan]) -> str:
    """The header that declares every launch function."""
    lines = [
        "// Generated from the TileLang kernels; do not edit.",
        "#pragma once",
        "",
        '#include "runtime/kernel.h"',
        "",
        "namespace flashqla {",
        "",
        *(f"{_declaration(plan)};" for plan in plans),
        "",
        "}  // namespace flashqla",
    ]
    return "\n".join(lines) + "\n"


def launcher_source(plan: LaunchPlan, cubin: bytes) -> str:
    """The translation unit of one kernel; it embeds `<name>.cubin` from its own folder."""
    lines = [
        f"// Generated from the TileLang kernel {plan.name}; do not edit.",
        f"// sha256 of the cubin: {hashlib.sha256(cubin).hexdigest()}",
        f'#include "{HEADER}"',
        '#include "runtime/registration.h"',
        "",
        "namespace flashqla {",
        "namespace {",
        "",
        "alignas(64) constexpr unsigned char CUBIN[] = {",
        f'#embed "{plan.name}.cubin"',
        "};",
        _kernel_object(plan),
        *(f"constexpr TileLayout TILE_{tile.name}{{{_tile_layout(tile)}}};" for tile in plan.maps),
        "",
        "}  // namespace",
        "",
        f"{_declaration(plan)} {{",
        *("  " + line for line in _body(plan)),
        "}",
        "",
        *_stage_op(plan),
        "",
        "}  // namespace flashqla",
    ]
    return "\n".join(lines) + "\n"


def stage_schema(plan: LaunchPlan) -> str:
    """Schema of the op that launches one kernel alone, on tensors that the caller allocates; any of them may be written."""
    tensors = [f"Tensor({chr(ord('a') + i)}!) {tensor.name}" for i, tensor in enumerate(plan.tensors)]
    scalars = [f"{SCHEMA_TYPES[scalar.dtype]} {scalar.name}" for scalar in plan.scalars]
    return f"{STAGE_OP_PREFIX}{plan.name}({', '.join(tensors + scalars)}) -> ()"


def _declaration(plan: LaunchPlan) -> str:
    tensors = [f"const TensorView& {tensor.name}" for tensor in plan.tensors]
    scalars = [f"[[maybe_unused]] {CPP_TYPES[scalar.dtype]} {scalar.name}" for scalar in plan.scalars]
    return f"void launch_{plan.name}({', '.join(['const DeviceScope& scope', *tensors, *scalars])})"


def _kernel_object(plan: LaunchPlan) -> str:
    programmatic = "true" if plan.programmatic_launch else "false"
    traits = f"{{{plan.dynamic_shared_memory}, {programmatic}}}"
    return f'constinit Kernel kernel{{"{plan.kernel}", CUBIN, {traits}}};'


def _tile_layout(tile: TensorMap) -> str:
    box, strides = ("{" + ", ".join(map(str, values)) + "}" for values in (tile.box, tile.element_strides))
    modes = f"{tile.interleave}, {tile.swizzle}, {tile.l2_promotion}, {tile.out_of_bounds}"
    return f"{len(tile.dims)}, {tile.dtype}, {box}, {strides}, {modes}"


def _body(plan: LaunchPlan) -> list[str]:
    lines = [f'constexpr const char* NAME = "{plan.name}";']
    for tensor in plan.tensors:
        dtype = f"aoti_torch_dtype_{tensor.dtype}()"
        lines.append(f"require_tensor({tensor.name}, NAME, {dtype}, {len(tensor.shape)}, scope.index());")
    lines += [_symbol(symbol) for symbol in plan.symbols]
    for tensor in plan.tensors:
        lines += _layout_checks(tensor, plan.symbols)
    lines.append(f"const Extent grid{{{', '.join(plan.grid)}}};")
    lines.append("if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0) return;")
    for tile in plan.maps:
        lines += _map(tile)
    for index, argument in enumerate(plan.arguments):
        lines += _argument(index, argument)
    addresses = [
        f"&{argument.value}" if argument.kind == "map" else f"&argument_{i}"
        for i, argument in enumerate(plan.arguments)
    ]
    lines.append(f"void* arguments[] = {{{', '.join(addresses)}}};")
    block, cluster = ("{" + ", ".join(extent) + "}" for extent in (plan.block, plan.cluster))
    lines.append(f"kernel.launch(scope, grid, {block}, {cluster}, arguments);")
    return lines


def _symbol(symbol: Symbol) -> str:
    value = f"{symbol.tensor}.{symbol.kind}[{symbol.axis}]" + (f" - {symbol.offset}" if symbol.offset else "")
    if symbol.dtype == "int32":
        value = f'require_int32({value}, NAME, "{symbol.tensor}.{symbol.kind}[{symbol.axis}]")'
    return f"[[maybe_unused]] const int64_t {symbol.name} = {value};"


def _layout_checks(tensor: Tensor, symbols: Sequence[Symbol]) -> list[str]:
    """Checks of everything that no symbol was read from."""
    sources = {(symbol.tensor, symbol.kind, symbol.axis) for symbol in symbols}
    lines = [
        f"require_size({tensor.name}, NAME, {axis}, {size});"
        for axis, size in enumerate(tensor.shape)
        if (tensor.name, "size", axis) not in sources
    ]
    return lines + [
        f"require_stride({tensor.name}, NAME, {axis}, {stride});"
        for axis, stride in enumerate(tensor.strides)
        if (tensor.name, "stride", axis) not in sources
    ]


def _map(tile: TensorMap) -> list[str]:
    return [
        f"const int64_t {tile.name}_dims[] = {{{', '.join(tile.dims)}}};",
        f"const int64_t {tile.name}_strides[] = {{{', '.join(tile.strides)}}};",
        f"cuda::TensorMap {tile.name} = "
        f"tensor_map({tile.tensor}, NAME, TILE_{tile.name}, {tile.name}_dims, {tile.name}_strides);",
    ]


def _argument(index: int, argument: Argument) -> list[str]:
    if argument.kind == "map":
        return []
    if argument.kind == "pointer":
        return [f"void* argument_{index} = {argument.value}.data;"]
    kind = CPP_TYPES[argument.dtype]
    return [f"{kind} argument_{index} = static_cast<{kind}>({argument.value});"]


def _stage_op(plan: LaunchPlan) -> list[str]:
    """An op for this kernel alone, in libraries that are built to test kernels one by one."""
    count = len(plan.tensors)
    takes = [f"  {tensor.name}.take(stack[{i}]);" for i, tensor in enumerate(plan.tensors)]
    reads = [f'  {tensor.name}.read("{tensor.name}");' for tensor in plan.tensors]
    numbers = [
        f"static_cast<{CPP_TYPES[scalar.dtype]}>(as_{SCHEMA_TYPES[scalar.dtype].replace('float', 'double')}(stack[{count + i}]))"
        for i, scalar in enumerate(plan.scalars)
    ]
    views = [f"{tensor.name}.view()" for tensor in plan.tensors]
    return [
        "#ifdef FLASHQLA_STAGE_OPS",
        f"static void run_{plan.name}(StableIValue* stack, uint64_t, uint64_t) {{",
        f"  ArgumentTensor {', '.join(tensor.name for tensor in plan.tensors)};",
        *takes,
        *reads,
        f"  DeviceScope scope({plan.tensors[0].name}.view().device);",
        f"  launch_{plan.name}({', '.join(['scope', *views, *numbers])});",
        "}",
        f'static const OpRegistration stage_op("{stage_schema(plan)}",',
        f'                                    "{STAGE_OP_PREFIX}{plan.name}", run_{plan.name});',
        "#endif",
    ]
