#include "kernel.h"

#include "errors.h"

namespace flashqla {
namespace {

constexpr int SM90 = 90;
constexpr int DEFAULT_SHARED_MEMORY = 48 * 1024;  // beyond it a kernel must ask, CUDA C++ Programming Guide 16.7.3
constexpr int LARGE_SHARED_MEMORY = 16 * 1024;    // from here on it limits how many blocks an SM holds
constexpr int WHOLE_SHARED_MEMORY = 100;          // percent of what an SM can give, and the same for kernels that overlap
constexpr int64_t MANY_BLOCKS = 512;              // from so many on, an SM may take several blocks of a cluster
constexpr int64_t MAX_GRID_X = INT32_MAX, MAX_GRID_YZ = 65535;
constexpr int TMA_ALIGNMENT = 16;                     // bytes, of the address and of every stride but the first
constexpr int64_t MAX_TMA_SIZE = int64_t(1) << 32;    // elements
constexpr int64_t MAX_TMA_STRIDE = int64_t(1) << 40;  // bytes, exclusive

}  // namespace

void Kernel::load() {
  if (loaded_.is_done() || !loaded_.enter()) return;
  const cuda::Driver& driver = cuda::driver();
  cuda::Library library = nullptr;  // stays loaded until the process ends
  cuda::Result result = driver.library_load_data(&library, cubin_, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result == 0) result = driver.library_get_kernel(&handle_, library, name_);
  if (result == 0) {
    loaded_.done();
  } else {
    loaded_.retry();
  }
  cuda::check(result, name_);
}

void Kernel::prepare(const DeviceScope& scope) {
  const DeviceProperties& device = device_properties(scope.index());
  FLASHQLA_CHECK(
      device.compute_capability == SM90,
      "%s runs on compute capability 9.0 only (H100, H200, GH200) and device %d has %d.%d; use CPU tensors or "
      "fla on this GPU.",
      name_, scope.index(), device.compute_capability / 10, device.compute_capability % 10);
  load();
  const cuda::Driver& driver = cuda::driver();
  if (traits_.dynamic_shared_memory > DEFAULT_SHARED_MEMORY) {
    cuda::check(driver.kernel_set_attribute(cuda::FUNCTION_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                            traits_.dynamic_shared_memory, handle_, device.handle),
                name_);
  }
  if (traits_.dynamic_shared_memory >= LARGE_SHARED_MEMORY) {
    cuda::check(driver.kernel_set_attribute(cuda::FUNCTION_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                                            WHOLE_SHARED_MEMORY, handle_, device.handle),
                name_);
  }
  cuda::Function function;  // asking for it loads the code now and not lazily, perhaps inside a graph capture
  cuda::check(driver.kernel_get_function(&function, handle_), name_);
  ready_[scope.index()].set();
}

void Kernel::launch(const DeviceScope& scope, Extent grid, Extent block, Extent cluster, void** arguments) {
  FLASHQLA_CHECK(
      grid.x <= MAX_GRID_X && grid.y <= MAX_GRID_YZ && grid.z <= MAX_GRID_YZ,
      "%s would need a grid of %lld x %lld x %lld blocks, and CUDA takes 2147483647 x 65535 x 65535; split the "
      "call.",
      name_, static_cast<long long>(grid.x), static_cast<long long>(grid.y), static_cast<long long>(grid.z));
  if (__builtin_expect(!ready_[scope.index()].is_set(), 0)) prepare(scope);
  cuda::LaunchAttribute attributes[3];
  uint32_t count = 0;
  if (cluster.x * cluster.y * cluster.z > 1) {
    attributes[count].id = cuda::LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count++].value.cluster_dimension = {uint32_t(cluster.x), uint32_t(cluster.y), uint32_t(cluster.z)};
    if (grid.x * grid.y * grid.z >= MANY_BLOCKS) {
      attributes[count].id = cuda::LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
      attributes[count++].value.cluster_scheduling_policy_preference = cuda::CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING;
    }
  }
  if (traits_.programmatic_launch) {
    attributes[count].id = cuda::LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count++].value.programmatic_stream_serialization_allowed = 1;
  }
  const cuda::LaunchConfig config = {uint32_t(grid.x),
                                     uint32_t(grid.y),
                                     uint32_t(grid.z),
                                     uint32_t(block.x),
                                     uint32_t(block.y),
                                     uint32_t(block.z),
                                     uint32_t(traits_.dynamic_shared_memory),
                                     scope.stream(),
                                     attributes,
                                     count};
  // A CUkernel stands for its CUfunction in the current context (driver API, cuLaunchKernelEx).
  cuda::check(cuda::driver().launch_kernel_ex(&config, reinterpret_cast<cuda::Function>(handle_), arguments, nullptr),
              name_);
}

cuda::TensorMap tensor_map(const TensorView& tensor, const char* kernel, const TileLayout& layout, const int64_t* dims,
                           const int64_t* strides) {
  FLASHQLA_CHECK(reinterpret_cast<uintptr_t>(tensor.data) % TMA_ALIGNMENT == 0,
                 "%s starts at an address that is no multiple of %d bytes, which %s needs; pass %s.clone().",
                 tensor.name, TMA_ALIGNMENT, kernel, tensor.name);
  uint64_t sizes[MAX_RANK], byte_strides[MAX_RANK];
  for (int axis = 0; axis < layout.rank; axis++) {
    FLASHQLA_CHECK(dims[axis] > 0 && dims[axis] <= MAX_TMA_SIZE,
                   "%s has a size of %lld and %s takes 1 to 2^32; a tensor without elements needs no launch.",
                   tensor.name, static_cast<long long>(dims[axis]), kernel);
    const bool is_valid = strides[axis] > 0 && strides[axis] % TMA_ALIGNMENT == 0 && strides[axis] < MAX_TMA_STRIDE;
    FLASHQLA_CHECK(axis == 0 || dims[axis] == 1 || is_valid,
                   "%s has a stride of %lld bytes and %s takes multiples of %d below 2^40; pass %s.contiguous().",
                   tensor.name, static_cast<long long>(strides[axis]), kernel, TMA_ALIGNMENT, tensor.name);
    sizes[axis] = uint64_t(dims[axis]);
    byte_strides[axis] = is_valid ? uint64_t(strides[axis]) : TMA_ALIGNMENT;  // a size of 1 may have any stride
  }
  cuda::TensorMap map;
  cuda::check(cuda::driver().tensor_map_encode_tiled(
                  &map, layout.dtype, uint32_t(layout.rank), tensor.data, sizes, byte_strides + 1, layout.box,
                  layout.element_strides, layout.interleave, layout.swizzle, layout.l2_promotion, layout.out_of_bounds),
              tensor.name);
  return map;
}

}  // namespace flashqla
