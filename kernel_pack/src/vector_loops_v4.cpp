#define LEVEL v4
#define LANES_AT_ONCE 9
#include "vector_loops.inc"
