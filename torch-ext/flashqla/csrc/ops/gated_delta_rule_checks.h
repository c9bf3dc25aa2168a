// What an op of the gated delta rule demands of its tensors, in one sentence each.
#pragma once

#include "../runtime/tensor.h"

namespace flashqla {

constexpr int64_t STATE_DIM = 128;      // K = V
constexpr int64_t TMA_ROW_ELEMENTS = 8;  // of 16 bits, that make TMA's 16 bytes

inline void check_size(const TensorView& tensor, int axis, int64_t expected, const char* like) {
  FLASHQLA_CHECK(tensor.size[axis] == expected, "%s.shape[%d] is %lld and %s gives %lld; pass tensors of one batch.",
                 tensor.name, axis, static_cast<long long>(tensor.size[axis]), like, static_cast<long long>(expected));
}

inline void check_same_device(const TensorView& tensor, const TensorView& q) {
  FLASHQLA_CHECK(tensor.device == q.device, "%s is on device %d and q is on device %d; move it there.", tensor.name,
                 tensor.device, q.device);
}

// q, k, v and do: [B, T, heads, 128] with contiguous rows, aligned for TMA, the batch one run of tokens.
inline void check_token_rows(const TensorView& tensor, const TensorView& q) {
  check_same_device(tensor, q);
  FLASHQLA_CHECK(tensor.rank == 4, "%s has %d dimensions and must have 4, [B, T, heads, 128].", tensor.name,
                 tensor.rank);
  FLASHQLA_CHECK(tensor.dtype == q.dtype, "%s and q have different dtypes; convert %s to that of q.", tensor.name,
                 tensor.name);
  FLASHQLA_CHECK(tensor.size[3] == STATE_DIM,
                 "%s has head dim %lld and the SM90 kernels take 128; use the PyTorch path for other sizes.",
                 tensor.name, static_cast<long long>(tensor.size[3]));
  check_size(tensor, 0, q.size[0], "q");
  check_size(tensor, 1, q.size[1], "q");
  if (tensor.element_count() == 0) return;
  const bool rows_are_contiguous = tensor.stride[3] == 1;
  const bool is_aligned = (tensor.size[2] == 1 || tensor.stride[2] % TMA_ROW_ELEMENTS == 0) &&
                          (tensor.size[0] * tensor.size[1] == 1 || tensor.stride[1] % TMA_ROW_ELEMENTS == 0);
  const bool is_one_run = tensor.size[0] == 1 || tensor.stride[0] == tensor.size[1] * tensor.stride[1];
  FLASHQLA_CHECK(
      rows_are_contiguous && is_aligned && is_one_run,
      "%s has strides (%lld, %lld, %lld, %lld) and the SM90 kernels need the last to be 1, the others multiples "
      "of 8, and the first T times the second; pass %s.contiguous().",
      tensor.name, static_cast<long long>(tensor.stride[0]), static_cast<long long>(tensor.stride[1]),
      static_cast<long long>(tensor.stride[2]), static_cast<long long>(tensor.stride[3]), tensor.name);
}

inline void check_floating(const TensorView& tensor) {
  const int32_t dtype = tensor.dtype;
  FLASHQLA_CHECK(dtype == aoti_torch_dtype_float32() || dtype == aoti_torch_dtype_bfloat16() ||
                     dtype == aoti_torch_dtype_float16() || dtype == aoti_torch_dtype_float64(),
                 "%s must be bfloat16, float16, float32 or float64; pass %s.float().", tensor.name, tensor.name);
}

// g and beta: [B, T, HV] of any floating dtype and layout.
inline void check_gates(const TensorView& tensor, const TensorView& v) {
  check_same_device(tensor, v);
  check_floating(tensor);
  FLASHQLA_CHECK(tensor.rank == 3, "%s has %d dimensions and must have 3, [B, T, HV].", tensor.name, tensor.rank);
  for (int axis = 0; axis < 3; axis++) check_size(tensor, axis, v.size[axis], "v");
}

// States and their gradients: [N, HV, 128, 128] of any floating dtype and layout.
inline void check_states(const TensorView& tensor, const TensorView& q, int64_t sequences, int64_t v_heads) {
  check_same_device(tensor, q);
  check_floating(tensor);
  FLASHQLA_CHECK(tensor.rank == 4, "%s has %d dimensions and must have 4, [N, HV, 128, 128].", tensor.name,
                 tensor.rank);
  const int64_t expected[] = {sequences, v_heads, STATE_DIM, STATE_DIM};
  for (int axis = 0; axis < 4; axis++) check_size(tensor, axis, expected[axis], "the batch");
}

// cu_seqlens: [N + 1] int32 or int64, contiguous.
inline void check_offsets(const TensorView& offsets, const TensorView& q, const char* op) {
  check_same_device(offsets, q);
  FLASHQLA_CHECK(offsets.dtype == aoti_torch_dtype_int32() || offsets.dtype == aoti_torch_dtype_int64(),
                 "cu_seqlens must be int32 or int64; convert it.");
  FLASHQLA_CHECK(offsets.rank == 1 && offsets.size[0] >= 1,
                 "cu_seqlens must be one-dimensional with N + 1 entries, the first 0; see the documentation.");
  require_stride(offsets, op, 0, 1);
  FLASHQLA_CHECK(q.size[0] == 1,
                 "q has batch size %lld and cu_seqlens packs all sequences into one; flatten to [1, T, ...].",
                 static_cast<long long>(q.size[0]));
}

// [B, T, heads, 128] -> [B * T, heads, 128].
inline TensorView as_token_rows(const TensorView& tensor) {
  TensorView view = tensor;
  view.rank = 3;
  view.size[0] = tensor.size[0] * tensor.size[1];
  for (int axis = 1; axis < 3; axis++) view.size[axis] = tensor.size[axis + 1];
  for (int axis = 0; axis < 3; axis++) view.stride[axis] = tensor.stride[axis + 1];
  return view;
}

// The argument itself when it is contiguous float32, else a copy that is.
inline TensorView as_contiguous_float32(const ArgumentTensor& argument, NewTensor& copy) {
  const TensorView& view = argument.view();
  if (view.dtype == aoti_torch_dtype_float32() && view.is_contiguous()) return view;
  copy.allocate_like(view, aoti_torch_dtype_float32());
  copy.copy_from(argument.handle());
  return copy.view();
}

}  // namespace flashqla
