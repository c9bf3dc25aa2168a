"""Named barriers cost no kernel a block: an SM has 64, and one whose number is in a register takes all 16 of its block."""

import re

from flashqla_hub.compile.cubin import assemble, compile_ptx, run
from flashqla_hub.kernels._sm90 import REGISTER_FILE, REGISTER_STEP, SHARED_MEMORY_OF_SM

BARRIERS_OF_SM, THREADS_OF_SM, BLOCKS_OF_SM = 64, 2048, 32
RESERVED = 1024  # bytes of shared memory that the driver adds to a block's

COMPUTED = """
extern "C" __global__ void __launch_bounds__(64) computed(float* x) {
  __shared__ float y[64];
  y[threadIdx.x] = x[threadIdx.x];
  asm volatile("bar.sync %0, 32;" :: "r"(1 + (int)threadIdx.x / 32) : "memory");
  x[threadIdx.x] = y[threadIdx.x ^ 1];
}
"""


def barriers_of(tools, name, cubin, folder):
    """How many barriers ptxas reserved for a block."""
    (folder / f"{name}.cubin").write_bytes(cubin)
    flags = re.findall(r"SHF_BARRIERS=(\d+)", run([tools.nvdisasm, "-c", f"{name}.cubin"], folder))
    return max((int(number) for number in flags), default=0)


def blocks_without_barriers(threads, registers, shared_memory):
    """Blocks of an SM by everything else that limits them."""
    each = -(-registers // REGISTER_STEP) * REGISTER_STEP * threads
    return min(
        BLOCKS_OF_SM, THREADS_OF_SM // threads, REGISTER_FILE // each, SHARED_MEMORY_OF_SM // (shared_memory + RESERVED)
    )


def costs_blocks(barriers, threads, registers, shared_memory):
    return barriers * blocks_without_barriers(threads, registers, shared_memory) > BARRIERS_OF_SM


def test_barriers_limit_the_blocks_of_no_kernel(tools, product, tmp_path):
    found = {}
    for kernel in product:
        threads = int(kernel.plan.block[0])
        shared_memory = kernel.plan.dynamic_shared_memory + kernel.resources.static_shared_memory
        barriers = barriers_of(tools, kernel.plan.name, kernel.cubin, tmp_path)
        if costs_blocks(barriers, threads, kernel.resources.registers, shared_memory):
            found[kernel.plan.name] = barriers
    assert not found, f"{found} barriers cost these kernels blocks of an SM: name each by a number that is known"


def test_a_computed_number_takes_all_barriers_of_a_block(tools, tmp_path):
    cubin, resources = assemble(tools, "computed", compile_ptx(tools, "computed", COMPUTED, tmp_path), tmp_path)
    barriers = barriers_of(tools, "computed", cubin, tmp_path)
    assert barriers == 16
    assert costs_blocks(barriers, 64, resources.registers, resources.static_shared_memory)


def test_few_barriers_of_a_block_that_has_the_sm_to_itself_cost_nothing():
    assert not costs_blocks(16, 512, 128, 200_000) and not costs_blocks(3, 128, 80, 37_000)
