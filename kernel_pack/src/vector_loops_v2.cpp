#define LEVEL v2
#define LANES_AT_ONCE 3
#include "vector_loops.inc"
