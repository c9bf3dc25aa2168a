#include "device.h"

#include "atomics.h"

namespace flashqla {
namespace {

int attribute(cuda::Device device, int which) {
  int value = 0;
  cuda::check(cuda::driver().device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

// A thread that has not called CUDA yet has no context; PyTorch's run time would make the primary one current too.
void ensure_context(int32_t index) {
  const cuda::Driver& driver = cuda::driver();
  cuda::Context context = nullptr;
  cuda::check(driver.context_get_current(&context), "cuCtxGetCurrent");
  if (context != nullptr) return;
  cuda::check(driver.primary_context_retain(&context, device_properties(index).handle), "cuDevicePrimaryCtxRetain");
  cuda::check(driver.context_set_current(context), "cuCtxSetCurrent");
}

}  // namespace

const DeviceProperties& device_properties(int32_t index) {
  static DeviceProperties table[MAX_DEVICES];
  static Flag known[MAX_DEVICES];
  FLASHQLA_CHECK(index >= 0 && index < MAX_DEVICES, "The SM90 kernels serve devices 0 to %d and got device %d.",
                 MAX_DEVICES - 1, index);
  if (__builtin_expect(!known[index].is_set(), 0)) {
    DeviceProperties properties;
    cuda::check(cuda::driver().device_get(&properties.handle, index), "cuDeviceGet");
    properties.compute_capability = 10 * attribute(properties.handle, cuda::DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                                    attribute(properties.handle, cuda::DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    properties.multiprocessors = attribute(properties.handle, cuda::DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    table[index] = properties;  // two threads may both write, and write the same
    known[index].set();
  }
  return table[index];
}

DeviceScope::DeviceScope(int32_t index) : index_(index) {
  cuda::driver();  // says what is missing before PyTorch is asked for a guard
  FLASHQLA_TORCH(aoti_torch_create_device_guard(index, &guard_));
  ensure_context(index);
  void* stream = nullptr;
  FLASHQLA_TORCH(cuda::driver().torch_current_stream(index, &stream));
  stream_ = static_cast<cuda::Stream>(stream);
}

void DeviceScope::release() {
  if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
  guard_ = nullptr;
}

}  // namespace flashqla
