#define LEVEL v2
#define LANES_AT_ONCE 3
#define ROWS_AT_ONCE 2
#include "vector_loops.inc"
