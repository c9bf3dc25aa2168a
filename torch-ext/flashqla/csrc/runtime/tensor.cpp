#include "tensor.h"

#include <string.h>

namespace flashqla {
namespace {

const char* dtype_name(int32_t dtype) {
  if (dtype == aoti_torch_dtype_bfloat16()) return "bfloat16";
  if (dtype == aoti_torch_dtype_float16()) return "float16";
  if (dtype == aoti_torch_dtype_float32()) return "float32";
  if (dtype == aoti_torch_dtype_int32()) return "int32";
  if (dtype == aoti_torch_dtype_int64()) return "int64";
  return "another dtype";
}

TensorView read_view(AtenTensorHandle handle, const char* name) {
  TensorView view;
  view.name = name;
  int32_t device_type = 0;
  int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  FLASHQLA_TORCH(aoti_torch_get_device_type(handle, &device_type));
  FLASHQLA_CHECK(device_type == aoti_torch_device_type_cuda(),
                 "%s is not a CUDA tensor, and the SM90 kernels take CUDA tensors only; move it with .cuda().", name);
  FLASHQLA_TORCH(aoti_torch_get_dim(handle, &rank));
  FLASHQLA_CHECK(rank <= MAX_RANK, "%s has %lld dimensions, and the SM90 kernels take at most %d.", name,
                 static_cast<long long>(rank), MAX_RANK);
  FLASHQLA_TORCH(aoti_torch_get_dtype(handle, &view.dtype));
  FLASHQLA_TORCH(aoti_torch_get_device_index(handle, &view.device));
  FLASHQLA_TORCH(aoti_torch_get_data_ptr(handle, &view.data));
  FLASHQLA_TORCH(aoti_torch_get_sizes(handle, &sizes));
  FLASHQLA_TORCH(aoti_torch_get_strides(handle, &strides));
  view.rank = static_cast<int>(rank);
  for (int axis = 0; axis < view.rank; axis++) {
    view.size[axis] = sizes[axis];
    view.stride[axis] = strides[axis];
  }
  return view;
}

AtenTensorHandle as_handle(StableIValue value) {
  AtenTensorHandle handle;
  memcpy(&handle, &value, sizeof handle);
  return handle;
}

}  // namespace

int64_t bytes_of(int32_t dtype) {
  if (dtype == aoti_torch_dtype_bfloat16() || dtype == aoti_torch_dtype_float16()) return 2;
  const bool is_wide = dtype == aoti_torch_dtype_int64() || dtype == aoti_torch_dtype_float64();
  return is_wide ? 8 : 4;
}

int64_t TensorView::element_count() const {
  int64_t count = 1;
  for (int axis = 0; axis < rank; axis++) count *= size[axis];
  return count;
}

bool TensorView::is_contiguous() const {
  int64_t expected = 1;
  for (int axis = rank - 1; axis >= 0; axis--) {
    if (size[axis] > 1 && stride[axis] != expected) return false;  // a size of 1 may have any stride
    expected *= size[axis];
  }
  return true;
}

TensorView contiguous_view(const char* name, void* data, int32_t dtype, int32_t device, int rank,
                           const int64_t* sizes) {
  TensorView view;
  view.name = name;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = rank;
  int64_t stride = 1;
  for (int axis = rank - 1; axis >= 0; axis--) {
    view.size[axis] = sizes[axis];
    view.stride[axis] = stride;
    stride *= view.size[axis];
  }
  return view;
}

void ArgumentTensor::take(StableIValue value) { handle_ = as_handle(value); }

void ArgumentTensor::take_optional(StableIValue value) {
  StableIValue* box = nullptr;  // libtorch makes it with new, and the op deletes it
  memcpy(&box, &value, sizeof box);
  if (box == nullptr) return;
  const StableIValue content = *box;
  ::operator delete(box);
  take(content);
}

void ArgumentTensor::read(const char* name) {
  if (has_value()) view_ = read_view(handle_, name);
}

void ArgumentTensor::make_contiguous() {
  NewTensor copy;
  copy.allocate_like(view_, view_.dtype);
  copy.copy_from(handle_);
  release();
  view_ = copy.view();
  take(copy.hand_over());
}

void ArgumentTensor::release() {
  if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  handle_ = nullptr;
}

void NewTensor::allocate(const TensorView& layout, int32_t device_type) {
  FLASHQLA_CHECK(aoti_torch_empty_strided(layout.rank, layout.size, layout.stride, layout.dtype, device_type,
                                          layout.device, &handle_) == 0,
                 "PyTorch could not allocate %s with %lld elements of %s on device %d, most likely for lack of memory; "
                 "free memory or split the call.",
                 layout.name, static_cast<long long>(layout.element_count()), dtype_name(layout.dtype), layout.device);
  view_ = layout;
  FLASHQLA_TORCH(aoti_torch_get_data_ptr(handle_, &view_.data));
}

void NewTensor::allocate_like(const TensorView& other, int32_t dtype) {
  allocate(contiguous_view(other.name, nullptr, dtype, other.device, other.rank, other.size));
}

void NewTensor::allocate_on_host(const TensorView& other) {
  constexpr int32_t HOST = 0;
  allocate(contiguous_view(other.name, nullptr, other.dtype, HOST, other.rank, other.size),
           aoti_torch_device_type_cpu());
}

void NewTensor::fill_zero() { FLASHQLA_TORCH(aoti_torch_zero_(handle_)); }

void NewTensor::copy_from(AtenTensorHandle source) { FLASHQLA_TORCH(aoti_torch_copy_(handle_, source, 1)); }

void NewTensor::fetch_from(AtenTensorHandle source) { FLASHQLA_TORCH(aoti_torch_copy_(handle_, source, 0)); }

StableIValue NewTensor::hand_over() {
  StableIValue value = 0;
  memcpy(&value, &handle_, sizeof handle_);
  handle_ = nullptr;
  return value;
}

void NewTensor::release() {
  if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  handle_ = nullptr;
}

void Workspace::add(TensorView& array) {
  FLASHQLA_CHECK(count_ < MAX_ARRAYS, "%s is one array more than a workspace holds; raise MAX_ARRAYS.", array.name);
  arrays_[count_] = &array;
  offsets_[count_++] = bytes_;
  const int64_t bytes = array.element_count() * bytes_of(array.dtype);
  bytes_ += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

void Workspace::allocate() {
  if (count_ == 0) return;
  const int32_t word = aoti_torch_dtype_int32();
  storage_.allocate("workspace", {bytes_ / bytes_of(word)}, word, arrays_[0]->device);
  for (int i = 0; i < count_; i++) arrays_[i]->data = static_cast<char*>(storage_.view().data) + offsets_[i];
}

double as_double(StableIValue value) {
  double number;
  memcpy(&number, &value, sizeof number);
  return number;
}

bool as_bool(StableIValue value) {
  bool flag;
  memcpy(&flag, &value, sizeof flag);
  return flag;
}

int64_t as_int(StableIValue value) { return static_cast<int64_t>(value); }

void require_tensor(const TensorView& tensor, const char* kernel, int32_t dtype, int rank, int32_t device) {
  FLASHQLA_CHECK(tensor.device == device, "%s is on device %d and the other tensors are on device %d; move it there.",
                 tensor.name, tensor.device, device);
  FLASHQLA_CHECK(tensor.dtype == dtype, "%s is %s and %s takes %s; convert it.", tensor.name, dtype_name(tensor.dtype),
                 kernel, dtype_name(dtype));
  FLASHQLA_CHECK(tensor.rank == rank, "%s has %d dimensions and %s takes %d.", tensor.name, tensor.rank, kernel, rank);
}

void require_size(const TensorView& tensor, const char* kernel, int axis, int64_t expected) {
  FLASHQLA_CHECK(tensor.size[axis] == expected,
                 "%s.shape[%d] is %lld and %s takes %lld, as the other arguments give it.", tensor.name, axis,
                 static_cast<long long>(tensor.size[axis]), kernel, static_cast<long long>(expected));
}

void require_stride(const TensorView& tensor, const char* kernel, int axis, int64_t expected) {
  if (tensor.size[axis] <= 1 || tensor.stride[axis] == expected) return;  // a size of 1 has no meaningful stride
  FLASHQLA_FAIL("%s.stride(%d) is %lld and %s takes %lld; pass %s.contiguous().", tensor.name, axis,
                static_cast<long long>(tensor.stride[axis]), kernel, static_cast<long long>(expected), tensor.name);
}

int64_t require_int32(int64_t value, const char* kernel, const char* what) {
  FLASHQLA_CHECK(value <= INT32_MAX, "%s is %lld and %s counts in 32 bits, up to %d; split the call.", what,
                 static_cast<long long>(value), kernel, INT32_MAX);
  return value;
}

}  // namespace flashqla
