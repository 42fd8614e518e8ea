// Vectors of float32, and conversion from other number types.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr long W = 16, REGISTERS = 32;  // floats in a vector register
#elif defined(__AVX__)
constexpr long W = 8, REGISTERS = 16;
#else
constexpr long W = 4, REGISTERS = 16;
#endif
using vec = float __attribute__((vector_size(W * 4)));
using ints = int32_t __attribute__((vector_size(W * 4)));
using four = float __attribute__((vector_size(16), may_alias));
using bfloat16 = uint16_t;

// A typedef, because clang ignores `aligned` of a `using`.
inline vec load(const float *p) {
    typedef float there __attribute__((vector_size(W * 4), aligned(4), may_alias));
    return *reinterpret_cast<const there *>(p);
}

// W numbers widened to 32 bits. Compilers' own vector conversion takes three times as long.
inline ints widened(const bfloat16 *p) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    typedef uint16_t there __attribute__((vector_size(W * 2), aligned(2), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const there *>(p), ints);
#endif
}

inline ints widened(const int8_t *p) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepi8_epi32(_mm_loadu_si64(p));
#else
    typedef int8_t there __attribute__((vector_size(W), aligned(1), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const there *>(p), ints);
#endif
}

inline vec load(const bfloat16 *p) { return (vec)(widened(p) << 16); }
inline vec load(const int8_t *p) { return __builtin_convertvector(widened(p), vec); }

inline void store(float *p, vec v) {
    typedef float there __attribute__((vector_size(W * 4), aligned(4), may_alias));
    *reinterpret_cast<there *>(p) = v;
}

inline vec everywhere(float x) { return x - vec{}; }  // adding to zeros is an instruction of its own, because of -0

// a * b + c, rounded once. A compiler may round twice in one place and once in another, and a token's bits would depend on the tile.
inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps(a, b, c);
#elif defined(__AVX__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;  // without such an instruction always twice
#endif
}

inline float number(float x) { return x; }
inline float number(int8_t x) { return x; }
inline float number(bfloat16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void write(float *p, float x) { *p = x; }
inline void write(bfloat16 *p, float x) {  // to the nearest, ties to even, as torch rounds
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *p = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float sum(vec v) {
    float lanes[W];
    store(lanes, v);
    for (long half = W / 2; half; half /= 2)
        for (long i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// e^x: powers of two and a polynomial, relative error under 3e-7; 0 below -87, so that masked positions have weight exactly 0.
inline vec exponential(vec x) {
    vec kept = x < -87.0f ? vec{} - 87.0f : x;
    kept = kept > 88.0f ? vec{} + 88.0f : kept;
    vec power = (kept * 1.44269504f + 12582912.0f) - 12582912.0f;  // to a whole number
    vec r = kept - power * 0.693359375f + power * 2.12194440e-4f;
    vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    vec scaled = y * (vec)((__builtin_convertvector(power, ints) + 127) << 23);
    return x < -87.0f ? vec{} : scaled;
}
