// Errors become RuntimeError in Python.
//
// The library is built without exceptions and links no C++ run time. aoti_torch_check() throws from libtorch's own
// frames, and the unwinder passes over ours by their unwind tables without running a destructor. What our frames own is
// therefore kept on a list per thread, and fail() releases the list before it throws.
#pragma once

#include <stdint.h>
#include <stdio.h>

#include "torch_shim.h"

namespace flashqla {

// Base of everything that must be released when an error leaves its scope; objects live on the stack only.
class Owned {
 public:
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  static void release_all() {
    for (; newest != nullptr; newest = newest->older_) newest->release();
  }

 protected:
  Owned() : older_(newest) { newest = this; }
  ~Owned() { newest = older_; }  // derived destructors have released by then
  virtual void release() {}      // not pure: that would need a C++ run time

 private:
  inline static thread_local Owned* newest = nullptr;
  Owned* older_;
};

[[noreturn, gnu::cold]] inline void fail(const char* function, uint32_t line, const char* message) {
  Owned::release_all();
  aoti_torch_check(false, function, "flashqla", line, message);
  __builtin_trap();  // aoti_torch_check threw
}

}  // namespace flashqla

// One sentence, printf style.
#define FLASHQLA_FAIL(...)                                            \
  do {                                                                \
    char flashqla_message[768];                                       \
    snprintf(flashqla_message, sizeof flashqla_message, __VA_ARGS__); \
    ::flashqla::fail(__func__, uint32_t(__LINE__), flashqla_message); \
  } while (false)

#define FLASHQLA_CHECK(condition, ...)                                 \
  do {                                                                 \
    if (__builtin_expect(!(condition), 0)) FLASHQLA_FAIL(__VA_ARGS__); \
  } while (false)

// A libtorch call that fails only when PyTorch itself is in trouble; PyTorch has printed why.
#define FLASHQLA_TORCH(call) FLASHQLA_CHECK((call) == 0, "PyTorch failed in %s; its own message stands above.", #call)
