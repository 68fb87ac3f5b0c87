#include "paged_attention.h"

#include <algorithm>
#include <memory>

#include "paths.h"

namespace {

// Cuts a step into items.
struct WorkSplitter {
    const Geometry& g;
    StepWork& work;
    int64_t num_sequences;
    double share = 0;                  // an item of more work than this, of one head, could keep one thread busy alone
    std::vector<int32_t> common = {};  // by part: splits that it shares with the part before it

    // Query rows (new tokens x heads of a group) of a part of a sequence, which share one reading of K and V: whole passes of
    // the kernels, the more the longer what they read, as long as each thread has a few parts.
    int64_t part_rows(int64_t num_keys) const {
        constexpr int64_t MOST = 256, PARTS_PER_THREAD = 4;
        const bool tiles = bf16_path() == BF16_TILES && g.fits_tile_registers() && !g.int8_cache;
        const int64_t pass = tiles ? 32 : 48, least = tiles ? 64 : 48, keys_per_row = tiles ? 8 : 32;
        const int64_t fair = work.cu_q[num_sequences] * g.num_heads / (PARTS_PER_THREAD * work.threads);
        return std::clamp<int64_t>(std::min(num_keys / keys_per_row, fair) / pass * pass, least, MOST / pass * pass);
    }

    void run() {
        const int64_t group = g.group();
        double total_cost = 0;  // query rows x keys of all heads, at most
        std::vector<Part> others;
        for (int32_t b = 0; b < num_sequences; b++) {
            const int32_t num_new = work.cu_q[b + 1] - work.cu_q[b];
            const int64_t num_keys = work.window ? std::min<int64_t>(work.num_tokens[b], work.window + num_new) : work.num_tokens[b];
            total_cost += double(num_new) * num_keys * group * g.num_kv_heads;
            const int64_t tokens = std::max<int64_t>(1, part_rows(num_keys) / group);
            work.max_rows = std::max(work.max_rows, tokens * group);
            for (int32_t end = num_new; end > 0;) {  // the longest first
                const int32_t begin = std::max<int32_t>(0, (end - 1) / tokens * tokens);
                Part part{b, begin, end};
                part.split_begin = (int32_t)(work.first_seen(part) / KEYS);
                part.split_end = (int32_t)((work.end(part) + KEYS - 1) / KEYS);
                // the beginnings of tables, where a window leaves them undefined, are not compared
                const bool may_share = !work.window && num_new * group * 2 <= SHARING_ROWS && old_splits(part) > 0;
                (may_share ? work.parts : others).push_back(part);
                end = begin;
            }
        }
        share = total_cost / (8.0 * work.threads);
        std::sort(work.parts.begin(), work.parts.end(), [&](const Part& x, const Part& y) {
            const int32_t *a = table(x), *b = table(y);
            return std::lexicographical_compare(a, a + old_blocks(x), b, b + old_blocks(y));
        });
        const int32_t num_sharing = (int32_t)work.parts.size();
        work.parts.insert(work.parts.end(), others.begin(), others.end());
        common.assign(work.parts.size() + 1, 0);
        for (int32_t i = 1; i < num_sharing; i++) common[i] = common_splits(work.parts[i - 1], work.parts[i]);
        add_shared(0, num_sharing, 0);
        for (int32_t i = 0; i < (int32_t)work.parts.size(); i++)
            add(i, 1, std::max({work.parts[i].split_begin, common[i], common[i + 1]}), work.parts[i].split_end);
    }

    const int32_t* table(const Part& part) const { return work.table + part.b * work.table_stride; }

    // Splits that end before the part's first token, and the blocks that they lie in.
    int64_t old_splits(const Part& part) const { return work.begin(part) / KEYS; }
    int64_t old_blocks(const Part& part) const { return (old_splits(part) * KEYS + g.block_size - 1) / g.block_size; }

    int32_t common_splits(const Part& x, const Part& y) const {
        const int64_t most = std::min(old_blocks(x), old_blocks(y));
        const int64_t same = std::mismatch(table(x), table(x) + most, table(y)).first - table(x);
        return (int32_t)std::min({same * g.block_size / KEYS, old_splits(x), old_splits(y)});
    }

    // Items of the splits from `split` on that parts first ... end-1 have in common, then of those that only some have.
    void add_shared(int32_t first, int32_t end, int32_t split) {
        if (end - first < 2) return;
        const int32_t least = *std::min_element(&common[first + 1], &common[end]);
        if (least > split) {
            for (int32_t i = first, next = first; i < end; i = next) {
                int64_t rows = 0;
                while (next < end && (rows += work.parts[next].num_rows(g)) <= SHARING_ROWS) next++;
                add(i, next - i, split, least);
            }
        }
        for (int32_t i = first, next = first; i < end; i = next) {
            for (next = i + 1; next < end && common[next] > least;) next++;
            add_shared(i, next, least);
        }
    }

    // Splits begin ... end-1 of parts first ... first+count-1, which share them.
    void add(int32_t first, int32_t count, int32_t begin, int32_t end) {
        int64_t rows = 0;
        for (int32_t i = first; i < first + count; i++) rows += work.parts[i].num_rows(g);
        const int32_t heads = (int32_t)g.num_kv_heads;
        const Part& part = work.parts[first];
        const int64_t first_key = std::max<int64_t>(begin * KEYS, work.first_seen(part));
        const int64_t keys = std::min<int64_t>(end * KEYS, work.end(part)) - first_key;
        const double cost = double(rows) * keys;
        const bool cut = end - begin > 1 && work.threads > 1 && cost > share;
        const int32_t splits = cut ? 1 : end - begin;
        // As many heads in a row as a fair share allows: from one to the next the cache is fetched ahead.
        const double fair = share / cost * (cut ? end - begin : 1);
        const int32_t step = work.threads == 1 ? heads : (int32_t)std::clamp<int64_t>(fair, 1, heads);
        for (int32_t i = first; i < first + count; i++) {
            Part& of = work.parts[i];
            if (of.partial >= 0 || splits == of.num_splits()) continue;
            of.partial = (int32_t)work.partial_rows, of.merge = (int32_t)work.num_merges++;
            work.partial_rows += of.num_splits() * of.num_rows(g);
        }
        for (int32_t h = 0; h < heads; h += step)
            for (int32_t s = begin; s < end; s += splits)
                work.items.push_back({first, count, h, std::min(heads, h + step), s, s + splits});
    }
};

}  // namespace

extern "C" {

StepWork* paged_work_new(const Geometry* geometry, int64_t num_sequences, const int32_t* cu_q, const int32_t* num_tokens,
                     const int32_t* table, int64_t table_stride, int64_t window, int threads) {
    auto work = std::make_unique<StepWork>();
    work->cu_q = cu_q, work->num_tokens = num_tokens, work->table = table, work->table_stride = table_stride;
    work->window = window, work->threads = threads;
    WorkSplitter{*geometry, *work, num_sequences}.run();
    return work.release();
}

void paged_work_free(StepWork* work) { delete work; }
}
