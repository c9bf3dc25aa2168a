// sm90_gated_delta_net_step: a decoded token of the GatedDeltaNet layer, everything between its projections, on the
// decode_layer kernels of flashqla_hub/kernels (see its README). Moves both states on where they lie.
#include "../generated/launchers.h"
#include "../runtime/registration.h"
#include "decode.h"
#include "rows.h"

namespace flashqla {
namespace {

constexpr int64_t HEAD_DIM = 128;  // K = V
constexpr int64_t TAPS = 4;        // width of the convolution, and tokens of its state
constexpr int64_t MAX_CLUSTER = 8;
constexpr int64_t MAX_SEQUENCES = 65535;  // on the second axis of the grid
constexpr int64_t BLOCKS_OF_HEAD = 2, BLOCKS_OF_HEAD_OF_FEW = 4;
constexpr int64_t HISTORY_ALIGNMENT = 8, ALIGNMENT = 16;  // bytes
constexpr float SCALE = 0.08838834764831845f;             // 1 / sqrt(K)
const char* const OP = "the SM90 step of the layer";

void check_memory(const TensorView& tensor, int64_t alignment) {
  FLASHQLA_CHECK(tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.data) % alignment == 0,
                 "%s must be contiguous at an address that is a multiple of %lld; pass a contiguous copy.", tensor.name,
                 static_cast<long long>(alignment));
}

void check_place(const TensorView& tensor, const TensorView& qkv) {
  FLASHQLA_CHECK(tensor.device == qkv.device, "%s is on device %d and qkv is on device %d; move it there.", tensor.name,
                 tensor.device, qkv.device);
}

void check_dtype(const TensorView& tensor, const TensorView& qkv) {
  check_place(tensor, qkv);
  FLASHQLA_CHECK(tensor.dtype == qkv.dtype, "%s and qkv have different dtypes; convert %s to that of qkv.", tensor.name,
                 tensor.name);
}

// A result of a projection, [B, 1, columns] with its columns side by side, as [B, columns].
TensorView as_token(const TensorView& tensor, const TensorView& qkv, int64_t columns) {
  check_dtype(tensor, qkv);
  FLASHQLA_CHECK(tensor.rank == 3 && tensor.size[0] == qkv.size[0] && tensor.size[1] == 1 && tensor.size[2] == columns,
                 "%s must be [B, 1, %lld], one token of the batch of qkv.", tensor.name,
                 static_cast<long long>(columns));
  FLASHQLA_CHECK(tensor.stride[2] == 1 || columns == 1, "%s has its columns apart; pass %s.contiguous().", tensor.name,
                 tensor.name);
  TensorView view = contiguous_view(tensor.name, tensor.data, tensor.dtype, tensor.device, {tensor.size[0], columns});
  if (tensor.size[0] > 1) view.stride[0] = tensor.stride[0];
  return view;
}

template <int RANK>
TensorView as_state(const TensorView& tensor, const TensorView& qkv, int32_t dtype, int64_t alignment,
                    const int64_t (&sizes)[RANK]) {
  check_place(tensor, qkv);
  FLASHQLA_CHECK(tensor.dtype == dtype, "%s has a dtype that %s does not take there; convert it.", tensor.name, OP);
  FLASHQLA_CHECK(tensor.rank == RANK, "%s has %d dimensions and must have %d.", tensor.name, tensor.rank, RANK);
  for (int axis = 0; axis < RANK; axis++) require_size(tensor, OP, axis, sizes[axis]);
  check_memory(tensor, alignment);
  return contiguous_view(tensor.name, tensor.data, dtype, tensor.device, sizes);
}

// A parameter of 16 or 32 bits as the words of memory that hold it.
struct Words {
  TensorView view;
  bool is_wide;

  Words(const TensorView& tensor, int64_t size, const TensorView& qkv) {
    const Parameter parameter(tensor, size, qkv.dtype, qkv);
    is_wide = parameter.is_wide;
    FLASHQLA_CHECK(reinterpret_cast<uintptr_t>(tensor.data) % 4 == 0,
                   "%s starts at an address that is no multiple of 4 bytes; pass a clone.", tensor.name);
    view = contiguous_view(tensor.name, tensor.data, aoti_torch_dtype_int32(), tensor.device,
                           {is_wide ? size : (size + 1) / 2});
  }
};

void run(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentTensor qkv_argument, history, factor, offset, z, a, b, A_log, dt_bias, states, weight;
  qkv_argument.take(stack[0]);
  history.take(stack[1]);
  factor.take(stack[2]);
  offset.take_optional(stack[3]);
  z.take(stack[4]);
  a.take(stack[5]);
  b.take(stack[6]);
  A_log.take(stack[7]);
  dt_bias.take(stack[8]);
  states.take(stack[9]);
  weight.take(stack[10]);
  const bool convolution_silu = as_bool(stack[11]), is_silu = as_bool(stack[13]);
  const float eps = static_cast<float>(as_double(stack[12]));
  qkv_argument.read("qkv");
  history.read("conv_state");
  factor.read("conv_weight");
  offset.read("conv_bias");
  z.read("z");
  a.read("a");
  b.read("b");
  A_log.read("A_log");
  dt_bias.read("dt_bias");
  states.read("the state");
  weight.read("norm_weight");
  const TensorView& qkv = qkv_argument.view();
  check_half(qkv);
  FLASHQLA_CHECK(qkv.rank == 3 && a.view().rank == 3, "qkv must be [B, 1, C] and a [B, 1, HV]; see the documentation.");
  const int64_t sequences = qkv.size[0], channels = qkv.size[2], heads = a.view().size[2];
  const int64_t keys = (channels - heads * HEAD_DIM) / (2 * HEAD_DIM);
  FLASHQLA_CHECK(heads > 0 && keys > 0 && (2 * keys + heads) * HEAD_DIM == channels && heads % keys == 0 &&
                     heads / keys * BLOCKS_OF_HEAD <= MAX_CLUSTER,
                 "qkv has %lld channels and a has %lld value heads, of 128 channels each; what is left must be key heads for "
                 "q and for k, of 1 to 4 value heads: step by the ops one by one.",
                 static_cast<long long>(channels), static_cast<long long>(heads));
  FLASHQLA_CHECK(sequences <= MAX_SEQUENCES, "qkv has %lld sequences and %s takes up to %lld; split the batch.",
                 static_cast<long long>(sequences), OP, static_cast<long long>(MAX_SEQUENCES));
  const int32_t float32 = aoti_torch_dtype_float32();
  const TensorView x = as_token(qkv, qkv, channels), gates = as_token(z.view(), qkv, heads * HEAD_DIM),
                   decays = as_token(a.view(), qkv, heads), strengths = as_token(b.view(), qkv, heads);
  const TensorView past =
      as_state(history.view(), qkv, qkv.dtype, HISTORY_ALIGNMENT, {sequences, channels, TAPS});
  as_state(states.view(), qkv, float32, ALIGNMENT, {sequences, heads, HEAD_DIM, HEAD_DIM});
  const TensorView factors = as_state(factor.view(), qkv, qkv.dtype, HISTORY_ALIGNMENT, {channels, TAPS});
  // The kernel reads as many numbers from wherever they are, and leaves them out.
  const TensorView offsets = offset.has_value()
                                 ? as_state(offset.view(), qkv, qkv.dtype, 2, {channels})
                                 : contiguous_view("conv_bias", factors.data, qkv.dtype, qkv.device, {channels});
  const Words rate(A_log.view(), heads, qkv), bias(dt_bias.view(), heads, qkv), norm(weight.view(), HEAD_DIM, qkv);
  const DeviceScope scope(qkv.device);
  NewTensor y;
  y.allocate("y", {sequences, int64_t(1), heads * HEAD_DIM}, qkv.dtype, qkv.device);
  if (sequences > 0) {
    using Launch = decltype(&launch_decode_layer_bf16_kv_f32);
    static constexpr Launch LAUNCHES[2][2] = {
        {launch_decode_layer_bf16_kv_f32, launch_decode_layer_bf16_kv_f32_few},
        {launch_decode_layer_fp16_kv_f32, launch_decode_layer_fp16_kv_f32_few},
    };
    const int64_t group = heads / keys, cluster_of_few = group * BLOCKS_OF_HEAD_OF_FEW;
    const bool is_few = sequences * heads <= FEW_HEADS && cluster_of_few <= MAX_CLUSTER;
    const bool is_float16 = qkv.dtype == aoti_torch_dtype_float16();
    LAUNCHES[is_float16][is_few](
        scope, x, past, factors, offsets, decays, strengths, rate.view, bias.view,
        contiguous_view("the state", states.view().data, float32, qkv.device, {sequences, heads, HEAD_DIM * HEAD_DIM}),
        gates, norm.view,
        contiguous_view("y", y.view().data, qkv.dtype, qkv.device, {sequences, heads, HEAD_DIM}), SCALE, eps,
        sequences_ahead(sequences, heads * HEAD_DIM * HEAD_DIM * 4, true), static_cast<int32_t>(group),
        static_cast<int32_t>(is_few ? cluster_of_few : group * BLOCKS_OF_HEAD), offset.has_value(), convolution_silu,
        rate.is_wide, bias.is_wide, norm.is_wide, is_silu);
  }
  stack[0] = y.hand_over();
}

const OpRegistration registration(
    "sm90_gated_delta_net_step(Tensor qkv, Tensor(a!) conv_state, Tensor conv_weight, Tensor? conv_bias, Tensor z, "
    "Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(b!) states, Tensor norm_weight, bool conv_silu, float eps, "
    "bool norm_silu) -> Tensor y",
    "sm90_gated_delta_net_step", run);

}  // namespace
}  // namespace flashqla
