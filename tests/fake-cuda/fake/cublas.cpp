// libcublas: matrix products as operations of the handle's stream.
#include <string.h>

#include <algorithm>

#include "gemm.h"

using namespace fake;

namespace {

enum {
    SUCCESS = 0,
    BLAS_NOT_INITIALIZED = 1,
    BLAS_INVALID_VALUE = 7,
    MAPPING_ERROR = 11,
    EXECUTION_FAILED = 13,
    INTERNAL_ERROR = 14,
    BLAS_NOT_SUPPORTED = 15
};

struct Handle {
    Context* context = nullptr;
    void* stream = nullptr;
    int math = 0, pointer_mode = 0, atomics = 0;
    void* workspace = nullptr;
    size_t workspace_bytes = 0;
};
std::set<Handle*>& handles() {
    static auto* all = new std::set<Handle*>();
    return *all;
}

// The status for an error of the driver's kind.
int status_of(int error) {
    if (error == OK) return SUCCESS;
    return error == INVALID_CONTEXT || error == NOT_INITIALIZED ? BLAS_NOT_INITIALIZED : EXECUTION_FAILED;
}

constexpr int COMPUTE_32F = 68, COMPUTE_32F_PEDANTIC = 69, COMPUTE_FAST_16F = 74, COMPUTE_FAST_16BF = 75,
              COMPUTE_FAST_TF32 = 77, MATH_TF32 = 3;

// How a product with f32 inputs rounds them; false: this compute type is none of those that are known here.
bool inputs_of(const Handle& h, int compute, int type, Inputs* out) {
    *out = Inputs::AsTheyAre;
    const bool is_f32 = type == R_32F;
    switch (compute) {
        case COMPUTE_32F:
            if (is_f32 && (h.math & 15) == MATH_TF32) *out = Inputs::Tf32;
            return true;
        case COMPUTE_32F_PEDANTIC: return true;
        case COMPUTE_FAST_16F: *out = is_f32 ? Inputs::F16 : Inputs::AsTheyAre; return true;
        case COMPUTE_FAST_16BF: *out = is_f32 ? Inputs::Bf16 : Inputs::AsTheyAre; return true;
        case COMPUTE_FAST_TF32: *out = is_f32 ? Inputs::Tf32 : Inputs::AsTheyAre; return true;
        default: return false;
    }
}

// The combinations of types with f32 sums that cuBLAS has: inputs alike, the output like them or f32.
bool types_are_known(int a, int b, int c) {
    if (a != b || (a != R_32F && a != R_16F && a != R_16BF)) return false;
    return c == a || c == R_32F;
}

struct Shape {
    int ta, tb;
    long long m, n, k, lda, ldb, ldc, stride_a, stride_b, stride_c, batch;
};

int gemm(Call& call, const char* who, Handle* h, const Shape& s, const void* alpha, const void* a, int type_a, const void* b,
         int type_b, const void* beta, void* c, int type_c, int compute) {
    if (!handles().count(h)) return BLAS_NOT_INITIALIZED;
    if (h->context != current_context) return BLAS_NOT_INITIALIZED;
    int error;
    Stream* stream = stream_of(h->stream, &error);
    if (!stream) return status_of(error);
    (void)call;
    const bool ta = s.ta != 0, tb = s.tb != 0;
    if (s.ta < 0 || s.ta > 2 || s.tb < 0 || s.tb > 2) return BLAS_INVALID_VALUE;
    if (s.m < 0 || s.n < 0 || s.k < 0 || s.batch < 0 || !alpha || !beta) return BLAS_INVALID_VALUE;
    const long long rows_a = ta ? s.k : s.m, rows_b = tb ? s.n : s.k;
    if (s.lda < std::max(1LL, rows_a) || s.ldb < std::max(1LL, rows_b) || s.ldc < std::max(1LL, s.m))
        return BLAS_INVALID_VALUE;
    if (!types_are_known(type_a, type_b, type_c)) return BLAS_NOT_SUPPORTED;
    if (s.m == 0 || s.n == 0 || s.batch == 0) return SUCCESS;
    if (s.batch > 1 && s.stride_c < (s.n - 1) * s.ldc + s.m) return BLAS_INVALID_VALUE;
    Product g;
    if (!inputs_of(*h, compute, type_a, &g.inputs)) return BLAS_NOT_SUPPORTED;
    g.who = who;
    g.device = stream->context->device;
    g.transpose_a = ta;
    g.transpose_b = tb;
    g.m = s.m, g.n = s.n, g.k = s.k, g.batch = s.batch;
    if (h->pointer_mode == 0) {
        g.alpha = *(const float*)alpha;
        g.beta = *(const float*)beta;
    } else {
        g.alpha_at = (const float*)alpha;
        g.beta_at = (const float*)beta;
    }
    g.a = {a, type_a, rows_a, ta ? s.m : s.k, s.lda, s.stride_a};
    g.b = {b, type_b, rows_b, tb ? s.k : s.n, s.ldb, s.stride_b};
    g.c = g.d = {c, type_c, s.m, s.n, s.ldc, s.stride_c};
    Work work;
    work.name = who;
    work.run = [g](std::shared_ptr<void>&) {
        multiply(g);
        return Step::Done;
    };
    return status_of(submit(stream, work));
}

}  // namespace

#define BLAS()                 \
    Call call(__func__);       \
    if (call.error) return call.on_purpose ? call.error : status_of(call.error)
#define BLAS_WITH(h) \
    BLAS();          \
    if (!handles().count(h)) return BLAS_NOT_INITIALIZED

FAKE_API int cublasCreate_v2(Handle** out) {
    BLAS();
    Handle* h = new Handle();
    h->context = current_context;
    handles().insert(h);
    *out = h;
    return SUCCESS;
}
FAKE_API int cublasDestroy_v2(Handle* h) {
    Call call(__func__, Call::Init);
    if (!handles().erase(h)) return BLAS_NOT_INITIALIZED;
    delete h;
    return SUCCESS;
}
FAKE_API int cublasGetVersion_v2(Handle*, int* version) {
    BLAS();
    *version = 130000;
    return SUCCESS;
}
FAKE_API int cublasSetStream_v2(Handle* h, void* stream) {
    BLAS_WITH(h);
    int error;
    if (!stream_of(stream, &error)) return MAPPING_ERROR;
    h->stream = stream;
    // As documented, a stream resets the workspace to the library's own.
    h->workspace = nullptr;
    h->workspace_bytes = 0;
    return SUCCESS;
}
FAKE_API int cublasGetStream_v2(Handle* h, void** stream) {
    BLAS_WITH(h);
    *stream = h->stream;
    return SUCCESS;
}
FAKE_API int cublasSetMathMode(Handle* h, int mode) {
    BLAS_WITH(h);
    if ((mode & ~16) < 0 || (mode & ~16) > 3) return BLAS_INVALID_VALUE;
    h->math = mode;
    return SUCCESS;
}
FAKE_API int cublasGetMathMode(Handle* h, int* mode) {
    BLAS_WITH(h);
    *mode = h->math;
    return SUCCESS;
}
FAKE_API int cublasSetPointerMode_v2(Handle* h, int mode) {
    BLAS_WITH(h);
    if (mode != 0 && mode != 1) return BLAS_INVALID_VALUE;
    h->pointer_mode = mode;
    return SUCCESS;
}
FAKE_API int cublasGetPointerMode_v2(Handle* h, int* mode) {
    BLAS_WITH(h);
    *mode = h->pointer_mode;
    return SUCCESS;
}
FAKE_API int cublasSetAtomicsMode(Handle* h, int mode) {
    BLAS_WITH(h);
    h->atomics = mode;
    return SUCCESS;
}
FAKE_API int cublasSetWorkspace_v2(Handle* h, void* workspace, size_t bytes) {
    BLAS_WITH(h);
    if ((uintptr_t)workspace % 256 != 0 || (bytes > 0 && !find(workspace, bytes))) return BLAS_INVALID_VALUE;
    h->workspace = workspace;
    h->workspace_bytes = bytes;
    return SUCCESS;
}

FAKE_API int cublasGemmEx(Handle* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int type_a,
                          int lda, const void* b, int type_b, int ldb, const void* beta, void* c, int type_c, int ldc,
                          int compute, int) {
    BLAS();
    const Shape s = {ta, tb, m, n, k, lda, ldb, ldc, 0, 0, 0, 1};
    return gemm(call, __func__, h, s, alpha, a, type_a, b, type_b, beta, c, type_c, compute);
}
FAKE_API int cublasGemmStridedBatchedEx(Handle* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a,
                                        int type_a, int lda, long long stride_a, const void* b, int type_b, int ldb,
                                        long long stride_b, const void* beta, void* c, int type_c, int ldc,
                                        long long stride_c, int batch, int compute, int) {
    BLAS();
    const Shape s = {ta, tb, m, n, k, lda, ldb, ldc, stride_a, stride_b, stride_c, batch};
    return gemm(call, __func__, h, s, alpha, a, type_a, b, type_b, beta, c, type_c, compute);
}
FAKE_API int cublasSgemm_v2(Handle* h, int ta, int tb, int m, int n, int k, const float* alpha, const float* a, int lda,
                            const float* b, int ldb, const float* beta, float* c, int ldc) {
    BLAS();
    const Shape s = {ta, tb, m, n, k, lda, ldb, ldc, 0, 0, 0, 1};
    return gemm(call, __func__, h, s, alpha, a, R_32F, b, R_32F, beta, c, R_32F, COMPUTE_32F);
}
FAKE_API int cublasSgemmStridedBatched(Handle* h, int ta, int tb, int m, int n, int k, const float* alpha, const float* a,
                                       int lda, long long stride_a, const float* b, int ldb, long long stride_b,
                                       const float* beta, float* c, int ldc, long long stride_c, int batch) {
    BLAS();
    const Shape s = {ta, tb, m, n, k, lda, ldb, ldc, stride_a, stride_b, stride_c, batch};
    return gemm(call, __func__, h, s, alpha, a, R_32F, b, R_32F, beta, c, R_32F, COMPUTE_32F);
}

FAKE_API const char* cublasGetStatusName(int status) {
    switch (status) {
        case 0: return "CUBLAS_STATUS_SUCCESS";
        case 1: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case 3: return "CUBLAS_STATUS_ALLOC_FAILED";
        case 7: return "CUBLAS_STATUS_INVALID_VALUE";
        case 8: return "CUBLAS_STATUS_ARCH_MISMATCH";
        case 11: return "CUBLAS_STATUS_MAPPING_ERROR";
        case 13: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case 14: return "CUBLAS_STATUS_INTERNAL_ERROR";
        case 15: return "CUBLAS_STATUS_NOT_SUPPORTED";
        default: return "CUBLAS_STATUS unknown";
    }
}
FAKE_API const char* cublasGetStatusString(int status) { return cublasGetStatusName(status); }
FAKE_API const char* cublasLtGetStatusName(int status) { return cublasGetStatusName(status); }
FAKE_API const char* cublasLtGetStatusString(int status) { return cublasGetStatusName(status); }
