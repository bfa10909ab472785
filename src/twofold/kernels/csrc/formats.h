// The formats in which keys and values are stored, and how they become floats.
//
// A narrow format is read as whole 32-bit lanes, each of which holds several channels; part p of all lanes becomes one
// vector by a shift. Channels then come in another order than they are stored in. That order is given to the query
// before the pass and taken from the output after it, so that the pass itself moves nothing. Where the processor has an
// instruction that converts neighbouring channels, that is used.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <type_traits>

#include "simd.h"

namespace twofold::TWOFOLD_ISA {

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };
struct Int4 { uint8_t bits; };  // two channels, each with 8 added

TWOFOLD_INLINE Ints load_lanes(const void* p) {
  Ints v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// kParts: channels in a 32-bit lane. kPerElement: channels in one T. `unpack` reads kParts vectors, `copy` a row in the
// order of storage.
template <class T>
struct Format;

template <>
struct Format<float> {
  static constexpr int kParts = 1, kPerElement = 1;
  static TWOFOLD_INLINE void unpack(const float* p, Floats* x) { x[0] = load(p); }
  static void copy(const float* row, int width, float* out) { std::memcpy(out, row, 4 * width); }
};

template <>
struct Format<BFloat16> {
  static constexpr int kParts = 2, kPerElement = 1;
  static TWOFOLD_INLINE void unpack(const BFloat16* p, Floats* x) {
    const Ints v = load_lanes(p);
    x[0] = as_floats(v << 16);
    x[1] = as_floats(v & int32_t(0xffff0000));
  }
  static void copy(const BFloat16* row, int width, float* __restrict out) {
    for (int d = 0; d < width; ++d) out[d] = from_bits(uint32_t(row[d].bits) << 16);
  }
};

template <>
struct Format<Float16> {
#if defined(__AVX512F__)
  static constexpr int kParts = 1, kPerElement = 1;
  static TWOFOLD_INLINE void unpack(const Float16* p, Floats* x) {
    x[0] = Floats(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
#elif defined(__F16C__)
  static constexpr int kParts = 1, kPerElement = 1;
  static TWOFOLD_INLINE void unpack(const Float16* p, Floats* x) {
    x[0] = Floats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
#else
  static constexpr int kParts = 2, kPerElement = 1;
  static TWOFOLD_INLINE void unpack(const Float16* p, Floats* x) {
    const Ints v = load_lanes(p);
    x[0] = widen(v << 16);
    x[1] = widen(v & int32_t(0xffff0000));
  }
#endif
  static void copy(const Float16* row, int width, float* __restrict out) {
    for (int d = 0; d < width; ++d) {
      const uint32_t magnitude = uint32_t(row[d].bits & 0x7fff) << 13;
      const float scaled = from_bits(magnitude) * kBias;
      const float x = (row[d].bits & 0x7c00) == 0x7c00 ? from_bits(magnitude | 0x7f800000) : scaled;
      out[d] = row[d].bits & 0x8000 ? -x : x;
    }
  }

 private:
  // The exponent is moved by a multiplication, which is right for subnormals too; infinities and NaN are put back.
  static constexpr float kBias = 0x1p112f;
  // From the upper halves of the lanes.
  static TWOFOLD_INLINE Floats widen(Ints v) {
    const Ints magnitude = (v & 0x7fffffff) >> 3;
    const Ints scaled = as_ints(as_floats(magnitude) * kBias);
    const Ints bits = (v & 0x7c000000) == 0x7c000000 ? magnitude | 0x7f800000 : scaled;
    return as_floats(bits | (v & int32_t(0x80000000)));
  }
};

template <>
struct Format<int8_t> {
#if defined(__AVX512F__)
  static constexpr int kParts = 1, kPerElement = 1;
  static TWOFOLD_INLINE void unpack(const int8_t* p, Floats* x) {
    x[0] = Floats(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
  }
#elif defined(__AVX2__)
  static constexpr int kParts = 1, kPerElement = 1;
  static TWOFOLD_INLINE void unpack(const int8_t* p, Floats* x) {
    x[0] = Floats(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
  }
#else
  static constexpr int kParts = 4, kPerElement = 1;
  static TWOFOLD_INLINE void unpack(const int8_t* p, Floats* x) {
    const Ints v = load_lanes(p);
    for (int part = 0; part < 4; ++part) x[part] = __builtin_convertvector((v << (24 - 8 * part)) >> 24, Floats);
  }
#endif
  static void copy(const int8_t* row, int width, float* __restrict out) {
    for (int d = 0; d < width; ++d) out[d] = row[d];
  }
};

template <>
struct Format<Int4> {
  static constexpr int kParts = 8, kPerElement = 2;
  static TWOFOLD_INLINE void unpack(const Int4* p, Floats* x) {
    const Ints v = load_lanes(p);
    for (int part = 0; part < 4; ++part) {
      x[part] = __builtin_convertvector(((v >> (8 * part)) & 15) - 8, Floats);
      x[4 + part] = __builtin_convertvector(((v >> (8 * part + 4)) & 15) - 8, Floats);
    }
  }
  static void copy(const Int4* row, int width, float* __restrict out) {
    for (int d = 0; d < width / 2; ++d) {
      out[d] = (row[d].bits & 15) - 8;
      out[width / 2 + d] = (row[d].bits >> 4) - 8;
    }
  }
};

// Asks for memory ahead of some bytes, for which the processor would begin to wait at every page. Not a multiple of 4,096
// ahead, or it would drive out what is being read: both would fall into one set of the cache. Processors without AVX-512
// look less far ahead by themselves; what they are asked for far ahead waits in the second-level cache.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kAhead = 33024, kAheadLevel = 2;  // bytes; the cache that is filled
#else
constexpr int kAhead = 6656, kAheadLevel = 1;
#endif

TWOFOLD_INLINE void fetch_ahead(const void* p, int bytes) {
  for (int b = 0; b < bytes; b += 64) __builtin_prefetch(static_cast<const char*>(p) + kAhead + b, 0, 4 - kAheadLevel);
}

// Stretches of memory that one pass reads side by side, no more than 1 KiB of each in turn. Processors without AVX-512
// answer four such streams a quarter faster than one; narrow formats are not read fast enough to gain by it.
template <class T>
constexpr int kStreams = kAheadLevel > 1 && std::is_same_v<T, float> ? 4 : 1;

// Whether rows of a width can be read as whole vectors of lanes.
template <class T>
constexpr bool fits(int width) { return width % (Format<T>::kParts * kWidth) == 0; }

// The channel that unpacking brings to a place, in rows that fit.
template <class T>
inline int channel_at(int place, int width) {
  constexpr int kParts = Format<T>::kParts, kGroup = kParts * kWidth;
  const int group = place / kGroup, part = place % kGroup / kWidth, lane = place % kWidth;
  if constexpr (Format<T>::kPerElement == 2)
    return group * kGroup / 2 + lane * kParts / 2 + part % (kParts / 2) + (part < kParts / 2 ? 0 : width / 2);
  return group * kGroup + lane * kParts + part;
}

// Rows as floats, in the order of unpacking or in that of storage.
template <class T>
inline const float* widen(const T* rows, int64_t stride, int n, int width, bool packed, float* out) {
  constexpr int kGroup = Format<T>::kParts * kWidth;
  for (int j = 0; j < n; ++j, rows += stride) {
    float* row = out + j * width;
    fetch_ahead(rows, width * int(sizeof(T)) / Format<T>::kPerElement);
    if (packed) {
      for (int d = 0; d < width; d += kGroup) {
        Floats x[Format<T>::kParts];
        Format<T>::unpack(rows + d / Format<T>::kPerElement, x);
        for (int part = 0; part < Format<T>::kParts; ++part) store(row + d + part * kWidth, x[part]);
      }
    } else {
      Format<T>::copy(rows, width, row);
    }
  }
  return out;
}

}  // namespace twofold::TWOFOLD_ISA
