// Products of activations with weights, and the order of their sums.
//
// M tokens, N outputs, V vectors of W tokens each.
#pragma once

#include "step.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <type_traits>

#define ALWAYS __attribute__((always_inline)) inline
constexpr bool MANY = REGISTERS >= 32;
constexpr long OUTPUTS = 4;            // outputs of one tile of a product
constexpr long TOKENS = MANY ? 5 : 2;  // of one tile, or one more if one is left: its sums, its tokens and a weight fit the registers
constexpr long CACHE_LINE = 64, AHEAD = 2 * OUTPUTS;  // bytes, outputs whose weights are prefetched
constexpr long WIDENED = MANY ? 33 : 7;  // tokens for which weights of another type are converted once, for all of them
// Numbers of activations and of weights processed at a time, so that they fit the caches.
constexpr long FIRST_CACHE = 4 * 1024, SECOND_CACHE = 32 * 1024, FIRST_CACHE_OF_WEIGHTS = 6 * 1024;

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
#if defined(__AVX512F__)
    // Blocks of four lanes change places with vectors, as in `transpose`.
    __m512 low[] = {_mm512_shuffle_f32x4(v[0], v[1], 0x44), _mm512_shuffle_f32x4(v[2], v[3], 0x44)};
    __m512 high[] = {_mm512_shuffle_f32x4(v[0], v[1], 0xee), _mm512_shuffle_f32x4(v[2], v[3], 0xee)};
    __m512 total = _mm512_shuffle_f32x4(low[0], low[1], 0x88) + _mm512_shuffle_f32x4(low[0], low[1], 0xdd);
    total = total + _mm512_shuffle_f32x4(high[0], high[1], 0x88) + _mm512_shuffle_f32x4(high[0], high[1], 0xdd);
    total = total + _mm512_permute_ps(total, 0x4e);
    total = total + _mm512_permute_ps(total, 0xb1);
    return (four)_mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0), total));
#else
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
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__x86_64__)
    asm("" : "+x"(v));
#endif
    return v;
}

// One step of a tile over W numbers. Unrolled here, so that all sums stay in registers together with the tokens and one weight.
template <long M, class T>
ALWAYS void step(vec (&sums)[M][OUTPUTS], const float *x, long x_stride, const T *w, long depth) {
    vec own[M];
#pragma GCC unroll 6
    for (long m = 0; m < M; m++) own[m] = in_register(load(x + m * x_stride));
#pragma GCC unroll 4
    for (long n = 0; n < OUTPUTS; n++) {
        vec weight = in_register(load(w + n * depth));
#pragma GCC unroll 6
        for (long m = 0; m < M; m++) sums[m][n] = fused(own[m], weight, sums[m][n]);
    }
}

// The last `rest` < W numbers before `end`, in the last lanes; the others are 0.
template <class T> ALWAYS vec last(const T *end, long rest, long depth) {
    vec own = {};
    if (depth < W) {
        for (long i = 0; i < rest; i++) own[W - rest + i] = number(end[i - rest]);
        return own;
    }
    ints lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    return in_register((vec)((ints)load(end - W) & (lanes >= (int)(W - rest))));
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
    if (long rest = depth - k) {
        vec own[M];
#pragma GCC unroll 6
        for (long m = 0; m < M; m++) own[m] = last(x + m * x_stride + depth, rest, depth);
#pragma GCC unroll 4
        for (long n = 0; n < OUTPUTS; n++) {
            vec weight = last(w + (n + 1) * depth, rest, depth);
#pragma GCC unroll 6
            for (long m = 0; m < M; m++) sums[m][n] = fused(own[m], weight, sums[m][n]);
        }
    }
#pragma GCC unroll 6
    for (long m = 0; m < M; m++) {
        four total = sums_of(sums[m]);
        std::memcpy(out[m], &total, sizeof total);
    }
}

template <long PARTS, class T>
inline void tile_of(long tokens, const float *x, long x_stride, const T *w, long depth, float (*out)[OUTPUTS], const T *ahead) {
    if constexpr (TOKENS > 2) {
        if (tokens == 6) tile<6, PARTS>(x, x_stride, w, depth, out, ahead);
        if (tokens == 5) tile<5, PARTS>(x, x_stride, w, depth, out, ahead);
        if (tokens == 4) tile<4, PARTS>(x, x_stride, w, depth, out, ahead);
    }
    if (tokens == 3) tile<3, PARTS>(x, x_stride, w, depth, out, ahead);
    if (tokens == 2) tile<2, PARTS>(x, x_stride, w, depth, out, ahead);
    if (tokens == 1) tile<1, PARTS>(x, x_stride, w, depth, out, ahead);
}

// Tiles that have a token in every lane: units of tokens, at most so many in a tile, and outputs.
constexpr long UNIT = MANY ? W : 2 * W, MOST_UNITS = MANY ? 3 : 1, WIDE = MANY ? 2 * OUTPUTS : OUTPUTS;
constexpr long FEWEST_TOGETHER = MANY ? 14 : UNIT;  // tokens for which a unit is faster, with idle lanes
constexpr long FEW = MANY ? FEWEST_TOGETHER : 8;    // tokens that are never split: a block of speculative decoding reads weights once
constexpr long MOST_TOGETHER = 256;                 // tokens that a thread lays out at a time

// The first of many tokens, laid out in groups that have a token in every lane. No sum runs over lanes then, which saves a fifth of
// the time. The bits are those of `tile`: what is a lane there is a remainder of k by W here, and remainders are added as `sums_of`
// adds lanes. All objects of a thread share memory: one at a time.
class Lanes {
    const float *x = nullptr;
    long depth;

    template <long N, long V> using Tile = vec[N][V];  // sums of N outputs

    // The sum over k = r, r + W, ...
    template <long N, long V> ALWAYS void remainder(const float *own, const float *w, long steps, Tile<N, V> &sums) const {
        for (const float *end = own + steps * V * W; own < end; own += V * W, w += W) {
            vec tokens[V];
#pragma GCC unroll 6
            for (long v = 0; v < V; v++) tokens[v] = in_register(load(own + v * W));
#pragma GCC unroll 8
            for (long n = 0; n < N; n++) {
                vec weight = everywhere(w[n * depth]);
#pragma GCC unroll 6
                for (long v = 0; v < V; v++) sums[n][v] = fused(tokens[v], weight, sums[n][v]);
            }
        }
    }

    // If `uncached`, prefetches the tile after the next.
    template <long N, long V> ALWAYS void tile(const float *group, const float *w, bool uncached, Tile<N, V> &out) const {
        Tile<N, V> parts[W];
        long part = N * depth / W, steps = depth / W, some = std::min(steps, FIRST_CACHE_OF_WEIGHTS / (N * W));
        if (!steps) std::memset(parts, 0, sizeof parts);
        for (long from = 0; from < steps; from += some)
            for (long r = 0; r < W; r++) {
                if (uncached && !from) prefetch(w + 2 * N * depth + r * part, part * sizeof(float) / CACHE_LINE);
                Tile<N, V> sums = {};
                if (from) std::memcpy(sums, parts[r], sizeof sums);
                remainder<N, V>(group + (r * steps + from) * V * W, w + r + from * W, std::min(some, steps - from), sums);
                std::memcpy(parts[r], sums, sizeof sums);
            }
        for (long k = steps * W; k < depth; k++)
            for (long n = 0; n < N; n++)
                for (long v = 0; v < V; v++) {
                    vec &own = parts[k + W - depth][n][v];
                    own = fused(load(group + (k * V + v) * W), everywhere(w[n * depth + k]), own);
                }
#pragma GCC unroll 8
        for (long n = 0; n < N; n++)
#pragma GCC unroll 6
            for (long v = 0; v < V; v++) {
                vec lanes[4];
#pragma GCC unroll 4
                for (long i = 0; i < 4; i++) {
                    lanes[i] = parts[i][n][v];
                    for (long r = i + 4; r < W; r += 4) lanes[i] += parts[r][n][v];
                }
                out[n][v] = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
            }
    }

    static long units(long tokens) {  // of the next group
        long all = (tokens + UNIT - 1) / UNIT;
        return all == MOST_UNITS + 1 ? (all + 1) / 2 : std::min(MOST_UNITS, all);
    }

    // A cache line of numbers of some tokens at a time, so that all lines read and written stay in the first cache.
    void lay_out(const float *from, long stride, long count, long together, float *to) const {
        long whole = depth / W * W;
        auto row = [&](long m) { return from + std::min(m, count - 1) * stride; };  // idle lanes repeat the last token
        auto four_by_four = [&](long m, long k) {
            four part[4];
            for (long i = 0; i < 4; i++) std::memcpy(&part[i], row(m + i) + k, sizeof(four));
            transpose(part);
            for (long i = 0; i < 4; i++) std::memcpy(to + ((k % W + i) * (whole / W) + k / W) * together + m, &part[i], sizeof(four));
        };
        for (long some = 0; some < together; some += UNIT)
            for (long line = 0; line < whole; line += W)
                for (long m = some; m < some + UNIT; m += 4)
                    for (long k = line; k < line + W; k += 4) four_by_four(m, k);
        for (long k = whole; k < depth; k++)
            for (long m = 0; m < together; m++) to[k * together + m] = row(m)[k];
    }

    // N outputs of a group of `count` tokens. Those before `start` are there already, maybe with a bias.
    template <long N, long V>
    __attribute__((noinline)) void some(const float *group, long count, const float *w, long start, float *y, long y_stride, bool uncached) const {
        Tile<N, V> out;
        tile<N, V>(group, w, uncached, out);
        for (long m = 0; m < count; m += 4)
            for (long n = 0; n < N; n += 4) {
                four own[4];
                for (long j = 0; j < 4; j++) own[j] = *reinterpret_cast<const four *>((const float *)out[n + j] + m);
                transpose(own);
                for (long i = 0; i < std::min(4L, count - m); i++) {
                    float *to = y + (m + i) * y_stride + n;
                    if (!start) std::memcpy(to, &own[i], sizeof(four));
                    else for (long j = start; j < 4; j++) to[j] = own[i][j];
                }
            }
    }

    template <long V>
    void of_group(const float *group, long count, const float *w, long begin, long start, long end, float *y, long y_stride, bool uncached) const {
        long n = start;
        for (; n + WIDE <= end; n += WIDE) some<WIDE, V>(group, count, w + (n - begin) * depth, 0, y + n, y_stride, uncached);
        for (; n < end; n += OUTPUTS) {
            long from = std::min(n, end - OUTPUTS);
            some<OUTPUTS, V>(group, count, w + (from - begin) * depth, n - from, y + from, y_stride, uncached);
        }
    }

  public:
    long tokens = 0;

    Lanes(const float *from, long stride, long asked, long depth) : depth(depth) {
        static thread_local Scratch memory;
        long rest = asked % UNIT;
        tokens = rest < FEWEST_TOGETHER ? asked - rest : asked;
        if (!tokens) return;
        float *to = memory.of((tokens + UNIT - 1) / UNIT * UNIT * depth);
        x = to;
        for (long first = 0, together; first < tokens; first += together) {
            together = units(tokens - first) * UNIT;
            lay_out(from + first * stride, stride, std::min(together, tokens - first), together, to + first * depth);
        }
    }

    // y[m][n] for the outputs from `start` to `end`. w: the weights of `begin`, as in `dots`.
    void outputs(const float *w, long begin, long start, long end, float *y, long y_stride, bool uncached) const {
        for (long first = 0; first < tokens;) {
            long all = units(tokens - first), count = std::min(all * UNIT, tokens - first);
            auto run = [&](auto these) {
                of_group<UNIT / W * these.value>(x + first * depth, count, w, begin, start, end, y + first * y_stride, y_stride,
                                                 uncached && !first);  // later groups find the weights in the cache
            };
            if (all == 1) run(Parts<1>());
            if constexpr (MANY) {
                if (all == 2) run(Parts<2>());
                if (all == 3) run(Parts<3>());
            }
            first += all * UNIT;
        }
    }
};

// y[m][n] = x[m] . w[n] for the outputs n of a share, at least 4 of them, and at most MOST_TOGETHER tokens, of which the first are in
// `lanes`. Strides are of one token.
template <class T>
void dots(const Lanes &lanes, const float *x, long x_stride, long tokens, const T *w, long depth, Share share, float *y, long y_stride) {
    constexpr bool AS_STORED = std::is_same_v<T, float>;
    long some_outputs = std::max(OUTPUTS, SECOND_CACHE / depth / OUTPUTS * OUTPUTS);
    long some_tokens = std::max(FEW, FIRST_CACHE / depth / TOKENS * TOKENS);
    auto block = [&](auto *own, long begin, long start, long end, long first, auto parts) {  // own: the weights of `begin`
        long last = std::min(tokens, first + some_tokens);
        for (long n = start; n < end; n += OUTPUTS) {
            // If the number is not a multiple of 4, the last outputs are computed together with some before them.
            long from = std::min(n, end - OUTPUTS);
            for (long m = first, height; m < last; m += height) {
                height = last - m == TOKENS + 1 ? TOKENS + 1 : std::min(TOKENS, last - m);
                float out[TOKENS + 1][OUTPUTS];
                const float *input = x + m * x_stride;
                auto *weights = own + (from - begin) * depth, *ahead = weights + AHEAD * depth;
                long part = m / TOKENS, rows = OUTPUTS / std::max<long>(1, parts.value);  // the first tiles share the prefetching
                if (part >= parts.value) tile_of<0>(height, input, x_stride, weights, depth, out, ahead);
                else tile_of<parts.value>(height, input, x_stride, weights, depth, out, ahead + part * rows * depth);
                // The outputs before are there already, maybe with a bias.
                for (long i = 0; i < height; i++)
                    for (long j = n - from; j < OUTPUTS; j++) y[(m + i) * y_stride + from + j] = out[i][j];
            }
        }
    };
    for (long n = share.begin; n < share.end; n += some_outputs) {
        long end = std::min(share.end, n + some_outputs), begin = std::min(n, end - OUTPUTS);
        const T *own = w + begin * depth;
        if constexpr (!AS_STORED)
            if (tokens >= WIDENED) {
                const float *wide = unpacked(own, (end - begin) * depth);
                lanes.outputs(wide, begin, n, end, y, y_stride, false);
                for (long m = lanes.tokens; m < tokens; m += some_tokens) block(wide, begin, n, end, m, Parts<0>());
                continue;
            }
        if constexpr (AS_STORED) lanes.outputs(own, begin, n, end, y, y_stride, true);
        for (long m = AS_STORED ? lanes.tokens : 0; m < tokens; m += some_tokens)
            if (tokens < 2 * TOKENS) block(own, begin, n, end, m, Parts<1>());
            else if (tokens < 4 * TOKENS) block(own, begin, n, end, m, Parts<2>());
            else block(own, begin, n, end, m, Parts<4>());
    }
}

struct Output {  // a thread's share of y (tokens, outputs) = x . weight^T
    const Matrix &w;
    Share share;
    float *y;
};

// Products of the same x (tokens, depth) with some matrices.
inline void products(std::initializer_list<Output> all, const float *x, long tokens, long depth) {
    for (long first = 0; first < tokens; first += MOST_TOGETHER) {
        long count = std::min(MOST_TOGETHER, tokens - first);
        const float *own = x + first * depth;
        Lanes lanes(own, depth, count, depth);
        for (auto &[w, share, y] : all) {
            float *to = y + first * w.outputs;
            if (w.kind == FLOAT32) dots(lanes, own, depth, count, (const float *)w.weight, depth, share, to, w.outputs);
            if (w.kind == BFLOAT16) dots(lanes, own, depth, count, (const bfloat16 *)w.weight, depth, share, to, w.outputs);
            if (w.kind == INT8) dots(lanes, own, depth, count, (const int8_t *)w.weight, depth, share, to, w.outputs);
        }
    }
    for (auto &[w, share, y] : all)
        for (long m = 0; m < tokens && (w.scale || w.bias); m++)
            for (long n = share.begin; n < share.end; n++) {
                float &own = y[m * w.outputs + n];
                own = own * (w.scale ? w.scale[n] : 1.0f) + (w.bias ? w.bias[n] : 0.0f);
            }
}

// out[m][d] = sum over p of weights[m][p] values[p][d], for V vectors of d, of which the last begins at `last`.
template <long M, long V, class T>
inline void weigh(const float *weights, long stride, long positions, const T *values, long width, long last, float *out) {
    auto begin = [&](long v) { return v + 1 < V ? v * W : last; };
    vec sums[M][V] = {};
    for (long p = 0; p < positions; p++) {
        vec own[V];
#pragma GCC unroll 4
        for (long v = 0; v < V; v++) own[v] = load(values + p * width + begin(v));
#pragma GCC unroll 3
        for (long m = 0; m < M; m++) {
            vec weight = everywhere(weights[m * stride + p]);
#pragma GCC unroll 4
            for (long v = 0; v < V; v++) sums[m][v] = fused(weight, own[v], sums[m][v]);
        }
    }
#pragma GCC unroll 3
    for (long m = 0; m < M; m++)
#pragma GCC unroll 4
        for (long v = 0; v < V; v++) store(out + m * width + begin(v), sums[m][v]);
}

template <class T>
void weighted_sums(const float *weights, long stride, long queries, long positions, const T *values, long width, float *out) {
    for (long m = 0, height; m < queries; m += height) {
        height = std::min<long>(3, queries - m);
        const float *own = weights + m * stride;
        float *to = out + m * width;
        // A last vector that is not full overlaps the one before it.
        for (long d = 0; d < width && width >= W; d += 4 * W) {
            long all = std::min<long>(4, (width - d + W - 1) / W), begin = all > 1 ? d : std::min(d, width - W);
            auto run = [&](auto vectors) {
                constexpr long V = vectors.value;
                long last = std::min((V - 1) * W, width - W - begin);
                if (height == 3) weigh<3, V>(own, stride, positions, values + begin, width, last, to + begin);
                if (height == 2) weigh<2, V>(own, stride, positions, values + begin, width, last, to + begin);
                if (height == 1) weigh<1, V>(own, stride, positions, values + begin, width, last, to + begin);
            };
            if (all == 4) run(Parts<4>());
            if (all == 3) run(Parts<3>());
            if (all == 2) run(Parts<2>());
            if (all == 1) run(Parts<1>());
        }
        for (long d = 0; d < width && width < W; d++)
            for (long i = 0; i < height; i++) {
                float total = 0.0f;
                for (long p = 0; p < positions; p++) total = std::fma(own[i * stride + p], number(values[p * width + d]), total);
                to[i * width + d] = total;
            }
    }
}
