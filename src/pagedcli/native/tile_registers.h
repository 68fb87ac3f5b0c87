// Tile registers (AMX): eight of 16 rows x 64 bytes, and products of whole tiles.
//
// Two bodies behind one struct: the instructions, and plain loops with the same strides and roundings, so that layouts,
// ends and invariance are tested on any machine (environment variable PAGEDCLI_EMULATE_TILES, see build.py).
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(EMULATE_TILES)
#define HAS_TILES
#include <atomic>
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(HAS_TILES)

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;  // of a whole tile; a row is also 16 sums

// What LDTILECFG reads.
struct alignas(64) TileConfig {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

// The registers of this thread while the object lives. Registers 0 to 3 are sums [row block][column block], 4 and 5 left
// operands (one per row block), 6 and 7 right ones (one per column block).
struct TileRegisters {
    TileRegisters() = default;
    TileRegisters(const TileRegisters&) = delete;
    ~TileRegisters();

    // Rows of the two left operands (0: not there), bytes of their rows, rows of the right operands. Zeroes all registers
    // if it differs from the last shape. A sum must not depend on how many rows there are, and what lies after the last
    // row may be anything: so the rows are configured, not padded.
    void shape(int rows0, int rows1, int left_bytes, int right_rows) {
        // one number in a register: numbers stored one by one and compared as 16 bytes wait for all stores before them
        const uint64_t now = (uint64_t)rows0 << 48 | (uint64_t)rows1 << 32 | (uint64_t)left_bytes << 16 | (uint64_t)right_rows;
        if (now == last) return;
        last = now;
        memset(&config, 0, sizeof config);
        config.palette = 1;
        const int rows[8] = {rows0, rows0, rows1, rows1, rows0, rows1, right_rows, right_rows};
        for (int i = 0; i < 8; i++) {
            config.rows[i] = rows[i];
            config.bytes[i] = !rows[i] ? 0 : i == 4 || i == 5 ? left_bytes : TILE_BYTES;
        }
        configure();
    }

    template <int T> void zero();
    template <int T> void load(const void* from, int64_t stride);  // stride: bytes from row to row
    template <int T> void store(void* to, int64_t stride);
    template <int C, int A, int B> void multiply_bf16();  // C += A . B, float32 sums of pairs
    template <int C, int A, int B> void multiply_codes();  // C += A . B, A signed, B unsigned, exact 32-bit sums

private:
    uint64_t last = 0;
    TileConfig config = {};
    void configure();
#if defined(EMULATE_TILES)
    alignas(64) char data[8][TILE_ROWS][TILE_BYTES];
    void check(bool ok) const { if (!ok) abort(); }  // where the processor would raise an exception
    void check_product(int c, int a, int b) const;
#endif
};

#if defined(EMULATE_TILES)

// What was done so far, for tests and measurements.
struct TileCounts {
    std::atomic<int64_t> configurations, loads, stores, products;
    static void add(std::atomic<int64_t>& count) { count.fetch_add(1, std::memory_order_relaxed); }
};
inline TileCounts tile_counts;

inline bool tiles_permitted() { return true; }
inline TileRegisters::~TileRegisters() {}
inline void TileRegisters::configure() {
    TileCounts::add(tile_counts.configurations);
    memset(data, 0, sizeof data);
}

template <int T> inline void TileRegisters::zero() {
    check(config.rows[T]);
    memset(data[T], 0, sizeof data[T]);
}
template <int T> inline void TileRegisters::load(const void* from, int64_t stride) {
    TileCounts::add(tile_counts.loads);
    zero<T>();
    for (int r = 0; r < config.rows[T]; r++) memcpy(data[T][r], (const char*)from + r * stride, config.bytes[T]);
}
template <int T> inline void TileRegisters::store(void* to, int64_t stride) {
    TileCounts::add(tile_counts.stores);
    check(config.rows[T]);
    for (int r = 0; r < config.rows[T]; r++) memcpy((char*)to + r * stride, data[T][r], config.bytes[T]);
}

inline void TileRegisters::check_product(int c, int a, int b) const {
    TileCounts::add(tile_counts.products);
    check(config.rows[c] && config.rows[c] == config.rows[a] && config.bytes[c] == config.bytes[b] &&
          config.bytes[a] == config.rows[b] * 4);
}

// Denormals count as zero.
inline float tile_float(uint32_t bits) {
    if (!(bits & 0x7f800000)) bits &= 0x80000000;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

template <int C, int A, int B> inline void TileRegisters::multiply_bf16() {
    check_product(C, A, B);
    for (int m = 0; m < config.rows[C]; m++) {
        float even[TILE_ROWS] = {}, odd[TILE_ROWS] = {}, sums[TILE_ROWS];
        for (int k = 0; k < config.rows[B]; k++) {
            uint32_t left, right[TILE_ROWS];
            memcpy(&left, data[A][m] + k * 4, 4);
            memcpy(right, data[B][k], TILE_BYTES);
            const float a0 = tile_float(left << 16), a1 = tile_float(left & 0xffff0000);
            for (int n = 0; n < TILE_ROWS; n++) {
                even[n] += a0 * tile_float(right[n] << 16);
                odd[n] += a1 * tile_float(right[n] & 0xffff0000);
            }
        }
        memcpy(sums, data[C][m], TILE_BYTES);
        for (int n = 0; n < TILE_ROWS; n++) sums[n] += even[n] + odd[n];
        memcpy(data[C][m], sums, TILE_BYTES);
    }
}
template <int C, int A, int B> inline void TileRegisters::multiply_codes() {
    check_product(C, A, B);
    for (int m = 0; m < config.rows[C]; m++) {
        int32_t sums[TILE_ROWS];
        memcpy(sums, data[C][m], TILE_BYTES);
        for (int k = 0; k < config.bytes[A]; k++)
            for (int n = 0; n < TILE_ROWS; n++) sums[n] += (int8_t)data[A][m][k] * (uint8_t)data[B][k / 4][n * 4 + k % 4];
        memcpy(data[C][m], sums, TILE_BYTES);
    }
}

#else

// Asks Linux once per process. It may say no: an old kernel, a sandbox.
inline bool tiles_permitted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool yes = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return yes;
}

// Assembly, as gcc 12's intrinsics take the numbers of registers as text alone, do not say that they read memory, and
// claim to read 8 bytes of a configuration: stores into the rest would vanish.
#define TILE_NUMBER(name, number) [name] "i"(number)

// Registers in use would be saved at every context switch.
inline TileRegisters::~TileRegisters() { __asm__ volatile("tilerelease"); }
inline void TileRegisters::configure() { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }

template <int T> inline void TileRegisters::zero() { __asm__ volatile("tilezero %%tmm%c[t]" ::TILE_NUMBER(t, T)); }
template <int T> inline void TileRegisters::load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c[t]" ::"r"(from), "r"(stride), TILE_NUMBER(t, T) : "memory");
}
template <int T> inline void TileRegisters::store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c[t], (%0,%1,1)" ::"r"(to), "r"(stride), TILE_NUMBER(t, T) : "memory");
}
template <int C, int A, int B> inline void TileRegisters::multiply_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c[b], %%tmm%c[a], %%tmm%c[c]" ::TILE_NUMBER(a, A), TILE_NUMBER(b, B), TILE_NUMBER(c, C));
}
template <int C, int A, int B> inline void TileRegisters::multiply_codes() {
    __asm__ volatile("tdpbsud %%tmm%c[b], %%tmm%c[a], %%tmm%c[c]" ::TILE_NUMBER(a, A), TILE_NUMBER(b, B), TILE_NUMBER(c, C));
}
#undef TILE_NUMBER

#endif
#endif
