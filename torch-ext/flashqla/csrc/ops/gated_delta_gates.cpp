// sm90_gated_delta_gates_fwd and _bwd: the gate activations of the layer, g = -exp(A_log) softplus(a + dt_bias) and
// beta = strength sigmoid(b), either of them or both, on the kernels of flashqla_hub/kernels (see its README).
#include "../generated/launchers.h"
#include "../runtime/registration.h"
#include "rows.h"

namespace flashqla {
namespace {

constexpr int64_t THREADS = 256;  // of a block, one a token and head
constexpr int64_t MAX_PARTS = 4 * SMS;

struct Arguments {
  ArgumentTensor a, b, A_log, dt_bias;
  double strength;

  explicit Arguments(StableIValue* stack) {
    a.take_optional(stack[0]);
    b.take_optional(stack[1]);
    A_log.take_optional(stack[2]);
    dt_bias.take_optional(stack[3]);
    strength = as_double(stack[4]);
  }

  void read() {
    a.read("a");
    b.read("b");
    A_log.read("A_log");
    dt_bias.read("dt_bias");
    FLASHQLA_CHECK(a.has_value() || b.has_value(), "a and b are both None; pass the raw values to activate.");
    FLASHQLA_CHECK(a.has_value() == A_log.has_value(), "A_log belongs to a; pass both or neither.");
    FLASHQLA_CHECK(a.has_value() || !dt_bias.has_value(), "dt_bias belongs to a; pass a too, or leave it out.");
    if (a.has_value() && b.has_value()) {
      check_like(b.view(), a.view());
      FLASHQLA_CHECK(a.view().dtype == b.view().dtype, "a and b have different dtypes; convert b to that of a.");
    }
  }

  const TensorView& first() const { return a.has_value() ? a.view() : b.view(); }
};

// Views that both kernels take; what is left out is stood in for by a tensor that is not read.
struct Gates {
  TensorView a, b;  // [tokens, heads]
  Parameter A_log, dt_bias;
  bool has_a, has_b, has_dt_bias;

  explicit Gates(const Arguments& arguments)
      : has_a(arguments.a.has_value()), has_b(arguments.b.has_value()), has_dt_bias(arguments.dt_bias.has_value()) {
    const TensorView& like = arguments.first();
    FLASHQLA_CHECK(is_wide(like) || is_bfloat16(like) || like.dtype == aoti_torch_dtype_float16(),
                   "%s is neither bfloat16, float16 nor float32, which the SM90 gate kernels take; convert it.",
                   like.name);
    a = as_gates(has_a ? arguments.a.view() : like);
    b = as_gates(has_b ? arguments.b.view() : like);
    const int64_t heads = a.size[1];
    if (has_a) A_log = parameter(arguments.A_log.view(), heads, like);
    if (has_dt_bias) dt_bias = parameter(arguments.dt_bias.view(), heads, like);
    if (!has_a) A_log = unused(heads);
    if (!has_dt_bias) dt_bias = unused(heads);
    require_int32((tokens() + 1) * larger(heads, THREADS), "the SM90 gate kernel", "the number of gates");
  }

  int64_t tokens() const { return a.size[0]; }
  int64_t heads() const { return a.size[1]; }
  bool is_empty() const { return tokens() == 0 || heads() == 0; }
  static bool is_wide(const TensorView& tensor) { return tensor.dtype == aoti_torch_dtype_float32(); }
  static bool is_bfloat16(const TensorView& tensor) { return tensor.dtype == aoti_torch_dtype_bfloat16(); }

 private:
  static Parameter parameter(const TensorView& tensor, int64_t heads, const TensorView& like) {
    return Parameter(tensor, heads, like.dtype, like);
  }

  Parameter unused(int64_t heads) const {
    return parameter(contiguous_view("an unused parameter", a.data, a.dtype, a.device, {heads}), heads, a);
  }
};

template <typename Launch>
Launch choose(const TensorView& tensor, Launch bf16, Launch fp16, Launch fp32) {
  return Gates::is_wide(tensor) ? fp32 : Gates::is_bfloat16(tensor) ? bf16 : fp16;
}

// [tokens, heads] on the memory of `data`, or on any valid address where the kernel does not look.
TensorView as_table(const Gates& gates, const TensorView& data, bool is_used, int32_t dtype) {
  const TensorView& place = is_used ? data : gates.a;
  return contiguous_view(data.name, place.data, dtype, gates.a.device, {gates.tokens(), gates.heads()});
}

void run_forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  arguments.read();
  const Gates gates(arguments);
  const DeviceScope scope(gates.a.device);
  const int32_t float32 = aoti_torch_dtype_float32();
  NewTensor g, beta;
  if (gates.has_a) g.allocate_like(arguments.a.view(), float32);
  if (!gates.has_a) g.allocate("g", {int64_t(0)}, float32, scope.index());
  if (gates.has_b) beta.allocate_like(arguments.b.view(), float32);
  if (!gates.has_b) beta.allocate("beta", {int64_t(0)}, float32, scope.index());
  if (!gates.is_empty()) {
    const auto launch = choose(gates.a, launch_gates_bf16, launch_gates_fp16, launch_gates_fp32);
    launch(scope, gates.a, gates.b, gates.A_log.narrow, gates.A_log.wide, gates.dt_bias.narrow, gates.dt_bias.wide,
           as_table(gates, g.view(), gates.has_a, float32), as_table(gates, beta.view(), gates.has_b, float32),
           static_cast<float>(arguments.strength), gates.A_log.is_wide, gates.dt_bias.is_wide, gates.has_dt_bias,
           gates.has_a, gates.has_b);
  }
  stack[0] = g.hand_over();
  stack[1] = beta.hand_over();
}

// The gradient of one of the results as [tokens, heads] with any strides, in float32; `unused` where it is not wanted.
TensorView gradient(const ArgumentTensor& argument, const TensorView& like, bool is_used, const TensorView& unused) {
  if (!is_used) return with_dtype(unused, aoti_torch_dtype_float32());
  FLASHQLA_CHECK(argument.has_value(), "the gradient of %s is None and %s is given; leave %s out.", like.name,
                 like.name, like.name);
  check_like(argument.view(), like);
  FLASHQLA_CHECK(Gates::is_wide(argument.view()), "%s is not float32, which the SM90 gate kernel takes; convert it.",
                 argument.view().name);
  return as_gates(argument.view());
}

void run_backward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentTensor dg, dbeta;
  dg.take_optional(stack[0]);
  dbeta.take_optional(stack[1]);
  Arguments arguments(stack + 2);
  dg.read("dg");
  dbeta.read("dbeta");
  arguments.read();
  const Gates gates(arguments);
  const TensorView grad_g = gradient(dg, arguments.a.view(), gates.has_a, gates.a);
  const TensorView grad_beta = gradient(dbeta, arguments.b.view(), gates.has_b, gates.b);
  const DeviceScope scope(gates.a.device);
  const int32_t float32 = aoti_torch_dtype_float32(), device = scope.index();
  NewTensor da, db, sums, parts;
  if (gates.has_a) da.allocate_like(arguments.a.view(), gates.a.dtype);
  if (!gates.has_a) da.allocate("da", {int64_t(0)}, gates.a.dtype, device);
  if (gates.has_b) db.allocate_like(arguments.b.view(), gates.a.dtype);
  if (!gates.has_b) db.allocate("db", {int64_t(0)}, gates.a.dtype, device);
  sums.allocate("sums", {int64_t(2), gates.heads()}, float32, device);
  if (gates.is_empty()) {
    sums.fill_zero();
  } else {
    const int64_t together = THREADS / smaller(THREADS, gates.heads());  // tokens of a block at a time
    const int64_t blocks = smaller(MAX_PARTS, (gates.tokens() + together - 1) / together);
    parts.allocate("parts", {blocks, int64_t(2), gates.heads()}, float32, device);
    const auto launch =
        choose(gates.a, launch_gates_backward_bf16, launch_gates_backward_fp16, launch_gates_backward_fp32);
    launch(scope, gates.a, gates.b, gates.A_log.narrow, gates.A_log.wide, gates.dt_bias.narrow, gates.dt_bias.wide,
           grad_g, grad_beta, as_table(gates, da.view(), gates.has_a, gates.a.dtype),
           as_table(gates, db.view(), gates.has_b, gates.a.dtype), parts.view(),
           static_cast<float>(arguments.strength), gates.A_log.is_wide, gates.dt_bias.is_wide, gates.has_dt_bias,
           gates.has_a, gates.has_b);
    const TensorView columns = contiguous_view("sums", sums.view().data, float32, device, {2 * gates.heads()});
    launch_partial_sums_bf16(scope, contiguous_view("parts", parts.view().data, float32, device,
                                                    {blocks, 2 * gates.heads()}),
                             with_dtype(columns, aoti_torch_dtype_bfloat16()), columns, true);
  }
  stack[0] = da.hand_over();
  stack[1] = db.hand_over();
  stack[2] = sums.hand_over();
}

const OpRegistration forward(
    "sm90_gated_delta_gates_fwd(Tensor? a, Tensor? b, Tensor? A_log, Tensor? dt_bias, float strength) "
    "-> (Tensor g, Tensor beta)",
    "sm90_gated_delta_gates_fwd", run_forward);
const OpRegistration backward(
    "sm90_gated_delta_gates_bwd(Tensor? dg, Tensor? dbeta, Tensor? a, Tensor? b, Tensor? A_log, Tensor? dt_bias, "
    "float strength) -> (Tensor da, Tensor db, Tensor sums)",
    "sm90_gated_delta_gates_bwd", run_backward);

}  // namespace
}  // namespace flashqla
