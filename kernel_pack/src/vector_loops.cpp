#include "vector_loops.h"

namespace archipel {

const VectorLoops& vector_loops() {
#ifdef ONLY_LEVEL  // tests compile with -DONLY_LEVEL=v2, and v3, to run these loops on a processor of a higher level
  return ONLY_LEVEL::loops;
#else
  static const VectorLoops& chosen = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                                             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
                                         ? v4::loops
                                     : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? v3::loops
                                                                                                      : v2::loops;
  return chosen;
#endif
}

float total(const float* lanes) {
  float sum = 0;
  for (size_t lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

}  // namespace archipel
