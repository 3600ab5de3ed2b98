// Kernels for the tests of the shim and of the fake libraries themselves: right ones, and wrong ones of each kind.

#define KERNEL(name) extern "C" __global__ void name

// y[i] = a * x[i]. FLAT.
KERNEL(selftest_scale)(float* y, const float* x, float a, long long n) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
        y[i] = a * x[i];
}

// out[block] = the sum of block's 64 elements; `barriers` says which of the two barriers are there.
KERNEL(selftest_sum)(const int* x, int* out, int barriers) {
    __shared__ int part[64];
    part[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    if (barriers & 1) __syncthreads();
    for (int step = 32; step > 0; step /= 2) {
        if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
        if (barriers & 2) __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}

// out[lane] = the value of the lane `from` lanes above, -1 where there is none.
KERNEL(selftest_shuffle)(int* out, int from) {
    const int got = __shfl_sync(0xffffffffu, (int)threadIdx.x * 10, (int)threadIdx.x + from);
    out[threadIdx.x] = got;
}

KERNEL(selftest_divergent)(int* out) {
    if (threadIdx.x == 3) return;
    __syncthreads();
    out[threadIdx.x] = 1;
}

KERNEL(selftest_two_barriers)(int* out) {
    if (threadIdx.x % 2) {
        out[0] = 1;
        __syncthreads();
    } else {
        __syncthreads();
    }
}

KERNEL(selftest_endless)(volatile int* never) {
    while (*never == 0) {
    }
}

// Writes n elements, whatever the size of y.
KERNEL(selftest_overrun)(float* y, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = 1.0f;
}

extern "C" __global__ void __launch_bounds__(64) selftest_bounded(int* out) { out[threadIdx.x] = 1; }

// Reverses n floats through dynamic shared memory.
KERNEL(selftest_reverse)(float* x, int n) {
    DYNAMIC_SHARED(float, copy);
    for (int i = threadIdx.x; i < n; i += blockDim.x) copy[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = copy[n - 1 - i];
}

// Stores half of its shared memory and gives out all of it.
KERNEL(selftest_uninitialised)(float* out) {
    __shared__ float part[64];
    if (threadIdx.x < 32) part[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = part[threadIdx.x];
}
