// Convolution of NCHW images by a square kernel, stride 1, as an implicit matrix product (Chetlur et al.
// 2014): the matrix of the input's windows (im2col) is gathered tile by tile and never stored. f32 in
// registers; bf16, f16 and f32 as tf32 by tensor cores.
//
//   forward          y[m, p]  = sum over q of weight[m, q] * window[q, p]
//   backward input   the same product of dy's windows with the kernel turned round and its channels exchanged
//   backward weight  dw[m, q] = sum over p of dy[m, p] * window[q, p]
//
// m is an output channel, p a pixel of the batch, q (input channel, row, column) of the kernel.
#include "prelude.cuh"

constexpr int THREADS = 128;
// Rows of the weight in a block's tile, and the depth that is gathered at a time.
constexpr int TILE_M = 32;
constexpr int DEPTH = 32;
// Elements of E between the rows of a tile: 16 bytes more than the depth, so that eight rows of ldmatrix lie
// in different banks.
template <class E>
constexpr int STRIDE = DEPTH + 16 / (int)sizeof(E);
// The same in halves, and those of the depth.
template <class E>
constexpr int HALVES = STRIDE<E> * (int)sizeof(E) / 2;
template <class E>
constexpr int DEEP = DEPTH * (int)sizeof(E) / 2;

// What is stored as the products take it: bf16 and f16 are, a float is rounded to tf32.
INLINE bf16 factor(bf16 v, bf16) { return v; }
INLINE f16 factor(f16 v, f16) { return v; }
INLINE tf32 factor(float v, tf32) { return to_tf32(v); }

// A correlation of [n, c, h, w] with m kernels of k x k into [n, m, oh, ow].
struct Shape {
    int n, c, h, w, m, k, pad, oh, ow;
    __device__ __forceinline__ int depth() const { return c * k * k; }
    __device__ __forceinline__ int pixels() const { return n * oh * ow; }
};

// Where the window of an output pixel begins in the input.
struct Window {
    long long image;  // the first element of the pixel's image
    int y, x;         // may be outside
    bool inside;      // the pixel is one
};

INLINE Window window_of(const Shape& s, int pixel) {
    Window r;
    r.inside = pixel < s.pixels();
    const int p = r.inside ? pixel : 0, area = s.oh * s.ow;
    const int image = p / area, rest = p - image * area, row = rest / s.ow;
    r.image = (long long)image * s.c * s.h * s.w;
    r.y = row - s.pad;
    r.x = rest - row * s.ow - s.pad;
    return r;
}

// A place in the kernel, counted up in the order of the weight.
struct Place {
    int c, y, x;
    __device__ __forceinline__ void next(int k) {
        if (++x == k) {
            x = 0;
            if (++y == k) y = 0, c++;
        }
    }
};

INLINE Place place_of(int q, int k) {
    const int area = k * k, c = q / area, rest = q - c * area, y = rest / k;
    return {c, y, rest - y * k};
}

template <class T>
INLINE T gather(const T* in, const Shape& s, const Window& w, const Place& q) {
    const int y = w.y + q.y, x = w.x + q.x;
    const bool inside = w.inside && (unsigned)y < (unsigned)s.h && (unsigned)x < (unsigned)s.w && q.c < s.c;
    return inside ? in[w.image + ((long long)q.c * s.h + y) * s.w + x] : T{};
}

// The weight that the product wants at (m, q). TURNED: of [c, m, k, k], the kernel turned round.
template <bool TURNED, class T>
INLINE T weight_at(const T* weight, const Shape& s, int m, int q) {
    if (m >= s.m || q >= s.depth()) return T{};
    if (!TURNED) return weight[(long long)m * s.depth() + q];
    const int area = s.k * s.k, c = q / area, rest = q - c * area;
    return weight[((long long)c * s.m + m) * area + (area - 1 - rest)];
}

INLINE float bias_at(const float* bias, int m) { return bias ? bias[m] : 0.0f; }

// f32: a thread has M rows of two pixels in registers and gathers what it multiplies itself; the weights come
// from shared memory.
template <bool TURNED, int M>
INLINE void correlate_f32(const float* in, const float* weight, const float* bias, float* out,
                          const Shape& s) {
    __shared__ __align__(16) float tile[DEPTH][M];
    const int first_m = (int)blockIdx.y * TILE_M, pixel = (int)blockIdx.x * 2 * THREADS + (int)threadIdx.x;
    const Window w0 = window_of(s, pixel), w1 = window_of(s, pixel + THREADS);
    float sums[2][M] = {};
    Place q{0, 0, 0};
    for (int start = 0; start < s.depth(); start += DEPTH) {
        __syncthreads();  // the tile before was read
        for (int i = (int)threadIdx.x; i < DEPTH * M; i += THREADS) {
            const int m = i / DEPTH, d = i % DEPTH;
            tile[d][m] = weight_at<TURNED>(weight, s, first_m + m, start + d);
        }
        __syncthreads();
        const int end = min(DEPTH, s.depth() - start);
#pragma unroll 2
        for (int d = 0; d < end; d++) {
            const float a = gather(in, s, w0, q), b = gather(in, s, w1, q);
            q.next(s.k);
#pragma unroll
            for (int m = 0; m < M; m += 4) {
                float v[4];
                load<4>(&tile[d][m], v);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    sums[0][m + e] += v[e] * a;
                    sums[1][m + e] += v[e] * b;
                }
            }
        }
    }
    const int area = s.oh * s.ow;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int p = pixel + i * THREADS;
        if (p >= s.pixels()) break;
        float* to = out + ((long long)(p / area) * s.m + first_m) * area + p % area;
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (first_m + m < s.m) to[(long long)m * area] = sums[i][m] + bias_at(bias, first_m + m);
        }
    }
}

// The tiles of windows and weights, and after the last of them the result: [M][OUT_STRIDE] floats.
constexpr int OUT_STRIDE = THREADS + 4;
template <class E>
constexpr int TILES = (THREADS + TILE_M) * STRIDE<E> * (int)sizeof(E);
constexpr int RESULT = TILE_M * OUT_STRIDE * 4;

// By tensor cores, stored as T and multiplied as E: each warp multiplies the M rows with the windows of its
// 32 pixels, which its threads gather, one each.
template <bool TURNED, int M, class E, class T>
INLINE void correlate_tensor(const T* in, const T* weight, const float* bias, T* out, const Shape& s,
                             unsigned char* memory) {
    constexpr int PER = 4 / (int)sizeof(E);
    E* windows = reinterpret_cast<E*>(memory);
    E* weights = windows + THREADS * STRIDE<E>;
    const int first_m = (int)blockIdx.y * TILE_M, pixel = (int)(blockIdx.x * THREADS + threadIdx.x);
    const Window w = window_of(s, pixel);
    float sums[M / 16][4][4] = {};
    Place q{0, 0, 0};
    for (int start = 0; start < s.depth(); start += DEPTH) {
        __syncthreads();  // the tiles before were read
#pragma unroll
        for (int d = 0; d < DEPTH; d += 4 * PER) {
            unsigned words[4] = {};
#pragma unroll
            for (int i = 0; i < 4 * PER; i++) {
                words[i / PER] |= (unsigned)factor(gather(in, s, w, q), E{}).bits << (i % PER * 16);
                q.next(s.k);
            }
            store_words<16>(windows + threadIdx.x * STRIDE<E> + d, words);
        }
        for (int i = (int)threadIdx.x; i < M * DEPTH; i += THREADS) {
            const int m = i / DEPTH, d = i % DEPTH;
            weights[m * STRIDE<E> + d] = factor(weight_at<TURNED>(weight, s, first_m + m, start + d), E{});
        }
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEEP<E>; d += 16) {
            unsigned b[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const E* rows = windows + (warp_of() * 32 + j * 16) * STRIDE<E>;
                load_b_transposed(b[j], (const unsigned short*)rows + d, HALVES<E>);
            }
#pragma unroll
            for (int i = 0; i < M / 16; i++) {
                unsigned a[4];
                load_a(a, (const unsigned short*)(weights + i * 16 * STRIDE<E>) + d, HALVES<E>);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma<E>(sums[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
    }
    __syncthreads();  // the result takes the tiles' place
    float* result = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int i = 0; i < M / 16; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int m = i * 16 + lane_of() / 4 + e / 2 * 8;
                const int p = warp_of() * 32 + j * 8 + lane_of() % 4 * 2 + e % 2;
                result[m * OUT_STRIDE + p] = sums[i][j][e];
            }
        }
    }
    __syncwarp();  // a warp reads its own pixels only
    if (!w.inside) return;
    const int area = s.oh * s.ow;
    T* to = out + ((long long)(pixel / area) * s.m + first_m) * area + pixel % area;
#pragma unroll 4
    for (int m = 0; m < M; m++) {
        if (first_m + m >= s.m) break;
        const float v = result[m * OUT_STRIDE + (int)threadIdx.x] + bias_at(bias, first_m + m);
        to[(long long)m * area] = from_f32<T>(v);
    }
}

template <bool TURNED, class E, class T>
INLINE void correlate(const T* in, const T* weight, const float* bias, T* out, const Shape& s) {
    const bool few = s.m <= 16;
    if constexpr (same_type<E, float>) {
        if (few) {
            correlate_f32<TURNED, 16>(in, weight, bias, out, s);
        } else {
            correlate_f32<TURNED, TILE_M>(in, weight, bias, out, s);
        }
    } else {
        __shared__ __align__(16) unsigned char memory[TILES<E> > RESULT ? TILES<E> : RESULT];
        if (few) {
            correlate_tensor<TURNED, 16, E>(in, weight, bias, out, s, memory);
        } else {
            correlate_tensor<TURNED, TILE_M, E>(in, weight, bias, out, s, memory);
        }
    }
}

template <class E, class T>
INLINE void conv_forward(const T* x, const T* weight, const float* bias, T* y, int n, int cin, int h, int w,
                         int cout, int k, int pad) {
    const Shape s{n, cin, h, w, cout, k, pad, h + 2 * pad - k + 1, w + 2 * pad - k + 1};
    correlate<false, E>(x, weight, bias, y, s);
}

template <class E, class T>
INLINE void conv_backward_input(const T* dy, const T* weight, T* dx, int n, int cin, int h, int w, int cout,
                                int k, int pad) {
    const Shape s{n, cout, h + 2 * pad - k + 1, w + 2 * pad - k + 1, cin, k, k - 1 - pad, h, w};
    correlate<true, E>(dy, weight, (const float*)nullptr, dx, s);
}

// -------------------------------------------------------------------------------- the gradient of the weight
// A block has 32 rows m and 64 columns q of dw, and adds a chunk of the pixels. One more column, whose
// windows are 1, is the bias.

constexpr int TILE_Q = 64;

struct Chunk {
    int first_m, first_q, begin, end;
};

INLINE Chunk chunk_of(const Shape& s, int pixels_per_chunk) {
    const int begin = (int)blockIdx.z * pixels_per_chunk;
    return {(int)blockIdx.y * TILE_M, (int)blockIdx.x * TILE_Q, begin,
            min(s.pixels(), begin + pixels_per_chunk)};
}

INLINE void fill_places(Place* places, const Shape& s, int first_q) {
    for (int i = (int)threadIdx.x; i < TILE_Q; i += THREADS) {
        Place q = place_of(first_q + i, s.k);
        if (first_q + i == s.depth()) q.c = -1;  // the bias
        places[i] = q;
    }
}

template <class T>
INLINE T window_or_one(const T* x, const Shape& s, const Window& w, const Place& q) {
    return q.c < 0 ? (w.inside ? from_f32<T>(1.0f) : T{}) : gather(x, s, w, q);
}

template <class T>
INLINE T dy_at(const T* dy, const Shape& s, int m, int pixel, int end) {
    if (m >= s.m || pixel >= end) return T{};
    const int area = s.oh * s.ow, image = pixel / area;
    return dy[((long long)image * s.m + m) * area + (pixel - image * area)];
}

INLINE void store_partial(float* partial, const Shape& s, int m, int q, float v) {
    if (m < s.m && q <= s.depth()) partial[((long long)blockIdx.z * s.m + m) * (s.depth() + 1) + q] = v;
}

INLINE void weight_chunk_f32(const float* x, const float* dy, float* partial, const Shape& s,
                             const Chunk& chunk) {
    __shared__ Place places[TILE_Q];
    __shared__ __align__(16) float left[DEPTH][TILE_M + 4];
    __shared__ __align__(16) float right[DEPTH][TILE_Q + 4];
    fill_places(places, s, chunk.first_q);
    const int row = (int)threadIdx.x / 16 * 4, col = (int)threadIdx.x % 16 * 4;
    float sums[4][4] = {};
    for (int start = chunk.begin; start < chunk.end; start += DEPTH) {
        __syncthreads();  // the places are there, the tiles before were read
        const int pixel = start + lane_of();
        const Window w = window_of(s, pixel < chunk.end ? pixel : s.pixels());
        for (int m = warp_of(); m < TILE_M; m += 4)
            left[lane_of()][m] = dy_at(dy, s, chunk.first_m + m, pixel, chunk.end);
#pragma unroll 4
        for (int q = warp_of(); q < TILE_Q; q += 4) right[lane_of()][q] = window_or_one(x, s, w, places[q]);
        __syncthreads();
#pragma unroll 8
        for (int d = 0; d < DEPTH; d++) {
            float a[4], b[4];
            load<4>(&left[d][row], a);
            load<4>(&right[d][col], b);
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] += a[i] * b[j];
            }
        }
    }
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++)
            store_partial(partial, s, chunk.first_m + row + i, chunk.first_q + col + j, sums[i][j]);
    }
}

template <class E, class T>
INLINE void weight_chunk_tensor(const T* x, const T* dy, float* partial, const Shape& s, const Chunk& chunk) {
    __shared__ Place places[TILE_Q];
    __shared__ __align__(16) E left[TILE_M * STRIDE<E>];
    __shared__ __align__(16) E right[TILE_Q * STRIDE<E>];
    fill_places(places, s, chunk.first_q);
    float sums[2][2][4] = {};
    for (int start = chunk.begin; start < chunk.end; start += DEPTH) {
        __syncthreads();  // the places are there, the tiles before were read
        const int pixel = start + lane_of();
        const Window w = window_of(s, pixel < chunk.end ? pixel : s.pixels());
        for (int m = warp_of(); m < TILE_M; m += 4) {
            left[m * STRIDE<E> + lane_of()] = factor(dy_at(dy, s, chunk.first_m + m, pixel, chunk.end), E{});
        }
#pragma unroll 4
        for (int q = warp_of(); q < TILE_Q; q += 4) {
            right[q * STRIDE<E> + lane_of()] = factor(window_or_one(x, s, w, places[q]), E{});
        }
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEEP<E>; d += 16) {
            unsigned b[4];
            load_b_transposed(b, (const unsigned short*)(right + warp_of() * 16 * STRIDE<E>) + d, HALVES<E>);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                unsigned a[4];
                load_a(a, (const unsigned short*)(left + i * 16 * STRIDE<E>) + d, HALVES<E>);
                mma<E>(sums[i][0], a, b[0], b[1]);
                mma<E>(sums[i][1], a, b[2], b[3]);
            }
        }
    }
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 2; j++) {
            for (int e = 0; e < 4; e++) {
                const int m = i * 16 + lane_of() / 4 + e / 2 * 8;
                const int q = warp_of() * 16 + j * 8 + lane_of() % 4 * 2 + e % 2;
                store_partial(partial, s, chunk.first_m + m, chunk.first_q + q, sums[i][j][e]);
            }
        }
    }
}

template <class E, class T>
INLINE void conv_backward_weight_partial(const T* x, const T* dy, float* partial, int n, int cin, int h,
                                         int w, int cout, int k, int pad, int pixels_per_chunk) {
    const Shape s{n, cin, h, w, cout, k, pad, h + 2 * pad - k + 1, w + 2 * pad - k + 1};
    const Chunk chunk = chunk_of(s, pixels_per_chunk);
    if constexpr (same_type<E, float>) {
        weight_chunk_f32(x, dy, partial, s, chunk);
    } else {
        weight_chunk_tensor<E>(x, dy, partial, s, chunk);
    }
}

// Adds the chunks in order and takes the bias's column out (+ what is there where `accumulate`). A block
// takes 32 values.
KERNEL(conv_backward_weight_final)(const float* partial, float* dweight, float* dbias, int chunks, int cout,
                                   int depth, int accumulate) {
    __shared__ float sums[8][32];
    const int i = (int)blockIdx.x * 32 + lane_of(), all = cout * (depth + 1);
    float sum = 0.0f;
    if (i < all) {
#pragma unroll 4
        for (int chunk = warp_of(); chunk < chunks; chunk += 8) sum += partial[(long long)chunk * all + i];
    }
    sums[warp_of()][lane_of()] = sum;
    __syncthreads();
    if (warp_of() != 0 || i >= all) return;
    const int m = i / (depth + 1), q = i % (depth + 1);
    if (q == depth && !dbias) return;
    float* to = q == depth ? dbias + m : dweight + (long long)m * depth + q;
    float total = accumulate ? *to : 0.0f;
    for (int w = 0; w < 8; w++) total += sums[w][lane_of()];
    *to = total;
}

#define INSTANTIATE_AS(S, T, E)                                                                              \
    KERNEL_BOUNDS(conv_forward_##S, 128, 3)(const T* x, const T* weight, const float* bias, T* y, int n,     \
                                            int cin, int h, int w, int cout, int k, int pad) {               \
        conv_forward<E>(x, weight, bias, y, n, cin, h, w, cout, k, pad);                                     \
    }                                                                                                        \
    KERNEL_BOUNDS(conv_backward_input_##S, 128, 3)(const T* dy, const T* weight, T* dx, int n, int cin,      \
                                                   int h, int w, int cout, int k, int pad) {                 \
        conv_backward_input<E>(dy, weight, dx, n, cin, h, w, cout, k, pad);                                  \
    }                                                                                                        \
    KERNEL_BOUNDS(conv_backward_weight_partial_##S, 128, 3)(const T* x, const T* dy, float* partial, int n,  \
                                                            int cin, int h, int w, int cout, int k, int pad, \
                                                            int pixels_per_chunk) {                          \
        conv_backward_weight_partial<E>(x, dy, partial, n, cin, h, w, cout, k, pad, pixels_per_chunk);       \
    }
#define INSTANTIATE(S, T) INSTANTIATE_AS(S, T, T)
FOR_EACH_TYPE(INSTANTIATE)
#ifdef PARAFT_F32
INSTANTIATE_AS(tf32, float, tf32)
#endif
