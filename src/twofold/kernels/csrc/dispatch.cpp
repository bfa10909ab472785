// Chooses the instruction set once, at the first call. Compiled with TWOFOLD_ISA there is only that one to choose.

#ifndef _WIN32
#include <pthread.h>
#endif

#include "decode.h"

#define DECLARE(isa) namespace twofold::isa { int decode_attention(const twofold_decode&); }
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

using Decode = int (*)(const twofold_decode&);

struct Choice { Decode decode; const char* name; };

Choice choose() {
#if defined(TWOFOLD_ISA)
  return {twofold::TWOFOLD_ISA::decode_attention, NAME_OF(TWOFOLD_ISA)};
#else
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return {twofold::avx512::decode_attention, "avx512"};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {twofold::avx2::decode_attention, "avx2"};
#endif
#if defined(__aarch64__)
  return {twofold::baseline::decode_attention, "neon"};
#else
  return {twofold::baseline::decode_attention, "baseline"};
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
  if (!forked) return choice().decode(*args);
  twofold_decode alone = *args;
  alone.threads = 1;
  return choice().decode(alone);
}

const char* twofold_isa(void) { return choice().name; }
