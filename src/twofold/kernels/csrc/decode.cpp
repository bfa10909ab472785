// One pass over the cache: a block of keys is scored, exponentiated and summed while it lies in the first-level cache.
// Compiled once for each instruction set; `TWOFOLD_ISA` names the namespace.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#if defined(__unix__)
#include <unistd.h>
#endif

#include "block.h"
#include "decode.h"
#include "formats.h"
#include "rotate.h"
#include "simd.h"

namespace twofold::TWOFOLD_ISA {
namespace {

// Bytes of a core's first-level data cache, or 0 where the system does not tell.
long first_level_cache() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  static const long bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  return bytes;
#else
  return 0;
#endif
}

// What holds for the whole call. A row is one query of one query head; rows are stored query by query, so that those of
// one query lie together.
struct Plan {
  const twofold_decode& a;
  int rows, width, query_width, block;
  bool packed;             // channels come in the order of unpacking
  bool fetch_rotated;      // keys that are fetched ahead leave room for angles in the first-level cache
  std::vector<int> order;  // the channel of the query, and of the output, that each place holds

  Plan(const twofold_decode& a, int block, bool packed)
      : a(a), rows(int(a.R * a.T)), width(int(a.D)), query_width(int(a.D + a.rope_width)), block(block), packed(packed),
        fetch_rotated(kAheadLevel > 1 || first_level_cache() > 32768), order(query_width) {}
};

template <class T>
Plan make_plan(const twofold_decode& a) {
  const int width = int(a.D), rope_width = int(a.rope_width);
  // Pairs of channels that are rotated stay half a width apart; floats beside codes are in the order of storage.
  const bool pairs = !a.position || (!a.recent && Format<T>::kPerElement == 1 && fits<T>(width / 2));
  const bool packed = pairs && fits<T>(width) && fits<T>(rope_width);
  // A block, what is made of it and what is fetched ahead fit in the first-level cache.
  const bool copied = a.position || (!std::is_same_v<T, float> && !(packed && a.R * a.T == 1));
  const int rows = int(a.R * a.T);
  const int bytes = a.position && rows == 1 ? 8192 : !copied && a.value && rows > 1 ? 32768 : 12288;
  const int row_bytes = copied ? 4 * width : width * int(sizeof(T)) / Format<T>::kPerElement;
  Plan plan(a, std::clamp(bytes / row_bytes, 16, 512) / kWidth * kWidth, packed);
  for (int i = 0; i < plan.query_width; ++i)
    plan.order[i] = !packed     ? i
                    : i < width ? channel_at<T>(i, width)
                                : width + channel_at<T>(i - width, rope_width);
  return plan;
}

// What one thread needs for the rows that share a key/value head.
struct Scratch {
  float *query, *turned_query, *output, *max, *sum, *score, *rope_score, *keys, *turned_keys, *values, *rope;
  std::optional<AlignedFloats> memory;
  std::optional<Rotation> rotation;

  explicit Scratch(const Plan& p) {
    const size_t r = p.rows, b = p.block, w = p.width, rope_width = p.a.rope_width;
    const size_t turned = std::max<size_t>(r, kStreams<float>) * w;
    const size_t size[] = {r * p.query_width, turned, r * w, r, r, r * b, r * b, b * w, b * w, b * w, b * rope_width};
    float** part[] = {&query, &turned_query, &output, &max, &sum, &score, &rope_score, &keys, &turned_keys, &values, &rope};
    size_t total = 0;
    for (size_t n : size) total += (n + 15) / 16 * 16;
    memory.emplace(total);
    float* at = memory->data();
    for (size_t i = 0; i < std::size(size); at += (size[i] + 15) / 16 * 16, ++i) *part[i] = at;
    if (p.a.position) rotation.emplace(p.a.frequency, p.a.key_weight, p.order.data(), p.width, p.block);
  }
};

// Some neighbouring keys and values as they are read: in place, or out of the scratch as floats.
template <class T>
struct Block {
  const T* keys;
  int64_t key_stride;
  const T* values;
  int64_t value_stride;
  const T* rope;
  int64_t rope_stride;
  int n;
  const float *key_scale, *value_scale, *rope_scale;  // or null
  bool in_place;
  bool rotates;  // the keys are still to be rotated
};

inline void multiply(float* x, const float* by, int n) {
  for (int j = 0; by && j < n; ++j) x[j] *= by[j];
}

// From scores to weights, and to the sum of what they weigh.
template <int Q, int D, class T>
inline void weigh(const Block<T>& block, int row, const Plan& p, Scratch& s) {
  for (int r = row; r < row + Q; ++r) {
    float *score = s.score + r * p.block, *rope_score = s.rope_score + r * p.block;
    multiply(score, block.key_scale, block.n);
    if (block.rope) {
      multiply(rope_score, block.rope_scale, block.n);
      for (int j = 0; j < block.n; ++j) score[j] += rope_score[j];
    }
    softmax_row(score, block.n, s.max[r], s.sum[r], s.output + r * p.width, p.width);
    multiply(score, block.value_scale, block.n);
  }
  add_rows<Q, D>(s.score + row * p.block, p.block, block.values, block.value_stride, block.n,
                 s.output + row * p.width, p.width);
}

// Whether keys can be rotated while they are scored.
template <class T, int D>
constexpr bool kRotatesInRegisters = std::is_same_v<T, float> && D != 0 && D / 2 % kWidth == 0;

template <int Q, int D, class T>
inline void score_keys(const float* query, int query_stride, const Block<T>& block, int row, const Plan& p, Scratch& s) {
  float* score = s.score + row * p.block;
  if constexpr (kRotatesInRegisters<T, D>)
    if (block.rotates)
      return s.rotation->score_rows<Q, D>(query, block.keys, block.key_stride, block.n, score, p.block, block.in_place);
  score_rows<Q, D>(query, query_stride, block.keys, block.key_stride, block.n, score, p.block, p.width, block.in_place);
}

template <int Q, int D, class T>
inline void attend_rows(const Block<T>& block, int row, const Plan& p, Scratch& s) {
  const float* query = s.rotation ? s.turned_query + row * p.width : s.query + row * p.query_width;
  const int query_stride = s.rotation ? p.width : p.query_width;
  score_keys<Q, D>(query, query_stride, block, row, p, s);
  if (block.rope)
    score_rows<Q, 0>(query + p.width, query_stride, block.rope, block.rope_stride, block.n, s.rope_score + row * p.block,
                     p.block, int(p.a.rope_width), block.in_place);
  weigh<Q, D>(block, row, p, s);
}

template <int D, class T>
inline void attend_block(const Block<T>& block, int row, int rows, const Plan& p, Scratch& s) {
  const int end = row + rows;
  for (; row + 4 <= end; row += 4) attend_rows<4, D>(block, row, p, s);
  for (; row + 2 <= end; row += 2) attend_rows<2, D>(block, row, p, s);
  for (; row < end; ++row) attend_rows<1, D>(block, row, p, s);
}

// The stored rows of one key/value head.
template <class T>
struct Head {
  const T *key, *value, *rope;
  int64_t key_stride, value_stride, rope_stride;
  const float *key_scale, *value_scale, *rope_scale;
  const int32_t* position;
  bool tied;

  Head(const twofold_decode& a, int64_t b, int64_t g) : tied(!a.value) {
    auto rows = [&](const void* p, const int64_t* stride) {
      return static_cast<const T*>(p) + b * stride[0] + g * stride[1];
    };
    auto scales = [&](const float* p, const int64_t* stride) { return p ? p + b * stride[0] + g * stride[1] : nullptr; };
    key = rows(a.key, a.key_stride), key_stride = a.key_stride[2];
    value = tied ? key : rows(a.value, a.value_stride), value_stride = tied ? key_stride : a.value_stride[2];
    rope = a.rope_key ? static_cast<const T*>(a.rope_key) + b * a.rope_stride[0] : nullptr;
    rope_stride = a.rope_stride[1];
    key_scale = scales(a.key_scale, a.key_scale_stride);
    value_scale = tied ? key_scale : scales(a.value_scale, a.value_scale_stride);
    rope_scale = a.rope_scale ? a.rope_scale + b * a.rope_scale_stride : nullptr;
    position = a.position ? a.position + b * a.position_stride : nullptr;
  }
};

// Keys j to j + n - 1 for some rows. Floats are read in place, and what one row alone needs; the rest goes through a
// copy in floats.
template <class T, int D>
inline void attend_keys(const Head<T>& head, int64_t j, int n, int row, int rows, const Plan& p, Scratch& s) {
  const int w = D ? D : p.width;
  const T *key = head.key + j * head.key_stride, *value = head.value + j * head.value_stride;
  const T* rope = head.rope ? head.rope + j * head.rope_stride : nullptr;
  auto at = [&](const float* scale) { return scale ? scale + j : nullptr; };
  const float *key_scale = at(head.key_scale), *value_scale = at(head.value_scale), *rope_scale = at(head.rope_scale);
  constexpr bool kFloat = std::is_same_v<T, float>;
  if (!s.rotation && (kFloat || (p.packed && rows == 1)))
    return attend_block<D>(Block<T>{key, head.key_stride, value, head.value_stride, rope, head.rope_stride, n, key_scale,
                                    value_scale, rope_scale, true, false}, row, rows, p, s);
  Block<float> block{nullptr, w, nullptr, w, nullptr, p.a.rope_width, n, key_scale, value_scale, rope_scale, kFloat, false};
  if constexpr (kFloat) {
    block.keys = key, block.key_stride = head.key_stride;
    block.values = value, block.value_stride = head.value_stride;
  } else {
    block.keys = widen(key, head.key_stride, n, w, p.packed, s.keys);
    block.values = head.tied ? block.keys : widen(value, head.value_stride, n, w, p.packed, s.values);
    if (rope) block.rope = widen(rope, head.rope_stride, n, int(p.a.rope_width), p.packed, s.rope);
  }
  if (s.rotation) {
    s.rotation->begin_at(head.position[j]);
    for (int r = row; r < row + rows; ++r)
      s.rotation->rotate_back(s.query + r * p.query_width, s.turned_query + r * w);
    block.rotates = kRotatesInRegisters<float, D> && !p.a.key_weight && rows <= 4;
    if (!block.rotates) {
      s.rotation->rotate<D>(block.keys, block.key_stride, n, s.turned_keys);
      block.keys = s.turned_keys, block.key_stride = w, block.in_place = false;
    }
  }
  attend_block<D>(block, row, rows, p, s);
}

// Whether the values of the last keys are added before the next are scored, in `attend_one`, or after: as it is faster.
template <class T>
constexpr bool kAddsFirst = sizeof(T) > 1 || kAheadLevel > 1;

// Keys that `attend_one` scores together, in vectors: as it is faster.
template <class T>
constexpr int kScored = kAheadLevel > 1 && sizeof(T) < 4 && Format<T>::kPerElement == 1 ? 4 : 1;

// Whether `attend_one` reads two tensors as well, or one alone: as it is faster.
constexpr bool kTwoAtOnce = kAheadLevel > 1;

// Keys `begin` to `end - 1`, kKeys of them or more, for one row that reads them in place, in as many streams as memory
// answers best. The output stays in registers; the values of the last kKeys keys are added beside the scoring of the next,
// so that memory is read all the time. Keys that are rotated lie at neighbouring positions and have no weights; a block of them
// ends with a run.
template <class T, int D, bool kRotated>
void attend_one(const Head<T>& head, int row, int64_t begin, int64_t end, const Plan& p, Scratch& s) {
  constexpr int P = Format<T>::kParts, kPer = Format<T>::kPerElement, kVectors = D / kWidth;
  constexpr int kKeys = kScored<T> * kWidth, kRun = kKeys / kStreams<T>;  // neighbouring keys of one stream
  const int64_t length = (end - begin) / kKeys * kRun;  // at least kRun
  auto place = [&](int i) { return i / kRun * length + i % kRun; };  // of key i, from the first of the kKeys keys
  const float* query = s.query + row * D;
  float* stored_output = s.output + row * D;
  Floats output[kVectors], total = {};
  for (int v = 0; v < kVectors; ++v) output[v] = load(stored_output + v * kWidth);
  total[0] = s.sum[row];
  float max = s.max[row];
  const T* before = head.value + begin * head.value_stride;
  alignas(64) float weight[kKeys] = {};
  auto add = [&]() __attribute__((always_inline)) {
    for (int i = 0; i < kKeys; ++i)
      for (int v = 0; v < kVectors; v += P) {
        Floats x[P];
        Format<T>::unpack(before + place(i) * head.value_stride + v * kWidth / kPer, x);
        for (int part = 0; part < P; ++part) output[v + part] += weight[i] * x[part];
      }
  };
  auto scales = [&](const float* scale, int64_t j, int first) __attribute__((always_inline)) {
    if (!scale) return splat(1);
    if (kStreams<T> == 1) return load(scale + j + first);
    Floats x = {};
    for (int i = 0; i < kWidth; ++i) x[i] = scale[j + place(first + i)];
    return x;
  };
  const bool fetch = kStreams<T> == 1 && (!kRotated || p.fetch_rotated);
  int turned = p.block;  // keys of a stream since the query was rotated back
  for (int64_t j = begin; j < begin + length; j += kRun, turned += kRun) {
    const T* keys = head.key + j * head.key_stride;
    if (kRotated && turned == p.block) {
      for (int stream = 0; stream < kStreams<T>; ++stream) {
        s.rotation->begin_at(head.position[j + stream * length], stream);
        s.rotation->rotate_back(query, s.turned_query + stream * D);
      }
      turned = 0;
    }
    const float* angles = kRotated ? s.rotation->angles(turned) : nullptr;
    if (kAddsFirst<T>) add();
    Floats score[kScored<T>], tops = splat(kNothing);
    for (int u = 0; u < kScored<T>; ++u)
      score[u] = sum_each([&](int lane) __attribute__((always_inline)) {
        const int i = u * kWidth + lane;
        const T* key = keys + place(i) * head.key_stride;
        if (fetch) fetch_ahead(key, D * int(sizeof(T)) / kPer);
        if constexpr (kRotated)
          return Rotation::products<D>(s.turned_query + i / kRun * D, key, angles + i % kRun * D);
        return products<D>(query, key, D);
      });
    if (!kAddsFirst<T>) add();
    for (int u = 0; u < kScored<T>; ++u) {
      score[u] *= scales(head.key_scale, j, u * kWidth);
      tops = larger(score[u], tops);
    }
    const float top = largest(tops);
    if (top > max) {
      const float factor = std::exp(max - top);
      for (Floats& x : output) x *= factor;
      total *= factor;
      max = top;
    }
    for (int u = 0; u < kScored<T>; ++u) {
      score[u] = exp_of_negative(score[u] - max);
      total += score[u];
      store(weight + u * kWidth, score[u] * scales(head.value_scale, j, u * kWidth));
    }
    before = head.value + j * head.value_stride;
  }
  add();
  for (int v = 0; v < kVectors; ++v) store(stored_output + v * kWidth, output[v]);
  s.sum[row] = sum(total);
  s.max[row] = max;
  const int64_t done = begin + length * kStreams<T>;
  if (done < end) attend_keys<T, D>(head, done, int(end - done), row, 1, p, s);
}

// How many of n positions follow each other without a gap.
inline int64_t neighbours(const int32_t* position, int64_t n) {
  int gaps = 0;
  for (int64_t i = 0; i < n; ++i) gaps |= position[i] - position[0] - int32_t(i);
  if (!gaps) return n;
  int64_t run = 1;
  while (position[run] == position[0] + run) ++run;
  return run;
}

// Keys `begin` to `end - 1`, for rows that all see them: those at neighbouring positions together, where they are rotated.
template <class T, int D>
void attend_range(const Head<T>& head, int row, int rows, int64_t begin, int64_t end, const Plan& p, Scratch& s) {
  for (int64_t run; begin < end; begin += run) {
    run = head.position ? neighbours(head.position + begin, end - begin) : end - begin;
    if constexpr (D != 0 && fits<T>(D) && D / kWidth + 6 <= kRegisters)
      if (rows == 1 && (head.tied || kTwoAtOnce) && p.packed && !head.rope && run >= kScored<T> * kWidth &&
          !p.a.key_weight) {
        if (!head.position) {
          attend_one<T, D, false>(head, row, begin, begin + run, p, s);
          continue;
        }
        if constexpr (fits<T>(D / 2) && Format<T>::kPerElement == 1)
          if (p.block % (kScored<T> * kWidth / kStreams<T>) == 0) {
            attend_one<T, D, true>(head, row, begin, begin + run, p, s);
            continue;
          }
      }
    for (int64_t j = begin; j < begin + run; j += p.block)
      attend_keys<T, D>(head, j, int(std::min<int64_t>(p.block, begin + run - j)), row, rows, p, s);
  }
}

// What each query sees of one part of the keys `from` to `to` - 1, which are the rows of this head.
template <class T, int D>
void attend_visible(const Head<T>& head, int64_t from, int64_t to, int64_t part, int64_t parts, const int32_t* first,
                    const int32_t* last, const Plan& p, Scratch& s) {
  const twofold_decode& a = p.a;
  auto attend = [&](int row, int rows, int64_t begin, int64_t end) {
    attend_range<T, D>(head, row, rows, begin - from, end - from, p, s);
  };
  const int64_t low = std::max<int64_t>(from, *std::min_element(first, first + a.T));
  const int64_t high = std::min<int64_t>(to, *std::max_element(last, last + a.T));
  const int64_t blocks = (std::max<int64_t>(0, high - low) + p.block - 1) / p.block;
  const int64_t begin = low + blocks * part / parts * p.block;
  const int64_t end = std::min(high, low + blocks * (part + 1) / parts * p.block);
  // Keys that all queries see are read once for all of them; what lies before and after, query by query.
  int64_t all_begin = std::max<int64_t>(begin, *std::max_element(first, first + a.T));
  int64_t all_end = std::min<int64_t>(end, *std::min_element(last, last + a.T));
  if (all_begin >= all_end) all_begin = all_end = end;
  attend(0, p.rows, all_begin, all_end);
  for (int t = 0; t < a.T; ++t) {
    const int64_t lo = std::max<int64_t>(first[t], begin), hi = std::min<int64_t>(last[t], end);
    attend(int(t * a.R), int(a.R), lo, std::min(hi, all_begin));
    attend(int(t * a.R), int(a.R), std::max(lo, all_end), hi);
  }
}

// The queries of one key/value head as rows, scaled; `order` says which channel comes to each place, null as it is.
void read_query(const float* query, const int* order, const Plan& p, float* out) {
  const twofold_decode& a = p.a;
  for (int t = 0; t < a.T; ++t)
    for (int r = 0; r < a.R; ++r)
      for (int d = 0; d < p.query_width; ++d)
        *out++ = query[(r * a.T + t) * p.query_width + (order ? order[d] : d)] * a.scale;
}

// One part of the keys of one key/value head; leaves unnormalised output, maximum and sum in the scratch. Recent floats
// belong to the first part and go before it, because they come in the order of storage.
template <class T, int D>
void attend_part(int64_t b, int64_t g, int64_t part, int64_t parts, const Plan& p, Scratch& s) {
  const twofold_decode& a = p.a;
  const float* query = a.query + (b * a.G + g) * p.rows * p.query_width;
  const int32_t *first = a.first + b * a.T, *last = a.last + b * a.T;
  std::fill(s.output, s.output + p.rows * p.width, 0.0f);
  std::fill(s.max, s.max + p.rows, kNothing);
  std::fill(s.sum, s.sum + p.rows, 0.0f);
  const int64_t stored = a.S - (a.recent ? a.recent->S : 0);
  if (a.recent && part == 0) {
    read_query(query, nullptr, p, s.query);
    attend_visible<float, D>(Head<float>(*a.recent, b, g), stored, a.S, 0, 1, first, last, p, s);
    std::copy(s.output, s.output + p.rows * p.width, s.turned_query);
    for (int i = 0; i < p.rows * p.width; ++i) s.output[i] = s.turned_query[i / p.width * p.width + p.order[i % p.width]];
  }
  read_query(query, p.order.data(), p, s.query);
  attend_visible<T, D>(Head<T>(a, b, g), 0, stored, part, parts, first, last, p, s);
}

// Where a part of the keys leaves its result when there are several: output, then maximum and sum of each row.
struct Partial {
  float *output, *max, *sum;
  Partial(float* memory, int rows, int width) : output(memory), max(memory + rows * width), sum(max + rows) {}
};

void merge(const Partial& into, const Partial& other, int rows, int width) {
  for (int row = 0; row < rows; ++row) {
    const float top = std::max(into.max[row], other.max[row]);
    const float mine = std::exp(into.max[row] - top), theirs = std::exp(other.max[row] - top);
    into.max[row] = top;
    into.sum[row] = into.sum[row] * mine + other.sum[row] * theirs;
    for (int d = row * width; d < (row + 1) * width; ++d)
      into.output[d] = into.output[d] * mine + other.output[d] * theirs;
  }
}

void finish(const Plan& p, int64_t head, const float* output, const float* sum) {
  const twofold_decode& a = p.a;
  float* out = a.output + head * a.R * a.T * a.D;
  for (int64_t t = 0; t < a.T; ++t)
    for (int64_t r = 0; r < a.R; ++r) {
      const int64_t row = t * a.R + r;
      const float factor = sum[row] == 0 ? 0 : 1 / sum[row];
      for (int64_t d = 0; d < a.D; ++d) out[(r * a.T + t) * a.D + p.order[d]] = output[row * a.D + d] * factor;
    }
}

template <class T, int D>
void attend(const twofold_decode& a) {
  const Plan plan = make_plan<T>(a);
  const int rows = plan.rows, width = plan.width;
  const int64_t heads = a.B * a.G;
  int64_t parts = 1;
  if (a.threads > 1) parts = std::max<int64_t>(1, std::min<int64_t>((2 * a.threads + heads - 1) / heads, a.S / 256));
  const int64_t items = heads * parts, size = int64_t(rows) * (width + 2);
  std::vector<float> memory(parts > 1 ? items * size : 0);
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    Scratch s(plan);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < items; ++item) {
      const int64_t head = item / parts;
      attend_part<T, D>(head / a.G, head % a.G, item % parts, parts, plan, s);
      if (parts == 1) {
        finish(plan, head, s.output, s.sum);
        continue;
      }
      const Partial to(memory.data() + item * size, rows, width);
      std::copy(s.output, s.output + rows * width, to.output);
      std::copy(s.max, s.max + rows, to.max);
      std::copy(s.sum, s.sum + rows, to.sum);
    }
  }
  for (int64_t head = 0; parts > 1 && head < heads; ++head) {
    const Partial whole(memory.data() + head * parts * size, rows, width);
    for (int64_t part = 1; part < parts; ++part)
      merge(whole, Partial(whole.output + part * size, rows, width), rows, width);
    finish(plan, head, whole.output, whole.sum);
  }
}

template <class T>
void attend_width(const twofold_decode& a) {
  if (a.D == 64) return attend<T, 64>(a);
  if (a.D == 128) return attend<T, 128>(a);
  attend<T, 0>(a);
}

}  // namespace

int decode_attention(const twofold_decode& a) {
  if (a.D < kWidth || a.D % kWidth || a.rope_width % kWidth || (a.position && a.rope_width)) return 1;
  switch (a.dtype) {
    case TWOFOLD_FLOAT32: attend_width<float>(a); return 0;
    case TWOFOLD_BFLOAT16: attend_width<BFloat16>(a); return 0;
    case TWOFOLD_FLOAT16: attend_width<Float16>(a); return 0;
    case TWOFOLD_INT8: attend_width<int8_t>(a); return 0;
    case TWOFOLD_INT4: attend_width<Int4>(a); return 0;
    default: return 1;
  }
}

}  // namespace twofold::TWOFOLD_ISA
