// Tensors: what kernels see (TensorView), the arguments of an op (ArgumentTensor) and its results (NewTensor).
#pragma once

#include <stdint.h>

#include "device.h"
#include "errors.h"

namespace flashqla {

constexpr int MAX_RANK = 5;  // of a tensor map

// Address, dtype and layout of a tensor on a CUDA device; owns nothing. `name` stands in error messages.
struct TensorView {
  const char* name = "";
  void* data = nullptr;
  int32_t dtype = 0;  // one of aoti_torch_dtype_*()
  int32_t device = 0;
  int rank = 0;
  int64_t size[MAX_RANK] = {};
  int64_t stride[MAX_RANK] = {};  // in elements

  int64_t element_count() const;
  bool is_contiguous() const;
};

int64_t bytes_of(int32_t dtype);  // of an element

// A contiguous tensor's view, for instance a part of a workspace or a tensor with other sizes.
TensorView contiguous_view(const char* name, void* data, int32_t dtype, int32_t device, int rank, const int64_t* sizes);

template <int RANK>
TensorView contiguous_view(const char* name, void* data, int32_t dtype, int32_t device, const int64_t (&sizes)[RANK]) {
  return contiguous_view(name, data, dtype, device, RANK, sizes);
}

// An argument of type Tensor or Tensor? of an op. The dispatcher hands all arguments over, so an op takes every one of
// them before it looks at any: an error in between would leak the rest. They are released with their objects.
class ArgumentTensor : public Owned {
 public:
  ~ArgumentTensor() { release(); }

  void take(StableIValue value);           // a Tensor
  void take_optional(StableIValue value);  // a Tensor?, which may hold nothing

  // Reads the view. Fails when the tensor is not on a CUDA device or has more than MAX_RANK dimensions.
  void read(const char* name);

  // Puts a contiguous copy, made on the current stream, in the place of the tensor.
  void make_contiguous();

  bool has_value() const { return handle_ != nullptr; }
  AtenTensorHandle handle() const { return handle_; }
  const TensorView& view() const { return view_; }  // once read

 protected:
  void release() override;

 private:
  AtenTensorHandle handle_ = nullptr;
  TensorView view_;
};

// A new contiguous tensor on a CUDA device: a result, a copy or a workspace.
class NewTensor : public Owned {
 public:
  ~NewTensor() { release(); }

  template <int RANK>
  void allocate(const char* name, const int64_t (&sizes)[RANK], int32_t dtype, int32_t device) {
    allocate(contiguous_view(name, nullptr, dtype, device, sizes));
  }
  void allocate_like(const TensorView& other, int32_t dtype);  // same name, sizes and device
  void allocate_on_host(const TensorView& other);              // same name, sizes and dtype
  void fill_zero();
  void copy_from(AtenTensorHandle source);  // with conversion of dtype and layout, on the current stream
  void fetch_from(AtenTensorHandle source);  // the same, and waits for it

  const TensorView& view() const { return view_; }
  StableIValue hand_over();  // to the dispatcher, as a result

 protected:
  void release() override;

 private:
  void allocate(const TensorView& layout) { allocate(layout, aoti_torch_device_type_cuda()); }
  void allocate(const TensorView& layout, int32_t device_type);

  AtenTensorHandle handle_ = nullptr;
  TensorView view_;
};

// Scratch arrays of one call in one allocation, since each allocation costs the call about 2 us of host time. Arrays that
// are added get their addresses from `allocate`, and keep them while this object lives.
class Workspace {
 public:
  template <int RANK>
  void add(TensorView& array, const char* name, const int64_t (&sizes)[RANK], int32_t dtype, int32_t device) {
    array = contiguous_view(name, nullptr, dtype, device, sizes);
    add(array);
  }
  void allocate();

 private:
  static constexpr int MAX_ARRAYS = 20;
  static constexpr int64_t ALIGNMENT = 256;  // bytes; TMA and vector loads need 128 at most

  void add(TensorView& array);

  TensorView* arrays_[MAX_ARRAYS] = {};
  int64_t offsets_[MAX_ARRAYS] = {};
  int count_ = 0;
  int64_t bytes_ = 0;
  NewTensor storage_;
};

// Numbers in the dispatcher's stack.
double as_double(StableIValue value);
bool as_bool(StableIValue value);
int64_t as_int(StableIValue value);

// Checks of a launcher's arguments; `kernel` names the launcher in messages.
void require_tensor(const TensorView& tensor, const char* kernel, int32_t dtype, int rank, int32_t device);
void require_size(const TensorView& tensor, const char* kernel, int axis, int64_t expected);
void require_stride(const TensorView& tensor, const char* kernel, int axis, int64_t expected);
int64_t require_int32(int64_t value, const char* kernel, const char* what);

}  // namespace flashqla
