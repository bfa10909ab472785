// Attention of a few queries over a cache of one tensor (K = V) or two. Plain C: any language can call it.
#pragma once

#include <stdint.h>

#ifdef _WIN32
#define TWOFOLD_PUBLIC __declspec(dllexport)
#else
#define TWOFOLD_PUBLIC __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// int4: two to a byte with 8 added; channel c in the low half of byte c, channel c + D/2 in its high half.
enum twofold_dtype {
  TWOFOLD_FLOAT32 = 0,
  TWOFOLD_BFLOAT16 = 1,
  TWOFOLD_FLOAT16 = 2,
  TWOFOLD_INT8 = 3,
  TWOFOLD_INT4 = 4
};

// B sequences, G key/value heads, R query heads to each, T queries, S keys, D head dim. Strides count elements, for
// int4 bytes. Pointers that are not needed are null.
struct twofold_decode {
  const float* query;  // (B, G, R, T, D + rope_width), contiguous
  float* output;       // (B, G, R, T, D), contiguous
  const void* key;     // (B, G, S, D), D contiguous
  const void* value;   // the same, or null where key and value are one tensor
  const float* key_scale;    // (B, G, S), S contiguous: factors on integer keys
  const float* value_scale;  // factors on integer values; not read where value is null
  const void* rope_key;      // (B, S, rope_width): further channels of the keys, for all heads
  const float* rope_scale;   // (B, S), S contiguous: factors on integer rope keys
  const int32_t* position;   // (B, S), S contiguous: keys are rotated by these when they are read
  const double* frequency;   // D/2 angles per position, of the pairs of channels c and c + D/2
  const float* key_weight;   // D factors on keys before they are rotated
  const int32_t* first;      // (B, T): a query sees keys first to last - 1; one that sees none gets zeros
  const int32_t* last;
  // Null, or float32 rows that stand in place of the last recent->S of the S keys and values: its pointers from key to
  // position, without scales, their strides and S; the rest is as here.
  const struct twofold_decode* recent;
  int64_t B, G, R, T, S, D, rope_width;
  int64_t key_stride[3], value_stride[3];              // of B, G, S
  int64_t rope_stride[2];                              // of B, S
  int64_t key_scale_stride[2], value_scale_stride[2];  // of B, G
  int64_t rope_scale_stride, position_stride;          // of B
  float scale;                                         // factor on q.k
  int32_t dtype;                                       // of key, value and rope_key
  int32_t threads;
};

// 0, or 1 for a width or dtype that it does not do.
TWOFOLD_PUBLIC int twofold_decode_attention(const struct twofold_decode* args);

// The instruction set in use: "avx512", "avx2", "neon", "baseline".
TWOFOLD_PUBLIC const char* twofold_isa(void);

#ifdef __cplusplus
}
#endif
