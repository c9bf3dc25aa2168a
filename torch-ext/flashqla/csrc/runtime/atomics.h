// std::atomic and std::once_flag in the size we need, without a C++ run time.
#pragma once

#include <sched.h>

namespace flashqla {

class Flag {
 public:
  bool is_set() const { return __atomic_load_n(&value_, __ATOMIC_ACQUIRE); }
  void set() { __atomic_store_n(&value_, true, __ATOMIC_RELEASE); }

 private:
  bool value_ = false;
};

// Serialises a first-time initialisation that may fail: a thread that enters leaves by done() or by retry().
class Once {
 public:
  bool is_done() const { return __atomic_load_n(&state_, __ATOMIC_ACQUIRE) == DONE; }

  // True when the caller must initialise; false when another thread has finished meanwhile.
  bool enter() {
    for (;;) {
      int expected = NEW;
      if (__atomic_compare_exchange_n(&state_, &expected, BUSY, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return true;
      if (expected == DONE) return false;
      sched_yield();  // the other thread is loading a cubin, about a millisecond
    }
  }
  void done() { __atomic_store_n(&state_, DONE, __ATOMIC_RELEASE); }
  void retry() { __atomic_store_n(&state_, NEW, __ATOMIC_RELEASE); }

 private:
  static constexpr int NEW = 0, BUSY = 1, DONE = 2;
  int state_ = NEW;
};

}  // namespace flashqla
