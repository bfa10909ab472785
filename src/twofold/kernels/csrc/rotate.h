// Rotation of keys when they are read. Key p0 + i of a block is rotated by i only, with a table that fits the first-level
// cache; the query is rotated back by p0, once a block. Angles are exact to double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "formats.h"
#include "simd.h"

namespace twofold::TWOFOLD_ISA {

class Rotation {
 public:
  // Tables for blocks of up to `rows` neighbouring positions. frequency holds the angles of width / 2 pairs of channels,
  // weight what channels are multiplied by, or null; place i of a key holds channel order[i].
  Rotation(const double* frequency, const float* weight, const int* order, int width, int rows)
      : half_(width / 2), frequency_(half_), weight_(weight ? width : 0), table_(rows * width),
        begin_(2 * half_), step_(2 * half_) {
    for (int d = 0; d < half_; ++d) frequency_[d] = frequency[order[d]];
    for (int d = 0; weight && d < width; ++d) weight_[d] = weight[order[d]];
    std::vector<double> c(half_, 1.0), s(half_, 0.0);
    for (int d = 0; d < half_; ++d) step_[d] = std::cos(frequency_[d]), step_[half_ + d] = std::sin(frequency_[d]);
    for (int i = 0; i < rows; ++i) {
      std::copy(c.begin(), c.end(), table_.data() + i * width);
      std::copy(s.begin(), s.end(), table_.data() + i * width + half_);
      turn(c.data(), s.data(), step_.data());
    }
    std::copy(c.begin(), c.end(), step_.begin());  // from now on a whole block
    std::copy(s.begin(), s.end(), step_.begin() + half_);
    rows_ = rows;
    for (Base& base : base_) base.turn.resize(2 * half_);
  }

  // Makes the block begin at a position, which is soon found when it follows the last block of the same stream.
  void begin_at(int64_t position, int stream = 0) {
    Base& base = base_[stream];
    double *c = base.turn.data(), *s = c + half_;
    if (position == base.position + rows_) {
      turn(c, s, step_.data());
    } else if (position != base.position) {
      for (int d = 0; d < half_; ++d) c[d] = std::cos(position * frequency_[d]), s[d] = std::sin(position * frequency_[d]);
    }
    base.position = position;
    for (int d = 0; d < 2 * half_; ++d) begin_.data()[d] = float(c[d]);
  }

  // A query rotated back by the position at which the block begins.
  void rotate_back(const float* query, float* __restrict out) const {
    const float *cos = begin_.data(), *sin = begin_.data() + half_;
    for (int d = 0; d < half_; ++d) {
      const float low = query[d], high = query[half_ + d];
      out[d] = low * cos[d] + high * sin[d];
      out[half_ + d] = high * cos[d] - low * sin[d];
    }
  }

  // Cosines and sines for key i of the block.
  const float* angles(int i) const { return table_.data() + i * 2 * half_; }

  // Products of a query that was rotated back with a key, still to be summed; the rotated key is not written. For keys
  // without weights.
  template <int D, class T>
  static TWOFOLD_INLINE Floats products(const float* query, const T* key, const float* angles) {
    constexpr int P = Format<T>::kParts, half = D / 2;
    Floats a = {}, b = {};
    for (int d = 0; d < half; d += P * kWidth) {
      Floats low[P], high[P];
      Format<T>::unpack(key + d, low);
      Format<T>::unpack(key + half + d, high);
      for (int p = 0; p < P; ++p) {
        const int at = d + p * kWidth;
        const Floats q = load(query + at), r = load(query + half + at);
        const Floats cos = load(angles + at), sin = load(angles + half + at);
        a += low[p] * (q * cos + r * sin);
        b += high[p] * (r * cos - q * sin);
      }
    }
    return a + b;
  }

  // Scores of Q queries, rotated back, and n neighbouring keys of floats without weights, kWidth / Q keys at a time.
  // `fetch`: the keys come from memory, and those a little ahead are asked for.
  template <int Q, int D>
  TWOFOLD_INLINE void score_rows(const float* query, const float* keys, int64_t stride, int n, float* score,
                                 int score_stride, bool fetch) const {
    constexpr int K = kWidth / Q, half = D / 2;
    int j = 0;
    for (; j + K <= n; j += K) {
      for (int c = 0; fetch && c < K; ++c) fetch_ahead(keys + (j + c) * stride, 4 * D);
      Floats a[kWidth] = {};
      for (int d = 0; d < half; d += kWidth) {
        Floats low[K], high[K];
        for (int c = 0; c < K; ++c) {
          const float *key = keys + (j + c) * stride + d, *cos = angles(j + c) + d, *sin = cos + half;
          low[c] = load(key) * load(cos) - load(key + half) * load(sin);
          high[c] = load(key + half) * load(cos) + load(key) * load(sin);
        }
        for (int r = 0; r < Q; ++r)
          for (int c = 0; c < K; ++c)
            a[r * K + c] += load(query + r * D + d) * low[c] + load(query + r * D + half + d) * high[c];
      }
      const Floats sums = sum_each([&](int i) __attribute__((always_inline)) { return a[i]; });
      for (int r = 0; r < Q; ++r)
        std::memcpy(score + r * score_stride + j, reinterpret_cast<const float*>(&sums) + r * K, 4 * K);
    }
    for (; j < n; ++j)
      for (int r = 0; r < Q; ++r)
        score[r * score_stride + j] = sum(products<D>(query + r * D, keys + j * stride, angles(j)));
  }

  // Key i of n neighbours, times the weights where there are any, rotated by i. D is the width, or 0 for any.
  template <int D>
  void rotate(const float* keys, int64_t stride, int n, float* __restrict out) const {
    const int half = D ? D / 2 : half_;
    const float* weight = this->weight();
    for (int i = 0; i < n; ++i, keys += stride, out += 2 * half) {
      const float *c = angles(i), *s = c + half;
      int d = 0;
      for (; d + kWidth <= half; d += kWidth) {
        Floats low = load(keys + d), high = load(keys + half + d);
        if (weight) low *= load(weight + d), high *= load(weight + half + d);
        store(out + d, low * load(c + d) - high * load(s + d));
        store(out + half + d, high * load(c + d) + low * load(s + d));
      }
      for (; d < half; ++d) {
        const float low = keys[d] * (weight ? weight[d] : 1), high = keys[half + d] * (weight ? weight[half + d] : 1);
        out[d] = low * c[d] - high * s[d];
        out[half + d] = high * c[d] + low * s[d];
      }
    }
  }

 private:
  const float* weight() const { return weight_.empty() ? nullptr : weight_.data(); }

  // (c, s) turned on by the angles whose cosines and sines lie in `by`.
  void turn(double* __restrict c, double* __restrict s, const double* __restrict by) const {
    for (int d = 0; d < half_; ++d) {
      const double cos = c[d] * by[d] - s[d] * by[half_ + d];
      s[d] = s[d] * by[d] + c[d] * by[half_ + d];
      c[d] = cos;
    }
  }

  // Where the last block of a stream begins, with the cosines and sines in double.
  struct Base {
    int64_t position = std::numeric_limits<int64_t>::min() / 2;  // nowhere
    std::vector<double> turn;
  };

  int half_, rows_;
  std::vector<double> frequency_;
  std::vector<float> weight_;
  AlignedFloats table_;    // cosines and sines of each place in a block
  AlignedFloats begin_;    // cosines and sines of the position at which the block begins
  std::vector<double> step_;  // those of a whole block
  Base base_[kStreams<float>];
};

}  // namespace twofold::TWOFOLD_ISA
