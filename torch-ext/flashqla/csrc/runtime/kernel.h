// A compiled kernel and its launch.
#pragma once

#include <stdint.h>

#include "atomics.h"
#include "cuda_driver.h"
#include "device.h"
#include "tensor.h"

namespace flashqla {

struct Extent {
  int64_t x = 1, y = 1, z = 1;
};

// What is fixed when the kernel is compiled.
struct KernelTraits {
  int dynamic_shared_memory = 0;  // bytes
  bool programmatic_launch = false;  // may start while the kernel before it on the stream still runs
};

// One cubin with one kernel. It is loaded at the first launch, once for all devices and threads.
class Kernel {
 public:
  constexpr Kernel(const char* name, const void* cubin, KernelTraits traits)
      : name_(name), cubin_(cubin), traits_(traits) {}

  // Enqueues on the scope's stream and returns. `arguments` holds the address of each kernel argument, in order.
  // `cluster` counts blocks, and divides the grid. Fails on a device other than sm_90, an oversized grid, or a driver error.
  void launch(const DeviceScope& scope, Extent grid, Extent block, Extent cluster, void** arguments);

 private:
  void prepare(const DeviceScope& scope);
  void load();

  const char* name_;
  const void* cubin_;
  KernelTraits traits_;
  cuda::Kernel handle_ = nullptr;
  Once loaded_;
  Flag ready_[MAX_DEVICES];
};

// How a tensor map cuts a tensor: the part of cuTensorMapEncodeTiled's arguments that is fixed at compile time.
struct TileLayout {
  int rank;
  int dtype;
  uint32_t box[MAX_RANK];
  uint32_t element_strides[MAX_RANK];
  int interleave, swizzle, l2_promotion, out_of_bounds;
};

// Encodes a map of `tensor` after checking what TMA demands of address, sizes and strides. `dims` and `strides` have
// layout.rank entries, innermost first; strides count bytes, and the innermost is not used.
cuda::TensorMap tensor_map(const TensorView& tensor, const char* kernel, const TileLayout& layout, const int64_t* dims,
                           const int64_t* strides);

constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace flashqla
