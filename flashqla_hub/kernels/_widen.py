"""16-bit numbers as float32, in an instruction each where the compiler would take three for two of them."""

import tilelang.language as T

WIDEN_CODE = """
// The two numbers of a register.
static __device__ __forceinline__ float widen_bfloat16_low(const void* pair) {
  return __uint_as_float(*static_cast<const unsigned*>(pair) << 16);
}
static __device__ __forceinline__ float widen_bfloat16_high(const void* pair) {
  return __uint_as_float(*static_cast<const unsigned*>(pair) & 0xffff0000u);
}
static __device__ __forceinline__ float widen_float16_low(const void* pair) {
  float number;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}"
      : "=f"(number) : "r"(*static_cast<const unsigned*>(pair)));
  return number;
}
static __device__ __forceinline__ float widen_float16_high(const void* pair) {
  float number;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}"
      : "=f"(number) : "r"(*static_cast<const unsigned*>(pair)));
  return number;
}
"""


@T.macro
def widen(size, wide, place, raw, i):
    """Vector `place` of `wide` = vector i of `raw`, as float32; the kernel imports WIDEN_CODE."""
    for pair in T.unroll(size // 2):
        at = T.address_of(raw[i * size + 2 * pair])
        wide[place * size + 2 * pair] = T.call_extern("float32", f"widen_{raw.dtype}_low", at)
        wide[place * size + 2 * pair + 1] = T.call_extern("float32", f"widen_{raw.dtype}_high", at)
