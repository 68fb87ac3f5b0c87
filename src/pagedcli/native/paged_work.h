// How the attention of one step is cut into pieces of work.
#pragma once

#include <cstdint>
#include <vector>

#include "paged_cache.h"

constexpr int KEYS = 256;  // tokens of one split: its K, V and scores stay in the L2 cache
constexpr int SHARING_ROWS = 48;  // query rows of sequences that share a reading of the blocks that they have in common

// New tokens q_begin ... q_end-1 of sequence b, the rows of which are computed together.
struct Part {
    int32_t b, q_begin, q_end;
    int32_t split_begin = 0, split_end = 0;  // the splits that its rows see
    int32_t partial = -1;  // its first row among partial results, split by split, if several items compute them
    int32_t merge = 0;     // which counter of unfinished splits

    int32_t num_splits() const { return split_end - split_begin; }
    int64_t num_rows(const Geometry& g) const { return (q_end - q_begin) * g.group(); }
};

// Some splits and key/value heads of one part, or of `count` parts that share the blocks of these splits.
struct Item {
    int32_t first, count, head_begin, head_end, split_begin, split_end;
};

// Reads the tables when it is made: they must not change before it is used.
struct StepWork {
    const int32_t *cu_q, *num_tokens, *table;
    int64_t table_stride;
    int64_t window;  // tokens that a query sees, itself included; 0: all before it
    int threads;
    int64_t partial_rows = 0, num_merges = 0;  // of one head
    int64_t max_rows = SHARING_ROWS;           // of an item
    std::vector<Part> parts;
    std::vector<Item> items;

    // Positions of its first token and behind its last one.
    int64_t begin(const Part& part) const { return num_tokens[part.b] - (cu_q[part.b + 1] - cu_q[part.b]) + part.q_begin; }
    int64_t end(const Part& part) const { return begin(part) + part.q_end - part.q_begin; }
    // The first token that its first row sees. The table's entries of the blocks before it are undefined.
    int64_t first_seen(const Part& part) const { return window ? std::max<int64_t>(0, begin(part) + 1 - window) : 0; }
};
