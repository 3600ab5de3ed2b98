// libcublasLt: products with an epilogue. Rules and limits as NVIDIA's documentation of cublasLtEpilogue_t and
// cublasLtMatmulDescAttributes_t has them.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "gemm.h"
#include "numbers.h"

using namespace fake;

namespace {

enum { SUCCESS = 0, LT_NOT_INITIALIZED = 1, LT_INVALID_VALUE = 7, LT_EXECUTION_FAILED = 13, LT_NOT_SUPPORTED = 15 };

// The bits of an epilogue.
enum : unsigned { E_DEFAULT = 1, E_RELU = 2, E_BIAS = 4, E_DRELU = 8, E_BGRAD = 16, E_GELU = 32, E_DGELU = 64, E_AUX = 128,
                  E_BGRADA = 256, E_BGRADB = 512 };
const unsigned EPILOGUES[] = {1, 2, 130, 4, 6, 134, 136, 152, 32, 160, 36, 164, 192, 208, 256, 512};

// The attributes of a cublasLtMatmulDesc_t by their numbers.
struct Desc {
    uint32_t magic;
    int compute, scale_type, pointer_mode, transpose[3];
    unsigned epilogue;
    void *bias, *aux;
    long long bias_stride, aux_ld, aux_stride;
    int bias_type, aux_type;  // -1: of D
};
struct Layout {
    uint32_t magic;
    int type, order, batch;
    uint64_t rows, columns;
    long long ld, stride;
};
struct Preference {
    uint32_t magic;
    uint64_t workspace;
};
constexpr uint32_t DESC = 0x0ba5de5c, LAYOUT = 0x0ba51a70, PREFERENCE = 0x0ba5bef0, ALGO = 0x0ba5a160;

struct Algo {
    uint64_t data[8];
};
struct Heuristic {
    Algo algo;
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};

struct LtHandle {
    int unused;
};
std::set<LtHandle*>& handles() {
    static auto* all = new std::set<LtHandle*>();
    return *all;
}

int status_of(int error) {
    if (error == OK) return SUCCESS;
    return error == INVALID_CONTEXT || error == NOT_INITIALIZED ? LT_NOT_INITIALIZED : LT_EXECUTION_FAILED;
}

template <class T>
int set(T* to, const void* from, size_t bytes) {
    if (bytes != sizeof(T)) return LT_INVALID_VALUE;
    memcpy(to, from, bytes);
    return SUCCESS;
}
template <class T>
int get(const T& from, void* to, size_t bytes, size_t* written) {
    if (written) *written = sizeof(T);
    if (bytes < sizeof(T)) return LT_INVALID_VALUE;
    memcpy(to, &from, sizeof(T));
    return SUCCESS;
}

int aux_type(const Desc& d, const Layout& out) { return d.aux_type >= 0 ? d.aux_type : out.type; }
int bias_type(const Desc& d, const Layout& out) { return d.bias_type >= 0 ? d.bias_type : out.type; }

// Whether cuBLASLt would run this; the status it would give.
int check(const Desc& d, const Layout& a, const Layout& b, const Layout& c, const Layout& out) {
    for (const Layout* l : {&a, &b, &c, &out})
        if (l->magic != LAYOUT || l->ld < (long long)std::max<uint64_t>(1, l->rows) || l->batch < 1) return LT_INVALID_VALUE;
    if (a.order || b.order || c.order || out.order || d.transpose[2]) return LT_NOT_SUPPORTED;
    const bool ta = d.transpose[0] != 0, tb = d.transpose[1] != 0;
    const uint64_t m = ta ? a.columns : a.rows, k = ta ? a.rows : a.columns, n = tb ? b.rows : b.columns;
    if ((tb ? b.columns : b.rows) != k || out.rows != m || out.columns != n || c.rows != m || c.columns != n)
        return LT_INVALID_VALUE;
    if (a.batch != out.batch || b.batch != out.batch || c.batch != out.batch) return LT_INVALID_VALUE;
    const bool inputs = a.type == b.type && (a.type == R_32F || a.type == R_16F || a.type == R_16BF);
    if (!inputs || c.type != out.type || (out.type != a.type && out.type != R_32F)) return LT_NOT_SUPPORTED;
    if (d.scale_type != R_32F || d.pointer_mode > 1) return LT_NOT_SUPPORTED;
    if (std::find(std::begin(EPILOGUES), std::end(EPILOGUES), d.epilogue) == std::end(EPILOGUES)) return LT_INVALID_VALUE;
    if (d.epilogue & (E_BIAS | E_BGRAD | E_BGRADA | E_BGRADB)) {
        const int type = bias_type(d, out);
        if (!d.bias || (type != out.type && type != R_32F)) return d.bias ? LT_NOT_SUPPORTED : LT_INVALID_VALUE;
    }
    if (d.epilogue & E_AUX) {
        if (!d.aux) return LT_INVALID_VALUE;
        // A mask of bits for ReLU, in rows of 128 bits; the values before GELU in eights.
        const long long unit = d.epilogue & (E_RELU | E_DRELU) ? 128 : 8;
        if (d.aux_ld % unit != 0 || d.aux_ld < (long long)m) return LT_INVALID_VALUE;
        if ((uintptr_t)d.aux % 16 != 0) return LT_INVALID_VALUE;
    }
    return SUCCESS;
}

// The tanh form, which is what cuBLASLt computes.
float gelu(float x) { return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }
float gelu_slope(float x) {
    const float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
}

// What an epilogue does to alpha * op(A) * op(B) + beta * C of one matrix of the batch.
struct Epilogue {
    Desc d;
    Product g;
    int type_of_bias, type_of_aux;

    void* bias(long long index) const {
        return (char*)d.bias + index * d.bias_stride * (long long)bytes_of(type_of_bias);
    }
    void apply(long long index, float* v) const {
        const unsigned e = d.epilogue;
        char* aux = (char*)d.aux;
        if (aux) aux += e & (E_RELU | E_DRELU) ? index * d.aux_stride / 8 : index * d.aux_stride * (long long)bytes_of(type_of_aux);
        for (long long j = 0; j < g.n; j++) {
            for (long long i = 0; i < g.m; i++) {
                float& x = v[j * g.m + i];
                const long long at = j * d.aux_ld + i;
                if (e & E_BIAS) x += load(bias(index), i, type_of_bias);
                if (e & E_RELU) {
                    if (e & E_AUX) set_bit(aux, at, x > 0);
                    x = x > 0 ? x : 0;
                }
                if (e & E_GELU) {
                    if (e & E_AUX) store(aux, at, type_of_aux, x);
                    x = gelu(x);
                }
                if (e & E_DRELU && !(aux[at / 8] >> (at % 8) & 1)) x = 0;
                if (e & E_DGELU) x *= gelu_slope(load(aux, at, type_of_aux));
            }
        }
        if (e & E_BGRAD) sum_rows(index, v);
        if (e & (E_BGRADA | E_BGRADB)) sum_input(index, e & E_BGRADA);
    }

  private:
    static void set_bit(char* bits, long long at, bool on) {
        const char bit = (char)(1 << (at % 8));
        bits[at / 8] = (char)(on ? bits[at / 8] | bit : bits[at / 8] & ~bit);
    }
    // The gradient of a bias: the sum of what is stored over the columns.
    void sum_rows(long long index, const float* v) const {
        for (long long i = 0; i < g.m; i++) {
            float sum = 0;
            for (long long j = 0; j < g.n; j++) sum += v[j * g.m + i];
            store(bias(index), i, type_of_bias, sum);
        }
    }
    // That of an input: the sum of op(A) or op(B) over k.
    void sum_input(long long index, bool of_a) const {
        const Matrix& x = of_a ? g.a : g.b;
        const char* at = (const char*)x.at + index * x.stride * (long long)bytes_of(x.type);
        const bool k_is_columns = of_a ? !g.transpose_a : g.transpose_b;
        for (long long i = 0; i < (of_a ? g.m : g.n); i++) {
            float sum = 0;
            for (long long p = 0; p < g.k; p++) sum += load(at, k_is_columns ? i + p * x.ld : p + i * x.ld, x.type);
            store(bias(index), i, type_of_bias, sum);
        }
    }
};

bool memory_is_usable(const Epilogue& e, std::string* why) {
    const Desc& d = e.d;
    const long long batch = e.g.batch;
    if (d.epilogue & (E_BIAS | E_BGRAD | E_BGRADA | E_BGRADB)) {
        const long long length = d.epilogue & E_BGRADB ? e.g.n : e.g.m;
        if (!usable(d.bias, ((batch - 1) * d.bias_stride + length) * bytes_of(e.type_of_bias), e.g.device, why)) return false;
    }
    if (!(d.epilogue & E_AUX)) return true;
    const long long elements = (batch - 1) * d.aux_stride + (e.g.n - 1) * d.aux_ld + e.g.m;
    const bool bits = d.epilogue & (E_RELU | E_DRELU);
    return usable(d.aux, bits ? (elements + 7) / 8 : elements * bytes_of(e.type_of_aux), e.g.device, why);
}

Matrix matrix(const void* at, const Layout& l) {
    return {at, l.type, (long long)l.rows, (long long)l.columns, l.ld, l.stride};
}

Inputs inputs_of(int compute, int type) {
    if (type != R_32F) return Inputs::AsTheyAre;
    return compute == 74 ? Inputs::F16 : compute == 75 ? Inputs::Bf16 : compute == 77 ? Inputs::Tf32 : Inputs::AsTheyAre;
}

}  // namespace

#define LT()             \
    Call call(__func__); \
    if (call.error) return call.on_purpose ? call.error : status_of(call.error)

FAKE_API size_t cublasLtGetVersion() { return 130000; }
FAKE_API size_t cublasLtGetCudartVersion() { return 13000; }

FAKE_API int cublasLtCreate(LtHandle** out) {
    LT();
    *out = new LtHandle();
    handles().insert(*out);
    return SUCCESS;
}
FAKE_API int cublasLtDestroy(LtHandle* h) {
    Lock lock(world().lock);
    if (!handles().erase(h)) return LT_NOT_INITIALIZED;
    delete h;
    return SUCCESS;
}

FAKE_API int cublasLtMatmulDescCreate(Desc** out, int compute, int scale_type) {
    if (!out || (compute != 68 && compute != 69 && compute != 74 && compute != 75 && compute != 77)) return LT_NOT_SUPPORTED;
    Desc* d = new Desc();
    d->magic = DESC;
    d->compute = compute;
    d->scale_type = scale_type;
    d->epilogue = E_DEFAULT;
    d->bias_type = d->aux_type = -1;
    *out = d;
    return SUCCESS;
}
FAKE_API int cublasLtMatmulDescDestroy(Desc* d) {
    if (!d || d->magic != DESC) return LT_INVALID_VALUE;
    d->magic = 0;
    delete d;
    return SUCCESS;
}
FAKE_API int cublasLtMatmulDescSetAttribute(Desc* d, int attribute, const void* from, size_t bytes) {
    if (!d || d->magic != DESC || !from) return LT_INVALID_VALUE;
    switch (attribute) {
        case 0: return set(&d->compute, from, bytes);
        case 1: return set(&d->scale_type, from, bytes);
        case 2: return set(&d->pointer_mode, from, bytes);
        case 3: case 4: case 5: return set(&d->transpose[attribute - 3], from, bytes);
        case 7: return set(&d->epilogue, from, bytes);
        case 8: return set(&d->bias, from, bytes);
        case 10: return set(&d->bias_stride, from, bytes);
        case 11: return set(&d->aux, from, bytes);
        case 12: return set(&d->aux_ld, from, bytes);
        case 13: return set(&d->aux_stride, from, bytes);
        case 15: return bytes == 4 ? SUCCESS : LT_INVALID_VALUE;  // SM_COUNT_TARGET
        case 22: return set(&d->aux_type, from, bytes);
        case 26: return set(&d->bias_type, from, bytes);
        default: return LT_NOT_SUPPORTED;
    }
}
FAKE_API int cublasLtMatmulDescGetAttribute(Desc* d, int attribute, void* to, size_t bytes, size_t* written) {
    if (!d || d->magic != DESC || !to) return LT_INVALID_VALUE;
    switch (attribute) {
        case 0: return get(d->compute, to, bytes, written);
        case 1: return get(d->scale_type, to, bytes, written);
        case 2: return get(d->pointer_mode, to, bytes, written);
        case 3: case 4: case 5: return get(d->transpose[attribute - 3], to, bytes, written);
        case 7: return get(d->epilogue, to, bytes, written);
        case 8: return get(d->bias, to, bytes, written);
        case 10: return get(d->bias_stride, to, bytes, written);
        case 11: return get(d->aux, to, bytes, written);
        case 12: return get(d->aux_ld, to, bytes, written);
        case 13: return get(d->aux_stride, to, bytes, written);
        case 22: return get(d->aux_type, to, bytes, written);
        case 26: return get(d->bias_type, to, bytes, written);
        default: return LT_NOT_SUPPORTED;
    }
}

FAKE_API int cublasLtMatrixLayoutCreate(Layout** out, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    if (!out || bytes_of(type) == 0) return LT_INVALID_VALUE;
    *out = new Layout{LAYOUT, type, 0, 1, rows, columns, ld, 0};
    return SUCCESS;
}
FAKE_API int cublasLtMatrixLayoutDestroy(Layout* l) {
    if (!l || l->magic != LAYOUT) return LT_INVALID_VALUE;
    l->magic = 0;
    delete l;
    return SUCCESS;
}
FAKE_API int cublasLtMatrixLayoutSetAttribute(Layout* l, int attribute, const void* from, size_t bytes) {
    if (!l || l->magic != LAYOUT || !from) return LT_INVALID_VALUE;
    switch (attribute) {
        case 0: return set(&l->type, from, bytes);
        case 1: return set(&l->order, from, bytes);
        case 2: return set(&l->rows, from, bytes);
        case 3: return set(&l->columns, from, bytes);
        case 4: return set(&l->ld, from, bytes);
        case 5: return set(&l->batch, from, bytes);
        case 6: return set(&l->stride, from, bytes);
        default: return LT_NOT_SUPPORTED;
    }
}

FAKE_API int cublasLtMatmulPreferenceCreate(Preference** out) {
    if (!out) return LT_INVALID_VALUE;
    *out = new Preference{PREFERENCE, 0};
    return SUCCESS;
}
FAKE_API int cublasLtMatmulPreferenceDestroy(Preference* p) {
    if (!p || p->magic != PREFERENCE) return LT_INVALID_VALUE;
    p->magic = 0;
    delete p;
    return SUCCESS;
}
FAKE_API int cublasLtMatmulPreferenceSetAttribute(Preference* p, int attribute, const void* from, size_t bytes) {
    if (!p || p->magic != PREFERENCE || !from) return LT_INVALID_VALUE;
    if (attribute == 1) return set(&p->workspace, from, bytes);
    return bytes == 4 || bytes == 8 ? SUCCESS : LT_INVALID_VALUE;  // preferences among algorithms: there is one here
}

FAKE_API int cublasLtMatmulAlgoGetHeuristic(LtHandle* h, Desc* d, Layout* a, Layout* b, Layout* c, Layout* out,
                                            Preference* p, int requested, Heuristic* results, int* returned) {
    LT();
    if (!handles().count(h)) return LT_NOT_INITIALIZED;
    if (!d || !a || !b || !c || !out || !p || !results || !returned || requested < 1) return LT_INVALID_VALUE;
    if (d->magic != DESC || p->magic != PREFERENCE) return LT_INVALID_VALUE;
    *returned = 0;
    // The pointers may be set after the heuristics were asked: their place is taken here.
    Desc asked = *d;
    if (!asked.bias) asked.bias = (void*)256;
    if (!asked.aux) asked.aux = (void*)256;
    if (int status = check(asked, *a, *b, *c, *out)) return status;
    memset(results, 0, sizeof *results);
    results->algo.data[0] = ALGO;
    results->workspace = std::min<uint64_t>(p->workspace, 32 << 10);
    results->algo.data[1] = results->workspace;
    results->waves = 1;
    *returned = 1;
    return SUCCESS;
}

FAKE_API int cublasLtMatmul(LtHandle* h, Desc* d, const void* alpha, const void* a, Layout* la, const void* b, Layout* lb,
                            const void* beta, const void* c, Layout* lc, void* out, Layout* ld, const Algo* algo,
                            void* workspace, size_t workspace_bytes, void* handle) {
    LT();
    if (!handles().count(h)) return LT_NOT_INITIALIZED;
    if (!d || d->magic != DESC || !la || !lb || !lc || !ld || !alpha || !beta) return LT_INVALID_VALUE;
    if (int status = check(*d, *la, *lb, *lc, *ld)) return status;
    if (algo && (algo->data[0] != ALGO || workspace_bytes < algo->data[1])) return LT_INVALID_VALUE;
    if (workspace_bytes > 0 && ((uintptr_t)workspace % 16 != 0 || !find(workspace, workspace_bytes))) return LT_INVALID_VALUE;
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return status_of(error);
    Epilogue e;
    e.d = *d;
    e.type_of_bias = bias_type(*d, *ld);
    e.type_of_aux = aux_type(*d, *ld);
    Product& g = e.g;
    g.who = __func__;
    g.device = stream->context->device;
    g.transpose_a = d->transpose[0] != 0;
    g.transpose_b = d->transpose[1] != 0;
    g.m = (long long)ld->rows, g.n = (long long)ld->columns, g.batch = ld->batch;
    g.k = (long long)(g.transpose_a ? la->rows : la->columns);
    if (d->pointer_mode == 0) g.alpha = *(const float*)alpha, g.beta = *(const float*)beta;
    else g.alpha_at = (const float*)alpha, g.beta_at = (const float*)beta;
    g.a = matrix(a, *la), g.b = matrix(b, *lb), g.c = matrix(c, *lc), g.d = matrix(out, *ld);
    g.inputs = inputs_of(d->compute, la->type);
    if (g.m == 0 || g.n == 0) return SUCCESS;
    Work work;
    work.name = g.who;
    work.run = [e](std::shared_ptr<void>&) {
        std::string why;
        if (!memory_is_usable(e, &why)) {
            break_device(e.g.device, ILLEGAL_ADDRESS, "the epilogue of cublasLtMatmul: " + why);
            return Step::Done;
        }
        Product product = e.g;
        product.epilogue = [&e](long long index, float* values) { e.apply(index, values); };
        multiply(product);
        return Step::Done;
    };
    return status_of(submit(stream, work));
}
