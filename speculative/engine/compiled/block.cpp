// Blocks of speculative decoding without Python: the draft's steps, the target's call, the rule, the commit.
//
// B blocks, R rows of the batch, K of them active, G drafted tokens, G1 = G + 1, C columns of the token buffer, L response positions,
// P places of the widest block, V vocabulary.

#include "rules.h"
#include "step.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

constexpr long CATCH_UP = 64;  // tokens per call when the draft catches up with the text
constexpr uint64_t MULTIPLIER = 0x9E3779B97F4A7C15;  // as in past_responses.py
constexpr int32_t END = -1;
enum Proposer : int64_t { NOBODY, MODEL, GIVEN };
enum Column : long { DRAFT, COIN, RESIDUAL, COLUMNS };  // columns of the uniforms of a place

struct Block {
    int64_t rows, blocks, nanoseconds;  // K; at most B blocks, of which none starts after so long or after the end of a response
    int64_t batch, gamma, proposer, greedy_target, greedy_draft, threads, columns, vocabulary, positions, places;
    int64_t longest_ngram, shortest_ngram, steps;  // of a lookup before the draft, 0 for none; tokens that the draft proposes
    const int32_t *past;                           // (N) past responses, or null: what is looked up is the row's own text
    const uint64_t *past_hashes;                   // (M) of their n-grams, rising
    const int32_t *past_starts;                    // (M) where what followed an n-gram begins
    int64_t past_tokens, past_ngrams;              // N, M
    const Model *target, *draft;
    const Layer *target_layers, *draft_layers;
    const int64_t *seats;                     // (K) rows that are active
    int64_t *tokens, *lengths, *read;         // (R, C); (R); (R): read by the draft
    const int64_t *prompt_lengths, *limits;   // (R); (R) length at which a response ends
    const int64_t *ends, *last_end;           // ids that end it
    const double *uniforms;                   // (R, L, P, 3), or null
    const int64_t *given_ids, *given_counts;  // (R, G); (R), or null for all
    const float *given_probs;                 // (R, G, V), or null for one-hot
    // Outputs by block and row; only active rows are written.
    int64_t *accepted, *drafted, *ids;        // (B, R); (B, R, G); (B, R, G1): accepted ids, then the target's own
    int64_t *counts, *sources;                // (B, R): drafted tokens; 1 drafted after a lookup, else 0
    double *log_probs, *peaks, *draft_peaks;  // (B, R, G1); (B, R) each: the last two are NaN or infinite if a logit is
    double *seconds;                          // (B, 3): draft, verify, accept
    double lenience;                          // 1 if lossless
    Sampling sampling, draft_sampling;
};

static thread_local Scratch memory_of_target_logits, memory_of_draft_logits, memory_of_draft_probs;

struct Work : Block {  // a block with its buffers: (K, G1, V), (K, V) or fewer columns, (K, G, V)
    float *target_logits, *draft_logits, *draft_probs;
    std::vector<int64_t> left;  // rows whose tokens the draft proposes, in the order of `seats` and of `draft_probs`
    long width = 0;             // drafted tokens of the longest row of the block
    explicit Work(const Block &block) : Block(block) {
        threads = threads_startable(threads);
        bool drafts = proposer == MODEL;
        target_logits = memory_of_target_logits.of(rows * (gamma + 1) * vocabulary);
        draft_logits = memory_of_draft_logits.of(drafts ? rows * vocabulary : 0);
        draft_probs = memory_of_draft_probs.of(drafts && !greedy_draft ? rows * gamma * vocabulary : 0);
    }

    void next() {  // outputs of the next block
        accepted += batch, counts += batch, sources += batch, peaks += batch, draft_peaks += batch, seconds += 3;
        drafted += batch * gamma, ids += batch * (gamma + 1), log_probs += batch * (gamma + 1);
    }

    bool ended() const {  // some response, in this block
        return std::any_of(seats, seats + rows, [&](int64_t row) {
            const int64_t *own = ids + row * (gamma + 1);
            return lengths[row] >= limits[row] || std::find_first_of(own, own + accepted[row] + 1, ends, last_end) != own + accepted[row] + 1;
        });
    }
};

static void forward(const Work &b, const Model *model, const Layer *layers, long queries, long kept, const std::vector<int64_t> &ids,
                    const std::vector<int64_t> &starts, const int64_t *columns, float *logits) {
    Call call{b.rows, queries, kept, b.threads, ids.data(), starts.data(), b.seats, nullptr, nullptr, logits, columns};
    run(model, layers, &call);
}

// Feeds the text that the draft has not read yet, up to the last token; logits after it, one per row.
static void catch_up(const Work &b) {
    for (bool last = false; !last;) {
        long missing = 1;
        for (long k = 0; k < b.rows; k++) missing = std::max<long>(missing, b.lengths[b.seats[k]] - b.read[b.seats[k]]);
        long width = std::min(missing, CATCH_UP);
        last = missing == width;
        std::vector<int64_t> ids(b.rows * width), starts(b.rows), columns(b.rows);
        for (long k = 0; k < b.rows; k++) {
            // A row that misses fewer tokens reads some again; a shorter row reads scratch after its end.
            long row = b.seats[k], end = last ? b.lengths[row] : std::min(b.read[row] + width, b.lengths[row]);
            starts[k] = std::max(0L, end - width);
            columns[k] = end - 1 - starts[k];
            std::copy_n(b.tokens + row * b.columns + starts[k], width, ids.begin() + k * width);
            b.read[row] = end;
        }
        forward(b, b.draft, b.draft_layers, width, 1, ids, starts, columns.data(), b.draft_logits);
    }
}

static const double *uniforms_of(const Work &b, long row, long place) {  // by the response position of the block's first token
    return b.uniforms + ((row * b.positions + b.lengths[row] - b.prompt_lengths[row]) * b.places + place) * COLUMNS;
}

// Work on every row, in threads. An exception that leaves a parallel region ends the process.
template <class F> static void for_rows(const Work &b, F work) {
    std::atomic<bool> failed{false};
#pragma omp parallel for num_threads(b.threads) if (b.threads > 1 && b.rows > 1)
    for (long k = 0; k < b.rows; k++) {
        try {
            work(k);
        } catch (const std::bad_alloc &) {
            failed = true;
        }
    }
    if (failed) throw std::bad_alloc();
}

// From the draft's logits to its token at one position of every row.
static void choose(const Work &b, long place) {
    for_rows(b, [&](long k) {
        long row = b.seats[k], V = b.vocabulary;
        const float *logits = b.draft_logits + k * V;
        double peak;
        long id;
        if (b.greedy_draft) id = most_likely(logits, V, peak);
        else {
            float *probs = b.draft_probs + (k * b.gamma + place) * V;
            probabilities(logits, V, b.draft_sampling, probs);
            id = draw(probs, V, uniforms_of(b, row, place)[DRAFT]);
            peak = probs[0];
        }
        b.drafted[row * b.gamma + place] = id;
        b.draft_peaks[row] += peak;
    });
}

// Prompt lookup: what followed the longest n-gram that ends the text, at its latest earlier occurrence; at the end of the text it goes on
// with its own tokens. The number of tokens, gamma or none.
static long look_up(const Work &b, long row) {
    const int64_t *text = b.tokens + row * b.columns;
    long length = b.lengths[row], found = 0, follower = 0;
    for (long p = length - 1; p > 0 && found < b.longest_ngram; p--) {
        long same = 0, most = std::min<long>(p, b.longest_ngram);
        while (same < most && text[p - 1 - same] == text[length - 1 - same]) same++;
        if (same > found && same >= b.shortest_ngram) found = same, follower = p;
    }
    for (long i = 0; i < b.gamma && found; i++) b.drafted[row * b.gamma + i] = text[follower + i % (length - follower)];
    return found ? b.gamma : 0;
}

// The same in past responses, up to the end of the response: see `ResponseIndex` in past_responses.py.
static long recall(const Work &b, long row) {
    const int64_t *end = b.tokens + row * b.columns + b.lengths[row];
    const uint64_t *last = b.past_hashes + b.past_ngrams;
    uint64_t hash = 0, power = 1;
    long found = 0, start = 0, count = 0;
    for (long size = 1; size <= std::min(b.longest_ngram, b.lengths[row]); size++) {
        hash += (uint64_t)(end[-size] + 1) * (power *= MULTIPLIER);
        if (size < b.shortest_ngram) continue;
        const uint64_t *place = std::lower_bound(b.past_hashes, last, hash);
        if (place == last || *place != hash) break;  // whatever has a longer match has every shorter one
        found = size, start = b.past_starts[place - b.past_hashes];
    }
    for (long i = 1; i <= found; i++)  // two n-grams may share a hash
        if (start < found || b.past[start - i] != end[-i]) return 0;
    for (; found && count < b.gamma && start + count < b.past_tokens && b.past[start + count] != END; count++)
        b.drafted[row * b.gamma + count] = b.past[start + count];
    return count;
}

// The draft's tokens for some rows.
static void draft(const Work &b) {
    catch_up(b);
    choose(b, 0);
    std::vector<int64_t> ids(b.rows), starts(b.rows);
    for (long place = 1; place < b.steps; place++) {
        for (long k = 0; k < b.rows; k++) {
            long row = b.seats[k];
            ids[k] = b.drafted[row * b.gamma + place - 1];
            starts[k] = b.lengths[row] + place - 1;
            b.read[row] = starts[k] + 1;
        }
        forward(b, b.draft, b.draft_layers, 1, 1, ids, starts, nullptr, b.draft_logits);
        choose(b, place);
    }
}

static void propose(Work &b) {
    b.left.clear(), b.width = 0;
    for (long k = 0; k < b.rows; k++) {
        long row = b.seats[k];
        // Forget rejected tokens, also before blocks without drafting.
        if (b.read) b.read[row] = std::min(b.read[row], b.lengths[row] - 1);
        b.draft_peaks[row] = 0.0;
        b.counts[row] = b.sources[row] = 0;
        std::fill_n(b.drafted + row * b.gamma, b.gamma, 0);
        if (b.proposer == GIVEN) {
            b.counts[row] = b.given_counts ? b.given_counts[row] : b.gamma;
            std::copy_n(b.given_ids + row * b.gamma, b.gamma, b.drafted + row * b.gamma);
        } else if (long found = !b.gamma || !b.longest_ngram ? 0 : b.past ? recall(b, row) : look_up(b, row)) {
            b.counts[row] = found;
        } else if (b.proposer == MODEL) {
            b.counts[row] = b.steps, b.sources[row] = b.longest_ngram > 0;
            b.left.push_back(row);
        }
        b.width = std::max<long>(b.width, b.counts[row]);
    }
    if (b.left.empty()) return;
    Work part = b;
    part.seats = b.left.data(), part.rows = b.left.size();
    draft(part);
}

// Greedy rules: the drafted tokens that are the target's own choice, then that choice.
static long accept_greedy(const Work &b, long row, const float *logits, long count, long &next) {
    for (long place = 0;; place++) {
        double peak;
        next = most_likely(logits + place * b.vocabulary, b.vocabulary, peak);
        b.peaks[row] += peak;
        if (place == count || b.drafted[row * b.gamma + place] != next) return place;
    }
}

// Speculative sampling (2211.17192, Algorithm 1), position by position: no probability is computed after the first rejection.
// draft: probabilities (G, V); null if they are one-hot.
static long accept_sampled(const Work &b, long row, const float *draft, float *logits, long count, long &next) {
    long V = b.vocabulary;
    bool one_hot = !draft;
    for (long place = 0;; place++) {
        float *target = logits + place * V;
        const float *own = one_hot ? nullptr : draft + place * V;
        probabilities(target, V, b.sampling, target);
        b.peaks[row] += target[0];
        long id = place < count ? b.drafted[row * b.gamma + place] : 0;
        const double *uniforms = uniforms_of(b, row, place);
        if (place < count) {
            double target_prob = target[id], draft_prob = one_hot ? 1.0 : own[id];
            if (uniforms[COIN] * draft_prob < b.lenience * target_prob) {
                b.log_probs[row * (b.gamma + 1) + place] = std::log(target_prob);
                continue;
            }
        }
        std::vector<float> residual(target, target + V);
        if (place < count) {
            bool left = false;
            for (long v = 0; v < V; v++) {
                residual[v] = one_hot ? (v == id ? 0.0f : target[v]) : std::max(target[v] - own[v], 0.0f);
                left = left || residual[v] > 0.0f;
            }
            // If nothing is left, a rejection has probability 0 in exact arithmetic: use the target's own row.
            if (!left) residual.assign(target, target + V);
        }
        next = draw(residual.data(), V, uniforms[RESIDUAL]);
        b.log_probs[row * (b.gamma + 1) + place] = std::log((double)target[next]);
        return place;
    }
}

static void verify(const Work &b) {
    std::vector<const float *> draft(b.batch, nullptr);
    for (size_t i = 0; i < b.left.size() && !b.greedy_draft; i++) draft[b.left[i]] = b.draft_probs + i * b.gamma * b.vocabulary;
    for (long k = 0; k < b.rows && b.proposer == GIVEN && b.given_probs; k++)
        draft[b.seats[k]] = b.given_probs + b.seats[k] * b.gamma * b.vocabulary;
    for_rows(b, [&](long k) {
        long row = b.seats[k], width = b.gamma + 1, next = 0, count = b.counts[row];
        float *logits = b.target_logits + k * (b.width + 1) * b.vocabulary;
        b.peaks[row] = 0.0;
        long accepted = b.greedy_target ? accept_greedy(b, row, logits, count, next) : accept_sampled(b, row, draft[row], logits, count, next);
        int64_t *ids = b.ids + row * width;
        std::copy_n(b.drafted + row * b.gamma, b.gamma, ids);
        ids[accepted] = next;
        std::copy_n(ids, accepted + 1, b.tokens + row * b.columns + b.lengths[row]);
        b.accepted[row] = accepted;
        b.lengths[row] += accepted + 1;
    });
}

static void run_one(Work &b) {
    auto now = [] { return std::chrono::steady_clock::now(); };
    auto since = [&](auto began) { return std::chrono::duration<double>(now() - began).count(); };
    auto began = now();
    propose(b);
    b.seconds[0] = since(began);
    began = now();
    long width = b.width + 1;
    std::vector<int64_t> ids(b.rows * width), starts(b.rows);
    for (long k = 0; k < b.rows; k++) {
        long row = b.seats[k];
        starts[k] = b.lengths[row] - 1;
        ids[k * width] = b.tokens[row * b.columns + starts[k]];
        std::copy_n(b.drafted + row * b.gamma, b.width, ids.begin() + k * width + 1);
    }
    forward(b, b.target, b.target_layers, width, width, ids, starts, nullptr, b.target_logits);
    b.seconds[1] = since(began);
    began = now();
    verify(b);
    b.seconds[2] = since(began);
}

// For Python, which declares the same structs.
extern "C" {
int64_t struct_bytes[] = {sizeof(Model), sizeof(Layer), sizeof(Call), sizeof(Block)};
}

// The number of blocks that ran; 0 if memory is short.
extern "C" int64_t run_blocks(const Block *block) {
    try {
        Work b(*block);
        auto began = std::chrono::steady_clock::now();
        for (long done = 1;; done++) {
            run_one(b);
            if (done == b.blocks || b.ended() || std::chrono::steady_clock::now() - began > std::chrono::nanoseconds(b.nanoseconds)) return done;
            b.next();
        }
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

// Frees the buffers of this thread.
extern "C" void forget_all() {
    memory_of_target_logits.forget(), memory_of_draft_logits.forget(), memory_of_draft_probs.forget();
    forget();
}
