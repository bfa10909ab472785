// One pass over the cache: a block of keys is scored, exponentiated and summed while it lies in the first-level cache.
// Compiled once for each instruction set; `TWOFOLD_ISA` names the namespace.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "decode.h"
#include "simd.h"

namespace twofold::TWOFOLD_ISA {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::max();

// Rows of a block, so that it takes 16 KiB as floats.
constexpr int block_rows(int width) { return std::max(16, std::min(64, 4096 / width / kWidth * kWidth)); }

// What one thread needs for the rows (queries) that share a key/value head.
struct Scratch {
  int rows, width, block;
  std::vector<float> memory;
  float *query, *output, *score, *keys, *values, *max, *sum;

  Scratch(int rows, int width) : rows(rows), width(width), block(block_rows(width)) {
    const size_t size[] = {size_t(rows) * width, size_t(rows) * width, size_t(rows) * block, size_t(block) * width,
                           size_t(block) * width, size_t(rows), size_t(rows)};
    float** part[] = {&query, &output, &score, &keys, &values, &max, &sum};
    size_t total = 16;
    for (size_t n : size) total += (n + 15) / 16 * 16;
    memory.resize(total);
    float* p = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    for (int i = 0; i < 7; ++i) {
      *part[i] = p;
      p += (size[i] + 15) / 16 * 16;
    }
  }
};

// Scores of Q rows and kWidth keys at a time (Q * K = kWidth accumulators).
template <int Q, int D>
inline void score_rows(const float* query, const float* keys, int64_t stride, int n, float* score, int block, int width) {
  constexpr int K = kWidth / Q;
  const int w = D ? D : width;
  int j = 0;
  for (; j + K <= n; j += K) {
    Floats a[kWidth] = {};
    for (int d = 0; d < w; d += kWidth) {
      Floats k[K];
      for (int c = 0; c < K; ++c) k[c] = load(keys + (j + c) * stride + d);
      for (int r = 0; r < Q; ++r) {
        const Floats q = load(query + r * w + d);
        for (int c = 0; c < K; ++c) a[r * K + c] += q * k[c];
      }
    }
    const Floats sums = sum_each(a);
    if constexpr (Q == 1) {
      store(score + j, sums);
    } else {
      for (int r = 0; r < Q; ++r) std::memcpy(score + r * block + j, reinterpret_cast<const float*>(&sums) + r * K, 4 * K);
    }
  }
  for (; j < n; ++j)
    for (int r = 0; r < Q; ++r) {
      Floats a = {};
      for (int d = 0; d < w; d += kWidth) a += load(query + r * w + d) * load(keys + j * stride + d);
      score[r * block + j] = sum(a);
    }
}

// output += weights · values for Q rows, N vectors of the width at a time, U values at a time in accumulators of their own.
template <int Q, int N, int U>
inline void add_values(const float* weight, const float* values, int64_t stride, int n, float* output, int block, int width) {
  Floats a[U][Q][N];
  for (int r = 0; r < Q; ++r)
    for (int v = 0; v < N; ++v) {
      a[0][r][v] = load(output + r * width + v * kWidth);
      for (int u = 1; u < U; ++u) a[u][r][v] = Floats{};
    }
  int j = 0;
  for (; j + U <= n; j += U)
    for (int u = 0; u < U; ++u) {
      Floats x[N];
      for (int v = 0; v < N; ++v) x[v] = load(values + (j + u) * stride + v * kWidth);
      for (int r = 0; r < Q; ++r) {
        const float p = weight[r * block + j + u];
        for (int v = 0; v < N; ++v) a[u][r][v] += p * x[v];
      }
    }
  for (; j < n; ++j)
    for (int r = 0; r < Q; ++r)
      for (int v = 0; v < N; ++v) a[0][r][v] += weight[r * block + j] * load(values + j * stride + v * kWidth);
  for (int r = 0; r < Q; ++r)
    for (int v = 0; v < N; ++v) {
      for (int u = 1; u < U; ++u) a[0][r][v] += a[u][r][v];
      store(output + r * width + v * kWidth, a[0][r][v]);
    }
}

// Turns n scores into weights e^(score - max); scales what was summed before where the maximum grows.
inline void softmax_row(float* score, int n, const float* key_scale, const float* value_scale, Scratch& s, int row) {
  if (key_scale)
    for (int j = 0; j < n; ++j) score[j] *= key_scale[j];
  int padded = (n + kWidth - 1) / kWidth * kWidth;
  for (int j = n; j < padded; ++j) score[j] = kNothing;
  Floats top = load(score);
  for (int j = kWidth; j < padded; j += kWidth) top = larger(load(score + j), top);
  const float block_max = largest(top);
  if (block_max > s.max[row]) {
    const float factor = std::exp(s.max[row] - block_max);
    s.max[row] = block_max;
    s.sum[row] *= factor;
    float* output = s.output + row * s.width;
    for (int d = 0; d < s.width; d += kWidth) store(output + d, load(output + d) * factor);
  }
  const Floats max = splat(s.max[row]);
  Floats total = {};
  int j = 0;
  for (; j + kWidth <= n; j += kWidth) {
    const Floats e = exp_of_negative(load(score + j) - max);
    total += e;
    store(score + j, e);
  }
  float tail = 0;
  if (j < n) {
    store(score + j, exp_of_negative(load(score + j) - max));
    for (; j < n; ++j) tail += score[j];
  }
  s.sum[row] += sum(total) + tail;
  if (value_scale)
    for (int i = 0; i < n; ++i) score[i] *= value_scale[i];
}

template <int Q, int D>
inline void attend_rows(int row, const float* keys, int64_t key_stride, const float* values, int64_t value_stride, int n,
                        const float* key_scale, const float* value_scale, Scratch& s) {
  const int w = D ? D : s.width;
  float* score = s.score + row * s.block;
  score_rows<Q, D>(s.query + row * w, keys, key_stride, n, score, s.block, w);
  for (int r = 0; r < Q; ++r) softmax_row(score + r * s.block, n, key_scale, value_scale, s, row + r);
  float* output = s.output + row * w;
  constexpr int N = Q > 1 ? (kWidth == 8 ? 2 : 4) : (kWidth == 8 ? 8 : 4);
  constexpr int U = Q == 1 && N < 8 ? 2 : 1;
  int d = 0;
  for (; d + N * kWidth <= w; d += N * kWidth)
    add_values<Q, N, U>(score, values + d, value_stride, n, output + d, s.block, w);
  for (; d < w; d += kWidth) add_values<Q, 1, 2>(score, values + d, value_stride, n, output + d, s.block, w);
}

template <class T>
inline const float* as_float_rows(const T* rows, int64_t stride, int n, int width, float* scratch) {
  for (int j = 0; j < n; ++j)
    for (int d = 0; d < width; ++d) scratch[j * width + d] = to_float(rows[j * stride + d]);
  return scratch;
}

// Keys `begin` to `end - 1` of one key/value head, for rows that all see them.
template <class T, int D>
void attend_range(const twofold_decode& a, int64_t b, int64_t g, int row, int rows, int64_t begin, int64_t end, Scratch& s) {
  const int w = D ? D : s.width;
  const T* key = static_cast<const T*>(a.key) + b * a.key_stride[0] + g * a.key_stride[1];
  const T* value = a.value ? static_cast<const T*>(a.value) + b * a.value_stride[0] + g * a.value_stride[1] : key;
  const int64_t value_stride = a.value ? a.value_stride[2] : a.key_stride[2];
  const float* key_scale = a.key_scale ? a.key_scale + (b * a.G + g) * a.S : nullptr;
  const float* value_scale = a.value ? a.value_scale : a.key_scale;
  if (value_scale) value_scale += (b * a.G + g) * a.S;
  for (int64_t j = begin; j < end; j += s.block) {
    const int n = int(std::min<int64_t>(s.block, end - j));
    const T *k = key + j * a.key_stride[2], *v = value + j * value_stride;
    const float *keys, *values;
    int64_t ks = w, vs = w;
    if constexpr (std::is_same_v<T, float>) {
      keys = k, values = v, ks = a.key_stride[2], vs = value_stride;
    } else {
      keys = as_float_rows(k, a.key_stride[2], n, w, s.keys);
      values = a.value ? as_float_rows(v, value_stride, n, w, s.values) : keys;
    }
    const float* kscale = key_scale ? key_scale + j : nullptr;
    const float* vscale = value_scale ? value_scale + j : nullptr;
    int r = row;
    for (; r + 4 <= row + rows; r += 4) attend_rows<4, D>(r, keys, ks, values, vs, n, kscale, vscale, s);
    for (; r + 2 <= row + rows; r += 2) attend_rows<2, D>(r, keys, ks, values, vs, n, kscale, vscale, s);
    for (; r < row + rows; ++r) attend_rows<1, D>(r, keys, ks, values, vs, n, kscale, vscale, s);
  }
}

// One part of the keys of one key/value head; leaves unnormalised output, maximum and sum in the scratch.
template <class T, int D>
void attend_part(const twofold_decode& a, int64_t b, int64_t g, int64_t part, int64_t parts, Scratch& s) {
  const int rows = int(a.R * a.T);
  const float* query = a.query + (b * a.G + g) * rows * s.width;
  for (int t = 0; t < a.T; ++t)  // rows are stored query by query, so that those of one query lie together
    for (int r = 0; r < a.R; ++r)
      for (int d = 0; d < s.width; ++d)
        s.query[(t * a.R + r) * s.width + d] = query[(r * a.T + t) * s.width + d] * a.scale;
  std::fill(s.output, s.output + rows * s.width, 0.0f);
  std::fill(s.max, s.max + rows, kNothing);
  std::fill(s.sum, s.sum + rows, 0.0f);
  const int32_t *first = a.first + b * a.T, *last = a.last + b * a.T;
  const int64_t low = *std::min_element(first, first + a.T), high = *std::max_element(last, last + a.T);
  const int64_t blocks = (std::max<int64_t>(0, high - low) + s.block - 1) / s.block;
  const int64_t begin = low + blocks * part / parts * s.block;
  const int64_t end = std::min(high, low + blocks * (part + 1) / parts * s.block);
  // Where all queries see the same keys their rows go together; elsewhere query by query.
  const int64_t shared_begin = *std::max_element(first, first + a.T), shared_end = *std::min_element(last, last + a.T);
  const int64_t mid_begin = std::clamp(shared_begin, begin, end), mid_end = std::clamp(shared_end, mid_begin, end);
  if (mid_begin < mid_end) attend_range<T, D>(a, b, g, 0, rows, mid_begin, mid_end, s);
  for (int t = 0; t < a.T; ++t) {
    const int64_t lo = std::max<int64_t>(first[t], begin), hi = std::min<int64_t>(last[t], end);
    if (lo < std::min(hi, mid_begin)) attend_range<T, D>(a, b, g, int(t * a.R), int(a.R), lo, std::min(hi, mid_begin), s);
    const int64_t rest = std::max(lo, mid_end);
    if (mid_end > mid_begin ? rest < hi : std::max(lo, mid_begin) < hi)
      attend_range<T, D>(a, b, g, int(t * a.R), int(a.R), mid_end > mid_begin ? rest : std::max(lo, mid_begin), hi, s);
  }
}

template <class T, int D>
void attend(const twofold_decode& a) {
  const int rows = int(a.R * a.T), width = int(a.D);
  const int64_t heads = a.B * a.G;
  int64_t parts = 1;
  if (a.threads > 1) parts = std::max<int64_t>(1, std::min<int64_t>((2 * a.threads + heads - 1) / heads, a.S / 256));
  const int64_t items = heads * parts, size = int64_t(rows) * (width + 2);
  std::vector<float> partial(parts > 1 ? items * size : 0);
  auto finish = [&](int64_t head, const float* output, const float* sum) {
    float* out = a.output + head * rows * width;
    for (int t = 0; t < a.T; ++t)
      for (int r = 0; r < a.R; ++r) {
        const int row = t * int(a.R) + r;
        const float factor = sum[row] == 0 ? 0 : 1 / sum[row];
        for (int d = 0; d < width; ++d) out[(r * a.T + t) * width + d] = output[row * width + d] * factor;
      }
  };
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    Scratch s(rows, width);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < items; ++item) {
      const int64_t head = item / parts, part = item % parts;
      attend_part<T, D>(a, head / a.G, head % a.G, part, parts, s);
      if (parts == 1) {
        finish(head, s.output, s.sum);
        continue;
      }
      float* to = partial.data() + item * size;
      std::copy(s.output, s.output + rows * width, to);
      std::copy(s.max, s.max + rows, to + rows * width);
      std::copy(s.sum, s.sum + rows, to + rows * (width + 1));
    }
  }
  if (parts == 1) return;
  for (int64_t head = 0; head < heads; ++head) {
    float* whole = partial.data() + head * parts * size;
    float *max = whole + rows * width, *sum = max + rows;
    for (int64_t part = 1; part < parts; ++part) {
      const float* other = whole + part * size;
      for (int row = 0; row < rows; ++row) {
        const float other_max = other[rows * width + row], other_sum = other[rows * (width + 1) + row];
        const float top = std::max(max[row], other_max);
        const float mine = std::exp(max[row] - top), theirs = std::exp(other_max - top);
        max[row] = top;
        sum[row] = sum[row] * mine + other_sum * theirs;
        for (int d = 0; d < width; ++d)
          whole[row * width + d] = whole[row * width + d] * mine + other[row * width + d] * theirs;
      }
    }
    finish(head, whole, sum);
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
  if (a.D % kWidth || a.D < kWidth) return 1;
  switch (a.dtype) {
    case TWOFOLD_FLOAT32: attend_width<float>(a); return 0;
    case TWOFOLD_BFLOAT16: attend_width<BFloat16>(a); return 0;
    case TWOFOLD_FLOAT16: attend_width<Float16>(a); return 0;
    case TWOFOLD_INT8: attend_width<int8_t>(a); return 0;
    default: return 1;
  }
}

}  // namespace twofold::TWOFOLD_ISA
