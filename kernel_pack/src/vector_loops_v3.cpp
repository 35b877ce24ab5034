#define LEVEL v3
#define LANES_AT_ONCE 3
#define ROWS_AT_ONCE 6
#include "vector_loops.inc"
