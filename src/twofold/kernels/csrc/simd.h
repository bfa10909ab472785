// Vectors of the widest kind that the target has, in GCC's and Clang's portable notation.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

// Small functions whose arguments live in registers; a call would put them into memory.
#define TWOFOLD_INLINE inline __attribute__((always_inline))

namespace twofold::TWOFOLD_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kWidth = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kWidth = 4, kRegisters = 32;
#else
constexpr int kWidth = 4, kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));

TWOFOLD_INLINE Floats splat(float x) { return x - Floats{}; }

TWOFOLD_INLINE Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

TWOFOLD_INLINE void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

TWOFOLD_INLINE Floats as_floats(Ints v) {
  Floats f;
  std::memcpy(&f, &v, sizeof f);
  return f;
}

TWOFOLD_INLINE Ints as_ints(Floats v) {
  Ints i;
  std::memcpy(&i, &v, sizeof i);
  return i;
}

// `n` floats that begin at a multiple of the widest vector.
class AlignedFloats {
 public:
  explicit AlignedFloats(size_t n) : memory_(n + 16) {
    data_ = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
  }
  AlignedFloats(AlignedFloats&&) = default;
  float* data() { return data_; }
  const float* data() const { return data_; }

 private:
  std::vector<float> memory_;
  float* data_;
};

// Where lane `lane` of the sums of neighbours comes from: first those of one vector, then those of another. Within 16
// bytes, or of whole groups of 16 bytes: such shuffles are the cheap ones.
constexpr int neighbour(int lane, bool within, int odd) {
  const int unit = within ? 1 : 4, half = (within ? 4 : kWidth) / unit / 2, span = 2 * half * unit;
  const int place = lane % span / unit;
  return lane / span * span + (place % half * 2 + odd) * unit + lane % unit + place / half * kWidth;
}

template <bool kWithin, int... I>
TWOFOLD_INLINE Floats add_neighbours(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, neighbour(I, kWithin, 0)...) +
         __builtin_shufflevector(a, b, neighbour(I, kWithin, 1)...);
}

using Lanes = std::make_integer_sequence<int, kWidth>;

// Lane i of the result is the sum of all lanes of make(i). Two are added as soon as both were made, so that few registers
// are in use.
template <int kMany = kWidth, class Make>
TWOFOLD_INLINE Floats sum_each(const Make& make, int first = 0) {
  if constexpr (kMany == 1) {
    return make(first);
  } else {
    const Floats a = sum_each<kMany / 2>(make, first);
    const Floats b = sum_each<kMany / 2>(make, first + kMany / 2);
    return add_neighbours<kMany <= 4>(a, b, Lanes{});
  }
}

TWOFOLD_INLINE float sum(Floats v) {
  float total = 0;
  for (int i = 0; i < kWidth; ++i) total += v[i];
  return total;
}

TWOFOLD_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

template <int kStep = kWidth / 2, int... I>
TWOFOLD_INLINE float largest(Floats v, std::integer_sequence<int, I...> lanes) {
  const Floats pairs = larger(v, __builtin_shufflevector(v, v, (I ^ kStep)...));
  if constexpr (kStep == 1)
    return pairs[0];
  else
    return largest<kStep / 2>(pairs, lanes);
}

TWOFOLD_INLINE float largest(Floats v) { return largest(v, Lanes{}); }

// e^x for x <= 0, to about 2e-7; below -87 it is e^-87, and NaN stays NaN.
TWOFOLD_INLINE Floats exp_of_negative(Floats x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats n = (x * 1.44269504f + magic) - magic;
  x = x - n * 0.693359375f;
  x = x + n * 2.12194440e-4f;
  Floats y = splat(1.9875691500e-4f);
  y = y * x + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * (x * x) + (x + 1.0f);
  return y * as_floats((__builtin_convertvector(n, Ints) + 127) << 23);
}

}  // namespace twofold::TWOFOLD_ISA
