#define LEVEL v4
#define LANES_AT_ONCE 9
#define ROWS_AT_ONCE 24
#include "vector_loops.inc"
