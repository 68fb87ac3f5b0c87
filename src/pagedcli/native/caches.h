// The caches of this machine, as far as kernels choose their blocks by them.
#pragma once

#include <cstdint>

// Whether the processor reads a stream from memory faster if kernels do not fetch what is some KB ahead.
bool fetches_alone();

extern "C" {

// Bytes of L2 cache per core: one that several cores share counts in equal parts. 1 MiB where the system does not say.
int64_t native_l2_bytes();

// Rows of x, read again for every panel of a weight, that make a block, a multiple of `unit`: they take half of the L2 cache,
// which leaves the rest to what passes by. At least 64.
int64_t native_rows_per_block(int64_t row_bytes, int64_t unit);
}
