// sm90_gated_delta_rule_fwd: the gated delta rule, forward, on the kernels of flashqla_hub/kernels (see its README for
// their arguments). sm90_gated_delta_rule_fwd_kept also returns what the backward can use of it: the operand of each chunk and, for
// a backward in ranges of `range_slots` chunks each, the states between them. Chunks and segments live in slots, first_slot(n) =
// cu_seqlens[n] / step + n, so that no kernel needs a host round trip.
#include "../generated/launchers.h"
#include "../runtime/registration.h"
#include "../runtime/tensor.h"
#include "gated_delta_rule_checks.h"
#include "segment_plan.h"

namespace flashqla {
namespace {

constexpr int64_t CHUNK = 64;
constexpr int32_t NO_DENSE_LENGTH = -1;
constexpr int64_t LONG = 16 * CHUNK;  // tokens beyond which the kernel for short sequences leaves one to the recurrence

struct Sizes {
  int64_t tokens;     // T, over the whole batch
  int64_t heads;      // H
  int64_t v_heads;    // HV
  int64_t sequences;  // N
  int64_t slots;
  int32_t dense_length;  // tokens of each sequence, or NO_DENSE_LENGTH
  SegmentPlan segments;
  bool are_short;   // whether the kernel for short sequences takes the place of the recurrence
  int64_t borders;  // between ranges of the backward, whose states are kept
};

struct Arguments {
  ArgumentTensor q, k, v, g, beta, initial_state, cu_seqlens;
  double scale;
  bool use_l2norm, state_v_first, output_final_state;
  int64_t segment_chunks;
  int64_t range_slots;  // of the backward; 0 for one range

  Arguments(StableIValue* stack, bool has_ranges) {
    q.take(stack[0]);
    k.take(stack[1]);
    v.take(stack[2]);
    g.take(stack[3]);
    beta.take(stack[4]);
    initial_state.take_optional(stack[5]);
    cu_seqlens.take_optional(stack[6]);
    scale = as_double(stack[7]);
    use_l2norm = as_bool(stack[8]);
    state_v_first = as_bool(stack[9]);
    output_final_state = as_bool(stack[10]);
    segment_chunks = as_int(stack[11]);
    range_slots = has_ranges ? as_int(stack[12]) : 0;
    q.read("q");
    k.read("k");
    v.read("v");
    g.read("g");
    beta.read("beta");
    initial_state.read("initial_state");
    cu_seqlens.read("cu_seqlens");
  }
};

void check_arguments(Arguments& arguments) {
  const TensorView &q = arguments.q.view(), &k = arguments.k.view(), &v = arguments.v.view();
  FLASHQLA_CHECK(q.dtype == aoti_torch_dtype_bfloat16() || q.dtype == aoti_torch_dtype_float16(),
                 "q is neither bfloat16 nor float16, which the SM90 kernels take; convert q, k and v.");
  require_token_rows(arguments.q, q);
  require_token_rows(arguments.k, q);
  require_token_rows(arguments.v, q);
  check_size(k, 2, q.size[2], "q");
  FLASHQLA_CHECK(q.size[2] > 0 && v.size[2] > 0 && v.size[2] % q.size[2] == 0,
                 "v has %lld heads and q has %lld; the value heads must be a positive multiple of the key heads.",
                 static_cast<long long>(v.size[2]), static_cast<long long>(q.size[2]));
  check_gates(arguments.g.view(), v);
  check_gates(arguments.beta.view(), v);
  FLASHQLA_CHECK(arguments.segment_chunks >= 0,
                 "segment_chunks is %lld and must be positive, or 0 for a length chosen here.",
                 static_cast<long long>(arguments.segment_chunks));
}

Sizes read_sizes(Arguments& arguments) {
  const TensorView &q = arguments.q.view(), &v = arguments.v.view();
  Sizes sizes{q.size[0] * q.size[1], q.size[2], v.size[2], q.size[0], 0, NO_DENSE_LENGTH, {}, false, 0};
  require_int32(sizes.tokens, "the SM90 forward", "the number of tokens");
  if (arguments.cu_seqlens.has_value()) {
    require_offsets(arguments.cu_seqlens, q);
    check_offset_values(arguments.cu_seqlens, sizes.tokens);
    sizes.sequences = arguments.cu_seqlens.view().size[0] - 1;
  } else {
    sizes.dense_length = static_cast<int32_t>(q.size[1]);
  }
  sizes.slots = sizes.tokens / CHUNK + sizes.sequences;
  require_int32(sizes.slots * sizes.v_heads, "the SM90 forward", "the number of chunks times value heads");
  const int64_t longest = sizes.dense_length == NO_DENSE_LENGTH ? sizes.tokens : sizes.dense_length;
  sizes.segments = plan_segments(arguments.segment_chunks, sizes.tokens, longest, sizes.sequences, sizes.v_heads,
                                 device_properties(q.device).multiprocessors);
  require_int32(3 * sizes.segments.slots * sizes.v_heads, "the SM90 forward",
                "the number of segments times value heads");
  require_range(arguments.range_slots);
  sizes.borders = borders_of(arguments.range_slots, sizes.slots);
  sizes.are_short = arguments.segment_chunks == 0 && !sizes.segments.has_cuts && sizes.borders == 0 &&
                    are_short(sizes.tokens, sizes.sequences, sizes.heads, device_properties(q.device).multiprocessors);
  if (arguments.initial_state.has_value()) {
    const TensorView& state = arguments.initial_state.view();
    check_same_device(state, q);
    check_floating(state);
    FLASHQLA_CHECK(state.rank == 4, "initial_state has %d dimensions and must have 4, [N, HV, 128, 128].", state.rank);
    const int64_t expected[] = {sizes.sequences, sizes.v_heads, STATE_DIM, STATE_DIM};
    for (int axis = 0; axis < 4; axis++) require_size(state, "the SM90 forward", axis, expected[axis]);
  }
  return sizes;
}

class Forward {
 public:
  // Args: whether the operand is a result too, in the form that the backward takes.
  Forward(const Arguments& arguments, const Sizes& sizes, bool keeps_operand)
      : arguments_(arguments), sizes_(sizes), keeps_operand_(keeps_operand), scope_(arguments.q.view().device) {}

  void run() {
    allocate_results();
    if (sizes_.tokens == 0 || sizes_.sequences == 0) {
      finish_without_chunks();
    } else {
      launch_kernels();
    }
  }

  void hand_over(StableIValue* stack) {
    stack[0] = o_.hand_over();
    stack[1] = final_state_.hand_over();
    if (keeps_operand_) stack[2] = operand_.hand_over();
  }

 private:
  void allocate_results() {
    const TensorView& v = arguments_.v.view();
    const int64_t states = arguments_.output_final_state ? sizes_.sequences : 0;
    o_.allocate("o", {v.size[0], v.size[1], v.size[2], STATE_DIM}, v.dtype, scope_.index());
    final_state_.allocate("final_state", {states, sizes_.v_heads, STATE_DIM, STATE_DIM}, aoti_torch_dtype_float32(),
                          scope_.index());
    if (!keeps_operand_) return;
    operand_.allocate("operand",
                      {sizes_.slots + slots_of_borders(sizes_.borders), sizes_.v_heads, TRIANGLE_ROWS, HALF_CHUNK},
                      v.dtype, scope_.index());
  }

  // No token belongs to a sequence: o has no rows or only unused ones, and states stay as they are.
  void finish_without_chunks() {
    o_.fill_zero();
    if (!arguments_.output_final_state) return;
    if (arguments_.initial_state.has_value()) {
      final_state_.copy_from(arguments_.initial_state.handle());
    } else {
      final_state_.fill_zero();
    }
  }

  void launch_kernels() {
    const int32_t int32 = aoti_torch_dtype_int32(), float32 = aoti_torch_dtype_float32(), device = scope_.index();
    const SegmentPlan& segments = sizes_.segments;
    const int64_t rows = segments.inner * sizes_.v_heads, links = segments.has_cuts ? rows - sizes_.v_heads : 0;
    NewTensor g_copy, beta_copy, initial_copy;
    Workspace workspace;
    Intermediates between{};
    if (keeps_operand_) {
      between.operand = chunks_of_operand(operand_.view(), 0, sizes_.slots);
    } else {
      workspace.add(between.operand, "operand", {sizes_.slots, sizes_.v_heads, TRIANGLE_ROWS, HALF_CHUNK},
                    o_.view().dtype, device);
    }
    workspace.add(between.decay, "decay", {sizes_.slots, sizes_.v_heads, CHUNK}, float32, device);
    workspace.add(between.key_norm, "key_norm", {sizes_.slots, sizes_.heads, CHUNK}, float32, device);
    workspace.add(between.bound, "bound", {sizes_.slots, sizes_.v_heads}, float32, device);
    workspace.add(between.states, "states", {rows, STATE_DIM * STATE_DIM}, float32, device);
    workspace.add(between.transitions, "transitions", {links, 2 * STATE_DIM, STATE_DIM}, o_.view().dtype, device);
    workspace.add(between.reach, "reach", {links, STATE_DIM}, float32, device);
    workspace.add(between.ready, "ready", {rows, 2}, int32, device);
    workspace.allocate();
    launch_factor_kernel(as_gate(as_contiguous_float32(arguments_.g, g_copy)),
                         as_gate(as_contiguous_float32(arguments_.beta, beta_copy)), between);
    void* const unused = between.decay.data;  // any valid address: the kernel neither reads nor writes it
    const bool has_initial = arguments_.initial_state.has_value();
    void* const initial = has_initial ? as_contiguous_float32(arguments_.initial_state, initial_copy).data : unused;
    void* const final_state = arguments_.output_final_state ? final_state_.view().data : unused;
    if (sizes_.are_short) {
      launch_short_kernel(between, initial, final_state);
      const int64_t places = (sizes_.tokens + LONG - 1) / LONG;  // of the first tokens of what that kernel leaves
      if (longest() > LONG) launch_long_kernel(between, initial, final_state, places * sizes_.v_heads);
      return;
    }
    const int64_t outputs = segments.slots * sizes_.v_heads, states = 2 * rows;  // blocks
    if (segments.apart) {
      launch_recurrence_kernel(between, initial, final_state, 0, states);
      launch_recurrence_kernel(between, initial, final_state, states, outputs);
    } else {
      launch_recurrence_kernel(between, initial, final_state, 0, states + outputs);
    }
  }

  // What one kernel leaves to the other, and blocks of a kernel to others.
  struct Intermediates {
    TensorView operand, decay, key_norm, bound, states, transitions, reach, ready;
  };

  void launch_factor_kernel(const TensorView& g, const TensorView& beta, const Intermediates& between) {
    const TensorView o_words =
        contiguous_view("o", o_.view().data, aoti_torch_dtype_int32(), scope_.index(),
                        {sizes_.tokens, sizes_.v_heads * STATE_DIM / 2});
    const auto launch = keeps_operand_ ? launch_factor_kept_bf16 : is_bfloat16() ? launch_factor_bf16 : launch_factor_fp16;
    launch(scope_, as_token_rows(arguments_.k.view()), g, beta, offset_words(), between.operand,
           between.decay, between.key_norm, between.bound, between.ready, o_words, arguments_.use_l2norm,
           words_per_entry(), sizes_.dense_length, static_cast<int32_t>(sizes_.sequences));
  }

  void launch_short_kernel(const Intermediates& between, void* initial, void* final_state) {
    const auto launch = is_bfloat16() ? launch_short_bf16 : launch_short_fp16;
    launch(scope_, as_token_rows(arguments_.q.view()), as_token_rows(arguments_.k.view()),
           as_token_rows(arguments_.v.view()), between.operand, between.decay, between.key_norm, offset_words(),
           as_states("initial_state", initial), as_token_rows(o_.view()), as_states("final_state", final_state),
           static_cast<float>(arguments_.scale), arguments_.use_l2norm, arguments_.initial_state.has_value(),
           arguments_.output_final_state, arguments_.state_v_first, words_per_entry(), sizes_.dense_length,
           static_cast<int32_t>(sizes_.sequences));
  }

  void launch_long_kernel(const Intermediates& between, void* initial, void* final_state, int64_t blocks) {
    const auto launch = is_bfloat16() ? launch_recurrence_long_bf16 : launch_recurrence_long_fp16;
    launch_items(launch, between, initial, final_state, 0, blocks);
  }

  // Of the blocks that make states and of those that make outputs behind them, `blocks` from `first_block` on.
  void launch_recurrence_kernel(const Intermediates& between, void* initial, void* final_state, int64_t first_block,
                                int64_t blocks) {
    const auto launch = sizes_.borders > 0 ? launch_recurrence_kept_bf16
                        : is_bfloat16()    ? launch_recurrence_bf16
                                           : launch_recurrence_fp16;
    launch_items(launch, between, initial, final_state, first_block, blocks);
  }

  template <class Launch>
  void launch_items(Launch launch, const Intermediates& between, void* initial, void* final_state, int64_t first_block,
                    int64_t blocks) {
    const SegmentPlan& segments = sizes_.segments;
    void* const unused = between.decay.data;  // any valid address: only the kernel for training looks at it
    void* const borders = sizes_.borders > 0 ? border_of_operand(operand_.view(), sizes_.slots, 0) : unused;
    const TensorView kept = contiguous_view("states at borders", borders, aoti_torch_dtype_float32(), scope_.index(),
                                            {sizes_.borders, sizes_.v_heads, STATE_DIM * STATE_DIM});
    launch(scope_, as_token_rows(arguments_.q.view()), as_token_rows(arguments_.k.view()),
           as_token_rows(arguments_.v.view()), between.operand, between.decay, between.key_norm,
           between.bound, offset_words(), as_states("initial_state", initial), between.states, between.transitions,
           between.ready, between.reach, as_token_rows(o_.view()), as_states("final_state", final_state),
           kept, static_cast<float>(arguments_.scale), arguments_.use_l2norm,
           arguments_.initial_state.has_value(), arguments_.output_final_state, arguments_.state_v_first,
           words_per_entry(), sizes_.dense_length, static_cast<int32_t>(sizes_.sequences),
           static_cast<int32_t>(segments.chunks), static_cast<int32_t>(segments.replay),
           static_cast<int32_t>(arguments_.range_slots), static_cast<int32_t>(first_block), static_cast<int32_t>(blocks));
  }

  // Tokens of the longest sequence, or a bound.
  int64_t longest() const {
    return sizes_.dense_length == NO_DENSE_LENGTH ? sizes_.tokens : sizes_.dense_length;
  }

  int32_t words_per_entry() const { return flashqla::words_per_entry(arguments_.cu_seqlens); }
  TensorView offset_words() const { return flashqla::offset_words(arguments_.cu_seqlens, o_.view()); }

  // N * HV matrices of K * V numbers in one row each, in either layout.
  TensorView as_states(const char* name, void* data) const {
    return contiguous_view(name, data, aoti_torch_dtype_float32(), scope_.index(),
                           {sizes_.sequences * sizes_.v_heads, STATE_DIM * STATE_DIM});
  }

  // [B, T, HV] -> [B * T, HV], contiguous.
  TensorView as_gate(const TensorView& gate) const {
    return contiguous_view(gate.name, gate.data, gate.dtype, gate.device, {sizes_.tokens, sizes_.v_heads});
  }

  bool is_bfloat16() const { return arguments_.q.view().dtype == aoti_torch_dtype_bfloat16(); }

  const Arguments& arguments_;
  const Sizes sizes_;
  const bool keeps_operand_;
  DeviceScope scope_;
  NewTensor o_, final_state_, operand_;
};

void run(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack, false);
  check_arguments(arguments);
  Forward forward(arguments, read_sizes(arguments), false);
  forward.run();
  forward.hand_over(stack);
}

void run_kept(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack, true);
  check_arguments(arguments);
  FLASHQLA_CHECK(arguments.q.view().dtype == aoti_torch_dtype_bfloat16(),
                 "q is not bfloat16, in which alone the SM90 backward uses the operand of its forward.");
  Forward forward(arguments, read_sizes(arguments), true);
  forward.run();
  forward.hand_over(stack);
}

const OpRegistration registration(
    "sm90_gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, "
    "Tensor? cu_seqlens, float scale, bool use_qk_l2norm, bool state_v_first, bool output_final_state, "
    "int segment_chunks) "
    "-> (Tensor o, Tensor final_state)",
    "sm90_gated_delta_rule_fwd", run);

const OpRegistration kept_registration(
    "sm90_gated_delta_rule_fwd_kept(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, "
    "Tensor? cu_seqlens, float scale, bool use_qk_l2norm, bool state_v_first, bool output_final_state, "
    "int segment_chunks, int range_slots=0) "
    "-> (Tensor o, Tensor final_state, Tensor operand)",
    "sm90_gated_delta_rule_fwd_kept", run_kept);

}  // namespace
}  // namespace flashqla
