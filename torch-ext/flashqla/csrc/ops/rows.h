// Views and checks that the row-wise ops share: tensors of any rank as [tokens, heads, dim], and parameters of 16 or 32
// bits.
#pragma once

#include "../runtime/tensor.h"

namespace flashqla {

constexpr int64_t ROW_ALIGNMENT = 8;  // elements of 16 bits in a 16-byte access

// bfloat16 or float16, which the row kernels take.
inline void check_half(const TensorView& tensor) {
  FLASHQLA_CHECK(tensor.dtype == aoti_torch_dtype_bfloat16() || tensor.dtype == aoti_torch_dtype_float16(),
                 "%s is neither bfloat16 nor float16, which the SM90 kernels take; convert it.", tensor.name);
}

inline void check_like(const TensorView& tensor, const TensorView& other) {
  FLASHQLA_CHECK(tensor.device == other.device, "%s is on device %d and %s is on device %d; move it there.",
                 tensor.name, tensor.device, other.name, other.device);
  bool is_same = tensor.rank == other.rank;
  for (int axis = 0; is_same && axis < tensor.rank; axis++) is_same = tensor.size[axis] == other.size[axis];
  FLASHQLA_CHECK(is_same, "%s and %s have different shapes; pass tensors of one call.", tensor.name, other.name);
}

struct Axis {
  int64_t size, stride;
};

// The first `count` axes as one, which they must be in memory too.
inline Axis join_axes(const TensorView& tensor, int count) {
  Axis joined{1, 0};
  bool is_one_run = true;
  for (int axis = count - 1; axis >= 0; axis--) {
    if (tensor.size[axis] == 1) continue;  // may have any stride
    is_one_run = is_one_run && (joined.size <= 1 || tensor.stride[axis] == joined.size * joined.stride);
    if (joined.size == 1) joined.stride = tensor.stride[axis];
    joined.size *= tensor.size[axis];
  }
  FLASHQLA_CHECK(is_one_run || tensor.element_count() == 0,
                 "%s has a first axis that does not continue the ones behind it, as the SM90 kernels need; pass "
                 "%s.contiguous().",
                 tensor.name, tensor.name);
  return joined;
}

// [..., heads, dim], [rows, dim] or [dim] as [tokens, heads, dim]: rows of 16-byte units at 16-byte addresses.
inline TensorView as_rows(const TensorView& tensor, int64_t dim) {
  const int last = tensor.rank - 1;
  FLASHQLA_CHECK(tensor.rank >= 1 && tensor.size[last] == dim,
                 "%s must be [..., %lld], the size that the SM90 kernels take; use the PyTorch path for others.",
                 tensor.name, static_cast<long long>(dim));
  const bool has_heads = tensor.rank >= 3 && tensor.size[last - 1] != 1;
  const Axis tokens = join_axes(tensor, has_heads ? last - 1 : last);
  const Axis heads = has_heads ? Axis{tensor.size[last - 1], tensor.stride[last - 1]} : Axis{1, 0};
  FLASHQLA_CHECK(tensor.element_count() == 0 ||
                     (tensor.stride[last] == 1 && tokens.stride % ROW_ALIGNMENT == 0 &&
                      heads.stride % ROW_ALIGNMENT == 0 && reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0),
                 "%s has strides or an address that are no multiples of 16 bytes, as the SM90 kernels need; pass "
                 "%s.contiguous().clone().",
                 tensor.name, tensor.name);
  TensorView view = contiguous_view(tensor.name, tensor.data, tensor.dtype, tensor.device,
                                    {tokens.size, heads.size, dim});
  view.stride[0] = tokens.stride;
  view.stride[1] = heads.stride;
  return view;
}

// [..., heads] as [tokens, heads], with any strides.
inline TensorView as_gates(const TensorView& tensor) {
  const int last = tensor.rank - 1;
  FLASHQLA_CHECK(tensor.rank >= 1, "%s must be [..., HV]; unsqueeze it.", tensor.name);
  const Axis tokens = join_axes(tensor, last);
  TensorView view =
      contiguous_view(tensor.name, tensor.data, tensor.dtype, tensor.device, {tokens.size, tensor.size[last]});
  view.stride[0] = tokens.stride;
  view.stride[1] = tensor.stride[last];
  return view;
}

// The same numbers under another dtype: for the tensor of a pair of which a kernel reads only the other one.
inline TensorView with_dtype(TensorView view, int32_t dtype) {
  view.dtype = dtype;
  return view;
}

// A parameter [size] as a pair of views, of which a kernel reads the one that `is_wide` says.
struct Parameter {
  TensorView narrow, wide;
  bool is_wide = false;

  Parameter() = default;
  Parameter(const TensorView& tensor, int64_t size, int32_t narrow_dtype, const TensorView& like) {
    FLASHQLA_CHECK(tensor.device == like.device, "%s is on device %d and %s is on device %d; move it there.",
                   tensor.name, tensor.device, like.name, like.device);
    FLASHQLA_CHECK(tensor.rank == 1 && tensor.size[0] == size, "%s must have one axis, of size %lld; check which layer "
                   "it belongs to.", tensor.name, static_cast<long long>(size));
    require_stride(tensor, "the SM90 kernel", 0, 1);
    is_wide = tensor.dtype == aoti_torch_dtype_float32();
    FLASHQLA_CHECK(is_wide || tensor.dtype == narrow_dtype,
                   "%s is neither float32 nor of the dtype of %s; convert it to one of them.", tensor.name, like.name);
    const TensorView view = contiguous_view(tensor.name, tensor.data, tensor.dtype, tensor.device, {size});
    narrow = with_dtype(view, narrow_dtype);
    wide = with_dtype(view, aoti_torch_dtype_float32());
  }
};

// The SMs of an H100 SXM or H200. Kernels that leave parts of sums run a fixed number of blocks, a multiple of it, on
// whichever card, so that sums have the same bits everywhere.
constexpr int64_t SMS = 132;

}  // namespace flashqla
