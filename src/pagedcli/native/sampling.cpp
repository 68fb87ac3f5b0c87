// From logits to tokens: the likeliest token of each row, the k likeliest, what limits keep, and draws.
//
// A row's result depends on this row alone: neither on the others nor on the number of threads.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "decoder_rows.h"

namespace {

constexpr int64_t CHUNK = 1024;  // elements that are looked at, or whose weights are added, before others are

// The largest of n elements; NaN if one is.
template <class T> float largest(const typename T::Elem* x, int64_t n) {
    vf top = splat(-INFINITY);
    vi bad = {};
    for (int64_t i = 0; i + VL <= n; i += VL) {
        vf v = Rows<T>::load(x + i);
        bad |= v != v;
        top = max_of(top, v);
    }
    float best = max_in(top);
    for (int j = 0; j < VL; j++)
        if (bad[j]) return NAN;
    for (int64_t i = n / VL * VL; i < n; i++) {
        const float v = Rows<T>::load_one(x + i);
        if (v != v) return v;
        best = std::max(best, v);
    }
    return best;
}

// The largest element of a row, NaN if one is: as in torch, NaN is larger than any number. And the chunk that holds it.
template <class T> struct Peak {
    float value;
    int64_t start = 0;

    Peak(const typename T::Elem* row, int64_t size) : value(largest<T>(row, std::min(CHUNK, size))) {
        for (int64_t i = CHUNK; i < size && value == value; i += CHUNK) {
            const float other = largest<T>(row + i, std::min(CHUNK, size - i));
            if (!(other <= value)) value = other, start = i;
        }
    }
};

template <class T> void likeliest(const void* scores, int64_t num_rows, int64_t size, int64_t* out, int threads) {
    using E = typename T::Elem;
    constexpr int64_t FEW = 4 * VL;  // only the chunk that holds the largest is looked at twice
    parallel_for(threads_for(threads, num_rows * size / 4), num_rows, [&](int64_t r) {
        const E* row = (const E*)scores + r * size;
        const Peak<T> best(row, size);
        out[r] = -1;
        if (!std::isfinite(best.value)) return;
        int64_t where = best.start;
        while (where + FEW <= size && largest<T>(row + where, FEW) < best.value) where += FEW;
        while (Rows<T>::load_one(row + where) != best.value) where++;
        out[r] = where;
    });
}

// The k largest, largest first, equal ones by their place.
void top_of_row(const float* x, int64_t n, int64_t k, float* values, int64_t* places) {
    int64_t count = 0, i = 0;
    auto put = [&](int64_t place) {
        if (count == k && !(x[place] > values[k - 1])) return;
        int64_t at = count < k ? count++ : k - 1;
        for (; at > 0 && values[at - 1] < x[place]; at--) values[at] = values[at - 1], places[at] = places[at - 1];
        values[at] = x[place], places[at] = place;
    };
    while (i < k) put(i++);
    for (; i + 4 * VL <= n; i += 4 * VL) {
        const vf top = max_of(max_of(loadf(x + i), loadf(x + i + VL)), max_of(loadf(x + i + 2 * VL), loadf(x + i + 3 * VL)));
        if (!(max_in(top) > values[k - 1])) continue;
        for (int64_t j = 0; j < 4 * VL; j++) put(i + j);
    }
    while (i < n) put(i++);
}

// One row at a temperature. The weight of an element is its probability as a share of the largest one's.
template <class T> class Distribution {
  public:
    Distribution(const typename T::Elem* row, int64_t size, float temperature)
        : row(row), size(size), scale(1.44269504f / temperature), top(Peak<T>(row, size).value) {}

    bool is_valid() const { return std::isfinite(top); }

    // Of the elements that are at least `floor`, the first one with which their weights pass this share of the total.
    int64_t drawn(double share, float floor) const {
        static thread_local std::vector<double> ends;  // the weight up to the end of each chunk
        double total = 0;
        ends.clear();
        for (int64_t start = 0; start < size; start += CHUNK) ends.push_back(total += chunk_weight(start, floor));
        const double target = share * total;
        auto end = std::upper_bound(ends.begin(), ends.end(), target);
        if (end == ends.end()) end = std::lower_bound(ends.begin(), ends.end(), total);  // the last chunk with any weight
        const int64_t start = (end - ends.begin()) * CHUNK;
        double sum = start ? end[-1] : 0;
        int64_t found = -1;
        for (int64_t i = start; i < std::min(size, start + CHUNK); i += VL) {
            const vf some = weights(i, floor);
            for (int j = 0; j < VL; j++) {
                if (!(some[j] > 0)) continue;
                found = i + j;
                if ((sum += some[j]) > target) return found;
            }
        }
        return found;  // the sums of a chunk and of its elements differ in their last bits
    }

    // The smallest element that min-p, then top-k, then top-p keep; at most that where min-p alone decides.
    float smallest_kept(int64_t top_k, float top_p, float min_p, float temperature) const {
        float floor = min_p > 0 ? top + temperature * std::log(min_p) : -INFINITY;
        const bool counts = 0 < top_k && top_k <= size;
        if (!counts && !(top_p < 1)) return floor;
        static thread_local std::vector<float> kept;  // all that decide
        double total = 0;
        if (counts) {
            keep_largest(kept, top_k, floor);
            if ((int64_t)kept.size() == top_k) floor = *std::min_element(kept.begin(), kept.end());
            if (!(top_p < 1)) return floor;
            for (const float x : kept) total += weight(x);
        } else {
            for (int64_t start = 0; start < size; start += CHUNK) total += chunk_weight(start, floor);
            // all that weigh less than this together weigh less than what top-p drops, by half for rounding
            const double least = 0.5 * (1.0 - top_p) * total / size;
            keep_largest(kept, size, std::max(floor, top + (float)std::log2(least) / scale));
        }
        return smallest_of_share(kept, top_p * total);
    }

  private:
    const typename T::Elem* row;
    int64_t size;
    float scale, top;

    // From element i on, -INFINITY after the last one.
    vf load(int64_t i) const {
        if (i + VL <= size) return Rows<T>::load(row + i);
        const vi inside = iota() < (int32_t)(size - i);
        return (vf)(((vi)load_some<T>(row + i, size - i) & inside) | ((vi)splat(-INFINITY) & ~inside));
    }

    double weight(float x) const { return exp2_of((x - top) * scale); }

    // Of the elements from i on, 0 of those that are smaller than `floor`.
    vf weights(int64_t i, float floor) const {
        const vf x = load(i);
        return (vf)((vi)exp2_of((x - top) * scale) & (vi)(x >= floor));
    }

    double chunk_weight(int64_t start, float floor) const {
        vf sum = {};
        for (int64_t i = start; i < std::min(size, start + CHUNK); i += VL) sum += weights(i, floor);
        return sum_of(sum);
    }

    // The `count` largest elements that are at least `floor`, in any order.
    void keep_largest(std::vector<float>& kept, int64_t count, float floor) const {
        auto drop = [&] {
            std::nth_element(kept.begin(), kept.begin() + (count - 1), kept.end(), std::greater<>());
            kept.resize(count);
            floor = std::max(floor, kept[count - 1]);
        };
        kept.clear();
        for (int64_t i = 0; i < size; i += VL) {
            const vf x = load(i);
            if (max_in(x) < floor) continue;
            for (int j = 0; j < std::min<int64_t>(VL, size - i); j++)
                if (x[j] >= floor) kept.push_back(x[j]);
            if ((int64_t)kept.size() >= 2 * count + CHUNK) drop();
        }
        if ((int64_t)kept.size() > count) drop();
    }

    // The smallest of some elements such that all larger ones together weigh less than `share`; at least the largest.
    float smallest_of_share(std::vector<float>& elements, double share) const {
        float *first = elements.data(), *last = first + elements.size(), found = top;
        double above = 0;  // the weight of those before `first`
        while (first < last) {
            const float middle = first[(last - first) / 2];
            float* equal = std::partition(first, last, [=](float x) { return x > middle; });
            float* smaller = std::partition(equal, last, [=](float x) { return x == middle; });
            double larger = above;
            for (const float* x = first; x < equal; x++) larger += weight(*x);
            if (larger >= share) {
                last = equal;
                continue;
            }
            found = std::min(found, middle);
            above = larger + (smaller - equal) * weight(middle);
            first = smaller;
            if (above >= share) break;
        }
        return found;
    }
};

}  // namespace

extern "C" {

// The index of the largest of each row [num_rows][size], the first one of equals; -1 where the largest is no number.
void sampling_argmax(int64_t dtype, const void* scores, int64_t num_rows, int64_t size, int64_t* out, int threads) {
    with_activations(dtype, [&](auto type) { likeliest<decltype(type)>(scores, num_rows, size, out, threads); });
}

// The k largest of each row [num_rows][size], 0 < k <= size.
void sampling_top(const float* scores, int64_t num_rows, int64_t size, int64_t k, float* values, int64_t* places, int threads) {
    parallel_for(threads_for(threads, num_rows * size), num_rows, [&](int64_t r) {
        top_of_row(scores + r * size, size, k, values + r * k, places + r * k);
    });
}

// What the limits of each row [num_rows][size] keep: its smallest element. -INFINITY where the largest is no number, and
// for rows with temperature 0.
void sampling_floors(int64_t dtype, const void* scores, int64_t num_rows, int64_t size, const float* temperatures,
                     const int32_t* top_k, const float* top_p, const float* min_p, float* floors, int threads) {
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        parallel_for(threads_for(threads, num_rows * size), num_rows, [&](int64_t r) {
            floors[r] = -INFINITY;
            const float temperature = temperatures[r];
            if (temperature == 0 || !(top_k[r] > 0 || top_p[r] < 1 || min_p[r] > 0)) return;
            const Distribution<T> row((const typename T::Elem*)scores + r * size, size, temperature);
            if (row.is_valid()) floors[r] = row.smallest_kept(top_k[r], top_p[r], min_p[r], temperature);
        });
    });
}

// A token of each row [num_rows][size]: by a share of the weight of the elements that are at least the row's floor (null:
// all); the first of the largest where the temperature is 0; -1 where the largest is no number.
void sampling_draw(int64_t dtype, const void* scores, int64_t num_rows, int64_t size, const float* temperatures,
                   const float* shares, const float* floors, int64_t* out, int threads) {
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        parallel_for(threads_for(threads, num_rows * size), num_rows, [&](int64_t r) {
            const auto* scores_of_row = (const typename T::Elem*)scores + r * size;
            if (temperatures[r] == 0) return likeliest<T>(scores_of_row, 1, size, out + r, 1);
            const Distribution<T> row(scores_of_row, size, temperatures[r]);
            out[r] = row.is_valid() ? row.drawn(shares[r], floors ? floors[r] : -INFINITY) : -1;
        });
    });
}
}
