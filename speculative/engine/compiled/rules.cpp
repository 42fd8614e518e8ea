#include "rules.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

constexpr long PIECE = 256;  // number of weights that are summed before a token is searched among them

static float largest(const float *x, long V) {  // ignores NaN
    vec peaks = vec{} - INFINITY;
    long i = 0;
    for (; i + W <= V; i += W) {
        vec own = load(x + i);
        peaks = own > peaks ? own : peaks;
    }
    float peak = -INFINITY;
    for (long lane = 0; lane < W; lane++) peak = std::max(peak, (float)peaks[lane]);
    for (; i < V; i++) peak = std::max(peak, x[i]);
    return peak;
}

static double total(const float *x, long V) {
    double lanes[8] = {};
    long i = 0;
    for (; i + 8 <= V; i += 8)
        for (long lane = 0; lane < 8; lane++) lanes[lane] += x[i + lane];
    for (; i < V; i++) lanes[0] += x[i];
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

long most_likely(const float *scores, long V, double &peak) {
    float found = largest(scores, V);
    for (long i = 0; i < V; i++)
        if (scores[i] != scores[i]) return peak = scores[i], i;
    peak = found;
    return std::find(scores, scores + V, found) - scores;
}

// Weights outside the smallest set of tokens whose mass reaches top_p become 0; of equal weights the lower ids are removed first.
static void keep_nucleus(float *weights, long V, double top_p) {
    static thread_local std::vector<std::pair<float, int32_t>> heap;
    double mass = total(weights, V), wanted = top_p * mass, kept = 0.0;
    // Tokens of at most this weight together do not exceed the removed mass, so they need no sorting.
    float border = (float)((1.0 - top_p) * mass / V);
    heap.clear();
    for (long i = 0; i < V; i++)
        if (weights[i] > border) heap.emplace_back(weights[i], (int32_t)i);
    if (heap.empty()) return;
    std::make_heap(heap.begin(), heap.end());
    auto end = heap.end();
    std::pair<float, int32_t> least = heap.front();
    while (end != heap.begin() && kept < wanted) {
        std::pop_heap(heap.begin(), end);
        least = *--end;
        kept += least.first;
    }
    for (long i = 0; i < V; i++)
        if (weights[i] < least.first || (weights[i] == least.first && i < least.second)) weights[i] = 0.0f;
}

void probabilities(const float *logits, long V, const Sampling &sampling, float *probs) {
    float temperature = (float)sampling.temperature, least = -INFINITY;
    for (long i = 0; i < V; i++) probs[i] = logits[i] / temperature;
    if (sampling.top_k > 0 && sampling.top_k < V) {
        static thread_local std::vector<float> order;
        order.assign(probs, probs + V);
        auto kth = order.begin() + (sampling.top_k - 1);
        std::nth_element(order.begin(), kth, order.end(), std::greater<float>());
        least = *kth;
    }
    float peak = largest(probs, V);
    long i = 0;
    for (; i + W <= V; i += W) {
        vec own = load(probs + i);
        store(probs + i, own < least ? vec{} : exponential(own - peak));
    }
    for (; i < V; i++) probs[i] = probs[i] < least ? 0.0f : exponential(vec{} + (probs[i] - peak))[0];
    if (sampling.top_p < 1.0) keep_nucleus(probs, V, sampling.top_p);
    if (sampling.min_p > 0.0) {
        float border = (float)sampling.min_p * largest(probs, V);
        for (long j = 0; j < V; j++)
            if (probs[j] < border) probs[j] = 0.0f;
    }
    float factor = (float)(1.0 / total(probs, V));
    for (long j = 0; j < V; j++) probs[j] *= factor;
}

long draw(const float *weights, long V, double point) {
    // A product that rounds up to the whole sum would find no token.
    double mass = total(weights, V), wanted = point * (mass * (1.0 - 0x1p-52)), before = 0.0;
    long last = 0;
    for (long first = 0; first < V; first += PIECE) {
        long end = std::min(V, first + PIECE);
        double piece = total(weights + first, end - first);
        if (before + piece > wanted) {
            double sum = before;
            for (long i = first; i < end; i++) {
                sum += weights[i];
                if (weights[i] > 0.0f) {
                    last = i;
                    if (sum > wanted) return i;
                }
            }
        }
        before += piece;
    }
    if (weights[last] > 0.0f) return last;  // rounding: the sums of pieces were slightly larger
    for (long i = V; i-- > 0;)
        if (weights[i] > 0.0f) return i;
    return 0;
}
