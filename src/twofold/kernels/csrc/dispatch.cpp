// Chooses the instruction set once, at the first call. Compiled with TWOFOLD_ISA there is only that one to choose.

#ifndef _WIN32
#include <pthread.h>
#endif

#include "decode.h"
#include "linear.h"

#define DECLARE(isa)                                 \
  namespace twofold::isa {                          \
  int decode_attention(const twofold_decode&);      \
  int linear_forward(const twofold_linear&);        \
  }
#define CHOICE(isa, name) Choice{twofold::isa::decode_attention, twofold::isa::linear_forward, name}
#define NAME(isa) #isa
#define NAME_OF(isa) NAME(isa)
#if defined(TWOFOLD_ISA)
DECLARE(TWOFOLD_ISA)
#else
#if defined(__x86_64__)
DECLARE(avx512)
DECLARE(avx2)
#endif
DECLARE(baseline)
#endif

namespace {

struct Choice {
  int (*decode)(const twofold_decode&);
  int (*linear)(const twofold_linear&);
  const char* name;
};

Choice choose() {
#if defined(TWOFOLD_ISA)
  return CHOICE(TWOFOLD_ISA, NAME_OF(TWOFOLD_ISA));
#else
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return CHOICE(avx512, "avx512");
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return CHOICE(avx2, "avx2");
#endif
#if defined(__aarch64__)
  return CHOICE(baseline, "neon");
#else
  return CHOICE(baseline, "baseline");
#endif
#endif
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

// The threads of OpenMP do not survive fork; a forked child works alone.
bool forked = false;
#ifndef _WIN32
const int watching = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

}  // namespace

int twofold_decode_attention(const twofold_decode* args) {
  twofold_decode call = *args;
  if (forked) call.threads = 1;
  return choice().decode(call);
}

int twofold_linear_forward(const twofold_linear* args) {
  twofold_linear call = *args;
  if (forked) call.threads = 1;
  return choice().linear(call);
}

const char* twofold_isa(void) { return choice().name; }
