// sm90_causal_conv1d_fwd, _bwd and _update: the short convolution on the kernels of flashqla_hub/kernels (see its README
// for their arguments). Tokens lie in rows of channels; weights are in the dtype of x or in float32.
#include "../generated/launchers.h"
#include "../runtime/registration.h"
#include "../runtime/tensor.h"

namespace flashqla {
namespace {

constexpr int64_t ALIGNMENT = 16;         // bytes of the addresses that vectors are loaded from
constexpr int64_t VECTOR = 8;             // channels that the layout of x keeps together
constexpr int64_t GRID_LIMIT = 65535;     // blocks along the second axis of a grid
constexpr int64_t HEAD_DIM = 128;
constexpr int64_t NARROW = 4, WIDE = 8;   // taps of the two classes of kernels
constexpr int64_t MULTIPROCESSORS = 132;  // of an H100 or H200

const char* const NAME = "the SM90 convolution";

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Sizes {
  int64_t batch, tokens, channels, width;

  int64_t taps() const { return width <= NARROW ? NARROW : WIDE; }
  bool has_outputs() const { return batch * tokens * channels > 0; }
};

TensorView as_flat(const TensorView& tensor) {
  return contiguous_view(tensor.name, tensor.data, tensor.dtype, tensor.device, {tensor.element_count()});
}

// In place of an operand that is not there: the kernel does not look at it.
TensorView nothing(const char* name, const TensorView& x, int32_t dtype) {
  return contiguous_view(name, x.data, dtype, x.device, {1});
}

// A flat tensor from one of its elements on.
TensorView from_element(const TensorView& flat, int64_t element) {
  const int64_t bytes = flat.dtype == aoti_torch_dtype_float32() ? 4 : 2;
  return contiguous_view(flat.name, static_cast<char*>(flat.data) + element * bytes, flat.dtype, flat.device,
                         {flat.element_count() - element});
}

TensorView as_vectors(const TensorView& flat, int64_t vector) {
  return contiguous_view(flat.name, flat.data, flat.dtype, flat.device, {flat.element_count() / vector, vector});
}

TensorView flat_or_nothing(const ArgumentTensor& argument, const char* name, const TensorView& x, int32_t dtype) {
  return argument.has_value() ? as_flat(argument.view()) : nothing(name, x, dtype);
}

// The memory of [B, T, D] as vectors, from a channel of its first token to its last, and how many lie between rows and
// tokens.
struct Rows {
  TensorView vectors;
  int64_t row, token;

  Rows(const TensorView& x, int64_t vector, int64_t channel = 0) {
    const int64_t span = (x.size[0] - 1) * x.stride[0] + (x.size[1] - 1) * x.stride[1] + x.size[2];
    vectors = as_vectors(from_element(contiguous_view(x.name, x.data, x.dtype, x.device, {span}), channel), vector);
    row = x.stride[0] / vector;
    token = require_int32(x.stride[1] / vector, NAME, "the distance of two tokens");
  }
};

void check_device(const TensorView& tensor, const TensorView& x) {
  FLASHQLA_CHECK(tensor.device == x.device, "%s is on device %d and x is on device %d; move it there.", tensor.name,
                 tensor.device, x.device);
}

// [B, T, channels] with contiguous channels, and aligned tokens that do not overlap.
void check_rows(const TensorView& tensor, const TensorView& x, int64_t channels) {
  check_device(tensor, x);
  FLASHQLA_CHECK(tensor.rank == 3, "%s has %d dimensions and must have 3, [B, T, D].", tensor.name, tensor.rank);
  FLASHQLA_CHECK(tensor.dtype == x.dtype, "%s and x have different dtypes; convert %s to that of x.", tensor.name,
                 tensor.name);
  for (int axis = 0; axis < 2; axis++) require_size(tensor, NAME, axis, x.size[axis]);
  require_size(tensor, NAME, 2, channels);
  if (tensor.element_count() == 0) return;
  const bool is_aligned = reinterpret_cast<uintptr_t>(tensor.data) % ALIGNMENT == 0 && tensor.size[2] % VECTOR == 0 &&
                          tensor.stride[0] % VECTOR == 0 && tensor.stride[1] % VECTOR == 0;
  const bool is_positive = (tensor.size[0] == 1 || tensor.stride[0] > 0) && (tensor.size[1] == 1 || tensor.stride[1] > 0);
  FLASHQLA_CHECK((tensor.size[2] == 1 || tensor.stride[2] == 1) && is_aligned && is_positive,
                 "%s has %lld channels and strides (%lld, %lld, %lld); the SM90 convolution needs channels and strides in "
                 "multiples of 8, the last stride 1, and an address that is a multiple of 16: pass a contiguous copy.",
                 tensor.name, static_cast<long long>(tensor.size[2]), static_cast<long long>(tensor.stride[0]),
                 static_cast<long long>(tensor.stride[1]), static_cast<long long>(tensor.stride[2]));
}

void check_contiguous(const TensorView& tensor, const TensorView& x, int32_t dtype) {
  check_device(tensor, x);
  FLASHQLA_CHECK(tensor.dtype == dtype, "%s has a dtype that the SM90 convolution does not take there; convert it.",
                 tensor.name);
  FLASHQLA_CHECK(tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.data) % ALIGNMENT == 0,
                 "%s must be contiguous at an address that is a multiple of 16; pass a contiguous copy.", tensor.name);
}

template <int RANK>
void check_optional(const ArgumentTensor& argument, const TensorView& x, int32_t dtype, const int64_t (&sizes)[RANK]) {
  if (!argument.has_value()) return;
  const TensorView& tensor = argument.view();
  FLASHQLA_CHECK(tensor.rank == RANK, "%s has %d dimensions and must have %d.", tensor.name, tensor.rank, RANK);
  for (int axis = 0; axis < RANK; axis++) require_size(tensor, NAME, axis, sizes[axis]);
  if (tensor.element_count() > 0) check_contiguous(tensor, x, dtype);
}

// weight [D, W] and bias [D], both in the dtype of x or both in float32.
struct Weights {
  bool is_wide;
  int64_t width;
  TensorView weight, bias, wide_weight, wide_bias;
  bool has_bias;

  Weights(const ArgumentTensor& weight_argument, const ArgumentTensor& bias_argument, const TensorView& x,
          int64_t channels) {
    const TensorView& w = weight_argument.view();
    const int32_t float32 = aoti_torch_dtype_float32();
    is_wide = w.dtype == float32;
    FLASHQLA_CHECK(w.rank == 2 && w.size[0] == channels && w.size[1] >= 1 && w.size[1] <= WIDE,
                   "weight must be [D, W] with the channels of x and a width from 1 to 8; use the PyTorch path.");
    width = w.size[1];
    check_contiguous(w, x, is_wide ? float32 : x.dtype);
    check_optional(bias_argument, x, w.dtype, {channels});
    has_bias = bias_argument.has_value();
    weight = is_wide ? nothing("weight", x, x.dtype) : as_flat(w);
    wide_weight = is_wide ? as_flat(w) : nothing("weight", x, float32);
    const bool has_narrow_bias = has_bias && !is_wide, has_wide_bias = has_bias && is_wide;
    bias = has_narrow_bias ? as_flat(bias_argument.view()) : nothing("bias", x, x.dtype);
    wide_bias = has_wide_bias ? as_flat(bias_argument.view()) : nothing("bias", x, float32);
  }

  // Those of the channels from `channel` on.
  Weights from_channel(int64_t channel) const {
    Weights rest = *this;
    TensorView& values = is_wide ? rest.wide_weight : rest.weight;
    values = from_element(values, channel * width);
    TensorView& offsets = is_wide ? rest.wide_bias : rest.bias;
    if (has_bias) offsets = from_element(offsets, channel);
    return rest;
  }
};

void check_dtype(const TensorView& x) {
  FLASHQLA_CHECK(x.dtype == aoti_torch_dtype_bfloat16() || x.dtype == aoti_torch_dtype_float16(),
                 "x is neither bfloat16 nor float16, which the SM90 kernels take; use the PyTorch path.");
}

bool is_bfloat16(const TensorView& x) { return x.dtype == aoti_torch_dtype_bfloat16(); }

// How the kernels cut their work: SHAPES in flashqla_hub/kernels/convolution.py and convolution_backward.py.
struct Cut {
  int64_t vector, tokens;  // channels and tokens of a thread
};

constexpr Cut TURNED = {4, 8};

Cut cut_forward(const Sizes& sizes, bool is_exact, bool norms_heads) {
  if (norms_heads) return {4, 16};
  return {2, is_exact && sizes.taps() == NARROW ? 20 : 16};
}

int64_t backward_vector(const Sizes& sizes) { return sizes.taps() == NARROW ? 4 : 2; }

// Tokens of a thread of the backward, in whole rounds of as many as there are taps: those with which a launch for so many
// channels finishes first if a wave of threads takes as long as its tokens and the overhead of beginning and of the tokens
// around them.
int64_t choose_tokens(const Sizes& sizes, int64_t channels, bool is_exact) {
  constexpr int64_t MOST = 256, OVERHEAD = 16;
  const int64_t threads_per_sm = is_exact && sizes.taps() == NARROW ? 512 : 384;
  const int64_t wave = MULTIPROCESSORS * threads_per_sm, vectors = channels / backward_vector(sizes);
  int64_t best = 0, best_cost = 0;
  for (int64_t tokens = sizes.taps(); tokens <= MOST; tokens += sizes.taps()) {
    const int64_t threads = sizes.batch * divide_up(sizes.tokens, tokens) * vectors;
    const int64_t cost = divide_up(threads, wave) * (tokens + OVERHEAD);
    if (best == 0 || cost < best_cost) {
      best = tokens;
      best_cost = cost;
    }
  }
  return best;
}

void check_thread_count(const Sizes& sizes, int64_t tokens_per_thread, int64_t vector) {
  const int64_t tiles = sizes.batch * divide_up(sizes.tokens, tokens_per_thread);
  require_int32(tiles * (sizes.channels / vector), NAME, "the number of threads");
  require_int32(sizes.batch * sizes.tokens, NAME, "the number of tokens");
  require_int32(sizes.batch * sizes.channels * WIDE, NAME, "the size of the states");
}

// Of four kernels the one for the dtype of x and the number of taps.
template <typename Launch>
Launch choose_kernel(const Launch (&kernels)[4], const TensorView& x, const Sizes& sizes) {
  return kernels[(sizes.taps() == NARROW ? 0 : 2) + (is_bfloat16(x) ? 0 : 1)];
}

using ForwardLaunch = decltype(&launch_convolution_exact_4_bf16);

ForwardLaunch forward_kernel(const TensorView& x, const Sizes& sizes, bool is_exact, bool norms_heads) {
  static constexpr ForwardLaunch EXACT[] = {launch_convolution_exact_4_bf16, launch_convolution_exact_4_fp16,
                                            launch_convolution_exact_8_bf16, launch_convolution_exact_8_fp16};
  static constexpr ForwardLaunch GENERAL[] = {launch_convolution_general_4_bf16, launch_convolution_general_4_fp16,
                                              launch_convolution_general_8_bf16, launch_convolution_general_8_fp16};
  if (norms_heads && is_exact) {
    return is_bfloat16(x) ? launch_convolution_normed_exact_4_bf16 : launch_convolution_normed_exact_4_fp16;
  }
  if (norms_heads) {
    return is_bfloat16(x) ? launch_convolution_normed_general_4_bf16 : launch_convolution_normed_general_4_fp16;
  }
  return choose_kernel(is_exact ? EXACT : GENERAL, x, sizes);
}

// Whether tokens, not channels, lie side by side in x [B, T, D].
bool is_turned(const TensorView& x) {
  return x.rank == 3 && x.stride[1] == 1 && x.size[1] > 1 && x.size[2] > 1 && x.stride[2] >= x.size[1];
}

void launch_turned(const DeviceScope& scope, const TensorView& x, const Weights& weights, const Sizes& sizes,
                   const TensorView& sequence, const TensorView& initial, const TensorView& y, const TensorView& final,
                   bool is_packed, bool has_initial, bool writes_final, bool silu) {
  using Launch = decltype(&launch_convolution_turned_4_bf16);
  static constexpr Launch KERNELS[] = {launch_convolution_turned_4_bf16, launch_convolution_turned_4_fp16,
                                       launch_convolution_turned_8_bf16, launch_convolution_turned_8_fp16};
  TensorView channels = contiguous_view(x.name, x.data, x.dtype, x.device, {x.size[0], x.size[2], x.size[1]});
  channels.stride[0] = x.stride[0];
  channels.stride[1] = x.stride[2];
  choose_kernel(KERNELS, x, sizes)(scope, channels, weights.weight, weights.bias, weights.wide_weight,
                                   weights.wide_bias, sequence, initial, y, final, static_cast<int32_t>(sizes.width),
                                   weights.is_wide, weights.has_bias, is_packed, has_initial, writes_final, silu);
}

void run_forward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentTensor x_argument, weight, bias, sequence, initial;
  x_argument.take(stack[0]);
  weight.take(stack[1]);
  bias.take_optional(stack[2]);
  sequence.take_optional(stack[3]);
  initial.take_optional(stack[4]);
  const bool silu = as_bool(stack[5]), output_final = as_bool(stack[6]);
  const int64_t normed_channels = as_int(stack[7]);
  x_argument.read("x");
  weight.read("weight");
  bias.read("bias");
  sequence.read("sequence");
  initial.read("initial_states");
  const TensorView& x = x_argument.view();
  const bool turned = is_turned(x) && normed_channels == 0;
  check_dtype(x);
  if (turned) {
    FLASHQLA_CHECK(x.size[2] % VECTOR == 0, "x has %lld channels and the SM90 convolution takes multiples of 8.",
                   static_cast<long long>(x.size[2]));
  } else {
    check_rows(x, x, x.size[2]);
  }
  const Weights weights(weight, bias, x, x.size[2]);
  const Sizes sizes{x.size[0], x.size[1], x.size[2], weights.width};
  const int64_t history = sizes.width - 1;
  FLASHQLA_CHECK(normed_channels == 0 || (normed_channels > 0 && normed_channels <= sizes.channels &&
                                          normed_channels % HEAD_DIM == 0 && sizes.channels % HEAD_DIM == 0 &&
                                          sizes.width <= NARROW),
                 "normed_channels is %lld of %lld channels with width %lld; the SM90 convolution normalises heads of 128 "
                 "channels, with widths up to 4: normalise the output instead.",
                 static_cast<long long>(normed_channels), static_cast<long long>(sizes.channels),
                 static_cast<long long>(sizes.width));
  check_optional(sequence, x, aoti_torch_dtype_int32(), {sizes.batch, sizes.tokens});
  check_optional(initial, x, x.dtype, {sizes.batch, sizes.channels, history});
  DeviceScope scope(x.device);
  NewTensor y, final_states;
  y.allocate("y", {sizes.batch, sizes.tokens, sizes.channels}, x.dtype, x.device);
  final_states.allocate("final_states", {output_final ? sizes.batch : 0, sizes.channels, history}, x.dtype, x.device);
  if (sizes.has_outputs()) {
    const bool is_packed = sequence.has_value();
    const bool is_exact = !is_packed && sizes.width == sizes.taps();
    const Cut cut = turned ? TURNED : cut_forward(sizes, is_exact, normed_channels > 0);
    check_thread_count(sizes, cut.tokens, cut.vector);
    const bool has_initial = initial.has_value() && history > 0, writes_final = output_final && history > 0;
    const TensorView numbers = flat_or_nothing(sequence, "sequence", x, aoti_torch_dtype_int32());
    const TensorView before = has_initial ? as_flat(initial.view()) : nothing("initial_states", x, x.dtype);
    const TensorView after = writes_final ? as_flat(final_states.view()) : nothing("final_states", x, x.dtype);
    const Rows y_rows(y.view(), cut.vector);
    if (turned) {
      launch_turned(scope, x, weights, sizes, numbers, before, y_rows.vectors, after, is_packed, has_initial,
                    writes_final, silu);
    } else {
      const Rows rows(x, cut.vector);
      const int64_t tiles = sizes.batch * divide_up(sizes.tokens, cut.tokens);
      forward_kernel(x, sizes, is_exact, normed_channels > 0)(
          scope, rows.vectors, weights.weight, weights.bias, weights.wide_weight, weights.wide_bias, numbers, before,
          y_rows.vectors, after, static_cast<int32_t>(sizes.batch), static_cast<int32_t>(sizes.tokens),
          static_cast<int32_t>(sizes.channels / cut.vector), rows.row, static_cast<int32_t>(rows.token),
          static_cast<int32_t>(sizes.width), static_cast<int32_t>(tiles < GRID_LIMIT ? tiles : GRID_LIMIT),
          weights.is_wide, weights.has_bias, is_packed, has_initial, writes_final, silu,
          static_cast<int32_t>(normed_channels / cut.vector));
    }
  } else if (output_final) {
    if (initial.has_value()) {
      final_states.copy_from(initial.handle());
    } else {
      final_states.fill_zero();
    }
  }
  stack[0] = y.hand_over();
  stack[1] = final_states.hand_over();
}

using BackwardLaunch = decltype(&launch_convolution_backward_exact_4_bf16);

BackwardLaunch backward_kernel(const TensorView& x, const Sizes& sizes, bool is_exact, bool has_states) {
  static constexpr BackwardLaunch EXACT[] = {
      launch_convolution_backward_exact_4_bf16, launch_convolution_backward_exact_4_fp16,
      launch_convolution_backward_exact_8_bf16, launch_convolution_backward_exact_8_fp16};
  static constexpr BackwardLaunch GENERAL[] = {
      launch_convolution_backward_general_4_bf16, launch_convolution_backward_general_4_fp16,
      launch_convolution_backward_general_8_bf16, launch_convolution_backward_general_8_fp16};
  static constexpr BackwardLaunch STATES[] = {
      launch_convolution_backward_states_4_bf16, launch_convolution_backward_states_4_fp16,
      launch_convolution_backward_states_8_bf16, launch_convolution_backward_states_8_fp16};
  if (has_states) return choose_kernel(STATES, x, sizes);
  return choose_kernel(is_exact ? EXACT : GENERAL, x, sizes);
}

void sum_partial(const DeviceScope& scope, const NewTensor& partial, const NewTensor& dweight, const NewTensor& dbias,
                 const Weights& weights, const Sizes& sizes) {
  const TensorView& dw = dweight.view();
  const auto launch = dw.dtype == aoti_torch_dtype_float32()    ? launch_convolution_gradients_fp32
                      : dw.dtype == aoti_torch_dtype_bfloat16() ? launch_convolution_gradients_bf16
                                                                : launch_convolution_gradients_fp16;
  launch(scope, partial.view(), as_flat(dw), weights.has_bias ? as_flat(dbias.view()) : nothing("dbias", dw, dw.dtype),
         static_cast<int32_t>(sizes.width), weights.has_bias);
}

// dy of all channels, or of the first ones beside dy_k and dy_v of the next: what a split has made of one output.
constexpr int MAX_PARTS = 3;

void check_parts(const ArgumentTensor (&dy)[MAX_PARTS], const TensorView& x) {
  int64_t channels = 0;
  for (const ArgumentTensor& part : dy) {
    if (!part.has_value()) continue;
    FLASHQLA_CHECK(part.view().rank == 3, "%s has %d dimensions and must have 3, [B, T, D].", part.view().name,
                   part.view().rank);
    check_rows(part.view(), x, part.view().size[2]);
    channels += part.view().size[2];
  }
  FLASHQLA_CHECK(channels == x.size[2], "dy has %lld channels in all and x has %lld; give a gradient for each of them.",
                 static_cast<long long>(channels), static_cast<long long>(x.size[2]));
}

void run_backward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentTensor x_argument, dy[MAX_PARTS], weight, bias, sequence, initial, dfinal;
  x_argument.take(stack[0]);
  dy[0].take(stack[1]);
  weight.take(stack[2]);
  bias.take_optional(stack[3]);
  sequence.take_optional(stack[4]);
  initial.take_optional(stack[5]);
  dfinal.take_optional(stack[6]);
  const bool silu = as_bool(stack[7]);
  dy[1].take_optional(stack[8]);
  dy[2].take_optional(stack[9]);
  x_argument.read("x");
  dy[0].read("dy");
  dy[1].read("dy_k");
  dy[2].read("dy_v");
  weight.read("weight");
  bias.read("bias");
  sequence.read("sequence");
  initial.read("initial_states");
  dfinal.read("dfinal_states");
  const TensorView& x = x_argument.view();
  check_dtype(x);
  check_rows(x, x, x.size[2]);
  check_parts(dy, x);
  const Weights weights(weight, bias, x, x.size[2]);
  const Sizes sizes{x.size[0], x.size[1], x.size[2], weights.width};
  const int64_t history = sizes.width - 1;
  check_optional(sequence, x, aoti_torch_dtype_int32(), {sizes.batch, sizes.tokens});
  check_optional(initial, x, x.dtype, {sizes.batch, sizes.channels, history});
  check_optional(dfinal, x, x.dtype, {sizes.batch, sizes.channels, history});
  const int32_t weight_dtype = weight.view().dtype;
  DeviceScope scope(x.device);
  NewTensor dx, dweight, dbias, dinitial;
  dx.allocate("dx", {sizes.batch, sizes.tokens, sizes.channels}, x.dtype, x.device);
  dweight.allocate("dweight", {sizes.channels, sizes.width}, weight_dtype, x.device);
  dbias.allocate("dbias", {weights.has_bias ? sizes.channels : 0}, weight_dtype, x.device);
  dinitial.allocate("dinitial_states", {initial.has_value() ? sizes.batch : 0, sizes.channels, history}, x.dtype,
                    x.device);
  if (sizes.has_outputs()) {
    const bool is_packed = sequence.has_value(), has_states = (initial.has_value() || dfinal.has_value()) && history > 0;
    const bool is_exact = !is_packed && !has_states && sizes.width == sizes.taps();
    int64_t most = 0;  // channels of a part
    for (const ArgumentTensor& part : dy) {
      if (part.has_value() && part.view().size[2] > most) most = part.view().size[2];
    }
    const int64_t vector = backward_vector(sizes), tokens_per_thread = choose_tokens(sizes, most, is_exact);
    check_thread_count(sizes, tokens_per_thread, vector);
    const int64_t tiles = sizes.batch * divide_up(sizes.tokens, tokens_per_thread);
    NewTensor partial;
    partial.allocate("partial", {tiles, sizes.taps() + 1, sizes.channels}, aoti_torch_dtype_float32(), x.device);
    const bool has_initial = initial.has_value() && history > 0, has_dfinal = dfinal.has_value() && history > 0;
    const TensorView numbers = flat_or_nothing(sequence, "sequence", x, aoti_torch_dtype_int32());
    int64_t channel = 0;  // the first of a part
    const auto part_of = [&](bool is_there, const ArgumentTensor& argument, const char* name) {
      return is_there ? from_element(as_flat(argument.view()), channel * history) : nothing(name, x, x.dtype);
    };
    for (const ArgumentTensor& part : dy) {
      if (!part.has_value() || part.view().size[2] == 0) continue;
      const Rows rows(x, vector, channel), dy_rows(part.view(), vector), dx_rows(dx.view(), vector, channel);
      const Weights own = weights.from_channel(channel);
      backward_kernel(x, sizes, is_exact, has_states)(
          scope, rows.vectors, dy_rows.vectors, own.weight, own.bias, own.wide_weight, own.wide_bias, numbers,
          part_of(has_initial, initial, "initial_states"), part_of(has_dfinal, dfinal, "dfinal_states"),
          dx_rows.vectors,
          has_initial ? from_element(as_flat(dinitial.view()), channel * history) : nothing("dinitial_states", x, x.dtype),
          as_vectors(from_element(as_flat(partial.view()), channel), vector), static_cast<int32_t>(sizes.batch),
          static_cast<int32_t>(sizes.tokens), static_cast<int32_t>(part.view().size[2] / vector),
          static_cast<int32_t>(sizes.channels / vector), rows.row, static_cast<int32_t>(rows.token), dy_rows.row,
          static_cast<int32_t>(dy_rows.token), static_cast<int32_t>(sizes.width),
          static_cast<int32_t>(tokens_per_thread), weights.is_wide, weights.has_bias, is_packed, has_initial,
          has_dfinal, silu);
      channel += part.view().size[2];
    }
    sum_partial(scope, partial, dweight, dbias, weights, sizes);
  } else {
    dweight.fill_zero();
    dbias.fill_zero();
    if (initial.has_value() && dfinal.has_value()) {
      dinitial.copy_from(dfinal.handle());
    } else {
      dinitial.fill_zero();
    }
  }
  stack[0] = dx.hand_over();
  stack[1] = dweight.hand_over();
  stack[2] = dbias.hand_over();
  stack[3] = dinitial.hand_over();
}

// x [B, D, T] and conv_state [N, D, S] of any strides; rows [B] says which state each row of x has.
void run_update(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentTensor x_argument, state_argument, weight, bias, rows;
  x_argument.take(stack[0]);
  state_argument.take(stack[1]);
  weight.take(stack[2]);
  bias.take_optional(stack[3]);
  rows.take_optional(stack[4]);
  const bool silu = as_bool(stack[5]);
  x_argument.read("x");
  state_argument.read("conv_state");
  weight.read("weight");
  bias.read("bias");
  rows.read("conv_state_indices");
  const TensorView &x = x_argument.view(), &state = state_argument.view();
  check_dtype(x);
  FLASHQLA_CHECK(x.rank == 3 && state.rank == 3, "x must be [B, D, T] and conv_state [N, D, S]; see the documentation.");
  check_device(state, x);
  const Weights weights(weight, bias, x, x.size[1]);
  FLASHQLA_CHECK(state.dtype == x.dtype, "conv_state and x have different dtypes; use the PyTorch path.");
  require_size(state, NAME, 1, x.size[1]);
  FLASHQLA_CHECK(state.size[2] >= weights.width - 1, "conv_state keeps %lld tokens and the convolution needs %lld.",
                 static_cast<long long>(state.size[2]), static_cast<long long>(weights.width - 1));
  check_optional(rows, x, aoti_torch_dtype_int32(), {x.size[0]});
  if (!rows.has_value()) require_size(state, NAME, 0, x.size[0]);
  DeviceScope scope(x.device);
  NewTensor y;  // token-major, as the next projection reads it
  y.allocate("y", {x.size[0], x.size[2], x.size[1]}, x.dtype, x.device);
  if (x.element_count() > 0) {
    TensorView turned = contiguous_view("y", y.view().data, x.dtype, x.device, {x.size[0], x.size[1], x.size[2]});
    turned.stride[1] = 1;
    turned.stride[2] = x.size[1];
    const bool is_narrow = weights.width <= NARROW;
    const auto launch = is_narrow ? (is_bfloat16(x) ? launch_convolution_update_4_bf16 : launch_convolution_update_4_fp16)
                                  : (is_bfloat16(x) ? launch_convolution_update_8_bf16 : launch_convolution_update_8_fp16);
    launch(scope, x, state, weights.weight, weights.bias, weights.wide_weight, weights.wide_bias,
           flat_or_nothing(rows, "conv_state_indices", x, aoti_torch_dtype_int32()), turned,
           static_cast<int32_t>(weights.width), weights.is_wide, weights.has_bias, rows.has_value(), silu);
  }
  stack[0] = y.hand_over();
}

const OpRegistration forward_registration(
    "sm90_causal_conv1d_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? sequence, Tensor? initial_states, bool silu, "
    "bool output_final_states, int normed_channels) -> (Tensor y, Tensor final_states)",
    "sm90_causal_conv1d_fwd", run_forward);

const OpRegistration backward_registration(
    "sm90_causal_conv1d_bwd(Tensor x, Tensor dy, Tensor weight, Tensor? bias, Tensor? sequence, Tensor? initial_states, "
    "Tensor? dfinal_states, bool silu, Tensor? dy_k=None, Tensor? dy_v=None) -> (Tensor dx, Tensor dweight, Tensor dbias, "
    "Tensor dinitial_states)",
    "sm90_causal_conv1d_bwd", run_backward);

const OpRegistration update_registration(
    "sm90_causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, "
    "Tensor? conv_state_indices, bool silu) -> Tensor y",
    "sm90_causal_conv1d_update", run_update);

}  // namespace
}  // namespace flashqla
