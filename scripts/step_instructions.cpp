// One step of four layers of the Qwen3-0.6B shape in bfloat16, by the native library alone, for valgrind to count:
//
//   g++ -std=c++17 -O3 -march=haswell -pthread -fno-math-errno -w -I src/pagedcli/native \
//       scripts/step_instructions.cpp src/pagedcli/native/*.cpp -o /tmp/step
//   valgrind --tool=callgrind --toggle-collect=decoder_forward --cache-sim=yes --D1=49152,12,64 --LL=33554432,16,64 \
//       /tmp/step SEQUENCES NEW_TOKENS CONTEXT
//
// CONTEXT: tokens of each sequence after the step. valgrind has no AVX-512, hence haswell.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "decoder.h"
#include "epilogue.h"

extern "C" int decoder_forward(const Model* model, const Step* step);

namespace {

constexpr int64_t LAYERS = 4, HIDDEN = 1024, HEADS = 16, KV_HEADS = 8, HEAD = 128, INNER = 3072, BLOCK = 16;
constexpr uint16_t SMALL = 0x3c00;  // 2^-7

std::vector<std::unique_ptr<std::vector<uint16_t>>> kept;

uint16_t* numbers(int64_t count) {
    kept.push_back(std::make_unique<std::vector<uint16_t>>(count, SMALL));
    return kept.back()->data();
}

Linear linear(int64_t rows, int64_t columns, bool gated = false) {
    Linear l = {};
    l.kind = BFLOAT16, l.rows = rows, l.columns = columns, l.gated = gated;
    l.weight = numbers(rows * columns), l.panel_bytes = columns * PANEL * 2;
    return l;
}

Layer layer_at(int64_t place, int64_t positions) {
    Layer layer = {};
    layer.input_norm = numbers(HIDDEN), layer.mlp_norm = numbers(HIDDEN);
    layer.q_norm = numbers(HEAD), layer.k_norm = numbers(HEAD);
    layer.rope_table = numbers(positions * HEAD), layer.rotated = HEAD, layer.place = place;
    layer.qkv = linear((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN), layer.attention_out = linear(HIDDEN, HEADS * HEAD);
    layer.gate_up = linear(2 * INNER, HIDDEN, true), layer.down = linear(HIDDEN, INNER);
    layer.num_heads = HEADS, layer.num_kv_heads = KV_HEADS, layer.head_dim = HEAD, layer.scalar = 1;
    return layer;
}

}  // namespace

int main(int count, char** words) {
    if (count != 4) return printf("usage: step SEQUENCES NEW_TOKENS CONTEXT\n"), 2;
    const int64_t sequences = atoi(words[1]), fresh = atoi(words[2]), context = atoi(words[3]);
    const int64_t tokens = sequences * fresh;
    const int64_t width = (context + BLOCK - 1) / BLOCK, blocks = sequences * width;
    std::vector<int32_t> table(blocks), starts, last_starts, lengths(sequences, (int32_t)context), slots;
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(0));
    std::vector<int64_t> positions, ids(tokens), rows, last_positions(sequences, context - 1);
    for (int64_t b = 0; b <= sequences; b++) starts.push_back((int32_t)(b * fresh)), last_starts.push_back((int32_t)b);
    for (int64_t b = 0; b < sequences; b++) {
        for (int64_t t = context - fresh; t < context; t++)
            positions.push_back(t), slots.push_back((int32_t)(table[b * width + t / BLOCK] * BLOCK + t % BLOCK));
        rows.push_back((b + 1) * fresh - 1);
    }
    std::vector<Layer> layers;
    for (int64_t i = 0; i < LAYERS; i++) layers.push_back(layer_at(i, context));
    Model model = {};
    model.dtype = BFLOAT16, model.num_layers = LAYERS, model.hidden_size = HIDDEN;
    model.inner_size = INNER, model.gate = GATE_SILU, model.last_keeper = LAYERS - 1;
    model.eps = 1e-6, model.attention_scale = 0.088, model.residual_multiplier = 1;
    model.layers = layers.data(), model.final_norm = numbers(HIDDEN);
    model.qkv_size = (HEADS + 2 * KV_HEADS) * HEAD, model.head_size = HEADS * HEAD;
    const Geometry geometry{blocks, BLOCK, HEADS, KV_HEADS, HEAD, 0, KV_HEADS * BLOCK * HEAD};
    const int64_t layer_elements = blocks * KV_HEADS * BLOCK * HEAD;
    auto work_of = [&](const std::vector<int32_t>& cu_q) {
        return paged_work_new(&geometry, sequences, cu_q.data(), lengths.data(), table.data(), width, 0, 1);
    };
    GroupStep group = {};
    group.slots = slots.data(), group.work = work_of(starts), group.late_work = work_of(last_starts);
    Step step = {};
    step.num_tokens = tokens, step.threads = 1, step.residual = numbers(tokens * HIDDEN);
    step.positions = positions.data(), step.ids = ids.data();
    step.k_cache = numbers(LAYERS * layer_elements), step.v_cache = numbers(LAYERS * layer_elements);
    step.late = rows.data(), step.late_positions = last_positions.data(), step.num_late = sequences;
    step.rows = rows.data(), step.num_rows = sequences, step.out = numbers(sequences * HIDDEN), step.groups = &group;
    group.geometry = &geometry, group.layer_bytes = layer_elements * 2;
    const int failed = decoder_forward(&model, &step);
    printf("%s, first result %04x\n", failed ? "failed" : "done", *(uint16_t*)step.out);
    return failed;
}
