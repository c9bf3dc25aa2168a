// sm90_fused_recurrent_fwd and sm90_fused_recurrent_update: the gated delta rule token by token, for generation, on the
// decode kernels of flashqla_hub/kernels (see its README). The second updates states of a pool where they lie.
#include "../generated/launchers.h"
#include "../runtime/registration.h"
#include "decode.h"
#include "rows.h"

namespace flashqla {
namespace {

constexpr int64_t HEAD_DIM = 128;  // K = V
constexpr int32_t NO_DENSE_LENGTH = -1;
const char* const OP = "the SM90 decode kernel";

struct Arguments {
  ArgumentTensor q, k, v, g, beta, A_log, dt_bias, states, indices, cu_seqlens;
  double scale, strength;
  bool use_l2norm, state_v_first;

  // The first seven arguments, which both ops begin with.
  void take_token_inputs(StableIValue* stack) {
    q.take(stack[0]);
    k.take(stack[1]);
    v.take(stack[2]);
    g.take(stack[3]);
    beta.take(stack[4]);
    A_log.take_optional(stack[5]);
    dt_bias.take_optional(stack[6]);
  }

  void take_options(StableIValue* stack) {
    scale = as_double(stack[0]);
    strength = as_double(stack[1]);
    use_l2norm = as_bool(stack[2]);
    state_v_first = as_bool(stack[3]);
  }

  void read() {
    q.read("q");
    k.read("k");
    v.read("v");
    g.read("g");
    beta.read("beta");
    A_log.read("A_log");
    dt_bias.read("dt_bias");
    states.read("the state");
    indices.read("state_indices");
    cu_seqlens.read("cu_seqlens");
  }
};

// A tensor of 16 or 32 bits [tokens, heads] as a pair of views, heads side by side.
struct GateInput {
  TensorView narrow, wide;
  bool is_wide;

  GateInput(const TensorView& tensor, const TensorView& v) {
    is_wide = tensor.dtype == aoti_torch_dtype_float32();
    FLASHQLA_CHECK(is_wide || tensor.dtype == v.dtype, "%s is neither float32 nor of the dtype of v; convert it.",
                   tensor.name);
    FLASHQLA_CHECK(tensor.device == v.device, "%s is on device %d and v is on device %d; move it there.", tensor.name,
                   tensor.device, v.device);
    FLASHQLA_CHECK(tensor.rank == 3 && tensor.size[0] == v.size[0] && tensor.size[1] == v.size[1] &&
                       tensor.size[2] == v.size[2],
                   "%s must be [B, T, HV] = [%lld, %lld, %lld], as v gives it.", tensor.name,
                   static_cast<long long>(v.size[0]), static_cast<long long>(v.size[1]),
                   static_cast<long long>(v.size[2]));
    narrow = with_dtype(as_gates(tensor), v.dtype);
    wide = with_dtype(narrow, aoti_torch_dtype_float32());
  }
};

// Words of an int32 or int64 tensor, of which the kernel reads the low ones.
struct Words {
  TensorView view;
  int32_t per_entry = 0;  // 0: there is no such tensor

  Words(const ArgumentTensor& argument, const TensorView& unused, int64_t entries) {
    const int32_t int32 = aoti_torch_dtype_int32();
    view = contiguous_view(unused.name, unused.data, int32, unused.device, {int64_t(1)});
    if (!argument.has_value()) return;
    const TensorView& tensor = argument.view();
    FLASHQLA_CHECK(tensor.dtype == int32 || tensor.dtype == aoti_torch_dtype_int64(),
                   "%s must be int32 or int64; convert it.", tensor.name);
    FLASHQLA_CHECK(tensor.rank == 1 && (entries < 0 || tensor.size[0] == entries),
                   "%s must have one axis with an entry for every sequence.", tensor.name);
    FLASHQLA_CHECK(tensor.device == unused.device, "%s is on device %d and q is on device %d; move it there.",
                   tensor.name, tensor.device, unused.device);
    require_stride(tensor, OP, 0, 1);
    per_entry = tensor.dtype == int32 ? 1 : 2;
    view = contiguous_view(tensor.name, tensor.data, int32, tensor.device, {tensor.size[0] * per_entry});
  }
};

class Decode {
 public:
  explicit Decode(const Arguments& arguments) : arguments_(arguments), scope_(arguments.q.view().device) {
    const TensorView &q = arguments.q.view(), &k = arguments.k.view(), &v = arguments.v.view();
    check_half(q);
    check_like(k, q);
    FLASHQLA_CHECK(k.dtype == q.dtype && v.dtype == q.dtype, "q, k and v have different dtypes; convert them to one.");
    FLASHQLA_CHECK(q.rank == 4 && v.rank == 4 && v.size[0] == q.size[0] && v.size[1] == q.size[1],
                   "q and v must be [B, T, H, 128] and [B, T, HV, 128] of one batch; see the documentation.");
    FLASHQLA_CHECK(q.size[2] > 0 && v.size[2] > 0 && v.size[2] % q.size[2] == 0,
                   "v has %lld heads and q has %lld; the value heads must be a positive multiple of the key heads.",
                   static_cast<long long>(v.size[2]), static_cast<long long>(q.size[2]));
    heads_ = v.size[2];
    tokens_ = v.size[0] * v.size[1];
    const bool is_packed = arguments.cu_seqlens.has_value();
    FLASHQLA_CHECK(!is_packed || q.size[0] == 1,
                   "q has batch size %lld and cu_seqlens packs all sequences into one; flatten to [1, T, ...].",
                   static_cast<long long>(q.size[0]));
    sequences_ = is_packed ? arguments.cu_seqlens.view().size[0] - 1 : q.size[0];
    FLASHQLA_CHECK(sequences_ >= 0, "cu_seqlens must have N + 1 entries, the first 0; see the documentation.");
    dense_length_ = is_packed ? NO_DENSE_LENGTH : static_cast<int32_t>(require_int32(q.size[1], OP, "T"));
    require_int32(tokens_, OP, "the number of tokens");
    require_int32(4 * sequences_ * heads_, OP, "four times the number of sequences and value heads");
  }

  int64_t sequences() const { return sequences_; }
  int64_t heads() const { return heads_; }
  int32_t device() const { return scope_.index(); }

  void allocate_outputs() {
    const TensorView& v = arguments_.v.view();
    o_.allocate("o", {v.size[0], v.size[1], v.size[2], HEAD_DIM}, v.dtype, device());
  }

  // [slots, HV, 128, 128], contiguous, of a dtype that the kernels take.
  TensorView as_states(const TensorView& states) const {
    FLASHQLA_CHECK(states.rank == 4 && states.size[1] == heads_ && states.size[2] == HEAD_DIM &&
                       states.size[3] == HEAD_DIM && states.is_contiguous(),
                   "%s must be [N, %lld, 128, 128] and contiguous; pass .contiguous().", states.name,
                   static_cast<long long>(heads_));
    FLASHQLA_CHECK(states.device == device(), "%s is on device %d and q is on device %d; move it there.", states.name,
                   states.device, device());
    FLASHQLA_CHECK(reinterpret_cast<uintptr_t>(states.data) % 16 == 0,
                   "%s starts at an address that is no multiple of 16 bytes; pass a clone.", states.name);
    return contiguous_view(states.name, states.data, states.dtype, states.device,
                           {states.size[0], heads_, HEAD_DIM * HEAD_DIM});
  }

  // Reads `states` unless `has_initial` is false, and writes `new_states` unless `write_final` is false.
  void run(const TensorView& states, const TensorView& new_states, bool has_initial, bool write_final) {
    if (sequences_ == 0) return o_.fill_zero();
    const TensorView q = as_rows(arguments_.q.view(), HEAD_DIM), k = as_rows(arguments_.k.view(), HEAD_DIM),
                     v = as_rows(arguments_.v.view(), HEAD_DIM);
    const GateInput g(arguments_.g.view(), arguments_.v.view()), beta(arguments_.beta.view(), arguments_.v.view());
    const Parameter rate = parameter(arguments_.A_log, q), bias = parameter(arguments_.dt_bias, q);
    const Words offsets(arguments_.cu_seqlens, q, -1), indices(arguments_.indices, q, sequences_);
    const TensorView o = contiguous_view("o", o_.view().data, v.dtype, device(), {tokens_, heads_, HEAD_DIM});
    choose(v, states)(scope_, q, k, v, g.narrow, g.wide, beta.narrow, beta.wide, rate.narrow, rate.wide, bias.narrow,
                      bias.wide, offsets.view, indices.view, states, new_states, o,
                      static_cast<float>(arguments_.scale), static_cast<float>(arguments_.strength),
                      static_cast<int32_t>(sequences_), ahead(states), static_cast<int32_t>(heads_ / q.size[1]),
                      dense_length_, offsets.per_entry, indices.per_entry, g.is_wide,
                      beta.is_wide, rate.is_wide, bias.is_wide, arguments_.use_l2norm, arguments_.A_log.has_value(),
                      arguments_.strength != 0, arguments_.dt_bias.has_value(), has_initial, write_final);
  }

  StableIValue hand_over() { return o_.hand_over(); }

 private:
  using Launch = decltype(&launch_decode_bf16_kv_f32);

  int32_t ahead(const TensorView& states) const {
    const bool is_float32 = states.dtype == aoti_torch_dtype_float32();
    const int64_t bytes_of_sequence = heads_ * HEAD_DIM * HEAD_DIM * (is_float32 ? 4 : 2);
    return sequences_ahead(sequences_, bytes_of_sequence, is_float32 && !arguments_.state_v_first);
  }

  Launch choose(const TensorView& v, const TensorView& states) const {
    static constexpr Launch launches[2][2][2] = {
        {{launch_decode_bf16_kv_f32, launch_decode_bf16_kv_bf16},
         {launch_decode_bf16_vk_f32, launch_decode_bf16_vk_bf16}},
        {{launch_decode_fp16_kv_f32, launch_decode_fp16_kv_bf16},
         {launch_decode_fp16_vk_f32, launch_decode_fp16_vk_bf16}},
    };
    const bool is_float32 = states.dtype == aoti_torch_dtype_float32();
    FLASHQLA_CHECK(is_float32 || states.dtype == aoti_torch_dtype_bfloat16(),
                   "%s is neither float32 nor bfloat16, which the SM90 decode kernel takes; convert it.", states.name);
    const bool is_float16 = v.dtype == aoti_torch_dtype_float16();
    if (is_float32 && !arguments_.state_v_first && sequences_ * heads_ <= FEW_HEADS) {
      return is_float16 ? launch_decode_fp16_kv_f32_few : launch_decode_bf16_kv_f32_few;
    }
    return launches[is_float16][arguments_.state_v_first][!is_float32];
  }

  Parameter parameter(const ArgumentTensor& argument, const TensorView& q) const {
    const TensorView unused = contiguous_view("an unused parameter", q.data, q.dtype, q.device, {heads_});
    return Parameter(argument.has_value() ? argument.view() : unused, heads_, q.dtype, q);
  }

  const Arguments& arguments_;
  DeviceScope scope_;
  NewTensor o_;
  int64_t heads_, tokens_, sequences_;
  int32_t dense_length_;
};

void run_forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments;
  arguments.take_token_inputs(stack);
  arguments.states.take_optional(stack[7]);
  arguments.cu_seqlens.take_optional(stack[8]);
  arguments.take_options(stack + 9);
  const bool output_final_state = as_bool(stack[13]);
  arguments.read();
  Decode decode(arguments);
  const int32_t float32 = aoti_torch_dtype_float32();
  const bool has_initial = arguments.states.has_value();
  NewTensor final_state, copy;
  decode.allocate_outputs();
  final_state.allocate("final_state", {output_final_state ? decode.sequences() : 0, decode.heads(), HEAD_DIM, HEAD_DIM},
                       float32, decode.device());
  TensorView states = final_state.view();
  if (has_initial) {
    states = arguments.states.view();
    FLASHQLA_CHECK(states.rank == 4 && states.size[0] == decode.sequences(),
                   "initial_state must have one state for each of the %lld sequences.",
                   static_cast<long long>(decode.sequences()));
    if (states.dtype != float32 || !states.is_contiguous()) {
      copy.allocate_like(states, float32);
      copy.copy_from(arguments.states.handle());
      states = copy.view();
    }
    states = decode.as_states(states);
  }
  const TensorView shape = contiguous_view("the state", states.data, float32, decode.device(),
                                           {decode.sequences(), decode.heads(), HEAD_DIM * HEAD_DIM});
  TensorView written = shape;
  if (output_final_state) written.data = final_state.view().data;
  decode.run(shape, written, has_initial, output_final_state);
  stack[0] = decode.hand_over();
  stack[1] = final_state.hand_over();
}

void run_update(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments;
  arguments.take_token_inputs(stack);
  arguments.states.take(stack[7]);
  arguments.indices.take_optional(stack[8]);
  arguments.cu_seqlens.take_optional(stack[9]);
  arguments.take_options(stack + 10);
  arguments.read();
  Decode decode(arguments);
  decode.allocate_outputs();
  const TensorView states = decode.as_states(arguments.states.view());
  FLASHQLA_CHECK(arguments.indices.has_value() || states.size[0] == decode.sequences(),
                 "the state must have one entry for each of the %lld sequences, since there are no state_indices.",
                 static_cast<long long>(decode.sequences()));
  decode.run(states, states, true, true);
  stack[0] = decode.hand_over();
}

const OpRegistration forward(
    "sm90_fused_recurrent_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale, float strength, bool use_qk_l2norm, bool state_v_first, "
    "bool output_final_state) -> (Tensor o, Tensor final_state)",
    "sm90_fused_recurrent_fwd", run_forward);
const OpRegistration update(
    "sm90_fused_recurrent_update(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor(a!) states, Tensor? state_indices, Tensor? cu_seqlens, float scale, float strength, bool use_qk_l2norm, "
    "bool state_v_first) -> Tensor",
    "sm90_fused_recurrent_update", run_update);

}  // namespace
}  // namespace flashqla
