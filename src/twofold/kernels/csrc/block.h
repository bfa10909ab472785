// What is done with a block of keys and values while it lies in the first-level cache.
#pragma once

#include <cmath>
#include <limits>

#include "formats.h"
#include "simd.h"

namespace twofold::TWOFOLD_ISA {

constexpr float kNothing = -std::numeric_limits<float>::max();

// Products of a query with a key, still to be summed. D is the width, or 0 to take `width`.
template <int D, class T>
TWOFOLD_INLINE Floats products(const float* query, const T* key, int width) {
  constexpr int P = Format<T>::kParts, kSums = sizeof(T) < 4 ? 2 : 1;  // floats leave no register for a second one
  Floats a[kSums] = {};
  for (int d = 0; d < (D ? D : width); d += P * kWidth) {
    Floats k[P];
    Format<T>::unpack(key + d / Format<T>::kPerElement, k);
    for (int p = 0; p < P; ++p) a[d / (P * kWidth) % kSums] += load(query + d + p * kWidth) * k[p];
  }
  return a[0] + (kSums > 1 ? a[kSums - 1] : Floats{});
}

// Scores of Q queries and kWidth / Q keys at a time, in kWidth accumulators.
// `fetch`: the keys come from memory, and those a little ahead are asked for; for one query the processor does that itself.
template <int Q, int D, class T>
TWOFOLD_INLINE void score_rows(const float* query, int query_stride, const T* keys, int64_t stride, int n, float* score,
                               int score_stride, int width, bool fetch) {
  constexpr int K = kWidth / Q, P = Format<T>::kParts;
  const int w = D ? D : width, bytes = w * int(sizeof(T)) / Format<T>::kPerElement;
  int j = 0;
  for (; j + K <= n; j += K) {
    for (int c = 0; Q > 1 && fetch && c < K; ++c) fetch_ahead(keys + (j + c) * stride, bytes);
    Floats a[kWidth] = {};
    if constexpr (Q == 1) {
      for (int c = 0; c < K; ++c) a[c] = products<D>(query, keys + (j + c) * stride, w);
    } else {
      for (int d = 0; d < w; d += P * kWidth) {
        Floats k[K][P];
        for (int c = 0; c < K; ++c) Format<T>::unpack(keys + (j + c) * stride + d / Format<T>::kPerElement, k[c]);
        for (int r = 0; r < Q; ++r)
          for (int p = 0; p < P; ++p) {
            const Floats q = load(query + r * query_stride + d + p * kWidth);
            for (int c = 0; c < K; ++c) a[r * K + c] += q * k[c][p];
          }
      }
    }
    const Floats sums = sum_each([&](int i) __attribute__((always_inline)) { return a[i]; });
    for (int r = 0; r < Q; ++r)
      std::memcpy(score + r * score_stride + j, reinterpret_cast<const float*>(&sums) + r * K, 4 * K);
  }
  for (; j < n; ++j)
    for (int r = 0; r < Q; ++r)
      score[r * score_stride + j] = sum(products<D>(query + r * query_stride, keys + j * stride, w));
}

// output += weights · values for Q queries, N groups of the width at a time, U values at a time in accumulators of
// their own.
template <int Q, int N, int U, class T>
TWOFOLD_INLINE void add_values(const float* weight, int weight_stride, const T* values, int64_t stride, int n,
                               float* output, int output_stride) {
  constexpr int P = Format<T>::kParts, M = N * P;
  Floats a[U][Q][M];
  for (int r = 0; r < Q; ++r)
    for (int v = 0; v < M; ++v) {
      a[0][r][v] = load(output + r * output_stride + v * kWidth);
      for (int u = 1; u < U; ++u) a[u][r][v] = Floats{};
    }
  int j = 0;
  for (; j < n; j += U)
    for (int u = 0; u < U; ++u) {
      if (U > 1 && j + u >= n) break;
      Floats x[M];
      for (int v = 0; v < N; ++v)
        Format<T>::unpack(values + (j + u) * stride + v * P * kWidth / Format<T>::kPerElement, x + v * P);
      for (int r = 0; r < Q; ++r) {
        const float p = weight[r * weight_stride + j + u];
        for (int v = 0; v < M; ++v) a[u][r][v] += p * x[v];
      }
    }
  for (int r = 0; r < Q; ++r)
    for (int v = 0; v < M; ++v) {
      for (int u = 1; u < U; ++u) a[0][r][v] += a[u][r][v];
      store(output + r * output_stride + v * kWidth, a[0][r][v]);
    }
}

template <int Q, int D, class T>
TWOFOLD_INLINE void add_rows(const float* weight, int weight_stride, const T* values, int64_t stride, int n,
                             float* output, int width) {
  constexpr int P = Format<T>::kParts, kGroup = P * kWidth;
  constexpr int kVectors = Q > 1 ? (kWidth == 8 ? 2 : 4) : (kWidth == 8 ? 8 : 4);  // that registers hold
  constexpr int N = kVectors > P ? kVectors / P : 1, U = Q == 1 && N * P < 8 ? 2 : 1;
  const int w = D ? D : width;
  int d = 0;
  for (; d + N * kGroup <= w; d += N * kGroup)
    add_values<Q, N, U>(weight, weight_stride, values + d / Format<T>::kPerElement, stride, n, output + d, w);
  for (; N > 1 && d < w; d += kGroup)
    add_values<Q, 1, 1>(weight, weight_stride, values + d / Format<T>::kPerElement, stride, n, output + d, w);
}

// Turns n scores into weights e^(score - max), adds their sum to `sum`, and scales sum and output where max grows.
// `score` has room up to a multiple of kWidth.
TWOFOLD_INLINE void softmax_row(float* score, int n, float& max, float& sum, float* output, int width) {
  const int padded = (n + kWidth - 1) / kWidth * kWidth;
  for (int j = n; j < padded; ++j) score[j] = kNothing;
  Floats top = load(score);
  for (int j = kWidth; j < padded; j += kWidth) top = larger(load(score + j), top);
  const float block_max = largest(top);
  if (block_max > max) {
    const float factor = std::exp(max - block_max);
    max = block_max;
    sum *= factor;
    for (int d = 0; d < width; d += kWidth) store(output + d, load(output + d) * factor);
  }
  const Floats shift = splat(max);
  Floats total = {};
  int j = 0;
  for (; j + kWidth <= n; j += kWidth) {
    const Floats e = exp_of_negative(load(score + j) - shift);
    total += e;
    store(score + j, e);
  }
  float tail = 0;
  if (j < n) {
    store(score + j, exp_of_negative(load(score + j) - shift));
    for (; j < n; ++j) tail += score[j];
  }
  sum += twofold::TWOFOLD_ISA::sum(total) + tail;
}

}  // namespace twofold::TWOFOLD_ISA
