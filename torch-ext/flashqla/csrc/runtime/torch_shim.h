// The part of PyTorch's stable C interface that this library uses: every function exists since PyTorch 2.9 and keeps
// its signature (torch/csrc/inductor/aoti_torch/c/shim.h). Declared by hand, so that building needs no PyTorch headers;
// with FLASHQLA_CHECK_DECLARATIONS the real header is included too and the compiler compares the two.
#pragma once

#include <stdint.h>

#ifdef FLASHQLA_CHECK_DECLARATIONS
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#else
struct AtenTensorOpaque;
struct DeviceGuardOpaque;
struct TorchLibraryOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using DeviceGuardHandle = DeviceGuardOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
using AOTITorchError = int32_t;
using StableIValue = uint64_t;
#endif

// An op receives its arguments in `stack` and leaves its results there.
using BoxedFunction = void (*)(StableIValue* stack, uint64_t argument_count, uint64_t result_count);

extern "C" {
void aoti_torch_check(bool condition, const char* function, const char* file, uint32_t line, const char* message);

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* result);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* result);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* result);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* result);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** result);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** result);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** result);
AOTITorchError aoti_torch_empty_strided(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* result);
AOTITorchError aoti_torch_copy_(AtenTensorHandle destination, AtenTensorHandle source, int32_t non_blocking);
AOTITorchError aoti_torch_zero_(AtenTensorHandle tensor);

AOTITorchError aoti_torch_create_device_guard(int32_t device_index, DeviceGuardHandle* result);
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard);

AOTITorchError aoti_torch_library_init_fragment(const char* op_namespace, const char* file, uint32_t line,
                                                TorchLibraryHandle* result);
AOTITorchError aoti_torch_library_init_impl(const char* op_namespace, const char* dispatch_key, const char* file,
                                            uint32_t line, TorchLibraryHandle* result);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char* schema);
AOTITorchError aoti_torch_library_impl(TorchLibraryHandle library, const char* name, BoxedFunction function);
}
