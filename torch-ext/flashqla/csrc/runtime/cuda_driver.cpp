#include "cuda_driver.h"

#include <dlfcn.h>
#include <string.h>

#include "atomics.h"
#include "errors.h"

namespace flashqla::cuda {
namespace {

struct Entry {
  const char* symbol;
  void* slot;
};

// Fills the table; returns a sentence on what is missing, or nullptr.
const char* find_functions(Driver& driver) {
  void* libcuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (libcuda == nullptr) {
    return "The SM90 kernels need an NVIDIA driver and libcuda.so.1 cannot be opened; use CPU tensors on this machine.";
  }
  const Entry driver_entries[] = {
      {"cuLibraryLoadData", &driver.library_load_data},
      {"cuLibraryGetKernel", &driver.library_get_kernel},
      {"cuKernelGetFunction", &driver.kernel_get_function},
      {"cuKernelSetAttribute", &driver.kernel_set_attribute},
      {"cuLaunchKernelEx", &driver.launch_kernel_ex},
      {"cuTensorMapEncodeTiled", &driver.tensor_map_encode_tiled},
      {"cuCtxGetCurrent", &driver.context_get_current},
      {"cuCtxSetCurrent", &driver.context_set_current},
      {"cuDevicePrimaryCtxRetain", &driver.primary_context_retain},
      {"cuDeviceGet", &driver.device_get},
      {"cuDeviceGetAttribute", &driver.device_get_attribute},
      {"cuGetErrorString", &driver.get_error_string},
  };
  for (const Entry& entry : driver_entries) {
    void* symbol = dlsym(libcuda, entry.symbol);
    if (symbol == nullptr) {
      return "The SM90 kernels need the NVIDIA driver of CUDA 12.0 (R525) or newer and this one lacks their functions; "
             "update the driver.";
    }
    memcpy(entry.slot, &symbol, sizeof symbol);
  }
  void* libtorch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* current_stream =
      libtorch_cuda == nullptr ? nullptr : dlsym(libtorch_cuda, "aoti_torch_get_current_cuda_stream");
  if (current_stream == nullptr) {
    return "The SM90 kernels need a PyTorch with CUDA and this one has none; install a CUDA build of PyTorch.";
  }
  memcpy(&driver.torch_current_stream, &current_stream, sizeof current_stream);
  return nullptr;
}

}  // namespace

const Driver& driver() {
  static Driver table;
  static Once once;
  if (__builtin_expect(once.is_done(), 1)) return table;
  if (once.enter()) {
    const char* missing = find_functions(table);
    if (missing != nullptr) {
      once.retry();
      FLASHQLA_FAIL("%s", missing);
    }
    once.done();
  }
  return table;
}

void check(Result result, const char* what) {
  if (__builtin_expect(result == 0, 1)) return;
  const char* text = nullptr;
  driver().get_error_string(result, &text);
  FLASHQLA_FAIL("%s: the CUDA driver reports error %d (%s).", what, result, text == nullptr ? "unknown" : text);
}

}  // namespace flashqla::cuda
