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

enum twofold_dtype { TWOFOLD_FLOAT32 = 0, TWOFOLD_BFLOAT16 = 1, TWOFOLD_FLOAT16 = 2, TWOFOLD_INT8 = 3 };

// B sequences, G key/value heads, R query heads to each, T queries, S keys, D head dim. Strides count elements.
struct twofold_decode {
  const float* query;  // (B, G, R, T, D), contiguous
  float* output;       // the same
  const void* key;     // (B, G, S, D), D contiguous
  const void* value;   // the same, or null where key and value are one tensor
  const float* key_scale;    // (B, G, S) contiguous: factors on int8 keys, or null
  const float* value_scale;  // factors on int8 values, or null; ignored where value is null
  const int32_t* first;  // (B, T): a query sees keys first to last - 1; one that sees none gets zeros
  const int32_t* last;
  int64_t B, G, R, T, S, D;
  int64_t key_stride[3], value_stride[3];  // of B, G, S
  float scale;                             // factor on q.k
  int32_t dtype;
  int32_t threads;
};

// 0, or 1 for a head dim or dtype that it does not do.
TWOFOLD_PUBLIC int twofold_decode_attention(const struct twofold_decode* args);

// The instruction set in use: "avx512", "avx2", "neon", "baseline".
TWOFOLD_PUBLIC const char* twofold_isa(void);

#ifdef __cplusplus
}
#endif
