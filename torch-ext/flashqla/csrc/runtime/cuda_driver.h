// The CUDA driver: the few types and functions we need, found at the first call. The library links neither libcuda nor
// the CUDA run time, so it also loads where there is no driver.
#pragma once

#include <stdint.h>

#include "torch_shim.h"

namespace flashqla::cuda {

using Result = int;
using Device = int;
using Context = struct ContextOpaque*;
using Stream = struct StreamOpaque*;
using Library = struct LibraryOpaque*;
using Kernel = struct KernelOpaque*;
using Function = struct FunctionOpaque*;

struct alignas(128) TensorMap {  // CUtensorMap; __grid_constant__ parameters want 128-byte alignment
  uint64_t opaque[16];
};

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  char padding[4];
  union {
    char bytes[64];
    struct {
      uint32_t x, y, z;
    } cluster_dimension;
    int cluster_scheduling_policy_preference;
    int programmatic_stream_serialization_allowed;
  } value;
};

struct LaunchConfig {  // CUlaunchConfig
  uint32_t grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_memory_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  uint32_t attribute_count;
};

// Enumerators of cuda.h; tests/launch/check_declarations.cpp compares all of the above with the real header.
constexpr int LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4;
constexpr int LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE = 5;
constexpr int CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING = 2;
constexpr int LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6;
constexpr int FUNCTION_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
constexpr int FUNCTION_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9;
constexpr int DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
constexpr int DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
constexpr int DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;

struct Driver {
  Result (*library_load_data)(Library*, const void* image, void* jit_options, void* jit_values, uint32_t jit_count,
                              void* library_options, void* library_values, uint32_t library_count);
  Result (*library_get_kernel)(Kernel*, Library, const char* name);
  Result (*kernel_get_function)(Function*, Kernel);
  Result (*kernel_set_attribute)(int attribute, int value, Kernel, Device);
  Result (*launch_kernel_ex)(const LaunchConfig*, Function, void** arguments, void** extra);
  Result (*tensor_map_encode_tiled)(TensorMap*, int dtype, uint32_t rank, void* address, const uint64_t* dims,
                                    const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                    int interleave, int swizzle, int l2_promotion, int out_of_bounds);
  Result (*context_get_current)(Context*);
  Result (*context_set_current)(Context);
  Result (*primary_context_retain)(Context*, Device);
  Result (*device_get)(Device*, int ordinal);
  Result (*device_get_attribute)(int* value, int attribute, Device);
  Result (*get_error_string)(Result, const char** text);
  AOTITorchError (*torch_current_stream)(int32_t device_index, void** stream);  // from libtorch_cuda.so
};

// The function table; fails with one sentence where there is no driver, an old one, or a PyTorch without CUDA.
const Driver& driver();

// Fails unless `result` is CUDA_SUCCESS; `what` names the call or the tensor that it was made for.
void check(Result result, const char* what);

}  // namespace flashqla::cuda
