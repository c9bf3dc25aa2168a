// What the ops of the decode kernels share: which form serves how many heads, and how many states are ordered ahead.
#pragma once

#include "../runtime/kernel.h"

namespace flashqla {

constexpr int64_t FEW_HEADS = 64;  // up to as many, a head of [K, V] float32 states is cut in smaller parts
// Of states that are ordered before their turn: about what all blocks hold, and of float32 states [K, V] a quarter of all,
// within bounds.
constexpr int64_t BYTES_AHEAD = 16 << 20, LEAST_KV_BYTES_AHEAD = 4 << 20, MOST_KV_BYTES_AHEAD = 6 << 20;

// How many sequences ahead a block orders the state of its head; as many begin with an order of their own.
inline int32_t sequences_ahead(int64_t sequences, int64_t bytes_of_sequence, bool is_kv_float32) {
  int64_t bytes = BYTES_AHEAD;
  if (is_kv_float32) {
    bytes = smaller(MOST_KV_BYTES_AHEAD, larger(LEAST_KV_BYTES_AHEAD, sequences * bytes_of_sequence / 4));
  }
  return static_cast<int32_t>(larger(1, bytes / bytes_of_sequence));
}

}  // namespace flashqla
