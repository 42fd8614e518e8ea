// One call of a plain decoder (see architectures.py) on a cache of keys and values: embedding, layers, norm, head.
//
// No weights are repacked: they are read where torch keeps them, once for some hundred tokens of a call. Sums always run in the
// same order, for any number of tokens, rows and threads. So a token's logits have the same bits whether it is decoded alone
// or verified in a block.
//
// K rows of a call, Q tokens of each, M = K * Q tokens, H heads, N key/value heads, G = H / N, D head width, C capacity,
// P positions read.

#include "product.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <new>
#include <sched.h>
#include <sys/resource.h>
#include <system_error>
#include <thread>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

constexpr long QUERIES = 16;    // tokens whose attention is computed together

int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// If another process takes one of the cores, all threads wait milliseconds for the thread that ran on it, and two threads are slower
// than one. After such a call the next calls use one thread for a while, and longer each time the first call after that is slow
// again. Bits do not depend on the number of threads.
constexpr long SPINS = 100'000;
constexpr int64_t WAIT = 1'000'000, SHORTEST = 20'000'000, LONGEST = 640'000'000;  // ns
std::atomic<int64_t> alone_until{0}, alone_for{SHORTEST};

int64_t threads_now(int64_t asked) { return asked > 1 && nanoseconds() < alone_until ? 1 : asked; }

static thread_local long yields = 0;  // since the last call of `lost_core`

// Whether this thread lost its core since the last question, not counting the times it yielded.
bool lost_core() {
#ifdef RUSAGE_THREAD
    static thread_local long before = -1;
    rusage used;
    getrusage(RUSAGE_THREAD, &used);
    bool lost = before >= 0 && used.ru_nivcsw - before > yields;
    before = used.ru_nivcsw, yields = 0;
    return lost;
#else
    return true;  // not known here: the wait alone decides
#endif
}

constexpr long THREAD_BYTES = 1 << 12;  // what a new thread allocates before its own work

// The process ends if OpenMP cannot start a thread, so a caller's first larger team is tried with threads of our own, and then started
// while its memory is there. 1 if memory is short.
int64_t threads_startable(int64_t asked) {
#ifdef _OPENMP
    static thread_local int64_t most = 1;
    if (asked > most) {
        std::vector<std::thread> tried;
        std::atomic<bool> done{false}, all{true};
        try {
            tried.reserve(asked);
            while ((int64_t)tried.size() + 1 < asked)
                tried.emplace_back([&] {
                    std::unique_ptr<char[]> own(new (std::nothrow) char[THREAD_BYTES]);
                    if (!own) all = false;
                    while (!done) sched_yield();
                });
        } catch (const std::exception &) {
            all = false;
        }
        done = true;
        for (auto &one : tried) one.join();
        if (!all) return 1;
#pragma omp parallel num_threads(asked)
        lost_core();  // the thread's own variables
        most = asked;
    }
#endif
    return asked;
}

// Where the threads of a call wait for each other. It yields after a while; OpenMP's own barrier spins on, and on a busy machine that
// keeps the late thread from its core. A thread whose memory is short never arrives: the others stop waiting for it.
class Barrier {
    std::atomic<long> arrived{0}, round{0};
    std::atomic<bool> waited{false}, lost{false};

  public:
    std::atomic<bool> failed{false};

    void wait(long threads) {
        if (threads == 1) return;
        long own = round.load();
        if (arrived.fetch_add(1) + 1 == threads) {
            arrived.store(0);
            round.fetch_add(1);
            return;
        }
        int64_t since = 0;
        for (long spins = 0; round.load(std::memory_order_acquire) == own; spins++) {
            if (failed) throw std::bad_alloc();
            if (spins < SPINS) continue;
            if (!since) since = nanoseconds();
            sched_yield();
            yields++;
        }
        if (since && nanoseconds() - since > WAIT) waited = true;
    }

    void leave() {
        if (lost_core()) lost = true;
    }

    // After all threads have ended: decide whether the next calls use one thread.
    void judge() {
        int64_t now = alone_for;
        if (waited && lost) {
            alone_until = nanoseconds() + now;
            alone_for = std::min(2 * now, LONGEST);
        } else {
            alone_for = std::max(now - now / 16, SHORTEST);
        }
    }
};

void embed(const Matrix &table, int64_t id, long width, float *out) {
    for (long i = 0; i < width; i++) {
        long place = id * width + i;
        float own = table.kind == FLOAT32    ? ((const float *)table.weight)[place]
                    : table.kind == BFLOAT16 ? number(((const bfloat16 *)table.weight)[place])
                                             : number(((const int8_t *)table.weight)[place]);
        out[i] = table.scale ? own * table.scale[id] : own;
    }
}

// Root mean square norm (1910.07467).
void normalise(const float *x, const float *weight, long width, double epsilon, float *out) {
    vec squares = {};
    long i = 0;
    for (; i + W <= width; i += W) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < width; i++) total = std::fma(x[i], x[i], total);
    float factor = 1.0f / std::sqrt(total / width + (float)epsilon);
    for (long j = 0; j < width; j++) out[j] = weight[j] * (x[j] * factor);
}

// Rotary positions (2104.09864), halves against each other; in place, after the norm of a head if there is one.
void rotate(float *x, const float *norm, const float *cosines, const float *sines, long width, double epsilon) {
    if (norm) normalise(x, norm, width, epsilon, x);
    for (long i = 0, half = width / 2; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = low * cosines[i] - high * sines[i];
        x[i + half] = high * cosines[i + half] + low * sines[i + half];
    }
}

// In place over P scores, P a multiple of W; at least one is above -87 below the largest.
void softmax(float *scores, long positions) {
    vec peaks = load(scores);
    for (long p = W; p < positions; p += W) {
        vec own = load(scores + p);
        peaks = own > peaks ? own : peaks;
    }
    float peak = peaks[0];
    for (long i = 1; i < W; i++) peak = std::max(peak, (float)peaks[i]);
    vec sums = {};
    for (long p = 0; p < positions; p += W) {
        vec own = exponential(load(scores + p) - peak);
        sums += own;
        store(scores + p, own);
    }
    float factor = 1.0f / sum(sums);
    for (long p = 0; p < positions; p += W) store(scores + p, load(scores + p) * factor);
}

// Position of a token of a call in its text, and the positions it sees.
struct Place {
    const Call &call;
    long start;

    long position(long token) const { return start + (call.depths ? call.depths[token] : token); }

    bool visible(long token, long slot, long window) const {
        long inside = slot - start;
        if (inside >= call.tokens) return false;
        if (inside >= 0 && !(call.sees ? call.sees[token * call.tokens + inside] : inside <= token)) return false;
        return !window || position(token) - (inside < 0 ? slot : position(inside)) < window;
    }
};

// Attention of some tokens of one row over one key/value head, all query heads of its group together.
template <class T>
void attend(const Model &model, const Layer &layer, const Call &call, long row, long kv_head, long first, const float *queries,
            float *out, float *scratch) {
    long D = model.head_width, group = model.heads / model.kv_heads, tokens = std::min(QUERIES, call.tokens - first);
    Place place{call, call.starts[row]};
    // A chain's token sees nothing after itself; nodes of a tree use their own table.
    long positions = place.start + (call.sees ? call.tokens : first + tokens), stride = (positions + W - 1) / W * W;
    long cache_row = call.cache_rows ? call.cache_rows[row] : row;
    long head = (cache_row * model.kv_heads + kv_head) * model.capacity * D;
    float *own = scratch, *sums = own + tokens * group * D, *scores = sums + tokens * group * D;
    for (long q = 0; q < tokens; q++) {
        const float *from = queries + ((row * call.tokens + first + q) * model.heads + kv_head * group) * D;
        for (long i = 0; i < group * D; i++) own[q * group * D + i] = from[i] * (float)model.scaling;
    }
    Share keys(std::max(positions, OUTPUTS), OUTPUTS, 0, 1);
    for (long q = 0; q < tokens * group; q += MOST_TOGETHER) {
        long count = std::min(MOST_TOGETHER, tokens * group - q);
        Lanes lanes(own + q * D, D, count, D);
        dots(lanes, own + q * D, D, count, (const T *)layer.keys + head, D, keys, scores + q * stride, stride);
    }
    for (long q = 0; q < tokens; q++)
        for (long g = 0; g < group; g++) {
            float *mine = scores + (q * group + g) * stride;
            long begin = layer.window ? 0 : place.start;  // everything before a chain or a tree is visible
            for (long p = begin; p < positions; p++)
                if (!place.visible(first + q, p, layer.window)) mine[p] = -INFINITY;
            for (long p = positions; p < stride; p++) mine[p] = -INFINITY;
            softmax(mine, stride);
        }
    weighted_sums(scores, stride, tokens * group, positions, (const T *)layer.values + head, D, sums);
    for (long q = 0; q < tokens; q++)
        std::memcpy(out + ((row * call.tokens + first + q) * model.heads + kv_head * group) * D, sums + q * group * D,
                    group * D * sizeof(float));
}

// For one token and some key/value heads: rotate queries and keys, write keys and values into the cache.
template <class T>
void place_token(const Model &model, const Layer &layer, const Call &call, long m, Share kv_heads, float *queries, float *keys,
                 const float *values) {
    long D = model.head_width, row = m / call.tokens, token = m % call.tokens;
    Place place{call, call.starts[row]};
    long angle = std::min<long>(place.position(token), model.positions - 1) * D;
    const float *cosines = model.cosines + angle, *sines = model.sines + angle;
    long group = model.heads / model.kv_heads, cache_row = call.cache_rows ? call.cache_rows[row] : row;
    for (long h = kv_heads.begin * group; h < kv_heads.end * group; h++)
        rotate(queries + (m * model.heads + h) * D, layer.query_norm, cosines, sines, D, model.epsilon);
    for (long h = kv_heads.begin; h < kv_heads.end; h++) {
        float *key = keys + (m * model.kv_heads + h) * D;
        const float *value = values + (m * model.kv_heads + h) * D;
        rotate(key, layer.key_norm, cosines, sines, D, model.epsilon);
        long slot = ((cache_row * model.kv_heads + h) * model.capacity + place.start + token) * D;
        for (long d = 0; d < D; d++) {
            write((T *)layer.keys + slot + d, key[d]);
            write((T *)layer.values + slot + d, value[d]);
        }
    }
}

// Numbers of one thread's attention.
long attention_floats(const Model &model, const Call &call) {
    long reach = OUTPUTS;
    for (long k = 0; k < call.rows; k++) reach = std::max<long>(reach, call.starts[k] + call.tokens);
    return std::min<long>(QUERIES, call.tokens) * (model.heads / model.kv_heads) * (2 * model.head_width + reach + W);
}

static thread_local Scratch activations;

struct Buffers {  // (M, ...) each; threads: `of_thread` numbers for each, of which the last are its copy of few norms
    float *x, *normed, *queries, *keys, *values, *attended, *gate, *up, *threads;
    long of_attention, of_thread;
    Buffers(const Model &model, const Call &call, long tokens) : of_attention(attention_floats(model, call)) {
        of_thread = of_attention + (tokens <= FEW ? tokens * model.width : 0);
        float *scratch = activations.of(count(model, tokens) + call.threads * of_thread);
        long heads = model.heads * model.head_width, kv = model.kv_heads * model.head_width;
        long sizes[] = {model.width, model.width, heads, kv, kv, heads, model.inner, model.inner};
        float **parts[] = {&x, &normed, &queries, &keys, &values, &attended, &gate, &up};
        for (int i = 0; i < 8; i++) *parts[i] = scratch, scratch += sizes[i] * tokens;
        threads = scratch;
    }
    float *scratch(long thread) const { return threads + thread * of_thread; }
    static long count(const Model &model, long tokens) {
        return tokens * 2 * (model.width + (model.heads + model.kv_heads) * model.head_width + model.inner);
    }
};

void gated(float *gate, const float *up, long count) {  // silu(gate) * up, in place
    long i = 0;
    for (; i + W <= count; i += W) {
        vec own = load(gate + i);
        store(gate + i, own / (1.0f + exponential(-own)) * load(up + i));
    }
    for (; i < count; i++) {
        vec own = vec{} + gate[i];
        gate[i] = (own / (1.0f + exponential(-own)))[0] * up[i];
    }
}

// One thread's part of a layer. T: of the cache. fill: compute the keys and values only.
template <class T>
void run_layer(const Model &model, const Layer &layer, const Call &call, const Buffers &b, long thread, Barrier &all, bool fill) {
    long M = call.rows * call.tokens, threads = call.threads, heads = model.heads * model.head_width;
    auto share = [&](long total, long step) { return Share(total, step, thread, threads); };
    auto norm_all = [&](const float *weight) {  // waits only if the tokens were shared
        bool own = M <= FEW;  // for few tokens each thread's own copy is faster than waiting
        float *to = own ? b.scratch(thread) + b.of_attention : b.normed;
        Share tokens = own ? Share(M, 1, 0, 1) : share(M, 1);
        for (long m = tokens.begin; m < tokens.end; m++)
            normalise(b.x + m * model.width, weight, model.width, model.epsilon, to + m * model.width);
        if (!own) all.wait(threads);
        return to;
    };
    auto add = [&](const Matrix &w, const float *from, long depth) {  // adds to x, through the buffer of norms, and waits
        Share own = share(model.width, OUTPUTS);
        products({{w, own, b.normed}}, from, M, depth);
        for (long m = 0; m < M; m++)
            for (long n = own.begin; n < own.end; n++) b.x[m * model.width + n] += b.normed[m * model.width + n];
        all.wait(threads);
    };
    // If heads can be divided, no thread reads another's queries, keys or values. A product has at least 4 outputs.
    bool divided = model.kv_heads % threads == 0 && model.kv_heads / threads * model.head_width >= OUTPUTS;
    auto part = [&](const Matrix &w, float *y) { return Output{w, share(w.outputs, divided ? model.head_width : OUTPUTS), y}; };
    products({part(layer.query, b.queries), part(layer.key, b.keys), part(layer.value, b.values)}, norm_all(layer.norm), M, model.width);
    if (!divided) all.wait(threads);
    Share kv_heads = divided ? share(model.kv_heads, 1) : Share(model.kv_heads, 1, 0, 1);
    Share tokens = divided ? Share(M, 1, 0, 1) : share(M, 1);
    for (long m = tokens.begin; m < tokens.end; m++) place_token<T>(model, layer, call, m, kv_heads, b.queries, b.keys, b.values);
    if (!divided) all.wait(threads);
    if (fill) return;
    long chunks = (call.tokens + QUERIES - 1) / QUERIES;
    for (long i = 0; i < call.rows * model.kv_heads * chunks; i++) {
        long row = i / chunks / model.kv_heads, head = i / chunks % model.kv_heads;
        if (divided ? head < kv_heads.begin || head >= kv_heads.end : i % threads != thread) continue;
        attend<T>(model, layer, call, row, head, i % chunks * QUERIES, b.queries, b.attended, b.scratch(thread));
    }
    all.wait(threads);
    add(layer.out, b.attended, heads);
    Share inner = share(model.inner, OUTPUTS);
    products({{layer.gate, inner, b.gate}, {layer.up, inner, b.up}}, norm_all(layer.second_norm), M, model.width);
    for (long m = 0; m < M; m++) {
        long from = m * model.inner + inner.begin;
        gated(b.gate + from, b.up + from, inner.end - inner.begin);
    }
    all.wait(threads);
    add(layer.down, b.gate, model.inner);
}

void run(const Model *model, const Layer *layers, const Call *asked) {
    long M = asked->rows * asked->tokens, width = model->width;
    Buffers b(*model, *asked, M);
    Barrier all;
    int64_t threads_asked = threads_startable(threads_now(asked->threads));
#pragma omp parallel num_threads(threads_asked) if (threads_asked > 1)
    try {
        Call own_call = *asked, *call = &own_call;
        long thread = 0;
        call->threads = 1;
#ifdef _OPENMP  // OpenMP may give fewer threads than requested
        thread = omp_get_thread_num(), call->threads = omp_get_num_threads();
#endif
        long threads = call->threads;
        Share own(M, 1, thread, threads);
        for (long m = own.begin; m < own.end; m++) embed(model->embedding, call->ids[m], width, b.x + m * width);
        all.wait(threads);
        for (long l = 0; l < model->layers; l++) {
            bool fill = call->kept == 0 && l + 1 == model->layers;
            if (model->cache_kind == FLOAT32) run_layer<float>(*model, layers[l], *call, b, thread, all, fill);
            else run_layer<bfloat16>(*model, layers[l], *call, b, thread, all, fill);
        }
        Share kept(call->rows * call->kept, 1, thread, threads);
        for (long i = kept.begin; i < kept.end; i++) {
            long row = i / call->kept, m = (row + 1) * call->tokens - call->kept + i % call->kept;
            if (call->columns) m = row * call->tokens + call->columns[row];
            normalise(b.x + m * width, model->norm, width, model->epsilon, b.normed + i * width);
        }
        all.wait(threads);
        Share outputs(model->head.outputs, OUTPUTS, thread, threads);
        products({{model->head, outputs, call->logits}}, b.normed, call->rows * call->kept, width);
        all.wait(threads);
        if (threads > 1) all.leave();
    } catch (const std::bad_alloc &) {
        all.failed = true;  // an exception that leaves a parallel region ends the process
    }
    if (all.failed) throw std::bad_alloc();
    if (threads_asked > 1) all.judge();
}

extern "C" int64_t call_model(const Model *model, const Layer *layers, const Call *call) {
    try {
        run(model, layers, call);
    } catch (const std::bad_alloc &) {
        return 1;
    }
    return 0;
}

void forget() { activations.forget(); }
