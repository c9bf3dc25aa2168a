// Devices, the current stream, and the guard that an op holds while it works.
#pragma once

#include "cuda_driver.h"
#include "errors.h"

namespace flashqla {

constexpr int MAX_DEVICES = 64;

struct DeviceProperties {
  cuda::Device handle;
  int compute_capability;  // 90 for sm_90
  int multiprocessors;
};

// Properties of PyTorch's device `index`, read once.
const DeviceProperties& device_properties(int32_t index);

// Makes a device current for the rest of the block and restores the caller's device afterwards, also after an error.
class DeviceScope : public Owned {
 public:
  explicit DeviceScope(int32_t index);
  ~DeviceScope() { release(); }

  int32_t index() const { return index_; }
  cuda::Stream stream() const { return stream_; }  // PyTorch's current stream on that device

 protected:
  void release() override;

 private:
  DeviceGuardHandle guard_ = nullptr;
  int32_t index_;
  cuda::Stream stream_ = nullptr;
};

}  // namespace flashqla
