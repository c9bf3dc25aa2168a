// sm90_token_products: products of a few tokens with up to four weight matrices, on the kernel of flashqla_hub/kernels.
#include "../generated/launchers.h"
#include "../runtime/registration.h"
#include "rows.h"

namespace flashqla {
namespace {

constexpr int MATRICES = 4;
constexpr int64_t MAX_TOKENS = 4;
constexpr int64_t VECTOR = 8, STEP = 512;  // elements of a load, and columns that a warp reads at a time
// Of up to so many rows, blocks of 16 would leave SMs idle or with few loads on their way; then a block has 4 rows.
constexpr int64_t FEW_ROWS = 8192;
// Of a matrix alone, weights that are ordered into the L2 cache while the kernel before ends: what memory gives meanwhile.
constexpr int64_t BYTES_AHEAD = 12 << 20, LINE = 128;

void check_flat(const TensorView& tensor) {
  FLASHQLA_CHECK(tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0,
                 "%s is not contiguous at a 16-byte address, as the SM90 kernel needs; pass %s.contiguous().", tensor.name,
                 tensor.name);
}

void check_weight(const TensorView& weight, const TensorView& x, int64_t width) {
  FLASHQLA_CHECK(weight.device == x.device, "%s is on device %d and x is on device %d; move it there.", weight.name,
                 weight.device, x.device);
  FLASHQLA_CHECK(weight.dtype == x.dtype, "%s and x have different dtypes; convert x to that of the weights.",
                 weight.name);
  FLASHQLA_CHECK(weight.rank == 2 && weight.size[1] == width, "%s must be [rows, %lld], the last dimension of x.",
                 weight.name, static_cast<long long>(width));
  check_flat(weight);
}

void run(StableIValue* stack, uint64_t, uint64_t) {
  static constexpr const char* WEIGHTS[] = {"w0", "w1", "w2", "w3"};
  static constexpr const char* RESULTS[] = {"y0", "y1", "y2", "y3"};
  ArgumentTensor x_argument, w_argument[MATRICES];
  x_argument.take(stack[0]);
  w_argument[0].take(stack[1]);
  for (int i = 1; i < MATRICES; i++) w_argument[i].take_optional(stack[1 + i]);
  x_argument.read("x");
  for (int i = 0; i < MATRICES; i++) w_argument[i].read(WEIGHTS[i]);
  const TensorView& x = x_argument.view();
  check_half(x);
  FLASHQLA_CHECK(x.rank >= 1, "x must be [..., width]; unsqueeze it.");
  const int64_t width = x.size[x.rank - 1];
  FLASHQLA_CHECK(width > 0 && width % STEP == 0, "x has %lld columns and the SM90 kernel takes multiples of %lld.",
                 static_cast<long long>(width), static_cast<long long>(STEP));
  const int64_t tokens = x.element_count() / width, vectors = width / VECTOR;
  FLASHQLA_CHECK(tokens <= MAX_TOKENS, "x has %lld tokens and the SM90 kernel takes up to %lld; multiply more by PyTorch.",
                 static_cast<long long>(tokens), static_cast<long long>(MAX_TOKENS));
  check_flat(x);
  const DeviceScope scope(x.device);
  NewTensor y[MATRICES];
  TensorView w_vectors[MATRICES], y_rows[MATRICES];
  int64_t all_rows = 0;
  for (int i = 0; i < MATRICES; i++) {
    const bool is_there = w_argument[i].has_value();
    if (is_there) check_weight(w_argument[i].view(), x, width);
    const int64_t rows = is_there ? w_argument[i].view().size[0] : 0;
    TensorView result = x;
    result.name = RESULTS[i];
    result.size[x.rank - 1] = rows;
    y[i].allocate_like(result, x.dtype);
    w_vectors[i] = contiguous_view(WEIGHTS[i], is_there ? w_argument[i].view().data : x.data, x.dtype, x.device,
                                   {rows, vectors, VECTOR});
    y_rows[i] = contiguous_view(RESULTS[i], is_there ? y[i].view().data : x.data, x.dtype, x.device, {tokens, rows});
    all_rows += rows;
    require_int32(all_rows, "the SM90 product kernel", "the number of rows");
  }
  if (tokens > 0 && all_rows > 0) {
    const bool is_bfloat16 = x.dtype == aoti_torch_dtype_bfloat16();
    using Launch = decltype(&launch_token_products_1_bf16);
    static constexpr Launch LAUNCHES[2][2][2] = {
        {{launch_token_products_1_bf16, launch_token_products_1_fp16},
         {launch_token_products_4_bf16, launch_token_products_4_fp16}},
        {{launch_token_products_shared_1_bf16, launch_token_products_shared_1_fp16},
         {launch_token_products_shared_4_bf16, launch_token_products_shared_4_fp16}},
    };
    const bool is_alone = w_vectors[0].size[0] == all_rows;
    const int64_t lines = is_alone ? smaller(width * 2 / LINE, BYTES_AHEAD / LINE / all_rows) : 0;
    const TensorView x_vectors = contiguous_view("x", x.data, x.dtype, x.device, {tokens, vectors, VECTOR});
    LAUNCHES[all_rows <= FEW_ROWS][tokens > 1][!is_bfloat16](scope, x_vectors, w_vectors[0], w_vectors[1], w_vectors[2],
                                                             w_vectors[3], y_rows[0], y_rows[1], y_rows[2], y_rows[3],
                                                             static_cast<int32_t>(lines));
  }
  for (int i = 0; i < MATRICES; i++) stack[i] = y[i].hand_over();
}

const OpRegistration registration(
    "sm90_token_products(Tensor x, Tensor w0, Tensor? w1, Tensor? w2, Tensor? w3) "
    "-> (Tensor y0, Tensor y1, Tensor y2, Tensor y3)",
    "sm90_token_products", run);

}  // namespace
}  // namespace flashqla
