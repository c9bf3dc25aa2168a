#include "segment_plan.h"

namespace flashqla {
namespace {

constexpr int64_t CHUNK = 64;
constexpr int64_t SHORTEST = 4, MOST_SEGMENTS = 32;

// Microseconds on an H200 (docs/design/2026-11-29-split.md).
constexpr double CHUNK_TIME = 2.05;         // of a chunk with outputs
constexpr double SILENT_TIME = 1.3;         // of a chunk without
constexpr double BLOCK_TIME = 4;            // before the first chunk and behind the last
constexpr double LAUNCH_TIME = 4;           // of the pass that makes states
constexpr double LINK_TIME = 2.5;           // of a link
constexpr double EXPECTED_REPLAY = 6;       // chunks
constexpr double EXPECTED_LINKED = 0.25;    // heads that do not forget within a segment

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Expected time of a call whose sequences have `chunks` chunks each, in segments of `length`.
double expected_time(int64_t chunks, int64_t length, int64_t sequences, int64_t heads, int64_t sms) {
  const int64_t segments = divide_up(chunks, length);
  const double rounds = double(divide_up(sequences * heads * segments, sms));
  if (segments == 1) return rounds * (double(length) * CHUNK_TIME + BLOCK_TIME);
  const int64_t linked = int64_t(EXPECTED_LINKED * double(heads) + 0.999);
  const double state_rounds = double(divide_up(sequences * linked * (2 * segments - 3), sms));
  const double states = LAUNCH_TIME + state_rounds * (double(length) * SILENT_TIME + BLOCK_TIME);
  const double links = LINK_TIME * double(segments - 1);
  const double replayed = SILENT_TIME * EXPECTED_REPLAY;
  const double main = rounds * (double(length) * CHUNK_TIME + BLOCK_TIME) + (links > replayed ? links : replayed);
  return states + main;
}

int64_t best_length(int64_t tokens, int64_t longest, int64_t sequences, int64_t heads, int64_t sms) {
  const int64_t mean = divide_up(divide_up(tokens, sequences), CHUNK);
  const int64_t whole = divide_up(longest, CHUNK);
  int64_t best = whole;
  double best_time = expected_time(mean, mean, sequences, heads, sms);
  for (int64_t parts = 2; parts <= MOST_SEGMENTS; parts++) {
    const int64_t length = divide_up(mean, parts);
    if (length < SHORTEST) break;
    const double time = expected_time(mean, length, sequences, heads, sms);
    if (time < best_time) {
      best = length;
      best_time = time;
    }
  }
  return best;
}

}  // namespace

SegmentPlan plan_segments(int64_t segment_chunks, int64_t tokens, int64_t longest, int64_t sequences, int64_t heads,
                          int64_t sms) {
  const int64_t whole = divide_up(longest, CHUNK) > 0 ? divide_up(longest, CHUNK) : 1;
  int64_t chunks = segment_chunks;
  if (chunks == 0) chunks = sequences > 0 && tokens > 0 ? best_length(tokens, longest, sequences, heads, sms) : whole;
  if (chunks >= whole) return {whole, tokens / (whole * CHUNK) + sequences, 0, false};
  const int64_t replay = chunks;
  return {chunks, tokens / (chunks * CHUNK) + sequences, replay, true};
}

}  // namespace flashqla
