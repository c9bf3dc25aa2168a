// sm90_gated_delta_rule_bwd: gradients of the gated delta rule on the kernels of flashqla_hub/kernels (see its README for
// their arguments). Of the forward it takes the inputs and, in bfloat16, the operand and bound of each chunk, which it makes
// itself where they are missing; states are computed again, chunk by chunk.
//
// With `range_slots` the scans and the gradients take one range of so many slots of chunks after the other, on the same scratch,
// from the last to the first: each from the states that the forward has kept of the border before it, with the gradients of those
// behind.
//
// The kernel that forms gradients runs beside the scan that writes outputs, takes chunks as they become ready, and ends after
// that scan.
#include "../generated/launchers.h"
#include "../runtime/registration.h"
#include "../runtime/tensor.h"
#include "gated_delta_rule_checks.h"
#include "segment_plan.h"

namespace flashqla {
namespace {

constexpr const char* OP = "the SM90 backward";
constexpr int64_t CHUNK = 64;
constexpr int64_t VALUE_TILE = 64, HALVES = STATE_DIM / VALUE_TILE;  // value columns of a block of the scan
constexpr int64_t CHUNK_WORDS = 4, SEGMENT_WORDS = 7;                // int32 words of a row of `chunks` and of `segments`
constexpr int64_t ROW_VECTORS = 9, PAIR_VECTORS = 3, NORM_VECTORS = 2;  // float32 numbers of a token and head
constexpr int64_t DIRECTIONS = 2;  // states from the first chunk on, their gradients from the last
constexpr int64_t MAKERS = 3;      // of a segment's state, its transition and the gradient of its state
constexpr int64_t TRANSITION_PARTS = 4;
constexpr int64_t CURSOR_WORDS = 2;  // of a range's queue of chunks
constexpr int32_t NO_DENSE_LENGTH = -1;
constexpr int64_t MOST_SORTED = 1024;  // sequences whose lengths are compared, each with all others

// Chunks that are worked on together: those of some slots, which the scans and the gradients count from the first of them on.
struct Range {
  int64_t index;
  int64_t first_slot;
  int64_t slots;
};

struct Sizes {
  int64_t tokens;     // T, over the whole batch
  int64_t heads;      // H
  int64_t v_heads;    // HV
  int64_t sequences;  // N
  int64_t slots;
  int32_t dense_length;  // tokens of each sequence, or NO_DENSE_LENGTH
  int64_t range_slots;   // of each range but the last, which may have fewer
  int64_t ranges;
  SegmentPlan segments;  // of each range

  Range range(int64_t index) const {
    const int64_t first = index * range_slots;
    return {index, first, index == ranges - 1 ? slots - first : range_slots};
  }
};

struct Arguments {
  ArgumentTensor q, k, v, g, beta, initial_state, cu_seqlens, do_, dht, operand;
  double scale;
  bool use_l2norm, state_v_first, output_dinitial;
  int64_t segment_chunks;
  int64_t range_slots;  // 0 for one range

  explicit Arguments(StableIValue* stack) {
    q.take(stack[0]);
    k.take(stack[1]);
    v.take(stack[2]);
    g.take(stack[3]);
    beta.take(stack[4]);
    initial_state.take_optional(stack[5]);
    cu_seqlens.take_optional(stack[6]);
    do_.take(stack[7]);
    dht.take_optional(stack[8]);
    scale = as_double(stack[9]);
    use_l2norm = as_bool(stack[10]);
    state_v_first = as_bool(stack[11]);
    output_dinitial = as_bool(stack[12]);
    segment_chunks = as_int(stack[13]);
    operand.take_optional(stack[14]);
    range_slots = as_int(stack[15]);
    q.read("q");
    k.read("k");
    v.read("v");
    g.read("g");
    beta.read("beta");
    initial_state.read("initial_state");
    cu_seqlens.read("cu_seqlens");
    do_.read("do");
    dht.read("dht");
    operand.read("operand");
  }
};

bool is_bfloat16(const TensorView& tensor) { return tensor.dtype == aoti_torch_dtype_bfloat16(); }

void check_arguments(Arguments& arguments) {
  const TensorView &q = arguments.q.view(), &k = arguments.k.view(), &v = arguments.v.view();
  FLASHQLA_CHECK(is_bfloat16(q) || q.dtype == aoti_torch_dtype_float16(),
                 "q is neither bfloat16 nor float16, which the SM90 backward takes; convert q, k and v.");
  require_token_rows(arguments.q, q);
  require_token_rows(arguments.k, q);
  require_token_rows(arguments.v, q);
  require_token_rows(arguments.do_, q);
  check_size(k, 2, q.size[2], "q");
  FLASHQLA_CHECK(q.size[2] > 0 && v.size[2] > 0 && v.size[2] % q.size[2] == 0,
                 "v has %lld heads and q has %lld; the value heads must be a positive multiple of the key heads.",
                 static_cast<long long>(v.size[2]), static_cast<long long>(q.size[2]));
  check_size(arguments.do_.view(), 2, v.size[2], "v");
  check_gates(arguments.g.view(), v);
  check_gates(arguments.beta.view(), v);
  FLASHQLA_CHECK(arguments.segment_chunks >= 0,
                 "segment_chunks is %lld and must be positive, or 0 for a length chosen here.",
                 static_cast<long long>(arguments.segment_chunks));
}

// One plan serves all ranges, each of which has its share of the sequences, more or less, and places for all.
SegmentPlan plan_ranges(const Sizes& sizes, int64_t segment_chunks, int64_t multiprocessors) {
  const int64_t longest = sizes.dense_length == NO_DENSE_LENGTH ? sizes.tokens : sizes.dense_length;
  if (sizes.ranges == 1) {
    return plan_backward_segments(segment_chunks, sizes.tokens, longest, sizes.sequences, sizes.v_heads, multiprocessors);
  }
  const int64_t tokens = CHUNK * sizes.range_slots, share = (sizes.sequences + sizes.ranges - 1) / sizes.ranges;
  SegmentPlan plan = plan_backward_segments(segment_chunks, tokens, longest < tokens ? longest : tokens, share,
                                            sizes.v_heads, multiprocessors);
  // A chunk in slot s of sequence n has token 64 (s - n) or one of the 63 behind it, so a range spans so many chunks at most:
  const int64_t chunks = sizes.range_slots + sizes.sequences - 1;
  if (!plan.has_cuts) plan.chunks = chunks + 1;
  plan.slots = chunks / plan.chunks + sizes.sequences;
  return plan;
}

Sizes read_sizes(Arguments& arguments) {
  const TensorView &q = arguments.q.view(), &v = arguments.v.view();
  Sizes sizes{q.size[0] * q.size[1], q.size[2], v.size[2], q.size[0], 0, NO_DENSE_LENGTH, 0, 1, {}};
  require_int32(sizes.tokens, OP, "the number of tokens");
  if (arguments.cu_seqlens.has_value()) {
    require_offsets(arguments.cu_seqlens, q);
    check_offset_values(arguments.cu_seqlens, sizes.tokens);
    sizes.sequences = arguments.cu_seqlens.view().size[0] - 1;
  } else {
    sizes.dense_length = static_cast<int32_t>(q.size[1]);
  }
  sizes.slots = sizes.tokens / CHUNK + sizes.sequences;
  require_int32(sizes.slots * sizes.v_heads, OP, "the number of chunks times value heads");
  require_range(arguments.range_slots);
  sizes.range_slots = arguments.range_slots > 0 ? arguments.range_slots : sizes.slots;
  sizes.ranges = borders_of(arguments.range_slots, sizes.slots) + 1;
  FLASHQLA_CHECK(sizes.ranges == 1 || arguments.operand.has_value(),
                 "range_slots is %lld and operand is missing, which has the states between ranges; hand over what the forward "
                 "returned, or 0.",
                 static_cast<long long>(arguments.range_slots));
  sizes.segments = plan_ranges(sizes, arguments.segment_chunks, device_properties(q.device).multiprocessors);
  require_int32(sizes.segments.slots * sizes.v_heads * HALVES * MAKERS, OP,
                "six times the segments times value heads");
  const ArgumentTensor* const states[] = {&arguments.initial_state, &arguments.dht};
  for (const ArgumentTensor* state : states) {
    if (state->has_value()) check_states(state->view(), q, sizes.sequences, sizes.v_heads);
  }
  if (arguments.operand.has_value()) {
    const TensorView& operand = arguments.operand.view();
    FLASHQLA_CHECK(is_bfloat16(q), "operand is given, which the SM90 backward takes in bfloat16 only; leave it out.");
    check_same_device(operand, q);
    require_tensor(operand, OP, q.dtype, 4, q.device);
    const int64_t rows = border_slot(sizes.slots) + slots_of_borders(sizes.ranges - 1);
    const int64_t expected[] = {rows, sizes.v_heads, TRIANGLE_ROWS, HALF_CHUNK};
    for (int axis = 0; axis < 4; axis++) require_size(operand, OP, axis, expected[axis]);
    FLASHQLA_CHECK(operand.is_contiguous(), "operand is not contiguous; hand it over as the forward returned it.");
  }
  return sizes;
}

class Backward {
 public:
  Backward(const Arguments& arguments, const Sizes& sizes)
      : arguments_(arguments), sizes_(sizes), scope_(arguments.q.view().device) {}

  void run() {
    allocate_results();
    if (sizes_.tokens == 0 || sizes_.sequences == 0) {
      finish_without_chunks();
    } else {
      launch_kernels();
    }
  }

  void hand_over(StableIValue* stack) {
    stack[0] = dq_.hand_over();
    stack[1] = dk_.hand_over();
    stack[2] = dv_.hand_over();
    stack[3] = dg_.hand_over();
    stack[4] = dbeta_.hand_over();
    stack[5] = dinitial_.hand_over();
  }

 private:
  void allocate_results() {
    const TensorView &q = arguments_.q.view(), &v = arguments_.v.view();
    const int32_t float32 = aoti_torch_dtype_float32(), device = scope_.index();
    const int64_t states = arguments_.output_dinitial ? sizes_.sequences : 0;
    dq_.allocate("dq", {q.size[0], q.size[1], q.size[2], STATE_DIM}, q.dtype, device);
    dk_.allocate("dk", {q.size[0], q.size[1], q.size[2], STATE_DIM}, q.dtype, device);
    dv_.allocate("dv", {v.size[0], v.size[1], v.size[2], STATE_DIM}, q.dtype, device);
    dg_.allocate("dg", {v.size[0], v.size[1], v.size[2]}, float32, device);
    dbeta_.allocate("dbeta", {v.size[0], v.size[1], v.size[2]}, float32, device);
    dinitial_.allocate("dh0", {states, sizes_.v_heads, STATE_DIM, STATE_DIM}, float32, device);
  }

  // No token belongs to a sequence: states stay as they are, and nothing else has a gradient.
  void finish_without_chunks() {
    NewTensor* const gradients[] = {&dq_, &dk_, &dv_, &dg_, &dbeta_};
    for (NewTensor* gradient : gradients) gradient->fill_zero();
    if (!arguments_.output_dinitial) return;
    if (arguments_.dht.has_value()) {
      dinitial_.copy_from(arguments_.dht.handle());
    } else {
      dinitial_.fill_zero();
    }
  }

  void launch_kernels() {
    Workspace workspace;
    Scratch scratch;
    add_arrays(workspace, scratch);
    workspace.allocate();
    NewTensor g_copy, beta_copy, initial_copy, dfinal_copy;
    Inputs inputs{};
    inputs.g = as_gate(as_contiguous_float32(arguments_.g, g_copy));
    inputs.beta = as_gate(as_contiguous_float32(arguments_.beta, beta_copy));
    void* const unused = scratch.rows.data;  // any valid address: the kernel neither reads nor writes it
    const bool has_initial = arguments_.initial_state.has_value(), has_dfinal = arguments_.dht.has_value();
    inputs.initial = has_initial ? as_contiguous_float32(arguments_.initial_state, initial_copy).data : unused;
    inputs.dfinal = has_dfinal ? as_contiguous_float32(arguments_.dht, dfinal_copy).data : unused;
    launch_plan_kernel(scratch);
    launch_kernels_of_rows(inputs, scratch);
    for (int64_t i = sizes_.ranges - 1; i >= 0; i--) {
      const Scratch part = scratch_of(scratch, sizes_.range(i));
      launch_scan_kernels(inputs, part);
      launch_gradient_kernel(part);
    }
  }

  // Arguments that may be copies.
  struct Inputs {
    TensorView g, beta;
    void *initial, *dfinal;
  };

  // What one kernel leaves to the next ones, and blocks of the scan to others.
  struct Scratch {
    TensorView chunks, segments, bound, rows, pairs, norms;
    TensorView errors, states, dstates, solve;
    TensorView decay, key_norm;  // of the forward's kernel, and not used, if it makes the solve
    TensorView segment_states, transitions, reach, forgets;
    TensorView border_state, gradient_before, gradient_behind;  // where a range begins, there, and where it ends
    TensorView arrivals, queue, cursors;  // how the scans tell the gradient kernel beside them which chunks are there
  };

  // Errors and states are of one range at a time.
  void add_arrays(Workspace& workspace, Scratch& scratch) {
    const int32_t int32 = aoti_torch_dtype_int32(), float32 = aoti_torch_dtype_float32(), device = scope_.index();
    const int32_t dtype = arguments_.q.view().dtype;
    const int64_t slots = sizes_.slots, v_heads = sizes_.v_heads, range_slots = sizes_.range(0).slots;
    const int64_t cut = sizes_.segments.links ? sizes_.segments.slots * v_heads : 1;  // maps are made in any case
    workspace.add(scratch.chunks, "chunks", {slots, CHUNK_WORDS}, int32, device);
    workspace.add(scratch.segments, "segments", {sizes_.ranges, sizes_.segments.slots, SEGMENT_WORDS}, int32, device);
    workspace.add(scratch.rows, "row_scales", {slots, v_heads, ROW_VECTORS, CHUNK}, float32, device);
    workspace.add(scratch.pairs, "pair_scales", {slots, v_heads, PAIR_VECTORS, CHUNK}, float32, device);
    workspace.add(scratch.norms, "norms", {slots, sizes_.heads, NORM_VECTORS, CHUNK}, float32, device);
    workspace.add(scratch.arrivals, "arrivals", {slots * sizes_.heads}, int32, device);
    workspace.add(scratch.queue, "queue", {slots * sizes_.heads}, int32, device);
    workspace.add(scratch.cursors, "cursors", {sizes_.ranges, CURSOR_WORDS}, int32, device);
    workspace.add(scratch.errors, "errors", {range_slots, v_heads, HALVES, CHUNK, VALUE_TILE}, dtype, device);
    workspace.add(scratch.states, "states", {range_slots, v_heads, HALVES, VALUE_TILE, STATE_DIM}, dtype, device);
    workspace.add(scratch.dstates, "dstates", {range_slots, v_heads, HALVES, VALUE_TILE, STATE_DIM}, dtype, device);
    if (arguments_.operand.has_value()) {
      scratch.solve = chunks_of_operand(arguments_.operand.view(), slots);
      scratch.bound = bounds_of_operand(arguments_.operand.view(), slots);
    } else {
      workspace.add(scratch.bound, "bound", {slots, v_heads}, float32, device);
      workspace.add(scratch.solve, "solve", {slots, v_heads, TRIANGLE_ROWS, HALF_CHUNK}, dtype, device);
      workspace.add(scratch.decay, "decay", {slots, v_heads, CHUNK}, float32, device);
      workspace.add(scratch.key_norm, "key_norm", {slots, sizes_.heads, CHUNK}, float32, device);
    }
    workspace.add(scratch.segment_states, "segment_states", {cut, DIRECTIONS, HALVES, VALUE_TILE * STATE_DIM}, float32,
                  device);
    workspace.add(scratch.transitions, "transitions", {cut, TRANSITION_PARTS, HALVES, VALUE_TILE, STATE_DIM}, dtype,
                  device);
    workspace.add(scratch.reach, "reach", {cut, STATE_DIM}, float32, device);
    workspace.add(scratch.forgets, "forgets", {cut, DIRECTIONS}, int32, device);
    if (sizes_.ranges > 1) {
      workspace.add(scratch.gradient_before, "gradient_before", {v_heads, STATE_DIM * STATE_DIM}, float32, device);
      workspace.add(scratch.gradient_behind, "gradient_behind", {v_heads, STATE_DIM * STATE_DIM}, float32, device);
    }
  }

  // Of the same arrays what belongs to the range.
  Scratch scratch_of(const Scratch& scratch, const Range& range) const {
    Scratch part = scratch;
    TensorView* const of_all[] = {&part.chunks, &part.bound, &part.rows, &part.pairs, &part.norms, &part.solve};
    for (TensorView* array : of_all) *array = rows_of(*array, range.first_slot, range.slots);
    const int64_t first_place = range.first_slot * sizes_.heads, places = range.slots * sizes_.heads;
    TensorView* const of_places[] = {&part.arrivals, &part.queue};
    for (TensorView* array : of_places) *array = rows_of(*array, first_place, places);
    TensorView* const of_ranges[] = {&part.errors, &part.states, &part.dstates};
    for (TensorView* array : of_ranges) *array = rows_of(*array, 0, range.slots);
    part.segments = contiguous_view("segments", rows_of(scratch.segments, range.index, 1).data, scratch.segments.dtype,
                                    scope_.index(), {sizes_.segments.slots, SEGMENT_WORDS});
    part.cursors = contiguous_view("cursors", rows_of(scratch.cursors, range.index, 1).data, scratch.cursors.dtype,
                                   scope_.index(), {CURSOR_WORDS});
    void* const unused = scratch.rows.data;
    if (sizes_.ranges == 1) {
      part.gradient_before = part.gradient_behind =
          as_border("a gradient at a border", unused, sizes_.v_heads, scope_.index());
    } else if (range.index % 2 == 1) {  // what one range leaves before it, the next one finds behind it
      part.gradient_before = scratch.gradient_behind;
      part.gradient_behind = scratch.gradient_before;
    }
    void* const border = range.index > 0 ? border_of_operand(arguments_.operand.view(), sizes_.slots, range.index - 1)
                                         : unused;
    part.border_state = as_border("a state at a border", border, sizes_.v_heads, scope_.index());
    return part;
  }

  // Rows of a contiguous array.
  static TensorView rows_of(const TensorView& array, int64_t first, int64_t count) {
    TensorView rows = array;
    rows.data = static_cast<char*>(array.data) + first * array.stride[0] * bytes_of(array.dtype);
    rows.size[0] = count;
    return rows;
  }

  void launch_plan_kernel(const Scratch& scratch) {
    const int64_t key_words = sizes_.heads * STATE_DIM / 2, value_words = sizes_.v_heads * STATE_DIM / 2;
    launch_backward_plan(scope_, offset_words(scratch.segments), scratch.chunks, scratch.segments,
                         as_words(dq_, key_words), as_words(dk_, key_words), as_words(dv_, value_words),
                         as_words(dg_, sizes_.v_heads), as_words(dbeta_, sizes_.v_heads), scratch.cursors,
                         words_per_entry(), sizes_.dense_length, static_cast<int32_t>(sizes_.sequences),
                         static_cast<int32_t>(sizes_.segments.chunks), static_cast<int32_t>(sizes_.range(0).slots),
                         !sizes_.segments.has_cuts && sizes_.sequences <= MOST_SORTED);
  }

  void launch_kernels_of_rows(const Inputs& inputs, const Scratch& scratch) {
    if (!arguments_.operand.has_value()) launch_solve_kernel(inputs, scratch);
    const bool is_bfloat = is_bfloat16(arguments_.q.view());
    const auto launch = is_bfloat ? launch_backward_rows_bf16 : launch_backward_rows_fp16;
    const bool writes_bound = sizes_.segments.has_cuts && !is_bfloat;  // in bfloat16 who made the solve has
    launch(scope_, q(), k(), inputs.g, inputs.beta, scratch.chunks, scratch.rows, scratch.pairs, scratch.norms,
           scratch.bound, scratch.arrivals, scratch.queue, static_cast<float>(arguments_.scale), arguments_.use_l2norm,
           writes_bound);
  }

  // A kernel of the forward; of what it writes beside the solve the bound is used, in bfloat16.
  void launch_solve_kernel(const Inputs& inputs, const Scratch& scratch) {
    const int64_t no_segments[] = {0, 2};
    const TensorView ready =
        contiguous_view("ready", scratch.decay.data, aoti_torch_dtype_int32(), scope_.index(), no_segments);
    const auto launch = is_bfloat16(arguments_.q.view()) ? launch_factor_kept_bf16 : launch_factor_errors_fp16;
    launch(scope_, k(), inputs.g, inputs.beta, offset_words(scratch.decay), scratch.solve, scratch.decay, scratch.key_norm,
           scratch.bound, ready, as_words(dv_, sizes_.v_heads * STATE_DIM / 2), arguments_.use_l2norm,
           words_per_entry(), sizes_.dense_length, static_cast<int32_t>(sizes_.sequences));
  }

  // With links first the blocks that make states and transitions of segments, then those that write outputs.
  void launch_scan_kernels(const Inputs& inputs, const Scratch& scratch) {
    const int64_t parts = sizes_.segments.slots * sizes_.v_heads;
    void* const dinitial = arguments_.output_dinitial ? dinitial_.view().data : scratch.rows.data;
    const auto launch = is_bfloat16(arguments_.q.view()) ? launch_backward_scan_bf16 : launch_backward_scan_fp16;
    const bool launches[] = {true, false};
    for (const bool makes_states : launches) {
      if (makes_states && !sizes_.segments.links) continue;
      const int64_t blocks = parts * HALVES * (makes_states ? MAKERS : DIRECTIONS);
      launch(scope_, q(), k(), as_token_rows(arguments_.v.view()), as_token_rows(arguments_.do_.view()), scratch.solve,
             scratch.rows, scratch.pairs, scratch.bound, scratch.segments, as_states("initial_state", inputs.initial),
             as_states("dht", inputs.dfinal), scratch.segment_states, scratch.transitions, scratch.reach,
             scratch.forgets, scratch.errors, scratch.states, scratch.dstates, as_token_rows(dv_.view()),
             as_states("dh0", dinitial), scratch.border_state, scratch.gradient_behind, scratch.gradient_before,
             scratch.arrivals, scratch.queue, scratch.cursors, arguments_.initial_state.has_value(),
             arguments_.dht.has_value(), arguments_.output_dinitial, arguments_.state_v_first,
             static_cast<int32_t>(sizes_.segments.chunks), makes_states, sizes_.segments.links,
             sizes_.segments.has_cuts, static_cast<int32_t>(blocks));
    }
  }

  void launch_gradient_kernel(const Scratch& scratch) {
    const auto launch = is_bfloat16(arguments_.q.view()) ? launch_backward_gradients_bf16 : launch_backward_gradients_fp16;
    launch(scope_, q(), k(), as_token_rows(arguments_.do_.view()), as_token_rows(dv_.view()), scratch.errors,
           scratch.states, scratch.dstates, scratch.rows, scratch.norms, scratch.chunks, scratch.queue, scratch.cursors,
           as_token_rows(dq_.view()), as_token_rows(dk_.view()), as_gate(dg_.view()), as_gate(dbeta_.view()),
           static_cast<float>(arguments_.scale), arguments_.use_l2norm);
  }

  int32_t words_per_entry() const { return flashqla::words_per_entry(arguments_.cu_seqlens); }
  TensorView offset_words(const TensorView& any) const { return flashqla::offset_words(arguments_.cu_seqlens, any); }

  TensorView q() const { return as_token_rows(arguments_.q.view()); }
  TensorView k() const { return as_token_rows(arguments_.k.view()); }

  // A gradient's rows of tokens as 32-bit words.
  TensorView as_words(const NewTensor& gradient, int64_t words) const {
    const TensorView& view = gradient.view();
    return contiguous_view(view.name, view.data, aoti_torch_dtype_int32(), scope_.index(), {sizes_.tokens, words});
  }

  // N * HV matrices of K * V numbers in one row each, in either layout.
  TensorView as_states(const char* name, void* data) const {
    return contiguous_view(name, data, aoti_torch_dtype_float32(), scope_.index(),
                           {sizes_.sequences * sizes_.v_heads, STATE_DIM * STATE_DIM});
  }

  // [B, T, HV] -> [B * T, HV], contiguous.
  TensorView as_gate(const TensorView& gate) const {
    return contiguous_view(gate.name, gate.data, gate.dtype, gate.device, {sizes_.tokens, sizes_.v_heads});
  }

  const Arguments& arguments_;
  const Sizes sizes_;
  DeviceScope scope_;
  NewTensor dq_, dk_, dv_, dg_, dbeta_, dinitial_;
};

void run(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  check_arguments(arguments);
  Backward backward(arguments, read_sizes(arguments));
  backward.run();
  backward.hand_over(stack);
}

const OpRegistration registration(
    "sm90_gated_delta_rule_bwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor do, Tensor? dht, float scale, bool use_qk_l2norm, bool state_v_first, "
    "bool output_dinitial, int segment_chunks, Tensor? operand=None, int range_slots=0) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dh0)",
    "sm90_gated_delta_rule_bwd", run);

}  // namespace
}  // namespace flashqla
