// libcuda: modules, functions and launches. A module is what the fake NVRTC makes: the names of kernels that the shim
// knows (image.h).
#include <stdio.h>
#include <string.h>

#include "../shim/emu.h"
#include "engine.h"
#include "image.h"

using namespace fake;

namespace {

constexpr int STATIC_SHARED_LIMIT = 48 << 10, SHARED_LIMIT = 227 << 10;

struct Function {
    std::string name;
    int dynamic_shared_limit = STATIC_SHARED_LIMIT;
};
struct Module {
    std::map<std::string, Function> functions;
};
std::set<Module*>& modules() {
    static auto* all = new std::set<Module*>();
    return *all;
}
std::set<Function*>& functions() {
    static auto* all = new std::set<Function*>();
    return *all;
}

// The values of a launch's arguments, as the driver copies them before it returns.
struct Arguments {
    std::vector<size_t> offsets;
    std::vector<char> bytes;
};

struct Launch {
    std::string kernel;
    emu_dim grid, block;
    size_t shared;
    Arguments arguments;
    int device, schedule;
};

std::string describe(const Launch& l) {
    char text[256];
    snprintf(text, sizeof text, "%s, grid (%u,%u,%u), block (%u,%u,%u), %zu bytes of shared memory", l.kernel.c_str(),
             l.grid.x, l.grid.y, l.grid.z, l.block.x, l.block.y, l.block.z, l.shared);
    return text;
}

void run(const Launch& l) {
    std::vector<char> bytes = l.arguments.bytes;
    std::vector<void*> pointers;
    for (size_t i = 0; i < l.arguments.offsets.size(); i++) {
        void* at = bytes.data() + l.arguments.offsets[i];
        pointers.push_back(at);
        if (!emu_kernel_arg_is_pointer(l.kernel.c_str(), (int)i)) continue;
        void* value;
        memcpy(&value, at, sizeof value);
        std::string why;
        if (!value || usable(value, 0, l.device, &why)) continue;
        break_device(l.device, ILLEGAL_ADDRESS, describe(l) + ": argument " + std::to_string(i) + ": " + why);
        return;
    }
    pointers.push_back(nullptr);
    const char* error =
        emu_launch(l.kernel.c_str(), l.grid, l.block, l.shared, pointers.data(), l.schedule, random_u64());
    if (error) break_device(l.device, LAUNCH_FAILED, error);
    check_guards(l.device, l.kernel);
}

int limits(const Function& f, emu_dim grid, emu_dim block, size_t shared) {
    const uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || !threads) return INVALID_VALUE;
    if (grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535) return INVALID_VALUE;
    if (block.x > 1024 || block.y > 1024 || block.z > 64 || threads > 1024) return INVALID_VALUE;
    if (shared > (size_t)f.dynamic_shared_limit) return INVALID_VALUE;
    if ((int)threads > emu_kernel_max_threads(f.name.c_str())) return LAUNCH_OUT_OF_RESOURCES;
    return OK;
}

}  // namespace

FAKE_API int cuModuleLoadData(Module** out, const void* image) {
    ENTER();
    if (!out || !image) return INVALID_VALUE;
    if (int error = forbidden_in_capture()) return error;
    Image parsed;
    if (!parse_image((const char*)image, &parsed)) return INVALID_IMAGE;
    const int have = world().compute;
    // Machine code runs on its own major version, of the same or a later minor one; PTX on the same and all later.
    const bool runs = parsed.is_ptx ? parsed.arch <= have : parsed.arch / 10 == have / 10 && parsed.arch <= have;
    if (!runs) return NO_BINARY_FOR_GPU;
    Module* module = new Module();
    for (const std::string& name : parsed.kernels) {
        module->functions[name].name = name;
        functions().insert(&module->functions[name]);
    }
    modules().insert(module);
    *out = module;
    return OK;
}
FAKE_API int cuModuleLoadDataEx(Module** out, const void* image, unsigned, int*, void**) {
    return cuModuleLoadData(out, image);
}

FAKE_API int cuModuleUnload(Module* module) {
    ENTER();
    if (!modules().erase(module)) return INVALID_HANDLE;
    for (auto& one : module->functions) functions().erase(&one.second);
    delete module;
    return OK;
}

FAKE_API int cuModuleGetFunction(Function** out, Module* module, const char* name) {
    ENTER();
    if (!out || !name) return INVALID_VALUE;
    if (!modules().count(module)) return INVALID_HANDLE;
    const auto found = module->functions.find(name);
    if (found == module->functions.end()) return NOT_FOUND;
    *out = &found->second;
    return OK;
}

FAKE_API int cuModuleGetFunctionCount(unsigned* count, Module* module) {
    ENTER();
    if (!modules().count(module)) return INVALID_HANDLE;
    *count = (unsigned)module->functions.size();
    return OK;
}

FAKE_API int cuModuleGetGlobal_v2(unsigned long long*, size_t*, Module*, const char*) {
    ENTER();
    return NOT_FOUND;
}

FAKE_API int cuFuncGetAttribute(int* value, int attribute, Function* function) {
    ENTER();
    if (!functions().count(function)) return INVALID_HANDLE;
    switch (attribute) {
        case 0: *value = emu_kernel_max_threads(function->name.c_str()); break;
        case 1: case 2: case 3: *value = 0; break;  // shared, constant and local bytes: the compiler of the host knows none
        case 4: *value = 32; break;                 // registers
        case 5: case 6: *value = world().compute; break;
        case 7: *value = 0; break;
        case 8: *value = function->dynamic_shared_limit; break;
        case 9: *value = -1; break;
        default: return INVALID_VALUE;
    }
    return OK;
}

FAKE_API int cuFuncSetAttribute(Function* function, int attribute, int value) {
    ENTER();
    if (!functions().count(function)) return INVALID_HANDLE;
    if (attribute == 9) return value >= -1 && value <= 100 ? OK : INVALID_VALUE;
    if (attribute != 8 || value < 0 || value > SHARED_LIMIT) return INVALID_VALUE;
    function->dynamic_shared_limit = value;
    return OK;
}

FAKE_API int cuFuncSetCacheConfig(Function* function, int) {
    ENTER();
    return functions().count(function) ? OK : INVALID_HANDLE;
}

FAKE_API int cuFuncGetName(const char** name, Function* function) {
    ENTER();
    if (!functions().count(function)) return INVALID_HANDLE;
    *name = function->name.c_str();
    return OK;
}

FAKE_API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int block_size, size_t shared) {
    ENTER();
    if (!functions().count(function)) return INVALID_HANDLE;
    if (block_size < 1 || block_size > 1024) return INVALID_VALUE;
    const int by_threads = 2048 / block_size, by_shared = shared ? (int)(SHARED_LIMIT / shared) : 32;
    *blocks = std::min(32, std::min(by_threads, by_shared));
    return OK;
}
FAKE_API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, Function* function, int block_size,
                                                                  size_t shared, unsigned) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size, shared);
}

FAKE_API int cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                            unsigned bz, unsigned shared, void* handle, void** params, void** extra) {
    std::string name;
    {
        Lock lock(world().lock);
        if (functions().count(function)) name = function->name;
    }
    Call call(__func__, Call::Current, name);
    if (call.error) return call.error;
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (!functions().count(function)) return INVALID_HANDLE;
    Launch l;
    l.kernel = function->name;
    l.grid = {gx, gy, gz};
    l.block = {bx, by, bz};
    l.shared = shared;
    l.device = stream->context->device;
    l.schedule = world().schedule;
    if ((error = limits(*function, l.grid, l.block, shared))) return error;
    const int count = emu_kernel_args(l.kernel.c_str(), nullptr, 0);
    if (extra || (count > 0 && !params)) return INVALID_VALUE;
    std::vector<size_t> sizes(count + 1);
    emu_kernel_args(l.kernel.c_str(), sizes.data(), count);
    for (int i = 0; i < count; i++) {
        if (!params[i]) return INVALID_VALUE;
        auto& bytes = l.arguments.bytes;
        bytes.resize((bytes.size() + 15) / 16 * 16);
        l.arguments.offsets.push_back(bytes.size());
        bytes.insert(bytes.end(), (char*)params[i], (char*)params[i] + sizes[i]);
    }
    Work work;
    work.name = l.kernel;
    work.run = [l](std::shared_ptr<void>&) {
        run(l);
        return Step::Done;
    };
    return submit(stream, work);
}

// ------------------------------------------------------------------------------------------------------- names of errors

namespace {
struct Name {
    int code;
    const char *name, *text;
};
const Name NAMES[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture from another thread"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};
const Name* name_of(int code) {
    for (const Name& one : NAMES)
        if (one.code == code) return &one;
    return nullptr;
}
}  // namespace

FAKE_API int cuGetErrorName(int code, const char** out) {
    const Name* name = name_of(code);
    *out = name ? name->name : nullptr;
    return name ? OK : INVALID_VALUE;
}
FAKE_API int cuGetErrorString(int code, const char** out) {
    const Name* name = name_of(code);
    *out = name ? name->text : nullptr;
    return name ? OK : INVALID_VALUE;
}
