// Compiled, never run: our hand-written declarations against the real cuda.h and PyTorch's own shim header.
#define FLASHQLA_CHECK_DECLARATIONS
#define USE_CUDA
#include <cuda.h>
#include <stddef.h>

#include "runtime/cuda_driver.h"
#include "runtime/torch_shim.h"

namespace ours = flashqla::cuda;

static_assert(sizeof(CUtensorMap) == sizeof(ours::TensorMap) && alignof(CUtensorMap) <= alignof(ours::TensorMap));
static_assert(sizeof(CUlaunchAttribute) == sizeof(ours::LaunchAttribute));
static_assert(offsetof(CUlaunchAttribute, value) == offsetof(ours::LaunchAttribute, value));
static_assert(sizeof(CUlaunchConfig) == sizeof(ours::LaunchConfig));
static_assert(offsetof(CUlaunchConfig, blockDimX) == offsetof(ours::LaunchConfig, block_x));
static_assert(offsetof(CUlaunchConfig, sharedMemBytes) == offsetof(ours::LaunchConfig, shared_memory_bytes));
static_assert(offsetof(CUlaunchConfig, hStream) == offsetof(ours::LaunchConfig, stream));
static_assert(offsetof(CUlaunchConfig, attrs) == offsetof(ours::LaunchConfig, attributes));
static_assert(offsetof(CUlaunchConfig, numAttrs) == offsetof(ours::LaunchConfig, attribute_count));

static_assert(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION == ours::LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE ==
              ours::LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
static_assert(CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING == ours::CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING);
static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ==
              ours::LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ==
              ours::FUNCTION_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT ==
              ours::FUNCTION_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == ours::DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == ours::DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == ours::DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);

// Same parameter types in the same order, whatever the types are called.
template <typename Ours, typename Theirs>
constexpr bool SAME_CALL = false;
template <typename... Ours, typename... Theirs>
constexpr bool SAME_CALL<int (*)(Ours...), CUresult (*)(Theirs...)> =
    sizeof...(Ours) == sizeof...(Theirs) && ((sizeof(Ours) == sizeof(Theirs)) && ...);

static_assert(SAME_CALL<decltype(ours::Driver::library_load_data), decltype(&cuLibraryLoadData)>);
static_assert(SAME_CALL<decltype(ours::Driver::library_get_kernel), decltype(&cuLibraryGetKernel)>);
static_assert(SAME_CALL<decltype(ours::Driver::kernel_get_function), decltype(&cuKernelGetFunction)>);
static_assert(SAME_CALL<decltype(ours::Driver::kernel_set_attribute), decltype(&cuKernelSetAttribute)>);
static_assert(SAME_CALL<decltype(ours::Driver::launch_kernel_ex), decltype(&cuLaunchKernelEx)>);
static_assert(SAME_CALL<decltype(ours::Driver::tensor_map_encode_tiled), decltype(&cuTensorMapEncodeTiled)>);
static_assert(SAME_CALL<decltype(ours::Driver::device_get_attribute), decltype(&cuDeviceGetAttribute)>);

static_assert(__is_same(decltype(ours::Driver::torch_current_stream), decltype(&aoti_torch_get_current_cuda_stream)));
