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

// The backward's scans, in microseconds on an H200 (docs/design/2026-11-30-backward-balance.md).
constexpr double SCAN_FORWARD_TIME = 1.05;  // of a chunk in a block that walks from the first one on
constexpr double SCAN_REVERSE_TIME = 1.39;  // and from the last one
constexpr double SCAN_BYTES_TIME = 0.043;   // of a chunk and value head in both directions, by the bytes alone
constexpr double SCAN_BLOCK_TIME = 8;       // of a block besides its chunks
constexpr double SCAN_LINK_TIME = 3;        // of a link
constexpr double SCAN_WAITING = 1.15;       // what blocks that follow links lengthen a launch by, waiting for the states
constexpr int64_t SCAN_HALVES = 2;          // blocks of a segment and head in each direction
constexpr int64_t MOST_WALKED = 4;          // segments of a sequence, if nobody makes states
constexpr double NEVER = 1e30;

// Gradients are formed beside the scans. These are no measured times: with them the plan takes the fastest of the cuts that were
// timed (docs/design/2026-11-30-backward-beside.md).
constexpr double GRADIENTS_BESIDE = 0.7;  // what is saved of the SMs' idle time where nobody makes states
constexpr double FEW_CHAINS = 1.2;        // by how much few blocks take longer that all walk whole sequences
constexpr double FULL_CARD = 0.9;         // blocks an SM from which on sequences stay whole; none between 0.5 and 1 was timed
constexpr double NEEDLESS_CUT = 1.15;     // what a cut counts more where only sequences of mean length would fill the card

// SMs that take blocks in their order, each as soon as it is free; those that are free at the same time are one group.
class Schedule {
 public:
  explicit Schedule(int64_t sms) : groups_{{0, sms}} {}

  void add(int64_t blocks, double time) {
    while (blocks > 0) {
      Group& first = groups_[earliest()];
      const double free = first.free;
      const bool takes_all = blocks >= first.sms || count_ == MOST_GROUPS;
      blocks -= first.sms;
      if (takes_all) {
        first.free = free + time;
      } else {
        groups_[count_++] = {free + time, blocks + first.sms};
        first.sms = -blocks;
      }
    }
  }

  double end() const {
    double latest = 0;
    for (int64_t i = 0; i < count_; i++) latest = groups_[i].free > latest ? groups_[i].free : latest;
    return latest;
  }

 private:
  static constexpr int64_t MOST_GROUPS = 32;  // more only make the estimate coarser

  struct Group {
    double free;
    int64_t sms;
  };

  int64_t earliest() const {
    int64_t found = 0;
    for (int64_t i = 1; i < count_; i++) found = groups_[i].free < groups_[found].free ? i : found;
    return found;
  }

  Group groups_[MOST_GROUPS];
  int64_t count_ = 1;
};

// What a cut of sequences of `chunks` chunks into segments of `length` is judged by, or `best` if it is not below that: the
// expected time of the scans, less the idle time that gradients fill where nobody makes states, lengthened by FEW_CHAINS or
// NEEDLESS_CUT. With links blocks that make states start first; else a head that does not forget is walked by one block, and
// the others' segments fill the SMs.
double expected_scan_time(int64_t chunks, int64_t length, int64_t sequences, int64_t heads, int64_t sms, bool links,
                          double best) {
  const int64_t segments = divide_up(chunks, length), blocks = SCAN_HALVES * sequences * heads;  // of a segment and direction
  const int64_t share = int64_t(EXPECTED_LINKED * double(blocks));
  const int64_t kept = share > 0 ? share : 1, forgotten = blocks - kept;  // one block at least does not forget
  const int64_t makers = links ? kept * (3 * segments - 4) : 0;
  const double both = SCAN_FORWARD_TIME + SCAN_REVERSE_TIME, making = double(length) * SCAN_FORWARD_TIME + SCAN_BLOCK_TIME;
  const double bytes = SCAN_BYTES_TIME * double(chunks * sequences * heads);
  const double work = double(makers) * making + double(blocks * chunks) * both;
  if (bytes >= best || work >= best * double(sms)) return best;
  const double most_links = 24 / (FORGOTTEN_PER_CHUNK * double(length)) + 1;
  const double times[] = {SCAN_REVERSE_TIME, SCAN_FORWARD_TIME};
  double longest = bytes;
  Schedule schedule(sms);
  if (links) {
    const double idle = double(3 * segments * blocks) * IDLE_TIME / double(sms) + LAUNCH_TIME;
    const double linking = SCAN_LINK_TIME * (double(segments - 2) < most_links ? double(segments - 2) : most_links);
    const double chain = idle + making + linking + double(length) * SCAN_REVERSE_TIME + SCAN_BLOCK_TIME;
    longest = chain > longest ? chain : longest;
    schedule.add(sms, idle);
    schedule.add(makers, making);
  }
  for (int64_t segment = 0; segment < segments; segment++) {
    const double between = double(segment - 1) < most_links ? double(segment - 1) : most_links;
    for (const double time : times) {
      const double first = double(links ? length : chunks) * time + SCAN_BLOCK_TIME;
      const double further = links ? double(length) * time + SCAN_BLOCK_TIME + SCAN_LINK_TIME * between : IDLE_TIME;
      schedule.add(kept, segment == 0 ? first : further);
      schedule.add(forgotten, (double(length) + (segment == 0 ? 0 : EXPECTED_REPLAY)) * time + SCAN_BLOCK_TIME);
    }
  }
  const double end = schedule.end() * (links ? SCAN_WAITING : 1);
  longest = end > longest ? end : longest;
  const bool fills_card = double(2 * blocks) >= FULL_CARD * double(sms);
  if (segments == 1) return fills_card ? longest : FEW_CHAINS * longest;
  if (fills_card) return NEEDLESS_CUT * longest;
  const double beside = links ? 0 : GRADIENTS_BESIDE * (longest - work / double(sms));
  return longest - beside > bytes ? longest - beside : bytes;
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

SegmentPlan find_backward_plan(int64_t segment_chunks, int64_t tokens, int64_t longest, int64_t sequences, int64_t heads,
                               int64_t sms) {
  const int64_t whole = divide_up(longest, CHUNK) > 0 ? divide_up(longest, CHUNK) : 1;
  int64_t chunks = segment_chunks > 0 ? segment_chunks : whole;
  bool links = true;
  // Blocks of both directions if all sequences were as long as the longest: of packed ones, whose lengths are not known here,
  // those of one sequence.
  const double chains = longest > 0 ? double(2 * SCAN_HALVES * heads) * double(tokens) / double(longest) : 0;
  if (segment_chunks == 0 && sequences > 0 && tokens > 0 && chains < FULL_CARD * double(sms)) {
    const int64_t mean = mean_chunks(tokens, sequences);
    double best = expected_scan_time(mean, mean, sequences, heads, sms, false, NEVER);
    for (int64_t parts = 2; parts <= MOST_SEGMENTS && divide_up(mean, parts) >= SHORTEST; parts++) {
      const bool kinds[] = {true, false};
      for (const bool linked : kinds) {
        if (!linked && parts > MOST_WALKED) continue;
        const double time = expected_scan_time(mean, divide_up(mean, parts), sequences, heads, sms, linked, best);
        if (time >= best) continue;
        best = time;
        chunks = divide_up(mean, parts);
        links = linked;
      }
    }
  }
  if (chunks >= whole) return uncut(tokens, sequences);
  SegmentPlan plan = cut(chunks, tokens, sequences, true);
  plan.links = links;
  return plan;
}

// A search takes up to some tenths of a millisecond, and the layers of a model all ask the same.
class Memory {
 public:
  using Find = SegmentPlan (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

  SegmentPlan answer(const int64_t (&question)[6], Find find) {
    if (memcmp(question_, question, sizeof question) != 0) {
      memcpy(question_, question, sizeof question);
      plan_ = find(question[0], question[1], question[2], question[3], question[4], question[5]);
    }
    return plan_;
  }

 private:
  int64_t question_[6] = {-1};
  SegmentPlan plan_ = {};
};

}  // namespace

SegmentPlan plan_backward_segments(int64_t segment_chunks, int64_t tokens, int64_t longest, int64_t sequences,
                                   int64_t heads, int64_t sms) {
  static thread_local Memory last;
  return last.answer({segment_chunks, tokens, longest, sequences, heads, sms}, find_backward_plan);
}

bool are_short(int64_t tokens, int64_t sequences, int64_t key_heads, int64_t sms) {
  return tokens <= MEAN_SHORT * sequences && sequences * key_heads >= FEWEST_SHORT_BLOCKS * sms;
}

SegmentPlan plan_segments(int64_t segment_chunks, int64_t tokens, int64_t longest, int64_t sequences, int64_t heads,
                          int64_t sms) {
  static thread_local Memory last;
  return last.answer({segment_chunks, tokens, longest, sequences, heads, sms}, find_plan);
}

}  // namespace flashqla
