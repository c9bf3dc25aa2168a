"""Lines of memory on their way to the L2 cache before anybody waits for them."""

import tilelang.language as T

PREFETCH_CODE = """
static __device__ __forceinline__ void prefetch_line(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}
"""


def call(name, element, *arguments):
    """Calls a function of the device code that a kernel imports, with the address of an element."""
    T.evaluate(T.call_extern("handle", name, T.address_of(element), *arguments))
