// A model, its layers and a call of it: layouts.py declares the same structs.
#pragma once

#include <cstdint>
#include <vector>

enum Kind : int64_t { FLOAT32, BFLOAT16, INT8 };

struct Matrix {  // weight (outputs, inputs), row-major; scale and bias by output, or null
    const void *weight;
    const float *scale, *bias;
    int64_t kind, outputs;
};

struct Layer {
    const float *norm, *second_norm, *query_norm, *key_norm;  // the last two, or null
    Matrix query, key, value, out, gate, up, down;
    void *keys, *values;  // (rows of the cache, N, C, D)
    int64_t window;       // positions that a token sees, including its own; 0 = all
};

struct Model {
    int64_t layers, width, heads, kv_heads, head_width, inner, capacity, cache_kind, positions;
    const float *cosines, *sines;  // (positions, D)
    Matrix embedding, head;
    const float *norm;
    double epsilon, scaling;
};

struct Call {
    int64_t rows, tokens, kept, threads;
    const int64_t *ids, *starts, *cache_rows;  // (K, Q); (K); (K), or null for all rows in order
    const int64_t *depths;                     // (Q) of a token tree, or null
    const uint8_t *sees;                       // (Q, Q) of a token tree, or null
    float *logits;                             // (K, kept, V)
    const int64_t *columns;                    // (K) index of the kept token, or null for the last of each row
};

// A thread's buffer, aligned to a cache line. The next call reuses it; it grows as needed.
class Scratch {
    std::vector<float> memory;

  public:
    float *of(long count) {
        if ((long)memory.size() < count + 32) memory = std::vector<float>(), memory.resize(count + 32);
        return (float *)(((uintptr_t)memory.data() + 63) / 64 * 64);
    }
    void forget() { memory = std::vector<float>(); }
};

void forget();  // frees the memory of this thread
int64_t threads_startable(int64_t asked);
void run(const Model *model, const Layer *layers, const Call *call);
