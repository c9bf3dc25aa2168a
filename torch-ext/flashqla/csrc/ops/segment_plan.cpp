#include "segment_plan.h"

#include <string.h>

namespace flashqla {
namespace {

constexpr int64_t CHUNK = 64;
constexpr int64_t SHORTEST = 6, MOST_SEGMENTS = 32;

// Microseconds on an H200 (docs/design/2026-11-29-split.md).
constexpr double CHUNK_TIME = 2.05;         // of a chunk with outputs
constexpr double SILENT_TIME = 1.3;         // of a chunk without
constexpr double BLOCK_TIME = 10;           // of a block besides its chunks
constexpr double IDLE_TIME = 1.5;           // of a block that has nothing to do
constexpr double LINK_TIME = 3.3;           // of a link
constexpr double LAUNCH_TIME = 4;           // of one launch more
constexpr double FORGOTTEN_PER_CHUNK = 0.2; // log2 of what a chunk of a head that does not decay forgets, which ends links
constexpr double TAIL = 0.9;                // of a block, when each SM has one
constexpr double WAITING_TIME = 6;          // of a block that shares the launch with those that make states
constexpr double EXPECTED_REPLAY = 6;       // chunks
constexpr double EXPECTED_LINKED = 0.25;    // share of the heads that do not forget within a segment
constexpr double WORST_LINKED = 1;          // the same of a model without decay,
constexpr double WORST_WEIGHT = 0.7;        // and what its time counts beside the expected one

// Of calls for the kernel for short sequences: tokens a sequence, and blocks an SM (docs/design/2026-11-30-short.md).
constexpr int64_t MEAN_SHORT = 64, FEWEST_SHORT_BLOCKS = 6;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t mean_chunks(int64_t tokens, int64_t sequences) { return divide_up(divide_up(tokens, sequences), CHUNK); }

// Times of a call whose sequences have `chunks` chunks each, in segments of `length`, if that share of the heads is linked.
struct Estimate {
  double together;  // states and outputs in one launch: all work shared out over the SMs, and a tail
  double apart;     // in two: whole rounds of blocks each
};

Estimate estimate(int64_t chunks, int64_t length, int64_t sequences, int64_t heads, int64_t sms, double share_linked) {
  const int64_t segments = divide_up(chunks, length), rows = sequences * heads;
  const double block = double(length) * CHUNK_TIME + BLOCK_TIME;
  const double rounds = double(divide_up(rows * segments, sms)) * block;
  if (segments == 1) return {rounds, rounds};
  const double linked = share_linked * double(rows), makers = linked * double(2 * segments - 3);
  const double making = double(length) * SILENT_TIME + BLOCK_TIME;
  const double idle = (double(2 * rows * segments) - makers) * IDLE_TIME / double(sms);
  const double most_links = 24 / (FORGOTTEN_PER_CHUNK * double(length)) + 2;
  const double linking = LINK_TIME * (most_links < double(segments - 1) ? most_links : double(segments - 1));
  const double replaying = SILENT_TIME * EXPECTED_REPLAY;
  const double starting = linking > replaying ? linking : replaying;
  const double made = double(divide_up(int64_t(makers), sms)) * making;
  const double apart = made + idle + LAUNCH_TIME + rounds + starting;
  const double work = makers * making + double(rows * segments) * block +
                      double(segments - 1) * ((double(rows) - linked) * replaying + linked * linking);
  const double blocks_per_sm = (makers + double(rows * segments)) / double(sms);
  const double waiting = WAITING_TIME * blocks_per_sm;
  const double shared_out = work / double(sms) + idle + waiting + TAIL * block / (blocks_per_sm > 1 ? blocks_per_sm : 1);
  const double chain = made + linking + block;
  return {shared_out > chain ? shared_out : chain, apart};
}

double fastest_time(int64_t chunks, int64_t length, int64_t sequences, int64_t heads, int64_t sms, double share_linked) {
  const Estimate times = estimate(chunks, length, sequences, heads, sms, share_linked);
  return times.apart < times.together ? times.apart : times.together;
}

// What the choice of a length is judged by: gates are not known, so a model without decay counts beside the expected one.
double cost(int64_t chunks, int64_t length, int64_t sequences, int64_t heads, int64_t sms) {
  return fastest_time(chunks, length, sequences, heads, sms, EXPECTED_LINKED) +
         WORST_WEIGHT * fastest_time(chunks, length, sequences, heads, sms, WORST_LINKED);
}

int64_t best_length(int64_t tokens, int64_t longest, int64_t sequences, int64_t heads, int64_t sms) {
  const int64_t mean = mean_chunks(tokens, sequences);
  const int64_t whole = divide_up(longest, CHUNK);
  int64_t best = whole;
  double least = cost(mean, mean, sequences, heads, sms);
  for (int64_t parts = 2; parts <= MOST_SEGMENTS; parts++) {
    const int64_t length = divide_up(mean, parts);
    if (length < SHORTEST) break;
    const double length_cost = cost(mean, length, sequences, heads, sms);
    if (length_cost < least) {
      best = length;
      least = length_cost;
    }
  }
  return best;
}

// The backward's scans, in microseconds on an H200 (docs/design/2026-11-30-backward-scan.md).
constexpr double SCAN_CHUNK_TIME = 1.3;     // of a chunk in a block
constexpr double SCAN_BYTES_TIME = 0.043;   // of a chunk and value head in both directions, by the bytes alone
constexpr double SCAN_BLOCK_TIME = 8;       // of a block besides its chunks
constexpr double SCAN_LINK_TIME = 3;        // of a link
constexpr int64_t SCAN_BLOCKS = 4;          // of a segment and head that write outputs: two halves, two directions

// Expected time of the scans of sequences of `chunks` chunks in segments of `length`.
double expected_scan_time(int64_t chunks, int64_t length, int64_t sequences, int64_t heads, int64_t sms) {
  const int64_t segments = divide_up(chunks, length), rows = sequences * heads;
  const double bytes = SCAN_BYTES_TIME * double(chunks * rows);
  const double block = double(length) * SCAN_CHUNK_TIME + SCAN_BLOCK_TIME;
  if (segments == 1) {
    const double walking = double(divide_up(SCAN_BLOCKS * rows, sms)) * block;
    return walking > bytes ? walking : bytes;
  }
  const double makers = 2 * EXPECTED_LINKED * double(rows) * double(3 * segments - 4);
  const double idle = double(6 * rows * segments) * IDLE_TIME / double(sms);
  const double most_links = 24 / (FORGOTTEN_PER_CHUNK * double(length)) + 1;
  const double links = most_links < double(segments - 2) ? most_links : double(segments - 2);
  const double replaying = SCAN_CHUNK_TIME * EXPECTED_REPLAY, linking = SCAN_LINK_TIME * links;
  const double starting = linking > replaying ? linking : replaying;
  const double walking = double(divide_up(SCAN_BLOCKS * rows * segments, sms)) * (block + starting);
  return double(divide_up(int64_t(makers), sms)) * block + idle + LAUNCH_TIME + (walking > bytes ? walking : bytes);
}

// The same if nobody makes states: a head that does not forget is walked by one block, and the others' segments fill the SMs.
double expected_walking_time(int64_t chunks, int64_t length, int64_t sequences, int64_t heads, int64_t sms) {
  const int64_t segments = divide_up(chunks, length), rows = sequences * heads;
  const double bytes = SCAN_BYTES_TIME * double(chunks * rows);
  const double whole = double(chunks) * SCAN_CHUNK_TIME + SCAN_BLOCK_TIME;
  const double cuts = (1 - EXPECTED_LINKED) * double(segments - 1) * (SCAN_CHUNK_TIME * EXPECTED_REPLAY + SCAN_BLOCK_TIME);
  const double idle = EXPECTED_LINKED * double(segments - 1) * IDLE_TIME;
  const double shared_out = double(SCAN_BLOCKS * rows) / double(sms) * (whole + cuts + idle);
  const double tail = 0.5 * double(length) * SCAN_CHUNK_TIME;
  const double walking = shared_out + tail > whole ? shared_out + tail : whole;
  return walking > bytes ? walking : bytes;
}

SegmentPlan uncut(int64_t tokens, int64_t sequences) { return {tokens / CHUNK + 1, sequences, 0, 0, false, false, false}; }

// The longest replay is a whole segment. For the places, see flashqla_hub/kernels/_segments.py.
SegmentPlan cut(int64_t chunks, int64_t tokens, int64_t sequences, bool apart) {
  const int64_t length = chunks * CHUNK;
  return {chunks, tokens / length + sequences, (tokens - 1) / length, chunks, true, apart, true};
}

SegmentPlan find_plan(int64_t segment_chunks, int64_t tokens, int64_t longest, int64_t sequences, int64_t heads,
                      int64_t sms) {
  const int64_t whole = divide_up(longest, CHUNK) > 0 ? divide_up(longest, CHUNK) : 1;
  int64_t chunks = segment_chunks;
  const bool empty = sequences == 0 || tokens == 0;
  if (chunks == 0 && !empty) chunks = best_length(tokens, longest, sequences, heads, sms);
  if (empty || chunks >= whole) return uncut(tokens, sequences);
  const Estimate times = estimate(mean_chunks(tokens, sequences), chunks, sequences, heads, sms, EXPECTED_LINKED);
  return cut(chunks, tokens, sequences, times.apart < times.together);
}

}  // namespace

SegmentPlan plan_backward_segments(int64_t segment_chunks, int64_t tokens, int64_t longest, int64_t sequences,
                                   int64_t heads, int64_t sms) {
  const int64_t whole = divide_up(longest, CHUNK) > 0 ? divide_up(longest, CHUNK) : 1;
  int64_t chunks = segment_chunks > 0 ? segment_chunks : whole;
  bool links = true;
  if (segment_chunks == 0 && sequences > 0 && tokens > 0) {
    const int64_t mean = mean_chunks(tokens, sequences);
    double best = expected_scan_time(mean, mean, sequences, heads, sms);
    for (int64_t parts = 2; parts <= MOST_SEGMENTS && divide_up(mean, parts) >= SHORTEST; parts++) {
      const int64_t length = divide_up(mean, parts);
      const double linking = expected_scan_time(mean, length, sequences, heads, sms);
      const double walking = expected_walking_time(mean, length, sequences, heads, sms);
      const double time = linking < walking ? linking : walking;
      if (time >= best) continue;
      best = time;
      chunks = length;
      links = linking < walking;
    }
  }
  if (chunks >= whole) return uncut(tokens, sequences);
  SegmentPlan plan = cut(chunks, tokens, sequences, true);
  plan.links = links;
  return plan;
}

bool are_short(int64_t tokens, int64_t sequences, int64_t key_heads, int64_t sms) {
  return tokens <= MEAN_SHORT * sequences && sequences * key_heads >= FEWEST_SHORT_BLOCKS * sms;
}

SegmentPlan plan_segments(int64_t segment_chunks, int64_t tokens, int64_t longest, int64_t sequences, int64_t heads,
                          int64_t sms) {
  // The search takes about a microsecond for a long sequence, and the layers of a model all ask the same.
  struct Answered {
    int64_t question[6];
    SegmentPlan plan;
  };
  static thread_local Answered last{{-1}, {}};
  const int64_t question[] = {segment_chunks, tokens, longest, sequences, heads, sms};
  if (memcmp(last.question, question, sizeof question) != 0) {
    memcpy(last.question, question, sizeof question);
    last.plan = find_plan(segment_chunks, tokens, longest, sequences, heads, sms);
  }
  return last.plan;
}

}  // namespace flashqla
