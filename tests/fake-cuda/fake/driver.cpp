// libcuda: devices, contexts, memory, copies, streams and events. modules.cpp and graphs.cpp have the rest.
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "engine.h"

using namespace fake;

typedef unsigned long long CUdeviceptr;

// ---------------------------------------------------------------------------------------------------- driver and device

FAKE_API int cuInit(unsigned flags) {
    ENTER(Call::Nothing);
    if (flags != 0) return INVALID_VALUE;
    World& w = world();
    if (w.device_count < 1) return NO_DEVICE;
    if (w.initialized) return OK;
    w.initialized = true;
    w.devices.resize(w.device_count);
    for (int i = 0; i < w.device_count; i++) {
        Context* context = &w.devices[i].primary;
        context->device = i;
        Stream* stream = new Stream();
        stream->context = context;
        stream->is_null = true;
        context->null_stream = stream;
        w.streams.insert(stream);
        w.contexts.insert(context);
    }
    return OK;
}

FAKE_API int cuDriverGetVersion(int* version) {
    ENTER(Call::Nothing);
    if (!version) return INVALID_VALUE;
    *version = world().driver_version;
    return OK;
}

static bool is_device(int device) { return device >= 0 && device < (int)world().devices.size(); }

FAKE_API int cuDeviceGetCount(int* count) {
    ENTER(Call::Init);
    *count = (int)world().devices.size();
    return OK;
}

FAKE_API int cuDeviceGet(int* device, int ordinal) {
    ENTER(Call::Init);
    if (!is_device(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

FAKE_API int cuDeviceGetName(char* name, int length, int device) {
    ENTER(Call::Init);
    if (!is_device(device)) return INVALID_DEVICE;
    snprintf(name, length, "Paraft Fake GPU %d", device);
    return OK;
}

FAKE_API int cuDeviceGetUuid_v2(char* uuid, int device) {
    ENTER(Call::Init);
    if (!is_device(device)) return INVALID_DEVICE;
    memcpy(uuid, "paraft fake gpu ", 16);
    uuid[15] = (char)device;
    return OK;
}
FAKE_API int cuDeviceGetUuid(char* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

FAKE_API int cuDeviceGetPCIBusId(char* id, int length, int device) {
    ENTER(Call::Init);
    if (!is_device(device)) return INVALID_DEVICE;
    snprintf(id, length, "0000:%02X:00.0", device + 1);
    return OK;
}

FAKE_API int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    ENTER(Call::Init);
    if (!is_device(device)) return INVALID_DEVICE;
    *bytes = world().memory;
    return OK;
}

FAKE_API int cuDeviceGetAttribute(int* value, int attribute, int device) {
    ENTER(Call::Init);
    if (!is_device(device)) return INVALID_DEVICE;
    if (attribute < 1) return INVALID_VALUE;
    // As of an H100, by the numbers of CUdevice_attribute; the others are 0.
    switch (attribute) {
        case 1: *value = 1024; break;           // threads per block
        case 2: case 3: *value = 1024; break;   // block x, y
        case 4: *value = 64; break;             // block z
        case 5: *value = 2147483647; break;     // grid x
        case 6: case 7: *value = 65535; break;  // grid y, z
        case 8: *value = 49152; break;          // shared memory per block
        case 9: *value = 65536; break;          // constant memory
        case 10: *value = 32; break;            // warp
        case 12: *value = 65536; break;         // registers per block
        case 13: *value = 1980000; break;       // clock, kHz
        case 15: case 31: *value = 1; break;    // overlap, concurrent kernels
        case 16: *value = 132; break;           // multiprocessors
        case 19: *value = 1; break;             // mapped host memory
        case 33: *value = device + 1; break;    // PCI bus
        case 36: *value = 2619000; break;       // memory clock, kHz
        case 37: *value = 5120; break;          // memory bus, bits
        case 38: *value = 52428800; break;      // L2
        case 39: *value = 2048; break;          // threads per multiprocessor
        case 40: *value = 3; break;             // copy engines
        case 41: *value = 1; break;             // unified addresses
        case 75: *value = world().compute / 10; break;
        case 76: *value = world().compute % 10; break;
        case 78: *value = 1; break;             // stream priorities
        case 81: *value = 233472; break;        // shared memory per multiprocessor
        case 82: *value = 65536; break;         // registers per multiprocessor
        case 97: *value = 232448; break;        // shared memory per block that may be asked for
        case 99: *value = 1; break;             // host memory may be registered
        case 106: *value = 32; break;           // blocks per multiprocessor
        case 115: *value = 1; break;            // memory pools
        default: *value = 0;
    }
    return OK;
}

// ------------------------------------------------------------------------------------------------------------- contexts

FAKE_API int cuDevicePrimaryCtxRetain(Context** context, int device) {
    ENTER(Call::Init);
    if (!is_device(device)) return INVALID_DEVICE;
    *context = &world().devices[device].primary;
    (*context)->retained++;
    return OK;
}

FAKE_API int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(Call::Init);
    if (!is_device(device)) return INVALID_DEVICE;
    Context& context = world().devices[device].primary;
    if (context.retained == 0) return INVALID_CONTEXT;
    context.retained--;
    return OK;
}

FAKE_API int cuCtxSetCurrent(Context* context) {
    ENTER(Call::Init);
    if (context && !world().contexts.count(context)) return INVALID_CONTEXT;
    current_context = context;
    return OK;
}

FAKE_API int cuCtxGetCurrent(Context** context) {
    ENTER(Call::Init);
    *context = current_context;
    return OK;
}

static thread_local std::vector<Context*> pushed;

FAKE_API int cuCtxPushCurrent_v2(Context* context) {
    ENTER(Call::Init);
    if (!world().contexts.count(context)) return INVALID_CONTEXT;
    pushed.push_back(current_context);
    current_context = context;
    return OK;
}

FAKE_API int cuCtxPopCurrent_v2(Context** context) {
    ENTER(Call::Init);
    if (!current_context) return INVALID_CONTEXT;
    if (context) *context = current_context;
    current_context = pushed.empty() ? nullptr : pushed.back();
    if (!pushed.empty()) pushed.pop_back();
    return OK;
}

FAKE_API int cuCtxGetDevice(int* device) {
    ENTER();
    *device = current_context->device;
    return OK;
}

FAKE_API int cuCtxSetFlags(unsigned flags) {
    ENTER();
    current_context->flags = flags;
    return OK;
}

FAKE_API int cuCtxGetFlags(unsigned* flags) {
    ENTER();
    *flags = current_context->flags;
    return OK;
}

FAKE_API int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return OK;
}

FAKE_API int cuCtxSynchronize() {
    ENTER();
    if (int error = forbidden_in_capture()) return error;
    wait_for_all(call.lock, call.device());
    return world().devices[call.device()].error;
}

// --------------------------------------------------------------------------------------------------------------- memory

FAKE_API int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
    ENTER();
    const size_t used = world().devices[call.device()].used;
    if (total) *total = world().memory;
    if (free_bytes) *free_bytes = world().memory > used ? world().memory - used : 0;
    return OK;
}

FAKE_API int cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) {
    ENTER();
    if (!out) return INVALID_VALUE;
    if (int error = forbidden_in_capture()) return error;
    void* at = nullptr;
    int error = allocate(call.device(), bytes, &at);
    if (error == OUT_OF_MEMORY && world().unfinished > 0) {
        // What streams are about to free is waited for, as the driver does.
        wait_for_all(call.lock, call.device());
        error = allocate(call.device(), bytes, &at);
    }
    *out = (CUdeviceptr)at;
    return error;
}

static const Allocation* exactly(CUdeviceptr at, bool of_host) {
    const Allocation* a = find((void*)at, 0);
    return a && a->at == at && (a->device < 0) == of_host ? a : nullptr;
}

FAKE_API int cuMemFree_v2(CUdeviceptr at) {
    ENTER();
    if (at == 0) return OK;
    const Allocation* a = exactly(at, false);
    if (!a) return INVALID_VALUE;
    if (int error = forbidden_in_capture()) return error;
    wait_for_all(call.lock, a->device);
    release((uintptr_t)at);
    return world().devices[call.device()].error;
}

FAKE_API int cuMemAllocAsync(CUdeviceptr* out, size_t bytes, void* handle) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (stream->capture) return NOT_SUPPORTED;
    void* at = nullptr;
    error = allocate(stream->context->device, bytes, &at);
    if (error == OUT_OF_MEMORY && world().unfinished > 0) {
        wait_for_all(call.lock, stream->context->device);
        error = allocate(stream->context->device, bytes, &at);
    }
    if (error) return error;
    *out = (CUdeviceptr)at;
    Work work;
    work.name = "cuMemAllocAsync";
    // What another stream wrote before this one came here is lost.
    work.run = [at, bytes](std::shared_ptr<void>&) {
        if (find(at, bytes)) memset(at, 0xff, bytes);
        return Step::Done;
    };
    return submit(stream, work);
}

FAKE_API int cuMemFreeAsync(CUdeviceptr at, void* handle) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (at == 0) return OK;
    if (!exactly(at, false)) return INVALID_VALUE;
    if (stream->capture) return NOT_SUPPORTED;
    Work work;
    work.name = "cuMemFreeAsync";
    work.run = [at](std::shared_ptr<void>&) {
        release((uintptr_t)at);
        return Step::Done;
    };
    return submit(stream, work);
}

FAKE_API int cuMemHostAlloc(void** out, size_t bytes, unsigned flags) {
    ENTER();
    if (!out) return INVALID_VALUE;
    if (int error = forbidden_in_capture()) return error;
    return allocate_host(bytes, flags, out);
}
FAKE_API int cuMemAllocHost_v2(void** out, size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }

FAKE_API int cuMemFreeHost(void* at) {
    ENTER();
    const Allocation* a = exactly((CUdeviceptr)at, true);
    if (!a || a->registered) return INVALID_VALUE;
    if (int error = forbidden_in_capture()) return error;
    for (int i = 0; i < (int)world().devices.size(); i++) wait_for_all(call.lock, i);
    release((uintptr_t)at);
    return OK;
}

FAKE_API int cuMemHostGetFlags(unsigned* flags, void* at) {
    ENTER();
    const Allocation* a = find(at, 0);
    if (!a || a->device >= 0) return INVALID_VALUE;
    *flags = a->flags;
    return OK;
}

FAKE_API int cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* at, unsigned) {
    ENTER();
    const Allocation* a = find(at, 0);
    if (!a || a->device >= 0) return INVALID_VALUE;
    *out = (CUdeviceptr)at;
    return OK;
}

FAKE_API int cuMemHostRegister_v2(void* at, size_t bytes, unsigned flags) {
    ENTER();
    if (!at || bytes == 0) return INVALID_VALUE;
    for (const auto& one : world().memory_map) {
        const Allocation& a = one.second;
        if (a.at < (uintptr_t)at + bytes && (uintptr_t)at < a.at + a.bytes) return HOST_MEMORY_ALREADY_REGISTERED;
    }
    Allocation a;
    a.at = (uintptr_t)at;
    a.bytes = bytes;
    a.flags = flags;
    a.registered = true;
    world().memory_map[a.at] = a;
    return OK;
}

FAKE_API int cuMemHostUnregister(void* at) {
    ENTER();
    const Allocation* a = exactly((CUdeviceptr)at, true);
    if (!a || !a->registered) return HOST_MEMORY_NOT_REGISTERED;
    for (int i = 0; i < (int)world().devices.size(); i++) wait_for_all(call.lock, i);
    release((uintptr_t)at);
    return OK;
}

// --------------------------------------------------------------------------------------------------------------- copies

namespace {

bool on_device(CUdeviceptr at, size_t bytes) {
    const Allocation* a = find((void*)at, bytes);
    return a != nullptr;
}
bool pinned(const void* at, size_t bytes) {
    const Allocation* a = find(at, bytes);
    return a && a->device < 0;
}

// `keep` owns what was copied of pageable memory. `host_is_pageable`: the range is the program's own.
Work copy_work(const char* name, void* to, const void* from, size_t bytes, bool check_to, bool check_from, int device,
               std::shared_ptr<std::vector<char>> keep = nullptr) {
    Work work;
    work.name = name;
    work.run = [=](std::shared_ptr<void>&) {
        std::string why;
        if ((check_to && !usable(to, bytes, device, &why)) || (check_from && !usable(from, bytes, device, &why))) {
            break_device(device, ILLEGAL_ADDRESS, std::string(name) + ": " + why);
            return Step::Done;
        }
        memmove(to, keep ? keep->data() : from, bytes);
        return Step::Done;
    };
    return work;
}

int copy_to_device(Call& call, CUdeviceptr to, const void* from, size_t bytes, void* handle) {
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (bytes == 0) return OK;
    if (!from || !on_device(to, bytes)) return INVALID_VALUE;
    const bool is_pinned = pinned(from, bytes);
    std::shared_ptr<std::vector<char>> keep;
    if (!is_pinned) {
        if (stream->capture) {
            stream->capture->invalid = true;
            return CAPTURE_UNSUPPORTED;
        }
        // Pageable memory is staged before the call returns.
        keep = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
    }
    (void)call;
    return submit(stream, copy_work("copy to the device", (void*)to, from, bytes, true, is_pinned,
                                    stream->context->device, keep));
}

int copy_to_host(Call& call, void* to, CUdeviceptr from, size_t bytes, void* handle) {
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (bytes == 0) return OK;
    if (!to || !on_device(from, bytes)) return INVALID_VALUE;
    const bool is_pinned = pinned(to, bytes);
    if (!is_pinned && stream->capture) {
        stream->capture->invalid = true;
        return CAPTURE_UNSUPPORTED;
    }
    const int device = stream->context->device;
    error = submit(stream, copy_work("copy to the host", to, (const void*)from, bytes, is_pinned, true, device));
    if (error || is_pinned) return error;
    // Into pageable memory the call returns when the copy is there.
    wait_for(call.lock, stream->last);
    return world().devices[device].error;
}

int copy_on_device(CUdeviceptr to, CUdeviceptr from, size_t bytes, void* handle) {
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (bytes == 0) return OK;
    if (!on_device(to, bytes) || !on_device(from, bytes)) return INVALID_VALUE;
    return submit(stream, copy_work("copy on the device", (void*)to, (const void*)from, bytes, true, true,
                                    stream->context->device));
}

int set_memory(CUdeviceptr to, unsigned value, size_t width, size_t count, void* handle) {
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (count == 0) return OK;
    if (count > SIZE_MAX / width || to % width != 0 || !on_device(to, width * count)) return INVALID_VALUE;
    const int device = stream->context->device;
    Work work;
    work.name = "memset";
    work.run = [=](std::shared_ptr<void>&) {
        std::string why;
        if (!usable((void*)to, width * count, device, &why)) {
            break_device(device, ILLEGAL_ADDRESS, "memset: " + why);
            return Step::Done;
        }
        if (width == 1) memset((void*)to, (int)value, count);
        for (size_t i = 0; width > 1 && i < count; i++) memcpy((char*)to + i * width, &value, width);
        return Step::Done;
    };
    return submit(stream, work);
}

// The forms without a stream work on the null stream. Those with the host on one side wait.
int null_stream_done(Call& call, int error) {
    if (error) return error;
    wait_for(call.lock, current_context->null_stream->last);
    return world().devices[call.device()].error;
}

}  // namespace

FAKE_API int cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, void* stream) {
    ENTER();
    return copy_to_device(call, to, from, bytes, stream);
}
FAKE_API int cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, void* stream) {
    ENTER();
    return copy_to_host(call, to, from, bytes, stream);
}
FAKE_API int cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream) {
    ENTER();
    return copy_on_device(to, from, bytes, stream);
}
FAKE_API int cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    ENTER();
    if (int error = forbidden_in_capture()) return error;
    return null_stream_done(call, copy_to_device(call, to, from, bytes, nullptr));
}
FAKE_API int cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    ENTER();
    if (int error = forbidden_in_capture()) return error;
    return null_stream_done(call, copy_to_host(call, to, from, bytes, nullptr));
}
FAKE_API int cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    ENTER();
    if (int error = forbidden_in_capture()) return error;
    return copy_on_device(to, from, bytes, nullptr);
}
FAKE_API int cuMemcpyPeerAsync(CUdeviceptr to, Context* to_context, CUdeviceptr from, Context* from_context, size_t bytes,
                               void* stream) {
    ENTER();
    if (!world().contexts.count(to_context) || !world().contexts.count(from_context)) return INVALID_CONTEXT;
    return copy_on_device(to, from, bytes, stream);
}
// Any direction: of what is here every address is unique.
FAKE_API int cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream) {
    ENTER();
    const Allocation *a = find((void*)to, 0), *b = find((void*)from, 0);
    if (a && a->device >= 0 && (!b || b->device < 0)) return copy_to_device(call, to, (void*)from, bytes, stream);
    if (b && b->device >= 0 && (!a || a->device < 0)) return copy_to_host(call, (void*)to, from, bytes, stream);
    return copy_on_device(to, from, bytes, stream);
}

FAKE_API int cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, void* stream) {
    ENTER();
    return set_memory(to, value, 1, count, stream);
}
FAKE_API int cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, void* stream) {
    ENTER();
    return set_memory(to, value, 2, count, stream);
}
FAKE_API int cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, void* stream) {
    ENTER();
    return set_memory(to, value, 4, count, stream);
}
FAKE_API int cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    ENTER();
    return set_memory(to, value, 1, count, nullptr);
}
FAKE_API int cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
    ENTER();
    return set_memory(to, value, 4, count, nullptr);
}

// -------------------------------------------------------------------------------------------------------------- streams

FAKE_API int cuStreamCreateWithPriority(Stream** out, unsigned flags, int priority) {
    ENTER();
    if (!out || flags > 1) return INVALID_VALUE;
    Stream* stream = new Stream();
    stream->context = current_context;
    stream->flags = flags;
    stream->blocking = (flags & 1) == 0;
    stream->priority = std::min(0, std::max(-5, priority));
    // Some streams fall far behind the others.
    const int weights[] = {1, 4, 16, 64};
    stream->weight = weights[random_below(4)];
    stream->id = world().next_stream++;
    world().streams.insert(stream);
    *out = stream;
    return OK;
}
FAKE_API int cuStreamCreate(Stream** out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }

FAKE_API int cuStreamDestroy_v2(Stream* stream) {
    ENTER();
    if (!stream || stream->is_null || !world().streams.count(stream)) return INVALID_HANDLE;
    if (stream->capture) {
        stream->capture->invalid = true;
        stream->capture->streams.erase(stream);
        if (stream->capture->origin == stream) world().captures.erase(stream->capture.get());
    }
    if (stream->last && !stream->last->done) world().orphans.push_back({stream->context->device, stream->last});
    world().streams.erase(stream);
    delete stream;
    return OK;
}

FAKE_API int cuStreamSynchronize(void* handle) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (stream->capture) {
        stream->capture->invalid = true;
        return CAPTURE_UNSUPPORTED;
    }
    const int device = stream->context->device;
    wait_for(call.lock, stream->last);
    return world().devices[device].error;
}

FAKE_API int cuStreamQuery(void* handle) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (stream->capture) {
        stream->capture->invalid = true;
        return CAPTURE_UNSUPPORTED;
    }
    const int device = stream->context->device;
    const OpRef last = stream->last;
    // So that a loop of queries comes to an end.
    if (last && !last->done) step(call.lock);
    if (world().devices[device].error) return world().devices[device].error;
    return !last || last->done ? OK : NOT_READY;
}

FAKE_API int cuStreamGetFlags(void* handle, unsigned* flags) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (stream) *flags = stream->flags;
    return error;
}

FAKE_API int cuStreamGetPriority(void* handle, int* priority) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (stream) *priority = stream->priority;
    return error;
}

FAKE_API int cuStreamGetCtx(void* handle, Context** context) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (stream) *context = stream->context;
    return error;
}

FAKE_API int cuStreamGetId(void* handle, unsigned long long* id) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (stream) *id = stream->id;
    return error;
}

FAKE_API int cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (!function) return INVALID_VALUE;
    Work work;
    work.name = "host function";
    work.host = [function, data] { function(data); };
    return submit(stream, work);
}

// --------------------------------------------------------------------------------------------------------------- events

constexpr unsigned WITHOUT_TIME = 2;

FAKE_API int cuEventCreate(Event** out, unsigned flags) {
    ENTER();
    if (!out || flags > 7) return INVALID_VALUE;
    Event* event = new Event();
    event->context = current_context;
    event->flags = flags;
    world().events.insert(event);
    *out = event;
    return OK;
}

FAKE_API int cuEventDestroy_v2(Event* event) {
    ENTER();
    if (!world().events.erase(event)) return INVALID_HANDLE;
    delete event;
    return OK;
}

FAKE_API int cuEventRecord(Event* event, void* handle) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (!world().events.count(event)) return INVALID_HANDLE;
    if (event->context != stream->context) return INVALID_HANDLE;
    if (stream->capture) {
        if (stream->capture->invalid) return CAPTURE_INVALIDATED;
        event->capture = stream->capture;
        event->captured = stream->captured_last;
        event->marker.reset();
        return OK;
    }
    Work work;
    work.name = "event";
    event->capture.reset();
    event->marker = submit_op(stream, work);
    return OK;
}
FAKE_API int cuEventRecordWithFlags(Event* event, void* stream, unsigned flags) {
    return flags ? NOT_SUPPORTED : cuEventRecord(event, stream);
}

FAKE_API int cuStreamWaitEvent(void* handle, Event* event, unsigned) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (!world().events.count(event)) return INVALID_HANDLE;
    if (event->capture) {
        if (event->capture->invalid) return CAPTURE_INVALIDATED;
        if (stream->capture && stream->capture != event->capture) {
            stream->capture->invalid = event->capture->invalid = true;
            return CAPTURE_MERGE;
        }
        if (!stream->capture) {
            if (!world().captures.count(event->capture.get())) return CAPTURED_EVENT;  // of a capture that has ended
            if (stream->is_null) return CAPTURE_IMPLICIT;
            stream->capture = event->capture;
            stream->capture->streams.insert(stream);
            stream->captured_last.clear();
        }
        for (int node : event->captured)
            if (std::find(stream->captured_last.begin(), stream->captured_last.end(), node) ==
                stream->captured_last.end())
                stream->captured_last.push_back(node);
        return OK;
    }
    if (!event->marker) return OK;  // never recorded: nothing to wait for
    if (stream->capture) {
        stream->capture->invalid = true;
        return CAPTURE_ISOLATION;
    }
    Work work;
    work.name = "wait for an event";
    submit_op(stream, work, {event->marker});
    return OK;
}

FAKE_API int cuEventQuery(Event* event) {
    ENTER();
    if (!world().events.count(event)) return INVALID_HANDLE;
    if (event->capture) {
        event->capture->invalid = true;
        return CAPTURED_EVENT;
    }
    if (int error = forbidden_in_capture()) return error;
    const OpRef marker = event->marker;
    const int device = event->context->device;
    if (marker && !marker->done) step(call.lock);
    if (world().devices[device].error) return world().devices[device].error;
    return !marker || marker->done ? OK : NOT_READY;
}

FAKE_API int cuEventSynchronize(Event* event) {
    ENTER();
    if (!world().events.count(event)) return INVALID_HANDLE;
    if (event->capture) {
        event->capture->invalid = true;
        return CAPTURED_EVENT;
    }
    if (int error = forbidden_in_capture()) return error;
    const int device = event->context->device;
    wait_for(call.lock, event->marker);
    return world().devices[device].error;
}

FAKE_API int cuEventElapsedTime_v2(float* ms, Event* start, Event* end) {
    ENTER();
    if (!world().events.count(start) || !world().events.count(end)) return INVALID_HANDLE;
    if ((start->flags | end->flags) & WITHOUT_TIME || !start->marker || !end->marker) return INVALID_HANDLE;
    if (!start->marker->done || !end->marker->done) return NOT_READY;
    *ms = (float)(end->marker->finished_ms - start->marker->finished_ms);
    return OK;
}
FAKE_API int cuEventElapsedTime(float* ms, Event* start, Event* end) { return cuEventElapsedTime_v2(ms, start, end); }
