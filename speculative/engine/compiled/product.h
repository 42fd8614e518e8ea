// Products of activations with weights, and the order of their sums.
//
// M tokens, N outputs, V vectors of W tokens each.
#pragma once

#include "step.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#define ALWAYS __attribute__((always_inline)) inline
constexpr long OUTPUTS = 4;     // outputs of one tile of a product
constexpr long TOKENS = 2;      // of one tile: 8 sums, which fit the 16 registers of AVX2 together with their inputs; 3 if one token is left
constexpr long CACHE_LINE = 64, AHEAD = 2 * OUTPUTS;  // bytes, outputs whose weights are prefetched
constexpr long FEW = 8;         // tokens that are never split: a block of speculative decoding reads weights once
// Numbers of activations and of weights processed at a time, so that they fit the caches.
constexpr long FIRST_CACHE = 4 * 1024, SECOND_CACHE = 32 * 1024;

template <long N> using Parts = std::integral_constant<long, N>;

struct Share {  // one thread's part of `total` items, in whole steps
    long begin, end;
    Share(long total, long step, long thread, long threads) {
        long steps = (total + step - 1) / step;
        begin = std::min(total, steps * thread / threads * step);
        end = std::min(total, steps * (thread + 1) / threads * step);
    }
};

// The numbers as float32, in a buffer that this thread reuses.
template <class T> const float *unpacked(const T *from, long count) {
    static thread_local Scratch memory;
    float *to = memory.of(count);
    long i = 0;
    for (; i + W <= count; i += W) {
        __builtin_prefetch(from + 2 * count + i, 0, 2);
        store(to + i, load(from + i));
    }
    for (; i < count; i++) to[i] = number(from[i]);
    return to;
}

// Sums of four vectors, each over its lanes, and all in the same order.
ALWAYS four sums_of(const vec (&v)[4]) {
    four part[4];
    for (int i = 0; i < 4; i++) {
        alignas(64) float lanes[W];
        store(lanes, v[i]);
        part[i] = *reinterpret_cast<four *>(lanes);
        for (long from = 4; from < W; from += 4) part[i] += *reinterpret_cast<four *>(lanes + from);
    }
#if defined(__clang__) || __GNUC__ >= 12
    four low = __builtin_shufflevector(part[0], part[1], 0, 4, 1, 5) + __builtin_shufflevector(part[0], part[1], 2, 6, 3, 7);
    four high = __builtin_shufflevector(part[2], part[3], 0, 4, 1, 5) + __builtin_shufflevector(part[2], part[3], 2, 6, 3, 7);
    return __builtin_shufflevector(low, high, 0, 1, 4, 5) + __builtin_shufflevector(low, high, 2, 3, 6, 7);
#else
    four total;
    for (int i = 0; i < 4; i++) total[i] = (part[i][0] + part[i][2]) + (part[i][1] + part[i][3]);
    return total;
#endif
}

// Rows become columns.
ALWAYS void transpose(four (&v)[4]) {
#if defined(__clang__) || __GNUC__ >= 12
    four low[] = {__builtin_shufflevector(v[0], v[1], 0, 4, 1, 5), __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5)};
    four high[] = {__builtin_shufflevector(v[0], v[1], 2, 6, 3, 7), __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7)};
    v[0] = __builtin_shufflevector(low[0], low[1], 0, 1, 4, 5), v[1] = __builtin_shufflevector(low[0], low[1], 2, 3, 6, 7);
    v[2] = __builtin_shufflevector(high[0], high[1], 0, 1, 4, 5), v[3] = __builtin_shufflevector(high[0], high[1], 2, 3, 6, 7);
#else
    for (long i = 0; i < 4; i++)
        for (long j = 0; j < i; j++) {
            float own = v[i][j];
            v[i][j] = v[j][i], v[j][i] = own;
        }
#endif
}

// Otherwise the compiler reads a number from memory again for every sum.
inline vec in_register(vec v) {
#ifdef __x86_64__
    asm("" : "+x"(v));
#endif
    return v;
}

// One step of a tile over W numbers. Unrolled here, so that all sums stay in registers together with the tokens and one weight.
template <long M, class T>
ALWAYS void step(vec (&sums)[M][OUTPUTS], const float *x, long x_stride, const T *w, long depth) {
    vec own[M];
#pragma GCC unroll 3
    for (long m = 0; m < M; m++) own[m] = in_register(load(x + m * x_stride));
#pragma GCC unroll 4
    for (long n = 0; n < OUTPUTS; n++) {
        vec weight = in_register(load(w + n * depth));
#pragma GCC unroll 3
        for (long m = 0; m < M; m++) sums[m][n] += own[m] * weight;
    }
}

// Of cache lines. In address order, which is fastest for memory, and a few at a time: more would wait for each other.
template <class T> ALWAYS void prefetch(const T *from, long lines) {
    for (long i = 0; i < lines; i++) __builtin_prefetch(from + i * (CACHE_LINE / sizeof(T)), 0, 2);
}

// out[m][n] = x[m] . w[n] for 4 outputs n. Prefetches its part of what is `ahead`, if PARTS tiles share the work; 0: nothing.
template <long M, long PARTS, class T>
inline void tile(const float *x, long x_stride, const T *w, long depth, float (*out)[OUTPUTS], const T *ahead) {
    constexpr long LINE = CACHE_LINE / sizeof(T), LINES = PARTS ? OUTPUTS / PARTS : 0;
    vec sums[M][OUTPUTS] = {};
    long k = 0;
    for (; k + LINE <= depth; ahead += LINES * LINE) {
        prefetch(ahead, LINES);
#pragma GCC unroll 8
        for (long i = 0; i < LINE; i += W) step<M>(sums, x + k + i, x_stride, w + k + i, depth);
        k += LINE;
    }
    for (; k + W <= depth; k += W) step<M>(sums, x + k, x_stride, w + k, depth);
#pragma GCC unroll 3
    for (long m = 0; m < M; m++) {
        four total = sums_of(sums[m]);
#pragma GCC unroll 4
        for (long n = 0; n < OUTPUTS; n++) {
            out[m][n] = total[n];
            for (long i = k; i < depth; i++) out[m][n] = std::fma(x[m * x_stride + i], number(w[n * depth + i]), out[m][n]);
        }
    }
}

template <long PARTS, class T>
inline void tile_of(long tokens, const float *x, long x_stride, const T *w, long depth, float (*out)[OUTPUTS], const T *ahead) {
    if (tokens == 3) tile<3, PARTS>(x, x_stride, w, depth, out, ahead);
    if (tokens == 2) tile<2, PARTS>(x, x_stride, w, depth, out, ahead);
    if (tokens == 1) tile<1, PARTS>(x, x_stride, w, depth, out, ahead);
}

constexpr long V = 2, TOGETHER = V * W;  // vectors of a tile that has a token in every lane, and their tokens
constexpr long MOST_TOGETHER = 256;  // tokens that a thread lays out at a time

using Tile = vec[OUTPUTS][V];  // sums of 4 outputs

// The first of many tokens, laid out in groups that have a token in every lane. No sum runs over lanes then, which saves a fifth of
// the time. The bits are those of `tile`: what is a lane there is a remainder of k by W here, and remainders are added as `sums_of`
// adds lanes.
class Lanes {
    const float *x = nullptr;
    long depth;

    // The sum over k = r, r + W, ...
    ALWAYS void remainder(const float *group, const float *w, long r, Tile &out) const {
        long steps = depth / W;
        Tile sums = {};
        for (const float *own = group + r * steps * TOGETHER, *end = own + steps * TOGETHER; own < end; own += TOGETHER, w += W) {
            vec tokens[V] = {in_register(load(own)), in_register(load(own + W))};
#pragma GCC unroll 4
            for (long n = 0; n < OUTPUTS; n++) {
                vec weight = everywhere(w[n * depth + r]);
#pragma GCC unroll 2
                for (long v = 0; v < V; v++) sums[n][v] += tokens[v] * weight;
            }
        }
#pragma GCC unroll 4
        for (long n = 0; n < OUTPUTS; n++)
#pragma GCC unroll 2
            for (long v = 0; v < V; v++) out[n][v] = sums[n][v];
    }

    // If `uncached`, prefetches the tile after the next.
    ALWAYS void tile(const float *group, const float *w, bool uncached, Tile &out) const {
        Tile parts[W];
        long part = OUTPUTS * depth / W;
        for (long r = 0; r < W; r++) {
            if (uncached) prefetch(w + AHEAD * depth + r * part, part * sizeof(float) / CACHE_LINE);
            remainder(group, w, r, parts[r]);
        }
#pragma GCC unroll 4
        for (long n = 0; n < OUTPUTS; n++)
#pragma GCC unroll 2
            for (long v = 0; v < V; v++) {
                vec lanes[4];
#pragma GCC unroll 4
                for (long i = 0; i < 4; i++) {
                    lanes[i] = parts[i][n][v];
                    for (long r = i + 4; r < W; r += 4) lanes[i] += parts[r][n][v];
                }
                out[n][v] = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
            }
        for (long k = depth / W * W; k < depth; k++)
            for (long n = 0; n < OUTPUTS; n++)
                for (long m = 0; m < TOGETHER; m++)
                    out[n][m / W][m % W] = std::fma(group[k * TOGETHER + m], w[n * depth + k], out[n][m / W][m % W]);
    }

  public:
    long tokens = 0;  // whole groups

    Lanes(const float *from, long stride, long asked, long depth) : depth(depth) {
        static thread_local Scratch memory;
        if (asked < TOGETHER) return;
        float *to = memory.of(asked / TOGETHER * TOGETHER * depth);
        x = to;
        for (long whole = depth / W * W; tokens + TOGETHER <= asked; tokens += TOGETHER, from += TOGETHER * stride, to += TOGETHER * depth)
            for (long m = 0; m < TOGETHER; m += 4) {
                const float *own = from + m * stride;
                for (long k = 0; k < whole; k += 4) {
                    four part[4];
                    for (long i = 0; i < 4; i++) std::memcpy(&part[i], own + i * stride + k, sizeof(four));
                    transpose(part);
                    for (long i = 0; i < 4; i++) std::memcpy(to + ((k % W + i) * (whole / W) + k / W) * TOGETHER + m, &part[i], sizeof(four));
                }
                for (long k = whole; k < depth; k++)
                    for (long i = 0; i < 4; i++) to[k * TOGETHER + m + i] = own[i * stride + k];
            }
    }

    // y[m][n] for the outputs from `start` to `end`. w: the weights of `begin`, as in `dots`.
    __attribute__((noinline)) void outputs(const float *w, long begin, long start, long end, float *y, long y_stride, bool uncached) const {
        for (long first = 0; first < tokens; first += TOGETHER)
            for (long n = start; n < end; n += OUTPUTS) {
                long from = std::min(n, end - OUTPUTS);
                Tile out;
                tile(x + first * depth, w + (from - begin) * depth, uncached && !first, out);  // later groups find them in the cache
                for (long m = 0; m < TOGETHER; m += 4) {
                    four own[4];
                    for (long j = 0; j < 4; j++) own[j] = *reinterpret_cast<const four *>((const float *)out[j] + m);
                    transpose(own);
                    for (long i = 0; i < 4; i++) {
                        float *to = y + (first + m + i) * y_stride + from;
                        if (n == from) std::memcpy(to, &own[i], sizeof(four));
                        else for (long j = n - from; j < OUTPUTS; j++) to[j] = own[i][j];
                    }
                }
            }
    }
};

// y[m][n] = x[m] . w[n] for the outputs n of a share, at least 4 of them. Strides are of one token.
template <class T>
void dots(const float *x, long x_stride, long tokens, const T *w, long depth, Share share, float *y, long y_stride) {
    if (tokens > MOST_TOGETHER) {
        for (long m = 0; m < tokens; m += MOST_TOGETHER)
            dots(x + m * x_stride, x_stride, std::min(MOST_TOGETHER, tokens - m), w, depth, share, y + m * y_stride, y_stride);
        return;
    }
    Lanes lanes(x, x_stride, tokens, depth);
    long some_outputs = std::max(OUTPUTS, SECOND_CACHE / depth / OUTPUTS * OUTPUTS);
    long some_tokens = std::max(FEW, FIRST_CACHE / depth / TOKENS * TOKENS);
    auto block = [&](auto *own, long begin, long start, long end, long first, auto parts) {  // own: the weights of `begin`
        long last = std::min(tokens, first + some_tokens);
        for (long n = start; n < end; n += OUTPUTS) {
            // If the number is not a multiple of 4, the last outputs are computed together with some before them.
            long from = std::min(n, end - OUTPUTS);
            for (long m = first, height; m < last; m += height) {
                height = last - m == 3 ? 3 : std::min(TOKENS, last - m);
                float out[TOKENS + 1][OUTPUTS];
                const float *input = x + m * x_stride;
                auto *weights = own + (from - begin) * depth, *ahead = weights + AHEAD * depth;
                long part = m / TOKENS, rows = OUTPUTS / std::max<long>(1, parts.value);  // the first tiles share the prefetching
                if (part >= parts.value) tile_of<0>(height, input, x_stride, weights, depth, out, ahead);
                else tile_of<parts.value>(height, input, x_stride, weights, depth, out, ahead + part * rows * depth);
                // The outputs before are another thread's, which may have added a bias already.
                for (long i = 0; i < height; i++)
                    for (long j = n - from; j < OUTPUTS; j++) y[(m + i) * y_stride + from + j] = out[i][j];
            }
        }
    };
    for (long n = share.begin; n < share.end; n += some_outputs) {
        long end = std::min(share.end, n + some_outputs), begin = std::min(n, end - OUTPUTS);
        const T *own = w + begin * depth;
        bool widened = false;
        if constexpr (std::is_same_v<T, float>) {
            if (lanes.tokens) lanes.outputs(own, begin, n, end, y, y_stride, true);
        } else if (tokens > 3 * TOKENS) {  // once for all tokens
            const float *wide = unpacked(own, (end - begin) * depth);
            lanes.outputs(wide, begin, n, end, y, y_stride, false);
            for (long m = lanes.tokens; m < tokens; m += some_tokens) block(wide, begin, n, end, m, Parts<0>());
            widened = true;
        }
        for (long m = lanes.tokens; m < tokens && !widened; m += some_tokens)
            if (tokens < 2 * TOKENS) block(own, begin, n, end, m, Parts<1>());
            else if (tokens < 4 * TOKENS) block(own, begin, n, end, m, Parts<2>());
            else block(own, begin, n, end, m, Parts<4>());
    }
}

// A share of y (tokens, outputs) = x (tokens, depth) . weight^T.
inline void product(const Matrix &w, const float *x, long tokens, long depth, Share share, float *y) {
    if (w.kind == FLOAT32) dots(x, depth, tokens, (const float *)w.weight, depth, share, y, w.outputs);
    if (w.kind == BFLOAT16) dots(x, depth, tokens, (const bfloat16 *)w.weight, depth, share, y, w.outputs);
    if (w.kind == INT8) dots(x, depth, tokens, (const int8_t *)w.weight, depth, share, y, w.outputs);
    if (!w.scale && !w.bias) return;
    for (long m = 0; m < tokens; m++)
        for (long n = share.begin; n < share.end; n++) {
            float &own = y[m * w.outputs + n];
            own = own * (w.scale ? w.scale[n] : 1.0f) + (w.bias ? w.bias[n] : 0.0f);
        }
}

