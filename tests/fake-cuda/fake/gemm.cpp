#include "gemm.h"

#include <string.h>

#include <algorithm>

#include "numbers.h"

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define FOR_VECTOR_UNITS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_VECTOR_UNITS
#endif

namespace fake {

size_t bytes_of(int type) {
    switch (type) {
        case R_32F: case R_32I: return 4;
        case R_64F: return 8;
        case R_16F: case R_16BF: return 2;
        case R_8I: return 1;
        default: return 0;
    }
}

float load(const void* base, long long i, int type) {
    switch (type) {
        case R_32F: return ((const float*)base)[i];
        case R_64F: return (float)((const double*)base)[i];
        case R_16F: return from_f16(((const uint16_t*)base)[i]);
        case R_16BF: return from_bf16(((const uint16_t*)base)[i]);
        case R_8I: return ((const int8_t*)base)[i];
        default: return (float)((const int32_t*)base)[i];
    }
}

void store(void* base, long long i, int type, float value) {
    switch (type) {
        case R_32F: ((float*)base)[i] = value; break;
        case R_64F: ((double*)base)[i] = value; break;
        case R_16F: ((uint16_t*)base)[i] = to_f16(value); break;
        case R_16BF: ((uint16_t*)base)[i] = to_bf16(value); break;
        default: ((int32_t*)base)[i] = (int32_t)value;
    }
}

size_t Matrix::bytes(long long batch) const {
    if (rows == 0 || columns == 0 || batch == 0) return 0;
    return (size_t)((batch - 1) * stride + (columns - 1) * ld + rows) * bytes_of(type);
}

namespace {

constexpr long long TM = 32, TN = 4;

float rounded(float x, Inputs how) {
    switch (how) {
        case Inputs::Tf32: return to_tf32(x);
        case Inputs::Bf16: return from_bf16(to_bf16(x));
        case Inputs::F16: return from_f16(to_f16(x));
        default: return x;
    }
}

// Panels of `tile` rows of the `rows` x k matrix whose element (i, p) is `at(i, p)`, zero past its end.
template <class At>
void pack(std::vector<float>& out, long long rows, long long k, long long tile, At at) {
    const long long panels = (rows + tile - 1) / tile;
    out.assign(panels * tile * k, 0.0f);
    for (long long i = 0; i < rows; i++) {
        float* to = &out[i / tile * tile * k + i % tile];
        for (long long p = 0; p < k; p++) to[p * tile] = at(i, p);
    }
}

typedef float Row __attribute__((vector_size(TM * sizeof(float))));

// out[j][i] = sum over p of a[p][i] * b[p][j]
FOR_VECTOR_UNITS void tile(const float* a, const float* b, long long k, float* out) {
    Row sum[TN] = {};
    for (long long p = 0; p < k; p++) {
        Row x;
        memcpy(&x, a + p * TM, sizeof x);
        for (int j = 0; j < TN; j++) sum[j] += x * b[p * TN + j];
    }
    memcpy(out, sum, sizeof sum);
}

void one(const Product& g, long long index, float alpha, float beta) {
    auto base = [&](const Matrix& x) { return (const char*)x.at + index * x.stride * (long long)bytes_of(x.type); };
    const char *a = base(g.a), *b = base(g.b), *c = base(g.c);
    std::vector<float> pa, pb, result(g.m * g.n);
    pack(pa, g.m, g.k, TM, [&](long long i, long long p) {
        return rounded(load(a, g.transpose_a ? p + i * g.a.ld : i + p * g.a.ld, g.a.type), g.inputs);
    });
    pack(pb, g.n, g.k, TN, [&](long long j, long long p) {
        return rounded(load(b, g.transpose_b ? j + p * g.b.ld : p + j * g.b.ld, g.b.type), g.inputs);
    });
    float out[TM * TN];
    for (long long i = 0; i < g.m; i += TM) {
        for (long long j = 0; j < g.n; j += TN) {
            tile(&pa[i * g.k], &pb[j * g.k], g.k, out);
            for (long long jj = 0; jj < TN && j + jj < g.n; jj++)
                for (long long ii = 0; ii < TM && i + ii < g.m; ii++)
                    result[(j + jj) * g.m + i + ii] = alpha * out[jj * TM + ii];
        }
    }
    // With beta 0, C is not read: it may hold NaN.
    if (beta != 0)
        for (long long j = 0; j < g.n; j++)
            for (long long i = 0; i < g.m; i++) result[j * g.m + i] += beta * load(c, i + j * g.c.ld, g.c.type);
    if (g.epilogue) g.epilogue(index, result.data());
    char* d = (char*)base(g.d);
    for (long long j = 0; j < g.n; j++)
        for (long long i = 0; i < g.m; i++) store(d, i + j * g.d.ld, g.d.type, result[j * g.m + i]);
}

}  // namespace

void multiply(const Product& g) {
    if (g.m == 0 || g.n == 0) return;
    std::string why;
    const bool ok = (g.k == 0 || (usable(g.a.at, g.a.bytes(g.batch), g.device, &why) &&
                                  usable(g.b.at, g.b.bytes(g.batch), g.device, &why))) &&
                    usable(g.d.at, g.d.bytes(g.batch), g.device, &why) &&
                    (!g.alpha_at || usable(g.alpha_at, 4, g.device, &why)) &&
                    (!g.beta_at || usable(g.beta_at, 4, g.device, &why));
    const float alpha = ok && g.alpha_at ? *g.alpha_at : g.alpha, beta = ok && g.beta_at ? *g.beta_at : g.beta;
    if (!ok || (beta != 0 && !usable(g.c.at, g.c.bytes(g.batch), g.device, &why))) {
        break_device(g.device, ILLEGAL_ADDRESS,
                     g.who + " of m " + std::to_string(g.m) + ", n " + std::to_string(g.n) + ", k " +
                         std::to_string(g.k) + ", batch " + std::to_string(g.batch) + ": " + why);
        return;
    }
    for (long long i = 0; i < g.batch; i++) one(g, i, alpha, beta);
    check_guards(g.device, g.who);
}

}  // namespace fake
