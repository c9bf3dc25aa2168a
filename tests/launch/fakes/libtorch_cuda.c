// Stands in for libtorch_cuda.so, and for the device functions of libtorch_cpu.so, in a PyTorch without CUDA. Loaded
// before the op library and globally, it makes CPU tensors pass for tensors on CUDA devices: the library that is
// shipped runs unchanged.
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

enum { MAX_DEVICES = 8, MAX_PLACED = 1024, CPU_DEVICE_TYPE = 0 };

typedef struct {
  int previous;
} Guard;

static __thread int current_device;
static uint64_t streams[MAX_DEVICES];
static struct {
  void* data;
  int device;
} placed[MAX_PLACED];
static int placed_count, open_guards, allowed_allocations = -1;
static void* allocated[MAX_PLACED];
static int64_t live_bytes, peak_bytes;

// libtorch's own functions behind those that are replaced here.
static int32_t (*real_get_data_ptr)(void* tensor, void** data);
static int32_t (*real_delete_tensor)(void* tensor);
static int32_t (*real_get_storage_size)(void* tensor, int64_t* bytes);
static int32_t (*real_empty_strided)(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                     int32_t device_type, int32_t device_index, void** result);

__attribute__((constructor)) static void find_real_functions(void) {
  void* libtorch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  *(void**)&real_get_data_ptr = dlsym(libtorch, "aoti_torch_get_data_ptr");
  *(void**)&real_delete_tensor = dlsym(libtorch, "aoti_torch_delete_tensor_object");
  *(void**)&real_get_storage_size = dlsym(libtorch, "aoti_torch_get_storage_size");
  *(void**)&real_empty_strided = dlsym(libtorch, "aoti_torch_empty_strided");
}

// ---- for the test

void fake_place(void* data, int device) {
  placed[placed_count].data = data;
  placed[placed_count++ % MAX_PLACED].device = device;
}
void fake_forget(void) {
  placed_count = 0;
  live_bytes = peak_bytes = 0;
  for (int i = 0; i < MAX_PLACED; i++) allocated[i] = NULL;
}
void fake_set_stream(int device, uint64_t stream) { streams[device] = stream; }
void fake_set_device(int device) { current_device = device; }
int fake_current_device(void) { return current_device; }
int fake_open_guards(void) { return open_guards; }
void fake_fail_allocation(int allowed_before) { allowed_allocations = allowed_before; }
int fake_live_allocations(void) {
  int count = 0;
  for (int i = 0; i < MAX_PLACED; i++) count += allocated[i] != NULL;
  return count;
}

// Bytes that the library had allocated at once at most, its results included.
int64_t fake_peak_bytes(void) { return peak_bytes; }

static int replace_allocated(void* from, void* to) {
  for (int i = 0; i < MAX_PLACED; i++)
    if (allocated[i] == from) {
      allocated[i] = to;
      return 1;
    }
  return 0;
}

static void count_bytes(void* tensor, int sign) {
  int64_t bytes = 0;
  real_get_storage_size(tensor, &bytes);
  live_bytes += sign * bytes;
  if (live_bytes > peak_bytes) peak_bytes = live_bytes;
}

// ---- libtorch

int32_t aoti_torch_device_type_cuda(void) { return CPU_DEVICE_TYPE; }

int32_t aoti_torch_get_device_index(void* tensor, int32_t* result) {
  void* data = NULL;
  int32_t error = real_get_data_ptr(tensor, &data);
  *result = 0;
  for (int i = 0; i < placed_count; i++)
    if (placed[i].data == data) *result = placed[i].device;
  return error;
}

int32_t aoti_torch_empty_strided(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                 int32_t device_type, int32_t device_index, void** result) {
  if (allowed_allocations >= 0 && allowed_allocations-- == 0) return 1;
  int32_t error = real_empty_strided(rank, sizes, strides, dtype, device_type, 0, result);
  void* data = NULL;
  if (!error) error = real_get_data_ptr(*result, &data);
  if (!error && device_index) fake_place(data, device_index);
  if (!error && replace_allocated(NULL, *result)) count_bytes(*result, 1);
  return error;
}

int32_t aoti_torch_delete_tensor_object(void* tensor) {
  if (replace_allocated(tensor, NULL)) count_bytes(tensor, -1);
  return real_delete_tensor(tensor);
}

int32_t aoti_torch_create_device_guard(int32_t device, void** result) {
  Guard* guard = malloc(sizeof *guard);
  guard->previous = current_device;
  current_device = device;
  __atomic_fetch_add(&open_guards, 1, __ATOMIC_RELAXED);
  *result = guard;
  return 0;
}

int32_t aoti_torch_delete_device_guard(void* guard) {
  current_device = ((Guard*)guard)->previous;
  __atomic_fetch_sub(&open_guards, 1, __ATOMIC_RELAXED);
  free(guard);
  return 0;
}

int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = (void*)(uintptr_t)streams[device];
  return 0;
}
