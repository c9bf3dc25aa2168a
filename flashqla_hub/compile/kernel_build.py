"""One spec -> one compiled kernel that has passed its gates."""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from .cache import Cache
from .cubin import NVCC_FLAGS, PTX_ISA, PTXAS_FLAGS, Resources, assemble, compile_ptx, count_instructions
from .errors import GateFailure
from .gates import kernel_failures
from .launch_plan import LaunchPlan
from .tools import Tools


class KernelSpec(Protocol):
    """What the compiler needs of an entry of flashqla_hub.kernels.spec.SPECS.

    `name` names the kernel's symbol, launcher and files; `build()` returns the prim_func; `minimum_instructions` counts
    SASS opcodes (HGMMA, UTMALDG, ...); `pass_configs` are TileLang's, such as {"tl.disable_warp_specialized": True}.
    """

    @property
    def name(self) -> str: ...

    @property
    def minimum_instructions(self) -> Mapping[str, int]: ...

    @property
    def pass_configs(self) -> Mapping[str, Any]: ...

    def build(self) -> Any: ...


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel ready to be embedded."""

    plan: LaunchPlan
    source: str
    cubin: bytes
    resources: Resources
    opcodes: Mapping[str, int]

    def manifest_entry(self) -> dict[str, Any]:
        """What the manifest records: resources, all opcode counts, the cubin's digest and the launch plan."""
        return {
            "cubin": {"bytes": len(self.cubin), "sha256": sha256(self.cubin).hexdigest()},
            "source_sha256": sha256(self.source.encode()).hexdigest(),
            "resources": asdict(self.resources) | {"dynamic_shared_memory": self.plan.dynamic_shared_memory},
            "instructions": dict(sorted(self.opcodes.items())),
            "launch": self.plan.as_json(),
        }


@dataclass(frozen=True)
class LoweredKernel:
    """CUDA source of one spec and how to launch it; made in one thread, since TileLang keeps global state."""

    spec: KernelSpec
    plan: LaunchPlan
    source: str


def lower_kernel(spec: KernelSpec, tools: Tools, cache: Cache) -> LoweredKernel:
    """Builds and lowers one spec.

    Raises:
        LoweringError: the launchers cannot express its host side.
    """
    from .canonical import digest_of, name_buffers  # these two import tilelang, which takes seconds
    from .lowering import lower

    prim_func = spec.build()
    name_buffers(prim_func)
    ingredients = {
        "prim_func": digest_of(prim_func),
        "name": spec.name,
        "pass_configs": dict(spec.pass_configs),
        "tools": tools.versions,
        "our_code": _digest_of_modules("canonical", "lowering", "expressions", "launch_plan"),
    }

    def make() -> bytes:
        lowered = lower(spec.name, prim_func, spec.pass_configs)
        return _to_bytes({"source": lowered.source, "plan": lowered.plan.as_json()})

    lowered = json.loads(cache.get_or_make("lowered", ingredients, make))
    return LoweredKernel(spec, LaunchPlan.from_json(lowered["plan"]), lowered["source"])


def compile_kernel(lowered: LoweredKernel, tools: Tools, cache: Cache) -> CompiledKernel:
    """Compiles one kernel without judging it; safe to call from several threads.

    Raises:
        CompilerError: it does not compile.
    """
    name, flags = lowered.plan.name, [NVCC_FLAGS, PTX_ISA, PTXAS_FLAGS]
    our_code = _digest_of_modules("cubin")
    ingredients = {"source": lowered.source, "flags": flags, "tools": tools.versions, "our_code": our_code}

    def make() -> bytes:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            cubin, resources = assemble(tools, name, compile_ptx(tools, name, lowered.source, folder), folder)
            opcodes = count_instructions(tools, name, cubin, folder)
        return _to_bytes({"cubin": cubin.hex(), "resources": asdict(resources), "opcodes": opcodes})

    compiled = json.loads(cache.get_or_make("compiled", ingredients, make))
    warnings = tuple(compiled["resources"].pop("warnings"))
    return CompiledKernel(
        plan=lowered.plan,
        source=lowered.source,
        cubin=bytes.fromhex(compiled["cubin"]),
        resources=Resources(**compiled["resources"], warnings=warnings),
        opcodes=Counter(compiled["opcodes"]),
    )


def judge_kernel(kernel: CompiledKernel, minimum_instructions: Mapping[str, int]) -> None:
    """Raises GateFailure unless the kernel may be shipped; one reason a line."""
    failures = kernel_failures(kernel.plan, kernel.resources, kernel.opcodes, minimum_instructions)
    if failures:
        raise GateFailure("\n".join(failures))


def _digest_of_modules(*names: str) -> str:
    texts = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in names]
    return sha256(b"\0".join(texts)).hexdigest()


def _to_bytes(data: dict[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True).encode()
