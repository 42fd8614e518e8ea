// Logits to probabilities to tokens, and which drafted tokens are kept: the C++ version of speculative/rules (sampling, verify).
#pragma once

#include <cstdint>

struct Sampling {
    double temperature, top_p, min_p;
    int64_t top_k;
};

// The largest of V scores, the first of equal ones. `peak`: it, or NaN when there is one.
long most_likely(const float *scores, long V, double &peak);

// Probabilities of V logits at a temperature above 0; all NaN when a logit is NaN or infinite.
void probabilities(const float *logits, long V, const Sampling &sampling, float *probs);

// The first token whose cumulative weight exceeds a point in [0, 1) of their sum; never one of weight 0 if there is another.
long draw(const float *weights, long V, double point);
