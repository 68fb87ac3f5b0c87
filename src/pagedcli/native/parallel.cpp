#include "parallel.h"

GompParallel gomp_parallel = nullptr;

extern "C" void native_set_parallel(void* function) { gomp_parallel = reinterpret_cast<GompParallel>(function); }
