// Vectors of the widest kind that the target has, in GCC's and Clang's portable notation. No intrinsics.
#pragma once

#include <cstdint>
#include <cstring>
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

template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};

template <int... I>
TWOFOLD_INLINE Floats add_pairs(Floats a, Floats b, Indices<I...>) {
  return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// Sums of neighbours: first those of a, then those of b.
TWOFOLD_INLINE Floats add_pairs(Floats a, Floats b) { return add_pairs(a, b, typename MakeIndices<kWidth>::type{}); }

// Lane i of the result is the sum of all lanes of v[i].
TWOFOLD_INLINE Floats sum_each(Floats* v) {
  for (int n = kWidth; n > 1; n /= 2)
    for (int i = 0; i < n / 2; ++i) v[i] = add_pairs(v[2 * i], v[2 * i + 1]);
  return v[0];
}

TWOFOLD_INLINE float sum(Floats v) {
  float total = 0;
  for (int i = 0; i < kWidth; ++i) total += v[i];
  return total;
}

TWOFOLD_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

TWOFOLD_INLINE float largest(Floats v) {
  float result = v[0];
  for (int i = 1; i < kWidth; ++i) result = v[i] > result ? v[i] : result;
  return result;
}

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
