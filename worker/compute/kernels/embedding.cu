// Embeddings of tokens and positions, and their gradients. The scatter-add of the gradient is deterministic:
// the rows of a token are given by the host and added in order.
#include "prelude.cuh"

// y[r] = table[tokens[r]] + positions[r % time] (positions null: none): a warp takes a row. A token outside
// the table gives NaN.
template <class T>
INLINE void embedding(const unsigned* tokens, const float* table, const float* positions, T* y, int rows,
                      int cols, int time, int vocab) {
    const bool wide = cols % 4 == 0 && aligned16(table) && aligned16(positions) && aligned16(y);
    for (int r = (int)blockIdx.x * 8 + warp_of(); r < rows; r += (int)gridDim.x * 8) {
        const unsigned token = tokens[r];
        const bool inside = token < (unsigned)vocab;
        const float* from = table + (long long)(inside ? token : 0u) * cols;
        const float* place = positions ? positions + (long long)(r % time) * cols : nullptr;
        T* to = y + (long long)r * cols;
        auto one = [&](auto width, int c) {
            constexpr int W = decltype(width)::value;
            float v[W], p[W];
            load<W>(from + c, v);
            if (place) {
                load<W>(place + c, p);
#pragma unroll
                for (int e = 0; e < W; e++) v[e] += p[e];
            }
#pragma unroll
            for (int e = 0; e < W; e++) v[e] = inside ? v[e] : not_a_number();
            store<W>(to + c, v);
        };
        if (wide) {
#pragma unroll 2
            for (int c = lane_of() * 4; c < cols; c += 128) one(Width<4>{}, c);
        } else {
            for (int c = lane_of(); c < cols; c += 32) one(Width<1>{}, c);
        }
    }
}

// The sum of the rows order[first..end] over the block's columns; each of the eight warps takes every eighth
// of them.
template <int W, class T>
INLINE float sum_rows(const T* dy, const unsigned* order, int first, int end, int cols) {
    float sums[8] = {};
    const Columns<W> columns{(int)blockIdx.y * 256};
#pragma unroll 4
    for (int i = first + warp_of(); i < end; i += 8) {
        const T* row = dy + (long long)order[i] * cols;
#pragma unroll
        for (int g = 0; g < Columns<W>::RUNS; g++) {
            const int c = columns.at(g);
            if (c < cols) {
                float v[W];
                load<W>(row + c, v);
#pragma unroll
                for (int e = 0; e < W; e++) sums[g * W + e] += v[e];
            }
        }
    }
    return column_total<W>(sums);
}

// dtable[ids[u]] = the sum of dy's rows order[starts[u]..starts[u + 1]] (+ what is there where `accumulate`).
// Grid (unique, 256 columns each).
template <class T>
INLINE void embedding_backward(const T* dy, const unsigned* order, const unsigned* starts,
                               const unsigned* ids, float* dtable, int unique, int cols, int accumulate) {
    const bool wide = cols % WIDE<T> == 0 && aligned16(dy);
    for (int u = (int)blockIdx.x; u < unique; u += (int)gridDim.x) {
        const int first = (int)starts[u], end = (int)starts[u + 1];
        const float total = wide ? sum_rows<WIDE<T>>(dy, order, first, end, cols)
                                 : sum_rows<1>(dy, order, first, end, cols);
        const int c = (int)(blockIdx.y * 256 + threadIdx.x);
        if (c < cols) {
            float* to = dtable + (long long)ids[u] * cols + c;
            *to = accumulate ? *to + total : total;
        }
    }
}

// dpositions[t] = the sum over the batch of dy[b, t] (+ what is there where `accumulate`).
template <class T>
INLINE void position_backward(const T* dy, float* dpositions, int batch, int time, int cols, int accumulate) {
    const long long n = (long long)time * cols;
    const bool wide = n % 4 == 0 && aligned16(dy) && aligned16(dpositions);
    flat<4>(n, wide, [&](auto width, long long i) {
        constexpr int W = decltype(width)::value;
        float sums[W] = {};
        if (accumulate) load<W>(dpositions + i, sums);
#pragma unroll 4
        for (int b = 0; b < batch; b++) {
            float v[W];
            load<W>(dy + b * n + i, v);
#pragma unroll
            for (int e = 0; e < W; e++) sums[e] += v[e];
        }
        store<W>(dpositions + i, sums);
    });
}

#define INSTANTIATE(S, T)                                                                                    \
    KERNEL(embedding_##S)(const unsigned* tokens, const float* table, const float* positions, T* y,          \
                          int rows, int cols, int time, int vocab) {                                         \
        embedding(tokens, table, positions, y, rows, cols, time, vocab);                                     \
    }                                                                                                        \
    KERNEL(embedding_backward_##S)(const T* dy, const unsigned* order, const unsigned* starts,               \
                                   const unsigned* ids, float* dtable, int unique, int cols,                 \
                                   int accumulate) {                                                         \
        embedding_backward(dy, order, starts, ids, dtable, unique, cols, accumulate);                        \
    }                                                                                                        \
    KERNEL(position_backward_##S)(const T* dy, float* dpositions, int batch, int time, int cols,             \
                                  int accumulate) {                                                          \
        position_backward(dy, dpositions, batch, time, cols, accumulate);                                    \
    }
FOR_EACH_TYPE(INSTANTIATE)
