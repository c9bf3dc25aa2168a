// What an op of the gated delta rule demands of its tensors, in one sentence each.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "../runtime/tensor.h"

namespace flashqla {

constexpr int64_t STATE_DIM = 128;      // K = V
constexpr int64_t TRIANGLE_ROWS = 96, HALF_CHUNK = 32;  // of a tile without its upper right quarter
constexpr int64_t BORDER_SLOTS = 11;  // of the operand, which hold the states at a border
static_assert(BORDER_SLOTS * TRIANGLE_ROWS * HALF_CHUNK * 2 >= STATE_DIM * STATE_DIM * 4, "a state is in float32");
constexpr int64_t TMA_ALIGNMENT = 16, TMA_ROW_ELEMENTS = 8;  // bytes, and elements of 16 bits that make them

inline void check_size(const TensorView& tensor, int axis, int64_t expected, const char* like) {
  FLASHQLA_CHECK(tensor.size[axis] == expected, "%s.shape[%d] is %lld and %s gives %lld; pass tensors of one batch.",
                 tensor.name, axis, static_cast<long long>(tensor.size[axis]), like, static_cast<long long>(expected));
}

inline void check_same_device(const TensorView& tensor, const TensorView& q) {
  FLASHQLA_CHECK(tensor.device == q.device, "%s is on device %d and q is on device %d; move it there.", tensor.name,
                 tensor.device, q.device);
}

// From one token to the next. The one token of a row may have any stride, and the batch walks the tokens.
inline int64_t token_stride(const TensorView& tensor) { return tensor.stride[tensor.size[1] == 1 ? 0 : 1]; }

// Whether tiles can be loaded from [B, T, heads, 128]: contiguous rows, aligned for TMA, the batch one run of tokens. An
// expanded tensor, with a stride of 0, does not do: a tensor map describes memory, not repetition.
inline bool is_loadable(const TensorView& tensor) {
  const auto is_step = [](int64_t stride) { return stride > 0 && stride % TMA_ROW_ELEMENTS == 0; };
  const int64_t batch = tensor.size[0], tokens = tensor.size[1];
  return tensor.stride[3] == 1 && reinterpret_cast<uintptr_t>(tensor.data) % TMA_ALIGNMENT == 0 &&
         (tensor.size[2] == 1 || is_step(tensor.stride[2])) && (batch * tokens == 1 || is_step(token_stride(tensor))) &&
         (batch == 1 || tokens == 1 || tensor.stride[0] == tokens * tensor.stride[1]);
}

// q, k, v and do: [B, T, heads, 128]. What tiles cannot be loaded from, a copy takes its place.
inline void require_token_rows(ArgumentTensor& argument, const TensorView& q) {
  const TensorView& tensor = argument.view();
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
  if (tensor.element_count() > 0 && !is_loadable(tensor)) argument.make_contiguous();
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

// cu_seqlens: [N + 1] int32 or int64.
inline void require_offsets(ArgumentTensor& argument, const TensorView& q) {
  const TensorView& offsets = argument.view();
  check_same_device(offsets, q);
  FLASHQLA_CHECK(offsets.dtype == aoti_torch_dtype_int32() || offsets.dtype == aoti_torch_dtype_int64(),
                 "cu_seqlens must be int32 or int64; convert it.");
  FLASHQLA_CHECK(offsets.rank == 1 && offsets.size[0] >= 1,
                 "cu_seqlens must be one-dimensional with N + 1 entries, the first 0; see the documentation.");
  FLASHQLA_CHECK(q.size[0] == 1,
                 "q has batch size %lld and cu_seqlens packs all sequences into one; flatten to [1, T, ...].",
                 static_cast<long long>(q.size[0]));
  if (!offsets.is_contiguous()) argument.make_contiguous();
}

// 32-bit words of an entry of cu_seqlens.
inline int32_t words_per_entry(const ArgumentTensor& offsets) {
  return offsets.has_value() && offsets.view().dtype == aoti_torch_dtype_int64() ? 2 : 1;
}

// cu_seqlens as 32-bit words, one of `any` for a dense batch, whose kernels read none: any valid address will do.
inline TensorView offset_words(const ArgumentTensor& offsets, const TensorView& any) {
  const TensorView& like = offsets.has_value() ? offsets.view() : any;
  const int64_t entries = offsets.has_value() ? like.size[0] : 1;
  return contiguous_view("cu_seqlens", like.data, aoti_torch_dtype_int32(), like.device,
                         {entries * words_per_entry(offsets)});
}

// What no launch can refuse, on request only, since looking at the values waits for the GPU: that the bounds start at 0,
// never decrease and end within the row. The caller has the sentence (flashqla/checks.py).
inline void check_offset_values(const ArgumentTensor& offsets, int64_t tokens) {
  const char* const wish = getenv("FLASHQLA_CHECK_CU_SEQLENS");
  if (wish == nullptr || strcmp(wish, "1") != 0) return;
  NewTensor copy;
  copy.allocate_on_host(offsets.view());
  copy.fetch_from(offsets.handle());
  const bool is_wide = copy.view().dtype == aoti_torch_dtype_int64();
  int64_t last = 0;
  for (int64_t n = 0; n < copy.view().size[0]; n++) {
    const int64_t bound = is_wide ? static_cast<int64_t*>(copy.view().data)[n] : static_cast<int32_t*>(copy.view().data)[n];
    FLASHQLA_CHECK(bound >= last && bound <= tokens && (n > 0 || bound == 0),
                   "cu_seqlens must start at 0, never decrease and end within the row of %lld tokens.",
                   static_cast<long long>(tokens));
    last = bound;
  }
}

// [B, T, heads, 128] -> [B * T, heads, 128].
inline TensorView as_token_rows(const TensorView& tensor) {
  TensorView view = tensor;
  view.rank = 3;
  view.size[0] = tensor.size[0] * tensor.size[1];
  for (int axis = 1; axis < 3; axis++) view.size[axis] = tensor.size[axis + 1];
  view.stride[0] = token_stride(tensor);
  for (int axis = 1; axis < 3; axis++) view.stride[axis] = tensor.stride[axis + 1];
  return view;
}

// What a forward keeps for its backward, [slots, HV, 96, 32] in 16 bits: the operand of each chunk and, if the backward takes
// ranges of chunks one after the other, behind them the states before each range but the first, float32 [HV, V, K].
inline void require_range(int64_t range_slots) {
  FLASHQLA_CHECK(range_slots >= 0, "range_slots is %lld and must be positive, or 0 for one range.",
                 static_cast<long long>(range_slots));
}

inline int64_t borders_of(int64_t range_slots, int64_t slots) {
  return range_slots > 0 && slots > 0 ? (slots - 1) / range_slots : 0;
}

inline int64_t slots_of_borders(int64_t borders) { return borders * BORDER_SLOTS; }

inline TensorView chunks_of_operand(const TensorView& operand, int64_t first_slot, int64_t slots) {
  const int64_t bytes_of_slot = operand.size[1] * TRIANGLE_ROWS * HALF_CHUNK * 2;
  return contiguous_view(operand.name, static_cast<char*>(operand.data) + first_slot * bytes_of_slot, operand.dtype,
                         operand.device, {slots, operand.size[1], TRIANGLE_ROWS, HALF_CHUNK});
}

inline void* border_of_operand(const TensorView& operand, int64_t slots, int64_t border) {
  const int64_t bytes_of_border = operand.size[1] * STATE_DIM * STATE_DIM * 4;
  return static_cast<char*>(chunks_of_operand(operand, slots, 0).data) + border * bytes_of_border;
}

inline TensorView as_border(const char* name, void* data, int64_t v_heads, int32_t device) {
  return contiguous_view(name, data, aoti_torch_dtype_float32(), device, {v_heads, STATE_DIM * STATE_DIM});
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
