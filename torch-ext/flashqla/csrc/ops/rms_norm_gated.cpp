// sm90_rms_norm_gated_fwd and _bwd: the gated RMS norm on the kernels of flashqla_hub/kernels (see its README).
#include "../generated/launchers.h"
#include "../runtime/registration.h"
#include "rows.h"

namespace flashqla {
namespace {

constexpr int64_t DIM = 128;
constexpr int64_t ROWS_PER_PART = 16;   // of a group of the backward kernel
constexpr int64_t MAX_PARTS = 7 * SMS;  // its blocks that fit at once
constexpr int64_t MANY_ROWS = 1 << 20;  // from so many on that kernel is the faster one (kernels/norm_backward_few.py)
constexpr int64_t FEW_ROWS_PER_PART = 24, FEW_MAX_PARTS = 4 * SMS;  // the same of the other

// [tokens, heads, 128] with the heads of a token where those of the one before end, as rows without heads: nothing to divide.
bool is_one_run(const TensorView& rows) { return rows.stride[0] == rows.size[1] * rows.stride[1] || rows.size[0] <= 1; }

TensorView without_heads(TensorView rows) {
  rows.stride[0] = rows.size[1] == 1 ? rows.stride[0] : rows.stride[1];
  rows.size[0] *= rows.size[1];
  rows.size[1] = 1;
  return rows;
}

// A new tensor as [rows, 128].
TensorView as_flat_rows(const NewTensor& tensor) {
  const TensorView& view = tensor.view();
  return contiguous_view(view.name, view.data, view.dtype, view.device, {view.element_count() / DIM, DIM});
}

struct Norm {
  TensorView x, g;  // [tokens, heads, 128]
  Parameter weight;

  Norm(const TensorView& values, const TensorView& gates, const TensorView& factor) {
    check_half(values);
    check_like(gates, values);
    FLASHQLA_CHECK(gates.dtype == values.dtype, "g and x have different dtypes; convert g to that of x.");
    x = as_rows(values, DIM);
    g = as_rows(gates, DIM);
    weight = Parameter(factor, DIM, values.dtype, values);
    require_int32(rows() + MAX_PARTS * ROWS_PER_PART, "the SM90 gated norm", "the number of rows");
    require_short_steps(x);
    require_short_steps(g);
  }

  // The kernels count the steps from row to row in vectors, in 32 bits.
  static void require_short_steps(const TensorView& rows) {
    for (int axis = 0; axis < 2; axis++) require_int32(rows.stride[axis] / ROW_ALIGNMENT, "the SM90 gated norm", "a stride");
  }

  int64_t rows() const { return x.size[0] * x.size[1]; }
  bool is_bfloat16() const { return x.dtype == aoti_torch_dtype_bfloat16(); }
};

void run_forward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentTensor x, g, weight;
  x.take(stack[0]);
  g.take(stack[1]);
  weight.take(stack[2]);
  x.read("x");
  g.read("g");
  weight.read("weight");
  const Norm norm(x.view(), g.view(), weight.view());
  const DeviceScope scope(norm.x.device);
  NewTensor y;
  y.allocate_like(x.view(), norm.x.dtype);
  if (norm.rows() > 0) {
    const auto launch = norm.is_bfloat16() ? launch_norm_bf16 : launch_norm_fp16;
    const bool is_plain = is_one_run(norm.x) && is_one_run(norm.g);
    launch(scope, is_plain ? without_heads(norm.x) : norm.x, is_plain ? without_heads(norm.g) : norm.g,
           norm.weight.narrow, norm.weight.wide, as_flat_rows(y),
           static_cast<float>(as_double(stack[3])), norm.weight.is_wide, as_bool(stack[4]));
  }
  stack[0] = y.hand_over();
}

void run_backward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentTensor dy, x, g, weight;
  dy.take(stack[0]);
  x.take(stack[1]);
  g.take(stack[2]);
  weight.take(stack[3]);
  dy.read("dy");
  x.read("x");
  g.read("g");
  weight.read("weight");
  const Norm norm(x.view(), g.view(), weight.view());
  check_like(dy.view(), x.view());
  FLASHQLA_CHECK(dy.view().dtype == norm.x.dtype, "dy and x have different dtypes; convert dy to that of x.");
  const TensorView grad = as_rows(dy.view(), DIM);
  Norm::require_short_steps(grad);
  const DeviceScope scope(norm.x.device);
  const int32_t float32 = aoti_torch_dtype_float32();
  NewTensor dx, dg, dweight, parts;
  dx.allocate_like(x.view(), norm.x.dtype);
  dg.allocate_like(g.view(), norm.x.dtype);
  dweight.allocate("dweight", {DIM}, weight.view().dtype, scope.index());
  if (norm.rows() == 0) {
    dweight.fill_zero();
  } else {
    const bool has_many = norm.rows() >= MANY_ROWS;
    const int64_t rows_per_part = has_many ? ROWS_PER_PART : FEW_ROWS_PER_PART;
    const int64_t blocks =
        smaller(has_many ? MAX_PARTS : FEW_MAX_PARTS, (norm.rows() + rows_per_part - 1) / rows_per_part);
    parts.allocate("parts", {blocks, DIM}, float32, scope.index());
    const auto eps = static_cast<float>(as_double(stack[4]));
    const bool is_silu = as_bool(stack[5]);
    if (has_many) {
      const auto launch = norm.is_bfloat16() ? launch_norm_backward_bf16 : launch_norm_backward_fp16;
      launch(scope, norm.x, norm.g, grad, norm.weight.narrow, norm.weight.wide, as_flat_rows(dx), as_flat_rows(dg),
             parts.view(), eps, norm.weight.is_wide, is_silu);
    } else {
      const auto launch = norm.is_bfloat16() ? launch_norm_backward_few_bf16 : launch_norm_backward_few_fp16;
      launch(scope, norm.x, norm.g, grad, norm.weight.narrow, norm.weight.wide, as_rows(dx.view(), DIM),
             as_rows(dg.view(), DIM), parts.view(), eps, norm.weight.is_wide, is_silu);
    }
    const auto add = norm.is_bfloat16() ? launch_partial_sums_bf16 : launch_partial_sums_fp16;
    add(scope, parts.view(), with_dtype(dweight.view(), norm.x.dtype), with_dtype(dweight.view(), float32),
        norm.weight.is_wide);
  }
  stack[0] = dx.hand_over();
  stack[1] = dg.hand_over();
  stack[2] = dweight.hand_over();
}

const OpRegistration forward(
    "sm90_rms_norm_gated_fwd(Tensor x, Tensor g, Tensor weight, float eps, bool is_silu) -> Tensor",
    "sm90_rms_norm_gated_fwd", run_forward);
const OpRegistration backward(
    "sm90_rms_norm_gated_bwd(Tensor dy, Tensor x, Tensor g, Tensor weight, float eps, bool is_silu) "
    "-> (Tensor dx, Tensor dg, Tensor dweight)",
    "sm90_rms_norm_gated_bwd", run_backward);

}  // namespace
}  // namespace flashqla
