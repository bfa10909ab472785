// Rotation of keys when they are read. Key p0 + i of a block is rotated by i only, with a table that fits the first-level
// cache; the query is rotated back by p0, once a block. Angles are exact to double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "formats.h"
#include "simd.h"

namespace twofold::TWOFOLD_ISA {

class Rotation {
 public:
  // Tables for blocks of up to `rows` neighbouring positions; frequency holds width / 2 angles.
  Rotation(const double* frequency, int width, int rows)
      : frequency_(frequency), half_(width / 2), cos_(rows * half_), sin_(rows * half_), begin_(2 * half_),
        base_(2 * half_), step_(2 * half_) {
    std::vector<double> c(half_, 1.0), s(half_, 0.0);
    for (int d = 0; d < half_; ++d) step_[d] = std::cos(frequency[d]), step_[half_ + d] = std::sin(frequency[d]);
    for (int i = 0; i < rows; ++i) {
      std::copy(c.begin(), c.end(), cos_.data() + i * half_);
      std::copy(s.begin(), s.end(), sin_.data() + i * half_);
      turn(c.data(), s.data(), step_.data());
    }
    std::copy(c.begin(), c.end(), step_.begin());  // from now on a whole block
    std::copy(s.begin(), s.end(), step_.begin() + half_);
    rows_ = rows;
    place(0);
  }

  // Makes the block begin at a position.
  void begin_at(int64_t position) {
    if (position == at_ + rows_) {
      turn(base_.data(), base_.data() + half_, step_.data());
      at_ = position;
    } else if (position != at_) {
      place(position);
    }
    for (int d = 0; d < 2 * half_; ++d) begin_.data()[d] = float(base_[d]);
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

  // Scores of one query that was rotated back, without writing the rotated keys. `factors` has room for 2 D floats;
  // `fetch` as in `score_rows`.
  template <int D>
  void score(const float* query, const float* keys, int64_t stride, int n, const float* weight, float* factors,
             float* score, bool fetch) const {
    const int half = D ? D / 2 : half_;
    float *low_cos = factors, *high_cos = factors + half, *low_sin = factors + 2 * half, *high_sin = factors + 3 * half;
    for (int d = 0; d < half; ++d) {
      const float low = weight ? weight[d] : 1, high = weight ? weight[half + d] : 1;
      low_cos[d] = query[d] * low, high_cos[d] = query[half + d] * high;
      low_sin[d] = query[half + d] * low, high_sin[d] = -query[d] * high;
    }
    const float *cos = cos_.data(), *sin = sin_.data();
    auto products = [&](const float* key, const float* c, const float* s) __attribute__((always_inline)) {
      Floats a = {};
      if (fetch) fetch_ahead(key, 8 * half);
      for (int d = 0; d < half; d += kWidth) {
        const Floats low = load(key + d), high = load(key + half + d);
        a += (low * load(low_cos + d) + high * load(high_cos + d)) * load(c + d);
        a += (low * load(low_sin + d) + high * load(high_sin + d)) * load(s + d);
      }
      return a;
    };
    int i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      store(score + i, sum_each([&](int k) __attribute__((always_inline)) {
        return products(keys + (i + k) * stride, cos + (i + k) * half, sin + (i + k) * half);
      }));
    }
    for (; i < n; ++i) score[i] = sum(products(keys + i * stride, cos + i * half, sin + i * half));
  }

  // Key i of n neighbours, times the weights where there are any, rotated by i. D is the width, or 0 for any.
  template <int D>
  void rotate(const float* keys, int64_t stride, int n, const float* weight, float* __restrict out,
              bool fetch) const {
    const int half = D ? D / 2 : half_;
    for (int i = 0; i < n; ++i, keys += stride, out += 2 * half) {
      if (fetch) fetch_ahead(keys, 8 * half);
      const float *c = cos_.data() + i * half, *s = sin_.data() + i * half;
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
  // (c, s) turned on by the angles whose cosines and sines lie in `by`.
  void turn(double* c, double* s, const double* by) const {
    for (int d = 0; d < half_; ++d) {
      const double cos = c[d] * by[d] - s[d] * by[half_ + d];
      s[d] = s[d] * by[d] + c[d] * by[half_ + d];
      c[d] = cos;
    }
  }

  void place(int64_t position) {
    for (int d = 0; d < half_; ++d) {
      base_[d] = std::cos(position * frequency_[d]);
      base_[half_ + d] = std::sin(position * frequency_[d]);
    }
    at_ = position;
  }

  const double* frequency_;
  int half_, rows_;
  int64_t at_;
  AlignedFloats cos_, sin_;
  AlignedFloats begin_;  // cosines and sines of the position at which the block begins
  std::vector<double> base_, step_;  // the same in double, and those of a whole block
};

}  // namespace twofold::TWOFOLD_ISA
