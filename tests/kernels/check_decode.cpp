// Compares attention and linear layers with a plain loop in double precision, on whatever machine this is compiled for:
//
//     c++ -std=c++17 -O2 -DTWOFOLD_ISA=baseline -I src/twofold/kernels/csrc tests/kernels/check_decode.cpp
//         src/twofold/kernels/csrc/{decode,dispatch,linear}.cpp -o check_decode && ./check_decode
//
// Prints the largest error of each format, and fails where one is larger than rounding explains.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "decode.h"
#include "linear.h"

namespace {

std::mt19937 generator(0);

int pick(std::initializer_list<int> from) {
  return from.begin()[generator() % from.size()];
}

float normal() {
  static std::normal_distribution<float> distribution;
  return distribution(generator);
}

uint16_t to_half(float x, int dtype) {  // by dropping bits: rounding is the caller's business, not the kernel's
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (dtype == TWOFOLD_BFLOAT16) return uint16_t(bits >> 16);
  const int exponent = int(bits >> 23 & 255) - 127;
  if (exponent < -14) return uint16_t(bits >> 16 & 0x8000);
  return uint16_t((bits >> 16 & 0x8000) | uint32_t(exponent + 15) << 10 | (bits >> 13 & 0x3ff));
}

double from_half(uint16_t half, int dtype) {
  if (dtype == TWOFOLD_BFLOAT16) {
    const uint32_t bits = uint32_t(half) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  const int exponent = half >> 10 & 31;
  const double size = exponent == 0 ? 0 : std::ldexp(1024 + (half & 0x3ff), exponent - 25);
  return half & 0x8000 ? -size : size;
}

// Rows (B, G, S, width) inside larger storage with rubbish around them, their scales, and what they stand for.
struct Rows {
  int64_t B, G, S, width, row_bytes, stride[3], scale_stride[2];  // strides in elements; bytes for int4
  std::vector<uint8_t> bytes;
  std::vector<float> scale;
  std::vector<double> exact;

  Rows(int64_t B, int64_t G, int64_t S, int64_t width, int dtype) : B(B), G(G), S(S), width(width) {
    const int size = dtype == TWOFOLD_FLOAT32 ? 4 : dtype == TWOFOLD_BFLOAT16 || dtype == TWOFOLD_FLOAT16 ? 2 : 1;
    const int64_t elements = dtype == TWOFOLD_INT4 ? width / 2 : width;
    row_bytes = elements * size;
    stride[2] = elements + 16, stride[1] = stride[2] * (S + 3), stride[0] = stride[1] * G;
    scale_stride[1] = S + 3, scale_stride[0] = scale_stride[1] * G;
    bytes.assign(B * stride[0] * size + 64, 0xff);  // NaN in every float format
    scale.assign(B * scale_stride[0], NAN);
    exact.resize(B * G * S * width);
    const bool integer = dtype == TWOFOLD_INT8 || dtype == TWOFOLD_INT4;
    for (int64_t bg = 0; bg < B * G; ++bg)
      for (int64_t j = 0; j < S; ++j) {
        uint8_t* row = bytes.data() + (bg * stride[1] + j * stride[2]) * size;
        double* meant = exact.data() + (bg * S + j) * width;
        const float factor = integer ? 0.02f + 0.01f * float(generator() % 8) : 1;
        scale[bg * scale_stride[1] + j] = factor;
        if (dtype == TWOFOLD_INT4) std::memset(row, 0, elements);
        for (int64_t d = 0; d < width; ++d) {
          const float x = normal();
          if (dtype == TWOFOLD_FLOAT32) {
            std::memcpy(row + 4 * d, &x, 4), meant[d] = x;
          } else if (!integer) {
            const uint16_t half = to_half(x, dtype);
            std::memcpy(row + 2 * d, &half, 2), meant[d] = from_half(half, dtype);
          } else if (dtype == TWOFOLD_INT8) {
            const int code = int(generator() % 255) - 127;
            row[d] = uint8_t(int8_t(code)), meant[d] = double(code) * factor / 30;
          } else {
            const int code = int(generator() % 15) - 7;
            row[d % elements] |= uint8_t((code + 8) << (d < elements ? 0 : 4)), meant[d] = double(code) * factor * 10 / 30;
          }
        }
        if (integer) scale[bg * scale_stride[1] + j] = factor * (dtype == TWOFOLD_INT8 ? 1 : 10) / 30;
      }
  }

  // The last rows mean these floats from now on; what is stored of them is rubbish.
  void replace_last(const Rows& floats) {
    const int64_t size = row_bytes / (stride[2] - 16);  // of an element
    for (int64_t bg = 0; bg < B * G; ++bg)
      for (int64_t i = 0, j = S - floats.S; i < floats.S; ++i, ++j) {
        std::memset(bytes.data() + (bg * stride[1] + j * stride[2]) * size, 0xff, row_bytes);
        scale[bg * scale_stride[1] + j] = NAN;
        std::copy_n(floats.exact.data() + (bg * floats.S + i) * width, width, exact.data() + (bg * S + j) * width);
      }
  }
};

// The largest error of one random case, relative to what the largest output can be.
double check(int dtype) {
  const int64_t B = pick({1, 2}), G = pick({1, 2, 3}), R = pick({1, 2, 4, 7}), T = pick({1, 1, 2, 5});
  const int64_t D = pick({16, 48, 64, 80, 128}), S = pick({1, 2, 31, 63, 64, 65, 130, 517});
  const int way = pick({0, 1, 2, 3});  // plain, rotated, rotated with weights, rope key
  const int64_t rope_width = way == 3 ? pick({16, 32, 64}) : 0;
  const bool tied = pick({0, 1});
  const bool integer = dtype == TWOFOLD_INT8 || dtype == TWOFOLD_INT4;
  Rows key(B, G, S, D, dtype), value(B, G, S, D, dtype), rope(B, 1, S, std::max<int64_t>(rope_width, 16), dtype);
  const int64_t num_recent = std::min<int64_t>(S, pick({0, 1, 33}));
  const Rows new_key(B, G, num_recent, D, TWOFOLD_FLOAT32), new_value(B, G, num_recent, D, TWOFOLD_FLOAT32);
  const Rows new_rope(B, 1, num_recent, rope.width, TWOFOLD_FLOAT32);
  key.replace_last(new_key), value.replace_last(new_value), rope.replace_last(new_rope);
  std::vector<float> query(B * G * R * T * (D + rope_width)), output(B * G * R * T * D, NAN), weight(D);
  for (float& x : query) x = normal();
  for (float& x : weight) x = way == 2 ? normal() : 1;
  std::vector<int32_t> position(B * (S + 2)), first(B * T), last(B * T);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t j = 0, at = generator() % 3000; j < S; ++j, at += j % 100 == 37 ? 5 : 1) position[b * (S + 2) + j] = int32_t(at);
  const bool everything = pick({0, 1});
  for (int64_t i = 0; i < B * T; ++i) {
    first[i] = everything ? 0 : int32_t(generator() % (S + 1));
    last[i] = everything ? int32_t(S) : int32_t(generator() % (S + 1));
  }
  std::vector<double> frequency(D / 2);
  for (int64_t c = 0; c < D / 2; ++c) frequency[c] = std::pow(10000.0, -2.0 * double(c) / double(D));

  twofold_decode a{};
  a.query = query.data(), a.output = output.data(), a.key = key.bytes.data();
  a.value = tied ? nullptr : value.bytes.data();
  if (integer) a.key_scale = key.scale.data(), a.value_scale = value.scale.data(), a.rope_scale = rope.scale.data();
  if (rope_width) a.rope_key = rope.bytes.data();
  if (way == 1 || way == 2) a.position = position.data(), a.frequency = frequency.data();
  if (way == 2) a.key_weight = weight.data();
  a.first = first.data(), a.last = last.data();
  a.B = B, a.G = G, a.R = R, a.T = T, a.S = S, a.D = D, a.rope_width = rope_width;
  std::copy(key.stride, key.stride + 3, a.key_stride), std::copy(value.stride, value.stride + 3, a.value_stride);
  // A rope key of 16 channels lies in rows that are wide enough for any width here.
  a.rope_stride[0] = rope.stride[0], a.rope_stride[1] = rope.stride[2];
  std::copy(key.scale_stride, key.scale_stride + 2, a.key_scale_stride);
  std::copy(value.scale_stride, value.scale_stride + 2, a.value_scale_stride);
  a.rope_scale_stride = rope.scale_stride[0], a.position_stride = S + 2;
  a.scale = 1 / std::sqrt(float(D)), a.dtype = dtype, a.threads = 1;
  twofold_decode recent{};
  recent.key = new_key.bytes.data(), recent.value = tied ? nullptr : new_value.bytes.data(), recent.S = num_recent;
  if (rope_width) recent.rope_key = new_rope.bytes.data();
  if (a.position) recent.position = position.data() + S - num_recent, recent.position_stride = S + 2;
  std::copy(new_key.stride, new_key.stride + 3, recent.key_stride);
  std::copy(new_value.stride, new_value.stride + 3, recent.value_stride);
  recent.rope_stride[0] = new_rope.stride[0], recent.rope_stride[1] = new_rope.stride[2];
  if (num_recent) a.recent = &recent;
  if (twofold_decode_attention(&a)) return INFINITY;

  double worst = 0;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t g = 0; g < G; ++g)
      for (int64_t row = 0; row < R * T; ++row) {
        const int64_t t = row % T, lo = first[b * T + t], hi = std::max<int64_t>(lo, last[b * T + t]);
        const float* q = query.data() + ((b * G + g) * R * T + row) * (D + rope_width);
        std::vector<double> weights(hi - lo), expected(D, 0.0);
        double sum = 0;
        for (int64_t j = lo; j < hi; ++j) {
          const double* k = key.exact.data() + ((b * G + g) * S + j) * D;
          double score = 0;
          for (int64_t c = 0; c < D / 2; ++c) {
            const double low = k[c] * weight[c], high = k[c + D / 2] * weight[c + D / 2];
            const double angle = a.position ? position[b * (S + 2) + j] * frequency[c] : 0;
            score += q[c] * (low * std::cos(angle) - high * std::sin(angle));
            score += q[c + D / 2] * (high * std::cos(angle) + low * std::sin(angle));
          }
          for (int64_t c = 0; c < rope_width; ++c) score += q[D + c] * rope.exact[(b * S + j) * rope.width + c];
          weights[j - lo] = std::exp(score * a.scale);
          sum += weights[j - lo];
        }
        for (int64_t j = lo; j < hi; ++j)
          for (int64_t d = 0; d < D; ++d)
            expected[d] += weights[j - lo] / sum * (tied ? key : value).exact[((b * G + g) * S + j) * D + d];
        for (int64_t d = 0; d < D; ++d) {
          const double error = std::fabs(output[((b * G + g) * R * T + row) * D + d] - expected[d]);
          worst = error <= worst ? worst : error;  // NaN is larger than everything
        }
      }
  return worst;
}

// The largest error of a linear layer, relative to the size of its outputs; its weights are one head's rows.
double check_linear(int dtype) {
  const int64_t rows = pick({1, 2, 3, 4, 7, 8}), in = pick({64, 128, 192, 320}), out = pick({1, 3, 15, 16, 17, 40});
  const Rows weight(1, 1, out, in, dtype);
  std::vector<uint8_t> packed;
  for (int64_t o = 0; o < out; ++o) {
    const uint8_t* row = weight.bytes.data() + o * weight.stride[2] * (weight.row_bytes / in);
    packed.insert(packed.end(), row, row + weight.row_bytes);
  }
  packed.resize(packed.size() + 64, 0xff);  // what is fetched ahead is not summed
  std::vector<float> input(rows * in), output(rows * out, NAN), bias(out);
  for (float& x : input) x = normal();
  for (float& x : bias) x = normal();
  const float* scale = dtype == TWOFOLD_INT8 ? weight.scale.data() : nullptr;
  const twofold_linear a{input.data(), output.data(), packed.data(), scale, bias.data(), rows, in, out, dtype, 1};
  if (twofold_linear_forward(&a)) return INFINITY;
  double worst = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < out; ++o) {
      double expected = bias[o];
      for (int64_t i = 0; i < in; ++i) expected += double(input[r * in + i]) * weight.exact[o * in + i];
      const double error = std::fabs(output[r * out + o] - expected) / std::sqrt(double(in));
      worst = error <= worst ? worst : error;
    }
  return worst;
}

// The worst of many random cases; fails where it is larger than rounding explains.
bool report(const char* what, const char* format, double (*once)(int), int dtype) {
  double worst = 0;
  for (int i = 0; i < 150; ++i) {
    const double error = once(dtype);
    worst = error <= worst ? worst : error;
  }
  std::printf("%s %s %-8s %.1e\n", twofold_isa(), what, format, worst);
  return worst < 2e-5;
}

}  // namespace

int main() {
  const char* names[] = {"float32", "bfloat16", "float16", "int8", "int4"};
  bool right = true;
  for (int dtype = TWOFOLD_FLOAT32; dtype <= TWOFOLD_INT4; ++dtype) right &= report("attention", names[dtype], check, dtype);
  for (int dtype = TWOFOLD_FLOAT32; dtype <= TWOFOLD_INT8; ++dtype) right &= report("linear", names[dtype], check_linear, dtype);
  return !right;
}
