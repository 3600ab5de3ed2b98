// The matrix products behind the fake cuBLAS and cuBLASLt: column-major, sums in f32 in the order of k.
#pragma once

#include <functional>
#include <string>

#include "engine.h"

namespace fake {

enum DataType : int { R_32F = 0, R_64F = 1, R_16F = 2, R_8I = 3, R_32I = 10, R_16BF = 14 };
// How the inputs are rounded before they are multiplied.
enum class Inputs { AsTheyAre, Tf32, Bf16, F16 };

size_t bytes_of(int type);  // 0: not a type that is known here
float load(const void* base, long long i, int type);
void store(void* base, long long i, int type, float value);

struct Matrix {
    const void* at = nullptr;
    int type = R_32F;
    long long rows = 0, columns = 0, ld = 0;  // as it lies in memory
    long long stride = 0;                     // elements between the matrices of a batch
    // The bytes from the first element to the last of all.
    size_t bytes(long long batch) const;
};

struct Product {
    std::string who;
    int device = 0;
    bool transpose_a = false, transpose_b = false;
    long long m = 0, n = 0, k = 0, batch = 1;
    float alpha = 1, beta = 0;
    const float *alpha_at = nullptr, *beta_at = nullptr;  // in device memory, instead
    Matrix a, b, c, d;
    Inputs inputs = Inputs::AsTheyAre;
    // Called for each matrix of the batch with alpha * op(A) * op(B) + beta * C in f32, [n][m]; before it is stored.
    std::function<void(long long index, float* values)> epilogue;
};

// Runs it at once. What is wrong with its memory is an error of the device.
void multiply(const Product& product);

}  // namespace fake
