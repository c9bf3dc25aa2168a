// Stands in for libcuda.so.1 where there is no GPU: every function succeeds and keeps what it was told, so that a test
// can compare it with what a kernel must get. Tensor maps hold their number in the record instead of hardware bits.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LAUNCHES = 256, MAX_MAPS = 512, MAX_KERNELS = 128, MAX_ARGUMENTS = 64, ARGUMENT_BYTES = 128, RANK = 5 };
enum { ATTRIBUTE_CLUSTER = 4, ATTRIBUTE_CLUSTER_POLICY = 5, ATTRIBUTE_PROGRAMMATIC = 6, CC_MAJOR = 75,
       CC_MINOR = 76, SM_COUNT = 16 };
static const uint64_t MAP_MAGIC = 0x7e4507a900000000u;

typedef struct {
  int id;
  char padding[4];
  union {
    char bytes[64];
    uint32_t cluster[3];
    int flag;
  } value;
} Attribute;

typedef struct {
  uint32_t grid[3], block[3], shared_memory;
  void* stream;
  Attribute* attributes;
  uint32_t attribute_count;
} Config;

typedef struct {
  char kernel[64];
  uint32_t grid[3], block[3], shared_memory, cluster[3], cluster_policy, programmatic, argument_count;
  uint64_t stream, context;
  unsigned char arguments[MAX_ARGUMENTS][ARGUMENT_BYTES];
} Launch;

typedef struct {
  uint64_t address, dims[RANK], strides[RANK];
  uint32_t box[RANK], element_strides[RANK];
  int32_t dtype, rank, interleave, swizzle, l2_promotion, out_of_bounds;
} Map;

typedef struct {
  char name[64];
  int sizes[MAX_ARGUMENTS], argument_count, max_shared_memory[8], carveout[8];
} Kernel;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Launch launches[MAX_LAUNCHES];
static Map maps[MAX_MAPS];
static Kernel kernels[MAX_KERNELS];
static int launch_count, map_count, kernel_count, load_count, failing_launches, compute_capability = 90;
static __thread void* current_context;

// ---- for the test

void fake_reset(void) { launch_count = map_count = 0; }
int fake_launch_count(void) { return launch_count; }
int fake_load_count(void) { return load_count; }
const Launch* fake_launch(int i) { return &launches[i]; }
const Map* fake_map(int i) { return &maps[i]; }
void fake_fail_next_launches(int count) { failing_launches = count; }
void fake_set_compute_capability(int value) { compute_capability = value; }

static Kernel* find_kernel(const char* name) {
  for (int i = 0; i < kernel_count; i++)
    if (!strcmp(kernels[i].name, name)) return &kernels[i];
  strncpy(kernels[kernel_count].name, name, sizeof kernels[0].name - 1);
  return &kernels[kernel_count++];
}

void fake_describe_kernel(const char* name, int argument_count, const int* sizes) {
  Kernel* kernel = find_kernel(name);
  kernel->argument_count = argument_count;
  memcpy(kernel->sizes, sizes, argument_count * sizeof(int));
}

int fake_max_shared_memory(const char* name, int device) { return find_kernel(name)->max_shared_memory[device]; }
int fake_carveout(const char* name, int device) { return find_kernel(name)->carveout[device]; }

// ---- the driver

int cuLibraryLoadData(void** library, const void* image, void* a, void* b, uint32_t c, void* d, void* e, uint32_t f) {
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  if (memcmp(image,
             "\x7f"
             "ELF",
             4))
    return 200;
  __atomic_fetch_add(&load_count, 1, __ATOMIC_RELAXED);
  *library = (void*)image;
  return 0;
}

int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  (void)library;
  pthread_mutex_lock(&lock);
  *kernel = find_kernel(name);
  pthread_mutex_unlock(&lock);
  return 0;
}

int cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, 0; }

int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  if (attribute == 8 && value <= 227 * 1024) return ((Kernel*)kernel)->max_shared_memory[device] = value, 0;
  if (attribute == 9 && value <= 100) return ((Kernel*)kernel)->carveout[device] = value, 0;
  return 1;
}

int cuTensorMapEncodeTiled(void* map, int dtype, uint32_t rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                           int interleave, int swizzle, int l2_promotion, int out_of_bounds) {
  if ((uintptr_t)map % 64 || (uintptr_t)address % 16 || !address || rank > RANK) return 1;
  for (uint32_t i = 0; i < rank; i++)
    if (!dims[i] || !box[i] || box[i] > 256 || (i && strides[i - 1] % 16)) return 1;
  pthread_mutex_lock(&lock);
  const int number = map_count++ % MAX_MAPS;
  pthread_mutex_unlock(&lock);
  Map* record = &maps[number];
  memset(record, 0, sizeof *record);
  record->address = (uint64_t)address, record->dtype = dtype, record->rank = (int)rank;
  memcpy(record->dims, dims, rank * 8), memcpy(record->strides, strides, (rank - 1) * 8);
  memcpy(record->box, box, rank * 4), memcpy(record->element_strides, element_strides, rank * 4);
  record->interleave = interleave, record->swizzle = swizzle;
  record->l2_promotion = l2_promotion, record->out_of_bounds = out_of_bounds;
  memset(map, 0, 128);
  *(uint64_t*)map = MAP_MAGIC + (uint64_t)number;
  return 0;
}

int cuLaunchKernelEx(const Config* config, void* function, void** arguments, void** extra) {
  const Kernel* kernel = function;
  if (failing_launches > 0) return failing_launches--, 719;
  if (extra || !current_context || config->shared_memory > 227 * 1024) return 1;
  pthread_mutex_lock(&lock);
  Launch* launch = &launches[launch_count++ % MAX_LAUNCHES];
  pthread_mutex_unlock(&lock);
  memset(launch, 0, sizeof *launch);
  strcpy(launch->kernel, kernel->name);
  memcpy(launch->grid, config->grid, 12), memcpy(launch->block, config->block, 12);
  launch->shared_memory = config->shared_memory;
  launch->stream = (uint64_t)config->stream, launch->context = (uint64_t)current_context;
  for (uint32_t i = 0; i < config->attribute_count; i++) {
    const Attribute* attribute = &config->attributes[i];
    if (attribute->id == ATTRIBUTE_CLUSTER) memcpy(launch->cluster, attribute->value.cluster, 12);
    if (attribute->id == ATTRIBUTE_CLUSTER_POLICY) launch->cluster_policy = (uint32_t)attribute->value.flag;
    if (attribute->id == ATTRIBUTE_PROGRAMMATIC) launch->programmatic = (uint32_t)attribute->value.flag;
  }
  launch->argument_count = (uint32_t)kernel->argument_count;
  for (int i = 0; i < kernel->argument_count; i++) memcpy(launch->arguments[i], arguments[i], kernel->sizes[i]);
  return 0;
}

int cuCtxGetCurrent(void** context) { return *context = current_context, 0; }
int cuCtxSetCurrent(void* context) { return current_context = context, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)(uintptr_t)(1000 + device), 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == CC_MAJOR   ? compute_capability / 10
           : attribute == CC_MINOR ? compute_capability % 10
           : attribute == SM_COUNT ? 132
                                   : -1;
  return 0;
}
int cuGetErrorString(int result, const char** text) { return *text = result == 719 ? "launch failed" : "invalid", 0; }
