#include "segment_plan.h"

namespace flashqla {
namespace {

constexpr int64_t CHUNK = 64;
constexpr int64_t SHORTEST = 4, MOST_SEGMENTS = 32;
constexpr int64_t FACTOR_BLOCKS_PER_SM = 4, FACTOR_ROUNDS = 4, MOST_HEADS_PER_BLOCK = 4;

// Microseconds on an H200 (docs/design/2026-11-29-split.md).
constexpr double CHUNK_TIME = 2.05;         // of a chunk with outputs
constexpr double SILENT_TIME = 1.3;         // of a chunk without
constexpr double BLOCK_TIME = 8;            // of a block besides its chunks
constexpr double IDLE_TIME = 1.5;           // of a block that has nothing to do
constexpr double LINK_TIME = 3.3;           // of a link
constexpr double LINKS_PER_CHUNK = 0.2;     // log2 of how much a chunk of a head that does not decay forgets: ends links
constexpr double EXPECTED_REPLAY = 6;       // chunks
constexpr double EXPECTED_LINKED = 0.25;    // heads that do not forget within a segment

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Expected time of a call whose sequences have `chunks` chunks each, in segments of `length`: that of all work shared
// out over the SMs in whole blocks, but not less than the longest chain of states, links and outputs.
double expected_time(int64_t chunks, int64_t length, int64_t sequences, int64_t heads, int64_t sms) {
  const int64_t segments = divide_up(chunks, length);
  const double block = double(length) * CHUNK_TIME + BLOCK_TIME;
  if (segments == 1) return double(divide_up(sequences * heads, sms)) * block;
  const double linked = EXPECTED_LINKED * double(sequences * heads);
  const double replayed = double(sequences * heads) - linked;
  double links = double(segments - 1);
  const double forgotten = 24 / (LINKS_PER_CHUNK * double(length)) + 2;
  if (links > forgotten) links = forgotten;
  const double makers = linked * double(2 * segments - 3), making = double(length) * SILENT_TIME + BLOCK_TIME;
  const double idle = (double(2 * sequences * heads * segments) - makers) * IDLE_TIME;
  const double replaying = SILENT_TIME * EXPECTED_REPLAY;
  const double work = makers * making + idle + double(sequences * heads) * block +
                      double(segments - 1) * (replayed * (block + replaying) + linked * (block + links * LINK_TIME));
  const double shared_out = work / double(sms) + block / 2;  // the last blocks do not end together
  const double chain = making + links * LINK_TIME + block;
  return shared_out > chain ? shared_out : chain;
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
  if (chunks >= whole) return {tokens / CHUNK + 1, sequences, 0, false};
  const int64_t replay = chunks;
  return {chunks, tokens / (chunks * CHUNK) + sequences, replay, true};
}

int64_t factor_heads_per_block(int64_t slots, int64_t key_heads, int64_t sms) {
  const int64_t resident = sms * FACTOR_BLOCKS_PER_SM;
  int64_t heads = 1;
  while (2 * heads <= MOST_HEADS_PER_BLOCK && slots * (key_heads / (2 * heads)) >= FACTOR_ROUNDS * resident) heads *= 2;
  return heads;
}

}  // namespace flashqla
