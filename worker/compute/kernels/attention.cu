// Causal attention that never stores the matrix of scores: FlashAttention (Dao et al. 2022), in the loop
// order of FlashAttention-2 (Dao 2023).
//
//   s = scale * q k^T,  p = softmax over the keys up to the query's own place
//   out = p v,  lse = log sum exp(s)
//   p = exp(s - lse),  ds = p * (dout v^T - delta),  delta = sum(dout * out)
//   dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T dout
//
// qkv and dqkv are [batch, time, 3, heads, hd], out and dout [batch, time, heads, hd], lse and delta [batch,
// heads, time]; all must be aligned to 16 bytes. Grid (tiles of the time, heads, batch). The backward pass is
// two kernels, one for keys and values and one for queries, so that no sum needs an atomic. bf16 and f16
// multiply by tensor cores with sums in f32; f32 does not.
#include "prelude.cuh"

constexpr int THREADS = 128;
constexpr float LOG2_E = 1.4426950408889634f;

// One head of one sequence.
template <class T>
struct Head {
    const T* q;
    const T* k;
    const T* v;
    long long row;   // elements between two places in qkv
    long long flat;  // and in out
    long long first;  // of the head in out
    long long stats;  // of the head in lse and delta
    int time;
};

template <int HD, class T>
INLINE Head<T> head_of(const T* qkv, int time, int heads) {
    const int h = (int)blockIdx.y, b = (int)blockIdx.z;
    Head<T> r;
    r.flat = (long long)heads * HD;
    r.row = 3 * r.flat;
    r.q = qkv + (long long)b * time * r.row + (long long)h * HD;
    r.k = r.q + r.flat;
    r.v = r.k + r.flat;
    r.first = (long long)b * time * r.flat + (long long)h * HD;
    r.stats = ((long long)b * heads + h) * time;
    r.time = time;
    return r;
}

// ---------------------------------------------------------------------------------------------- bf16 and f16

// Places that a block owns (queries; keys in the backward pass for keys and values), 16 for each of its four
// warps.
constexpr int OWN = 64;

// Starts to copy ROWS places from `first` on, zeros behind the last.
template <int ROWS, int HD, class T>
INLINE void copy_tile(AsyncCopies& copies, T* tile, const T* from, long long row, int first, int time) {
    constexpr int PARTS = HD / 8;
    for (int i = (int)threadIdx.x; i < ROWS * PARTS; i += THREADS) {
        const int r = i / PARTS, part = i % PARTS;
        const bool real = first + r < time;
        copies.copy16(tile + r * (HD + 8) + part * 8, from + (real ? first + r : 0) * row + part * 8, real);
    }
}

// 16 rows of a left operand, which stay where they are in shared memory (KEEP false) or are taken to
// registers.
template <int HD, bool KEEP, class T>
struct Left {
    const T* tile;
    unsigned held[KEEP ? HD / 16 : 1][4];

    __device__ __forceinline__ void take(const T* rows) {
        tile = rows;
        if constexpr (KEEP) {
#pragma unroll
            for (int d = 0; d < HD / 16; d++) load_a(held[d], tile + d * 16, HD + 8);
        }
    }

    __device__ __forceinline__ const unsigned (&at(int d))[4] {
        if constexpr (KEEP) {
            return held[d];
        } else {
            load_a(held[0], tile + d * 16, HD + 8);
            return held[0];
        }
    }
};

// c[i] (16 rows, columns from 8i on) += a b^T: b is N rows in shared memory.
template <int N, int HD, bool KEEP, class T>
INLINE void multiply_transposed(float (&c)[N / 8][4], Left<HD, KEEP, T>& a, const T* b) {
#pragma unroll
    for (int d = 0; d < HD / 16; d++) {
        const unsigned(&left)[4] = a.at(d);
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            unsigned right[4];
            load_b_transposed(right, b + j * 16 * (HD + 8) + d * 16, HD + 8);
            mma<T>(c[2 * j], left, right[0], right[1]);
            mma<T>(c[2 * j + 1], left, right[2], right[3]);
        }
    }
}

// c += a b: a (16 x N) as a product left it, b (N x HD) row-major in shared memory. What a thread holds of a
// result is what it must hold of a left operand.
template <int N, int HD, class T>
INLINE void multiply(float (&c)[HD / 8][4], const float (&a)[N / 8][4], const T* b) {
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        const unsigned left[4] = {pair<T>(a[2 * k][0], a[2 * k][1]), pair<T>(a[2 * k][2], a[2 * k][3]),
                                  pair<T>(a[2 * k + 1][0], a[2 * k + 1][1]),
                                  pair<T>(a[2 * k + 1][2], a[2 * k + 1][3])};
#pragma unroll
        for (int d = 0; d < HD / 16; d++) {
            unsigned right[4];
            load_b(right, b + k * 16 * (HD + 8) + d * 16, HD + 8);
            mma<T>(c[2 * d], left, right[0], right[1]);
            mma<T>(c[2 * d + 1], left, right[2], right[3]);
        }
    }
}

// Writes the warp's 16 rows (of which `rows` exist) of c, times a factor for the upper and the lower eight,
// through 16 rows of shared memory that nobody reads any more.
template <int HD, class T>
INLINE void write_rows(T* to, long long row, int rows, T* tile, const float (&c)[HD / 8][4], float upper,
                       float lower) {
    const int g = lane_of() / 4, t = lane_of() % 4;
#pragma unroll
    for (int i = 0; i < HD / 8; i++) {
        const unsigned high = pair<T>(c[i][0] * upper, c[i][1] * upper),
                       low = pair<T>(c[i][2] * lower, c[i][3] * lower);
        store_words<4>(tile + g * (HD + 8) + i * 8 + 2 * t, &high);
        store_words<4>(tile + (g + 8) * (HD + 8) + i * 8 + 2 * t, &low);
    }
    __syncwarp();
    constexpr int PARTS = HD / 8;
    for (int i = lane_of(); i < 16 * PARTS; i += 32) {
        const int r = i / PARTS, part = i % PARTS;
        if (r < rows) {
            unsigned words[4];
            load_words<16>(tile + r * (HD + 8) + part * 8, words);
            store_words<16>(to + r * row + part * 8, words);
        }
    }
}

// Sets scores to minus infinity whose key is behind their query. `ahead`: the place of this thread's first
// row less that of its first column; a row is a query, or else a key.
template <int N>
INLINE void mask(float (&s)[N / 8][4], int ahead, bool row_is_query) {
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int more = ahead + e / 2 * 8 - i * 8 - e % 2;
            if (row_is_query ? more < 0 : more > 0) s[i][e] = -infinity();
        }
    }
}

// Over the four threads that hold a row.
INLINE float quad_sum(float v) {
    v += __shfl_xor_sync(FULL_WARP, v, 1);
    return v + __shfl_xor_sync(FULL_WARP, v, 2);
}
INLINE float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, 1));
    return fmaxf(v, __shfl_xor_sync(FULL_WARP, v, 2));
}

// A warp's 16 queries: the running maximum and sum of two of its rows (g and g + 8) in each thread, and the
// output so far.
template <int HD>
struct Online {
    float max[2], sum[2], out[HD / 8][4];
};

// Turns scores into probabilities relative to the running maximum, which may rise: then what is there
// shrinks.
template <int HD>
INLINE void softmax_step(Online<HD>& o, float (&s)[OWN / 8][4], float scale2) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float max = o.max[r];
#pragma unroll
        for (int i = 0; i < OWN / 8; i++) max = fmaxf(max, fmaxf(s[i][2 * r], s[i][2 * r + 1]));
        max = quad_max(max);
        const float shrink = fast_exp2((o.max[r] - max) * scale2), base = max * scale2;
        float sum = o.sum[r] * shrink;
#pragma unroll
        for (int i = 0; i < OWN / 8; i++) {
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                s[i][e] = fast_exp2(s[i][e] * scale2 - base);
                sum += s[i][e];
            }
        }
#pragma unroll
        for (int i = 0; i < HD / 8; i++) {
            o.out[i][2 * r] *= shrink;
            o.out[i][2 * r + 1] *= shrink;
        }
        o.max[r] = max;
        o.sum[r] = sum;
    }
}

// 64 queries against 64 keys at a time, the next keys and values on their way meanwhile.
template <int HD, class T>
INLINE void forward_half(const T* qkv, T* out, float* lse, int time, int heads, float scale) {
    constexpr int SIZE = OWN * (HD + 8);
    DYNAMIC_SHARED(T, memory);
    T *queries = memory, *keys = memory + SIZE, *values = memory + 3 * SIZE;
    const Head<T> head = head_of<HD>(qkv, time, heads);
    // The longest first: the blocks that come last are short.
    const int tile = (int)(gridDim.x - 1 - blockIdx.x), first = tile * OWN;
    AsyncCopies copies;
    copy_tile<OWN, HD>(copies, queries, head.q, head.row, first, time);
    copy_tile<OWN, HD>(copies, keys, head.k, head.row, 0, time);
    copy_tile<OWN, HD>(copies, values, head.v, head.row, 0, time);
    copies.commit();
    Online<HD> o = {};
    o.max[0] = o.max[1] = -infinity();
    const int g = lane_of() / 4, t = lane_of() % 4, own = warp_of() * 16;
    const float scale2 = scale * LOG2_E;
    Left<HD, true, T> left;
    for (int j = 0; j <= tile; j++) {
        const int now = j % 2 * SIZE, next = (j + 1) % 2 * SIZE;
        if (j < tile) {
            copy_tile<OWN, HD>(copies, keys + next, head.k, head.row, (j + 1) * OWN, time);
            copy_tile<OWN, HD>(copies, values + next, head.v, head.row, (j + 1) * OWN, time);
            copies.commit();
            copies.template wait<1>();
        } else {
            copies.template wait<0>();
        }
        __syncthreads();  // everyone's copies are there
        if (j == 0) left.take(queries + own * (HD + 8));
        float s[OWN / 8][4] = {};
        multiply_transposed<OWN>(s, left, keys + now);
        if (j == tile) mask<OWN>(s, own + g - 2 * t, true);
        softmax_step<HD>(o, s, scale2);
        multiply<OWN, HD>(o.out, s, values + now);
        __syncthreads();  // the keys and values were read
    }
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = quad_sum(o.sum[r]);
        const int place = first + own + g + 8 * r;
        inverse[r] = 1.0f / sum;
        if (t == 0 && place < time) lse[head.stats + place] = o.max[r] * scale + logf(sum);
    }
    const long long start = head.first + (first + own) * head.flat;
    write_rows<HD>(out + start, head.flat, time - first - own, queries + own * (HD + 8), o.out, inverse[0],
                   inverse[1]);
}

// Places of the other side that a step of the backward pass takes.
template <int HD>
constexpr int OTHER = HD <= 64 ? 64 : 32;

// dk and dv of 64 keys: a warp holds the transposed scores of its 16 keys with the queries of a step.
template <int HD, class T>
INLINE void backward_kv_half(const T* qkv, const T* dout, const float* lse, const float* delta, T* dqkv,
                             int time, int heads, float scale) {
    constexpr int N = OTHER<HD>, SIZE = N * (HD + 8);
    DYNAMIC_SHARED(T, memory);
    T *keys = memory, *values = keys + OWN * (HD + 8), *queries = values + OWN * (HD + 8),
      *douts = queries + 2 * SIZE;
    float *lses = reinterpret_cast<float*>(douts + 2 * SIZE), *deltas = lses + 2 * N;
    const Head<T> head = head_of<HD>(qkv, time, heads);
    const int first = (int)blockIdx.x * OWN, own = warp_of() * 16, g = lane_of() / 4, t = lane_of() % 4;
    const int begin = first / N, end = (time + N - 1) / N;
    AsyncCopies copies;
    auto fetch = [&](int i) {
        const int at = i % 2 * SIZE, place = i * N;
        copy_tile<N, HD>(copies, queries + at, head.q, head.row, place, time);
        copy_tile<N, HD>(copies, douts + at, dout + head.first, head.flat, place, time);
        copies.commit();
        if ((int)threadIdx.x < N) {
            const bool real = place + (int)threadIdx.x < time;
            const long long from = head.stats + place + (int)threadIdx.x;
            // An infinite sum makes the probabilities of a query that is not there 0.
            lses[i % 2 * N + (int)threadIdx.x] = real ? lse[from] * LOG2_E : infinity();
            deltas[i % 2 * N + (int)threadIdx.x] = real ? delta[from] : 0.0f;
        }
    };
    copy_tile<OWN, HD>(copies, keys, head.k, head.row, first, time);
    copy_tile<OWN, HD>(copies, values, head.v, head.row, first, time);
    fetch(begin);
    float dk[HD / 8][4] = {}, dv[HD / 8][4] = {};
    Left<HD, false, T> left_keys, left_values;
    const float scale2 = scale * LOG2_E;
    for (int i = begin; i < end; i++) {
        if (i + 1 < end) {
            fetch(i + 1);
            copies.template wait<1>();
        } else {
            copies.template wait<0>();
        }
        __syncthreads();  // everyone's copies are there
        const T *q = queries + i % 2 * SIZE, *d = douts + i % 2 * SIZE;
        if (i == begin) {
            left_keys.take(keys + own * (HD + 8));
            left_values.take(values + own * (HD + 8));
        }
        float p[N / 8][4] = {}, ds[N / 8][4] = {};
        multiply_transposed<N>(p, left_keys, q);
        multiply_transposed<N>(ds, left_values, d);
        // From the diagonal's tiles only: what a key must not see has the score minus infinity.
        if (i * N < first + OWN) mask<N>(p, first + own + g - i * N - 2 * t, false);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int query = i % 2 * N + j * 8 + 2 * t + e % 2;
                p[j][e] = fast_exp2(p[j][e] * scale2 - lses[query]);
                ds[j][e] = p[j][e] * (ds[j][e] - deltas[query]);
            }
        }
        multiply<N, HD>(dv, p, d);
        multiply<N, HD>(dk, ds, q);
        __syncthreads();  // the queries were read
    }
    const long long flat = head.flat, start = head.k - qkv + (first + own) * head.row;
    const int rows = time - first - own;
    write_rows<HD>(dqkv + start, head.row, rows, keys + own * (HD + 8), dk, scale, scale);
    write_rows<HD>(dqkv + start + flat, head.row, rows, values + own * (HD + 8), dv, 1.0f, 1.0f);
}

// dq of 64 queries.
template <int HD, class T>
INLINE void backward_q_half(const T* qkv, const T* dout, const float* lse, const float* delta, T* dqkv,
                            int time, int heads, float scale) {
    constexpr int N = OTHER<HD>, SIZE = N * (HD + 8);
    DYNAMIC_SHARED(T, memory);
    T *queries = memory, *douts = queries + OWN * (HD + 8), *keys = douts + OWN * (HD + 8),
      *values = keys + 2 * SIZE;
    const Head<T> head = head_of<HD>(qkv, time, heads);
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * OWN, own = warp_of() * 16;
    const int g = lane_of() / 4, t = lane_of() % 4;
    const int end = (min(first + OWN, time) + N - 1) / N;
    AsyncCopies copies;
    auto fetch = [&](int j) {
        copy_tile<N, HD>(copies, keys + j % 2 * SIZE, head.k, head.row, j * N, time);
        copy_tile<N, HD>(copies, values + j % 2 * SIZE, head.v, head.row, j * N, time);
        copies.commit();
    };
    copy_tile<OWN, HD>(copies, queries, head.q, head.row, first, time);
    copy_tile<OWN, HD>(copies, douts, dout + head.first, head.flat, first, time);
    fetch(0);
    float sums[2], deltas[2], dq[HD / 8][4] = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int place = first + own + g + 8 * r;
        sums[r] = place < time ? lse[head.stats + place] * LOG2_E : infinity();
        deltas[r] = place < time ? delta[head.stats + place] : 0.0f;
    }
    Left<HD, HD <= 64, T> left_queries, left_douts;
    const float scale2 = scale * LOG2_E;
    for (int j = 0; j < end; j++) {
        if (j + 1 < end) {
            fetch(j + 1);
            copies.template wait<1>();
        } else {
            copies.template wait<0>();
        }
        __syncthreads();  // everyone's copies are there
        const T *k = keys + j % 2 * SIZE, *v = values + j % 2 * SIZE;
        if (j == 0) {
            left_queries.take(queries + own * (HD + 8));
            left_douts.take(douts + own * (HD + 8));
        }
        float p[N / 8][4] = {}, ds[N / 8][4] = {};
        multiply_transposed<N>(p, left_queries, k);
        multiply_transposed<N>(ds, left_douts, v);
        if (j * N + N > first) mask<N>(p, first + own + g - j * N - 2 * t, true);
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                ds[i][e] = fast_exp2(p[i][e] * scale2 - sums[e / 2]) * (ds[i][e] - deltas[e / 2]);
            }
        }
        multiply<N, HD>(dq, ds, k);
        __syncthreads();  // the keys and values were read
    }
    const long long start = head.q - qkv + (first + own) * head.row;
    write_rows<HD>(dqkv + start, head.row, time - first - own, queries + own * (HD + 8), dq, scale, scale);
}

// ------------------------------------------------------------------------------------------------------- f32
// 32 places against 32: a thread has four rows (those of its half warp) and two columns of the scores, and
// four rows and HD / 16 columns of a result.

constexpr int TILE = 32;
constexpr int SCORES = TILE + 4;  // elements between the rows of a tile of scores

template <int HD>
INLINE void copy_f32(float* tile, const float* from, long long row, int first, int time) {
    constexpr int PARTS = HD / 4;
    for (int i = (int)threadIdx.x; i < TILE * PARTS; i += THREADS) {
        const int r = i / PARTS, part = i % PARTS;
        float v[4] = {};
        if (first + r < time) load<4>(from + (first + r) * row + part * 4, v);
        store<4>(tile + r * (HD + 4) + part * 4, v);
    }
}

INLINE int half_row() { return (int)threadIdx.x / 16 * 4; }
INLINE int half_col() { return (int)threadIdx.x % 16; }

// s[i][j] = row i of this thread in a times row (column + 16 j) of b.
template <int HD>
INLINE void scores_f32(float (&s)[4][2], const float* a, const float* b) {
#pragma unroll
    for (int i = 0; i < 4; i++) s[i][0] = s[i][1] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < HD; d += 4) {
        float right[2][4];
        load<4>(b + half_col() * (HD + 4) + d, right[0]);
        load<4>(b + (half_col() + 16) * (HD + 4) + d, right[1]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float left[4];
            load<4>(a + (half_row() + i) * (HD + 4) + d, left);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[i][0] += left[e] * right[0][e];
                s[i][1] += left[e] * right[1][e];
            }
        }
    }
}

// c += p b for this thread's rows of p, or of p transposed.
template <int HD, bool TRANSPOSED>
INLINE void add_product(float (&c)[4][HD / 16], const float* p, const float* b) {
#pragma unroll 4
    for (int k = 0; k < TILE; k++) {
        float left[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            left[i] = TRANSPOSED ? p[k * SCORES + half_row() + i] : p[(half_row() + i) * SCORES + k];
        }
#pragma unroll
        for (int d = 0; d < HD / 16; d++) {
            const float right = b[k * (HD + 4) + half_col() + 16 * d];
#pragma unroll
            for (int i = 0; i < 4; i++) c[i][d] += left[i] * right;
        }
    }
}

template <int HD>
INLINE void write_f32(float* to, long long row, int rows, const float (&c)[4][HD / 16],
                      const float (&factor)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (half_row() + i >= rows) break;
#pragma unroll
        for (int d = 0; d < HD / 16; d++)
            to[(half_row() + i) * row + half_col() + 16 * d] = c[i][d] * factor[i];
    }
}

template <int HD>
INLINE void forward_f32(const float* qkv, float* out, float* lse, int time, int heads, float scale) {
    constexpr int SIZE = TILE * (HD + 4);
    DYNAMIC_SHARED(float, memory);
    float *queries = memory, *keys = memory + SIZE, *values = keys + SIZE, *p = values + SIZE;
    const Head<float> head = head_of<HD>(qkv, time, heads);
    const int tile = (int)(gridDim.x - 1 - blockIdx.x), first = tile * TILE;
    copy_f32<HD>(queries, head.q, head.row, first, time);
    float c[4][HD / 16] = {}, max[4], sum[4] = {};
    for (int i = 0; i < 4; i++) max[i] = -infinity();
    for (int j = 0; j <= tile; j++) {
        copy_f32<HD>(keys, head.k, head.row, j * TILE, time);
        copy_f32<HD>(values, head.v, head.row, j * TILE, time);
        __syncthreads();
        float s[4][2];
        scores_f32<HD>(s, queries, keys);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float top = max[i];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const bool seen = j * TILE + half_col() + 16 * e <= first + half_row() + i;
                s[i][e] = seen ? s[i][e] * scale : -infinity();
                top = fmaxf(top, s[i][e]);
            }
#pragma unroll
            for (int d = 8; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, d));
            const float shrink = expf(max[i] - top);
            max[i] = top;
            sum[i] *= shrink;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float x = expf(s[i][e] - top);
                sum[i] += x;
                p[(half_row() + i) * SCORES + half_col() + 16 * e] = x;
            }
#pragma unroll
            for (int d = 0; d < HD / 16; d++) c[i][d] *= shrink;
        }
        __syncwarp();  // a half warp reads the rows that it wrote
        add_product<HD, false>(c, p, values);
        __syncthreads();  // the keys and values were read
    }
    float factor[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int d = 8; d > 0; d >>= 1) sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], d);
        const int place = first + half_row() + i;
        factor[i] = 1.0f / sum[i];
        if (half_col() == 0 && place < time) lse[head.stats + place] = max[i] + logf(sum[i]);
    }
    write_f32<HD>(out + head.first + first * head.flat, head.flat, time - first, c, factor);
}

// Writes p and ds of this thread's scores s and products dp = dout v^T: queries from `query` on, keys from
// `key` on.
INLINE void store_gradients(float* p, float* ds, const float (&s)[4][2], const float (&dp)[4][2],
                            const float* lses, const float* deltas, int query, int key, float scale) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = half_row() + i;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int col = half_col() + 16 * e;
            const float x = key + col > query + row ? 0.0f : expf(s[i][e] * scale - lses[row]);
            if (p) p[row * SCORES + col] = x;
            ds[row * SCORES + col] = x * (dp[i][e] - deltas[row]);
        }
    }
}

INLINE void copy_stats(float* lses, float* deltas, const float* lse, const float* delta, long long stats,
                       int first, int time) {
    if ((int)threadIdx.x < TILE) {
        const bool real = first + (int)threadIdx.x < time;
        const long long from = stats + first + (int)threadIdx.x;
        lses[threadIdx.x] = real ? lse[from] : infinity();
        deltas[threadIdx.x] = real ? delta[from] : 0.0f;
    }
}

template <int HD>
INLINE void backward_kv_f32(const float* qkv, const float* dout, const float* lse, const float* delta,
                            float* dqkv, int time, int heads, float scale) {
    constexpr int SIZE = TILE * (HD + 4);
    DYNAMIC_SHARED(float, memory);
    float *keys = memory, *values = keys + SIZE, *queries = values + SIZE, *douts = queries + SIZE;
    float *p = douts + SIZE, *ds = p + TILE * SCORES, *lses = ds + TILE * SCORES, *deltas = lses + TILE;
    const Head<float> head = head_of<HD>(qkv, time, heads);
    const int first = (int)blockIdx.x * TILE;
    copy_f32<HD>(keys, head.k, head.row, first, time);
    copy_f32<HD>(values, head.v, head.row, first, time);
    float dk[4][HD / 16] = {}, dv[4][HD / 16] = {};
    for (int query = first; query < time; query += TILE) {
        copy_f32<HD>(queries, head.q, head.row, query, time);
        copy_f32<HD>(douts, dout + head.first, head.flat, query, time);
        copy_stats(lses, deltas, lse, delta, head.stats, query, time);
        __syncthreads();
        float s[4][2], dp[4][2];
        scores_f32<HD>(s, queries, keys);
        scores_f32<HD>(dp, douts, values);
        store_gradients(p, ds, s, dp, lses, deltas, query, first, scale);
        __syncthreads();  // columns are read, of which other warps wrote parts
        add_product<HD, true>(dv, p, douts);
        add_product<HD, true>(dk, ds, queries);
        __syncthreads();  // the tiles were read
    }
    const float scales[4] = {scale, scale, scale, scale}, ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    const long long start = head.k - qkv + first * head.row;
    write_f32<HD>(dqkv + start, head.row, time - first, dk, scales);
    write_f32<HD>(dqkv + start + head.flat, head.row, time - first, dv, ones);
}

template <int HD>
INLINE void backward_q_f32(const float* qkv, const float* dout, const float* lse, const float* delta,
                           float* dqkv, int time, int heads, float scale) {
    constexpr int SIZE = TILE * (HD + 4);
    DYNAMIC_SHARED(float, memory);
    float *keys = memory, *values = keys + SIZE, *queries = values + SIZE, *douts = queries + SIZE;
    float *ds = douts + SIZE, *lses = ds + 2 * TILE * SCORES, *deltas = lses + TILE;
    const Head<float> head = head_of<HD>(qkv, time, heads);
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * TILE;
    copy_f32<HD>(queries, head.q, head.row, first, time);
    copy_f32<HD>(douts, dout + head.first, head.flat, first, time);
    copy_stats(lses, deltas, lse, delta, head.stats, first, time);
    float dq[4][HD / 16] = {};
    for (int key = 0; key <= first; key += TILE) {
        copy_f32<HD>(keys, head.k, head.row, key, time);
        copy_f32<HD>(values, head.v, head.row, key, time);
        __syncthreads();
        float s[4][2], dp[4][2];
        scores_f32<HD>(s, queries, keys);
        scores_f32<HD>(dp, douts, values);
        store_gradients(nullptr, ds, s, dp, lses, deltas, first, key, scale);
        __syncwarp();  // a half warp reads the rows that it wrote
        add_product<HD, false>(dq, ds, keys);
        __syncthreads();  // the keys and values were read
    }
    const float scales[4] = {scale, scale, scale, scale};
    write_f32<HD>(dqkv + (head.q - qkv) + first * head.row, head.row, time - first, dq, scales);
}

// delta[b, h, t] = the sum of dout * out over the head's elements. A warp takes one.
template <class T>
INLINE void attention_delta(const T* dout, const T* out, float* delta, int batch, int time, int heads,
                            int hd) {
    const long long rows = (long long)batch * time * heads;
    for (long long r = (long long)blockIdx.x * 8 + warp_of(); r < rows; r += (long long)gridDim.x * 8) {
        float sum = 0.0f;
        for (int d = lane_of(); d < hd; d += 32) sum += to_f32(dout[r * hd + d]) * to_f32(out[r * hd + d]);
        sum = warp_sum(sum);
        if (lane_of() == 0) {
            const int h = (int)(r % heads);
            const long long place = r / heads, b = place / time;
            delta[(b * heads + h) * time + (place - b * time)] = sum;
        }
    }
}

template <int HD, class T>
INLINE void forward(const T* qkv, T* out, float* lse, int time, int heads, float scale) {
    if constexpr (same_type<T, float>) {
        forward_f32<HD>(qkv, out, lse, time, heads, scale);
    } else {
        forward_half<HD>(qkv, out, lse, time, heads, scale);
    }
}

template <int HD, class T>
INLINE void backward_kv(const T* qkv, const T* dout, const float* lse, const float* delta, T* dqkv, int time,
                        int heads, float scale) {
    if constexpr (same_type<T, float>) {
        backward_kv_f32<HD>(qkv, dout, lse, delta, dqkv, time, heads, scale);
    } else {
        backward_kv_half<HD>(qkv, dout, lse, delta, dqkv, time, heads, scale);
    }
}

template <int HD, class T>
INLINE void backward_q(const T* qkv, const T* dout, const float* lse, const float* delta, T* dqkv, int time,
                       int heads, float scale) {
    if constexpr (same_type<T, float>) {
        backward_q_f32<HD>(qkv, dout, lse, delta, dqkv, time, heads, scale);
    } else {
        backward_q_half<HD>(qkv, dout, lse, delta, dqkv, time, heads, scale);
    }
}

#define INSTANTIATE_HEAD(S, T, HD)                                                                           \
    KERNEL_BOUNDS(attention_##S##_##HD, 128, 2)(const T* qkv, T* out, float* lse, int batch, int time,       \
                                                int heads, float scale) {                                    \
        forward<HD>(qkv, out, lse, time, heads, scale);                                                      \
    }                                                                                                        \
    KERNEL_BOUNDS(attention_backward_kv_##S##_##HD, 128, 2)(const T* qkv, const T* dout, const float* lse,   \
                                                            const float* delta, T* dqkv, int batch,          \
                                                            int time, int heads, float scale) {              \
        backward_kv<HD>(qkv, dout, lse, delta, dqkv, time, heads, scale);                                    \
    }                                                                                                        \
    KERNEL_BOUNDS(attention_backward_q_##S##_##HD, 128, 2)(const T* qkv, const T* dout, const float* lse,    \
                                                           const float* delta, T* dqkv, int batch, int time, \
                                                           int heads, float scale) {                         \
        backward_q<HD>(qkv, dout, lse, delta, dqkv, time, heads, scale);                                     \
    }
// Heads of one size, where the compiler's options name it: PARAFT_HEAD=64.
#ifdef PARAFT_HEAD
#define EXPANDED(S, T, HD) INSTANTIATE_HEAD(S, T, HD)
#define EACH_HEAD(S, T) EXPANDED(S, T, PARAFT_HEAD)
#else
#define EACH_HEAD(S, T)                                                                                      \
    INSTANTIATE_HEAD(S, T, 16)                                                                               \
    INSTANTIATE_HEAD(S, T, 32)                                                                               \
    INSTANTIATE_HEAD(S, T, 64)                                                                               \
    INSTANTIATE_HEAD(S, T, 128)
#endif
#define INSTANTIATE(S, T)                                                                                    \
    EACH_HEAD(S, T)                                                                                          \
    KERNEL(attention_delta_##S)(const T* dout, const T* out, float* delta, int batch, int time, int heads,   \
                                int hd) {                                                                    \
        attention_delta(dout, out, delta, batch, time, heads, hd);                                           \
    }
FOR_EACH_TYPE(INSTANTIATE)
