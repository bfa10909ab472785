// Products of one or a few rows with a matrix: each weight is read once, in the order of memory, and fetched ahead.
// Compiled once for each instruction set; `TWOFOLD_ISA` names the namespace.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "block.h"
#include "formats.h"
#include "linear.h"
#include "simd.h"

namespace twofold::TWOFOLD_ISA {
namespace {

constexpr int64_t kBytesPerThread = 1 << 17;  // of weights, below which a second thread costs more than it brings

// Processors without AVX-512 read eight stretches of memory side by side faster than one after the other. A row of int8
// is too short for that.
template <class T>
constexpr bool kInStreams = kAheadLevel > 1 && sizeof(T) > 1;

// Products of one input with n rows, n <= kWidth.
template <class T>
TWOFOLD_INLINE void multiply_rows(const float* input, const T* weight, int64_t width, int n, float* output) {
  constexpr int P = Format<T>::kParts, kGroup = P * kWidth, kLines = 128 / sizeof(T);  // elements of two cache lines
  const Floats sums = sum_each([&](int r) __attribute__((always_inline)) {
    if (r >= n) return Floats{};
    const T* row = weight + r * width;
    Floats a[2][P] = {};
    auto add = [&](int64_t d, Floats* to) {
      Floats w[P];
      Format<T>::unpack(row + d, w);
      for (int p = 0; p < P; ++p) to[p] += load(input + d + p * kWidth) * w[p];
    };
    int64_t d = 0;
    for (; d + kLines <= width; d += kLines) {
      fetch_ahead(row + d, 128);
      for (int group = 0; group < kLines / kGroup; ++group) add(d + group * kGroup, a[group % 2]);
    }
    for (; d < width; d += kGroup) add(d, a[0]);
    Floats sum = {};
    for (int p = 0; p < P; ++p) sum += a[0][p] + a[1][p];
    return sum;
  });
  std::memcpy(output, &sums, 4 * n);
}

TWOFOLD_INLINE float scaled(const twofold_linear& a, int64_t output, float y) {
  if (a.scale) y *= a.scale[output];
  return a.bias ? y + a.bias[output] : y;
}

// Outputs `begin` to `end - 1` of one input: weights are read in kWidth streams, a cache line of each in turn. Returns the
// first output that is left over.
template <class T>
int64_t multiply_streams(const twofold_linear& a, const float* input, int64_t begin, int64_t end) {
  constexpr int P = Format<T>::kParts, kGroup = P * kWidth, kLine = 64 / sizeof(T);
  const int64_t width = a.in, length = (end - begin) / kWidth;
  if (width % kLine != 0) return begin;
  for (int64_t j = begin; j < begin + length; ++j) {
    const T* row = static_cast<const T*>(a.weight) + j * width;
    Floats products[kWidth] = {};
    for (int64_t line = 0; line < width; line += kLine)
      for (int stream = 0; stream < kWidth; ++stream)
        for (int64_t d = line; d < line + kLine; d += kGroup) {
          Floats w[P];
          Format<T>::unpack(row + stream * length * width + d, w);
          for (int p = 0; p < P; ++p) products[stream] += load(input + d + p * kWidth) * w[p];
        }
    const Floats sums = sum_each([&](int stream) __attribute__((always_inline)) { return products[stream]; });
    for (int stream = 0; stream < kWidth; ++stream) {
      const int64_t output = j + stream * length;
      a.output[output] = scaled(a, output, sums[stream]);
    }
  }
  return begin + length * kWidth;
}

// Outputs `begin` to `end - 1` for every row of the input, a few weight rows at a time.
template <class T>
void multiply_range(const twofold_linear& a, const float* input, int64_t begin, int64_t end) {
  const int64_t width = a.in;
  if (kInStreams<T> && a.rows == 1) begin = multiply_streams<T>(a, input, begin, end);
  for (int64_t j = begin; j < end; j += kWidth) {
    const int n = int(std::min<int64_t>(kWidth, end - j));
    const T* weight = static_cast<const T*>(a.weight) + j * width;
    float* output = a.output + j;
    int64_t row = 0;
    for (; row + 4 <= a.rows; row += 4)
      score_rows<4, 0>(input + row * width, int(width), weight, width, n, output + row * a.out, int(a.out), int(width), true);
    for (; row + 2 <= a.rows; row += 2)
      score_rows<2, 0>(input + row * width, int(width), weight, width, n, output + row * a.out, int(a.out), int(width), true);
    for (; row < a.rows; ++row) multiply_rows(input + row * width, weight, width, n, output + row * a.out);
    for (row = 0; row < a.rows; ++row)
      for (int i = 0; i < n; ++i) output[row * a.out + i] = scaled(a, j + i, output[row * a.out + i]);
  }
}

// The inputs in the order in which weights are unpacked.
template <class T>
const float* reorder(const twofold_linear& a, AlignedFloats& memory) {
  const int width = int(a.in);
  for (int64_t row = 0; row < a.rows; ++row)
    for (int i = 0; i < width; ++i) memory.data()[row * width + i] = a.input[row * width + channel_at<T>(i, width)];
  return memory.data();
}

template <class T>
int multiply(const twofold_linear& a) {
  if (!fits<T>(int(a.in))) return 1;
  constexpr bool kReorders = Format<T>::kParts > 1;
  AlignedFloats memory(kReorders ? a.rows * a.in : 0);
  const float* input = kReorders ? reorder<T>(a, memory) : a.input;
  const int64_t tiles = (a.out + kWidth - 1) / kWidth;
  const int64_t wanted = a.out * a.in * int64_t(sizeof(T)) / kBytesPerThread;
  const int64_t parts = std::max<int64_t>(1, std::min({int64_t(a.threads), wanted, tiles}));
  auto part = [&](int64_t i) {
    multiply_range<T>(a, input, tiles * i / parts * kWidth, std::min(a.out, tiles * (i + 1) / parts * kWidth));
  };
  if (parts == 1) return part(0), 0;
#pragma omp parallel for num_threads(int(parts)) schedule(static, 1)
  for (int64_t i = 0; i < parts; ++i) part(i);
  return 0;
}

}  // namespace

int linear_forward(const twofold_linear& a) {
  switch (a.dtype) {
    case TWOFOLD_FLOAT32: return multiply<float>(a);
    case TWOFOLD_BFLOAT16: return multiply<BFloat16>(a);
    case TWOFOLD_FLOAT16: return multiply<Float16>(a);
    case TWOFOLD_INT8: return multiply<int8_t>(a);
    default: return 1;
  }
}

}  // namespace twofold::TWOFOLD_ISA
