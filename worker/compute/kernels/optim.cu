// The servers' optimizers, bit for bit (common/src/optim): the same operations in the same order. To be
// compiled without fused multiply-add, and with division and root as IEEE 754 rounds them. The constants of
// an update are computed by the caller, as `rule` there does.
#include "prelude.cuh"

// What is done to a gradient before the rule: scale, clip by value (no limit is an infinite one), weight
// decay.
struct Stages {
    float scale;
    float limit;
    float decay;
};

INLINE float prepare(float g, float w, const Stages& s) {
    g = g * s.scale;
    g = g > s.limit ? s.limit : g;
    g = g < -s.limit ? -s.limit : g;
    return g + s.decay * w;
}

// `a` moved towards `b` by `weight`, as PyTorch's `lerp`, which changes formula at one half.
INLINE float lerp(float a, float b, float weight) {
    return weight < 0.5f ? a + weight * (b - a) : b - (b - a) * (1.0f - weight);
}

// Runs step(w, g, x, y, z) for every value, where x, y and z are the slots at a, b and c (a null one is left
// alone).
template <class Step>
INLINE void update(float* w, const float* grad, float* a, float* b, float* c, long long n,
                   const Stages& stages, Step step) {
    const bool wide = aligned16(w) && aligned16(grad) && aligned16(a) && aligned16(b) && aligned16(c);
    flat<4>(n, wide, [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        float ws[W], gs[W], x[W] = {}, y[W] = {}, z[W] = {};
        load<W>(w + i, ws);
        load<W>(grad + i, gs);
        if (a) load<W>(a + i, x);
        if (b) load<W>(b + i, y);
        if (c) load<W>(c + i, z);
#pragma unroll
        for (int e = 0; e < W; e++) step(ws[e], prepare(gs[e], ws[e], stages), x[e], y[e], z[e]);
        store<W>(w + i, ws);
        if (a) store<W>(a + i, x);
        if (b) store<W>(b + i, y);
        if (c) store<W>(c + i, z);
    });
}

// w <- w - lr * g.
KERNEL(sgd)(float* w, const float* grad, long long n, float scale, float limit, float decay, float lr) {
    update(w, grad, nullptr, nullptr, nullptr, n, {scale, limit, decay},
           [&](float& w, float g, float&, float&, float&) { w = w - lr * g; });
}

// b <- mu * b + enter * g; w <- w - lr * b.
KERNEL(momentum)(float* w, float* buf, const float* grad, long long n, float scale, float limit, float decay,
                 float lr, float mu, float enter) {
    update(w, grad, buf, nullptr, nullptr, n, {scale, limit, decay},
           [&](float& w, float g, float& b, float&, float&) {
               b = mu * b + enter * g;
               w = w - lr * b;
           });
}

// b <- mu * b + g; w <- w - lr * (g + mu * b).
KERNEL(nesterov)(float* w, float* buf, const float* grad, long long n, float scale, float limit, float decay,
                 float lr, float mu) {
    update(w, grad, buf, nullptr, nullptr, n, {scale, limit, decay},
           [&](float& w, float g, float& b, float&, float&) {
               b = mu * b + g;
               w = w - lr * (g + mu * b);
           });
}

// s <- s + g * g; w <- w - lr * g / (sqrt(s) + eps).
KERNEL(adagrad)(float* w, float* sum, const float* grad, long long n, float scale, float limit, float decay,
                float lr, float eps) {
    update(w, grad, sum, nullptr, nullptr, n, {scale, limit, decay},
           [&](float& w, float g, float& s, float&, float&) {
               s = s + g * g;
               w = w - lr * g / (sqrtf(s) + eps);
           });
}

// v <- keep * v + enter * g * g; centred: a <- lerp(a, g, enter) and the root is of v - a * a; momentum: b <-
// mu * b + g / d.
KERNEL(rmsprop)(float* w, float* v, float* mean, float* buf, const float* grad, long long n, float scale,
                float limit, float decay, float lr, float keep, float enter, float eps, float mu) {
    update(w, grad, v, mean, buf, n, {scale, limit, decay},
           [&](float& w, float g, float& v, float& a, float& b) {
               v = keep * v + enter * g * g;
               float under = v;
               if (mean) {
                   a = lerp(a, g, enter);
                   const float variance = v - a * a;
                   under = variance > 0.0f ? variance : 0.0f;
               }
               const float divisor = sqrtf(under) + eps;
               if (buf) {
                   b = mu * b + g / divisor;
                   w = w - lr * b;
               } else {
                   w = w - lr * g / divisor;
               }
           });
}

// m <- lerp(m, g, enter1); v <- keep2 * v + enter2 * g * g; w <- shrink * w - step * m / (sqrt(v) * unbias2 +
// eps).
KERNEL(adam)(float* w, float* m, float* v, const float* grad, long long n, float scale, float limit,
             float decay, float shrink, float enter1, float keep2, float enter2, float step, float unbias2,
             float eps) {
    update(w, grad, m, v, nullptr, n, {scale, limit, decay},
           [&](float& w, float g, float& m, float& v, float&) {
               m = lerp(m, g, enter1);
               v = keep2 * v + enter2 * g * g;
               const float divisor = sqrtf(v) * unbias2 + eps;
               w = w * shrink - step * m / divisor;
           });
}
