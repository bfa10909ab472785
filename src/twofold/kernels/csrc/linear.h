// Linear layers of one or a few tokens, which are bound by reading the weights. Plain C, as decode.h.
#pragma once

#include "decode.h"

#ifdef __cplusplus
extern "C" {
#endif

// output = input · weight^T · scale + bias, with one scale and one bias for each output. Pointers that are not needed
// are null.
struct twofold_linear {
  const float* input;  // (rows, in), contiguous
  float* output;       // (rows, out), contiguous
  const void* weight;  // (out, in), contiguous
  const float* scale;  // out
  const float* bias;   // out
  int64_t rows, in, out;
  int32_t dtype;  // of weight
  int32_t threads;
};

// 0, or 1 for a width or dtype that it does not do: `in` must be a multiple of 16 for float32, 32 for the 16-bit floats
// and 64 for int8.
TWOFOLD_PUBLIC int twofold_linear_forward(const struct twofold_linear* args);

#ifdef __cplusplus
}
#endif
