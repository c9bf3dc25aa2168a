// How sequences are cut into segments that run side by side: a function of lengths and head counts, never of values.
#pragma once

#include <stdint.h>

namespace flashqla {

struct SegmentPlan {
  int64_t chunks;  // of a segment; the last of a sequence may be shorter
  int64_t slots;   // places for segments: tokens / (64 chunks) + sequences
  int64_t inner;   // places for those that are not the last of their sequence: (tokens - 1) / (64 chunks)
  int64_t replay;  // longest warm-up of a segment, in chunks
  bool has_cuts;   // whether any sequence may have more than one segment
  bool apart;      // whether states are made in a launch of their own
  bool links;      // whether they are made at all; else who is before a segment that forgets nothing walks on (backward only)
};

// Args: chunks of a segment if the caller says, or 0 for the fastest; tokens of all sequences and of the longest one (or
// a bound); sequences, value heads, SMs of the GPU.
SegmentPlan plan_segments(int64_t segment_chunks, int64_t tokens, int64_t longest, int64_t sequences, int64_t heads,
                          int64_t sms);

// Whether sequences that are not cut are short and many enough for the kernel that takes all value heads of a key head in one
// block. It serves sequences of any length, so that a mean is enough to know.
bool are_short(int64_t tokens, int64_t sequences, int64_t key_heads, int64_t sms);

// The plan for the two scans of the backward, whose blocks take half of a value head in one direction each.
SegmentPlan plan_backward_segments(int64_t segment_chunks, int64_t tokens, int64_t longest, int64_t sequences,
                                   int64_t heads, int64_t sms);

}  // namespace flashqla
