// Vectors of the widest kind that the target has, in GCC's and Clang's portable notation. No intrinsics.
#pragma once

#include <cstdint>
#include <cstring>

namespace twofold::TWOFOLD_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;  // NEON, SSE
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline Floats splat(float x) { return x - Floats{}; }

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

inline Floats as_floats(Ints v) {
  Floats f;
  std::memcpy(&f, &v, sizeof f);
  return f;
}

// Conversions of one element, written so that loops over them become vector code.
inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float to_float(BFloat16 x) { return from_bits(uint32_t(x.bits) << 16); }

// The exponent is moved by a multiplication, which is right for subnormals too; infinities and NaN are put back.
inline float to_float(Float16 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  const float scaled = from_bits(magnitude) * 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &scaled, sizeof bits);
  bits = (x.bits & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : bits;
  return from_bits(bits | (uint32_t(x.bits & 0x8000) << 16));
}

template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};

template <int... I>
inline Floats add_pairs(Floats a, Floats b, Indices<I...>) {
  return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// Sums of neighbours: first those of a, then those of b.
inline Floats add_pairs(Floats a, Floats b) { return add_pairs(a, b, typename MakeIndices<kWidth>::type{}); }

// Lane i of the result is the sum of all lanes of v[i].
inline Floats sum_each(Floats* v) {
  for (int n = kWidth; n > 1; n /= 2)
    for (int i = 0; i < n / 2; ++i) v[i] = add_pairs(v[2 * i], v[2 * i + 1]);
  return v[0];
}

inline float sum(Floats v) {
  float total = 0;
  for (int i = 0; i < kWidth; ++i) total += v[i];
  return total;
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float largest(Floats v) {
  float result = v[0];
  for (int i = 1; i < kWidth; ++i) result = v[i] > result ? v[i] : result;
  return result;
}

// e^x for x <= 0, to about 2e-7; below -87 it is e^-87, and NaN stays NaN.
inline Floats exp_of_negative(Floats x) {
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
