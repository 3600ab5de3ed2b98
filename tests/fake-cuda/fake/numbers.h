// Element types of cuBLAS and NCCL in and out of f32 and f64.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace fake {

inline uint32_t bits_of(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    return b;
}
inline float of_bits(uint32_t b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
}

inline float from_bf16(uint16_t b) { return of_bits((uint32_t)b << 16); }
// To the nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
    const uint32_t b = bits_of(x);
    if ((b & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) return of_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * ldexpf((float)mantissa, -24);
    return of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline uint16_t to_f16(float x) {
    const uint16_t sign = (uint16_t)(bits_of(x) >> 16 & 0x8000);
    const float a = fabsf(x);
    if (a != a) return 0x7fff;
    if (a >= 65520.0f) return sign | 0x7c00;
    // rintf rounds ties to even, as the conversion does.
    if (a < 6.103515625e-5f) return (uint16_t)(sign | (int)rintf(ldexpf(a, 24)));
    int exponent;
    const float mantissa = frexpf(a, &exponent);                  // [0.5, 1) * 2^exponent
    const int rounded = (int)rintf(ldexpf(mantissa, 11));          // [1024, 2048]
    return (uint16_t)(sign | (((exponent + 14) << 10) + rounded - 1024));
}

// Ten bits of mantissa, as the tensor cores take an f32 for TF32.
inline float to_tf32(float x) {
    const uint32_t b = bits_of(x);
    if ((b & 0x7f800000) == 0x7f800000) return x;
    return of_bits((b + 0x1000) & 0xffffe000);
}

}  // namespace fake
