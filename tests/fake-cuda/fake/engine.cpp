// Settings, the queue of operations and who runs them. See engine.h.
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

namespace fake {

thread_local bool in_host_function = false;
thread_local Context* current_context = nullptr;

// ---------------------------------------------------------------------------------------------------------- settings

namespace {

const char* const SETTINGS[] = {"SEED",     "DEVICES", "MEMORY",     "FAIL",    "DRIVER_VERSION",
                                "SCHEDULE", "COMPUTE", "BACKGROUND", "VERBOSE"};

// function[:detail]:n:code, separated by commas.
bool parse_faults(const std::string& text, std::vector<Fault>* out) {
    out->clear();
    size_t from = 0;
    while (from < text.size()) {
        const size_t comma = std::min(text.find(',', from), text.size());
        std::vector<std::string> part;
        std::string rest = text.substr(from, comma - from);
        for (size_t colon; (colon = rest.find(':')) != std::string::npos; rest = rest.substr(colon + 1))
            part.push_back(rest.substr(0, colon));
        part.push_back(rest);
        if (part.size() != 3 && part.size() != 4) return false;
        Fault fault;
        fault.function = part[0];
        fault.detail = part.size() == 4 ? part[1] : "";
        fault.nth = atol(part[part.size() - 2].c_str());
        fault.code = atoi(part[part.size() - 1].c_str());
        if (fault.nth < 1 || fault.code == 0) return false;
        out->push_back(fault);
        from = comma + 1;
    }
    return true;
}

bool apply(World& w, const std::string& name, const std::string& value) {
    char* end = nullptr;
    const unsigned long long number = strtoull(value.c_str(), &end, 10);
    const bool is_number = !value.empty() && *end == 0;
    if (name == "FAIL") return parse_faults(value, &w.faults);
    if (name == "SCHEDULE") {
        w.schedule = value == "ascending" ? 0 : value == "descending" ? 1 : value == "random" ? 2 : -1;
        return w.schedule >= 0;
    }
    if (name == "COMPUTE") {
        int major = 0, minor = -1;
        if (sscanf(value.c_str(), "%d.%d", &major, &minor) != 2 || major < 5 || minor < 0 || minor > 9) return false;
        w.compute = 10 * major + minor;
        return true;
    }
    if (!is_number) return false;
    if (name == "SEED") w.seed = w.random = number;
    else if (name == "DEVICES") w.device_count = (int)number;
    else if (name == "MEMORY") w.memory = number;
    else if (name == "DRIVER_VERSION") w.driver_version = (int)number;
    else if (name == "BACKGROUND") w.background = number != 0;
    else if (name == "VERBOSE") w.verbose = number != 0;
    else return false;
    return true;
}

World* make_world() {
    World* w = new World();  // never destroyed: the background thread may still look at it when the process ends
    w->last_call = std::chrono::steady_clock::now();
    for (const char* name : SETTINGS) {
        const char* value = getenv((std::string("PARAFT_FAKE_CUDA_") + name).c_str());
        if (!value || !*value || apply(*w, name, value)) continue;
        fprintf(stderr, "fake CUDA: PARAFT_FAKE_CUDA_%s=%s is not understood\n", name, value);
        abort();
    }
    return w;
}

}  // namespace

World& world() {
    static World* one = make_world();
    return *one;
}

bool configure(const std::string& name, const std::string& value) { return apply(world(), name, value); }

uint64_t random_u64() {
    uint64_t z = world().random += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
unsigned random_below(unsigned n) { return (unsigned)((random_u64() >> 32) * n >> 32); }

double now_ms() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(since).count();
}

uint64_t this_thread() { return (uint64_t)syscall(SYS_gettid); }

int count_call(const char* function, const std::string& detail) {
    World& w = world();
    w.calls[function]++;
    if (!detail.empty()) w.calls[std::string(function) + " " + detail]++;
    for (Fault& fault : w.faults) {
        if (fault.function != function || (!fault.detail.empty() && fault.detail != detail)) continue;
        if (++fault.seen == fault.nth) return fault.code;
    }
    return 0;
}

bool is_sticky(int code) { return code == 214 || code == 700 || code == 702 || (code >= 714 && code <= 719); }

void break_device(int device, int code, const std::string& why) {
    World& w = world();
    w.last_error = why;
    fprintf(stderr, "fake CUDA: device %d: error %d: %s\n", device, code, why.c_str());
    if (device < 0 || device >= (int)w.devices.size() || w.devices[device].error) return;
    w.devices[device].error = code;
    w.devices[device].why = why;
}

// ------------------------------------------------------------------------------------------------------ the operations

namespace {

void finish(const OpRef& op) {
    World& w = world();
    op->done = true;
    op->finished_ms = now_ms();
    op->work = Work();
    op->state.reset();
    op->needs.clear();
    w.unfinished--;
    for (const OpRef& next : op->dependents)
        if (--next->unmet == 0) w.runnable.push_back(next);
    op->dependents.clear();
    w.progress.notify_all();
}

void execute(Lock& lock, OpRef op) {
    World& w = world();
    const int device = op->work.device;
    const bool broken = device < (int)w.devices.size() && w.devices[device].error;
    if (op->work.host) {
        w.executing++;
        lock.unlock();
        in_host_function = true;
        op->work.host();
        in_host_function = false;
        lock.lock();
        w.executing--;
        finish(op);
        return;
    }
    // Nothing runs on a device that has failed, yet those who wait must come to the error.
    if (op->work.run && !broken && op->work.run(op->state) == Step::Pending) {
        op->polled = true;
        w.waiting.push_back(op);
        return;
    }
    finish(op);
}

// The position of a random operation that can run, by the weights of the streams; -1: none.
int choose(const std::vector<OpRef>& from, uint64_t only_mark) {
    unsigned total = 0;
    int chosen = -1;
    for (size_t i = 0; i < from.size(); i++) {
        if (only_mark && from[i]->mark != only_mark) continue;
        total += from[i]->weight;
        if (random_below(total) < (unsigned)from[i]->weight) chosen = (int)i;
    }
    return chosen;
}

OpRef take(std::vector<OpRef>& from, int i) {
    OpRef op = from[i];
    from[i] = from.back();
    from.pop_back();
    return op;
}

// Asks the operations that wait for something from outside whether it has come.
bool poll_waiting() {
    World& w = world();
    bool progress = false;
    std::vector<OpRef> all;
    all.swap(w.waiting);
    for (const OpRef& op : all) {
        const int device = op->work.device;
        const bool broken = device < (int)w.devices.size() && w.devices[device].error;
        if (!broken && op->work.run(op->state) == Step::Pending) {
            w.waiting.push_back(op);
        } else {
            finish(op);
            progress = true;
        }
    }
    return progress;
}

void mark_ancestors(const OpRef& op, uint64_t mark) {
    std::vector<OpRef> stack = {op};
    while (!stack.empty()) {
        OpRef one = stack.back();
        stack.pop_back();
        if (one->done || one->mark == mark) continue;
        one->mark = mark;
        for (const auto& weak : one->needs)
            if (OpRef need = weak.lock()) stack.push_back(need);
    }
}

// Operations come to their end although nobody calls: a program may wait for a host function by its own means.
void background() {
    World& w = world();
    while (true) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        Lock lock(w.lock);
        const auto quiet = std::chrono::steady_clock::now() - w.last_call;
        if (!w.background || quiet < std::chrono::milliseconds(5)) continue;
        for (int i = 0; i < 8 && step(lock); i++) {
        }
    }
}

}  // namespace

bool step(Lock& lock, uint64_t only_mark) {
    World& w = world();
    if (!w.waiting.empty() && (w.runnable.empty() || random_below(4) == 0) && poll_waiting()) return true;
    const int chosen = choose(w.runnable, only_mark);
    if (chosen < 0) return false;
    execute(lock, take(w.runnable, chosen));
    return true;
}

void wait_for(Lock& lock, const OpRef& op) {
    if (!op) return;
    World& w = world();
    uint64_t mark = 0;
    // As late as possible for all others, or everything in any order.
    if (random_below(2) == 0) mark_ancestors(op, mark = ++w.next_mark);
    while (!op->done) {
        if (step(lock, mark) || step(lock)) continue;
        // Somebody else runs it, or it waits for another process.
        w.progress.wait_for(lock, std::chrono::milliseconds(1));
    }
}

void wait_for_all(Lock& lock, int device) {
    World& w = world();
    std::vector<OpRef> last;
    // By the streams' age, not their addresses, so that a seed gives the same order in every run.
    std::vector<Stream*> streams(w.streams.begin(), w.streams.end());
    std::sort(streams.begin(), streams.end(), [](const Stream* a, const Stream* b) { return a->id < b->id; });
    for (Stream* stream : streams)
        if (stream->context->device == device && stream->last) last.push_back(stream->last);
    for (const auto& one : w.orphans)
        if (one.first == device) last.push_back(one.second);
    w.orphans.clear();
    for (const OpRef& op : last) wait_for(lock, op);
}

static OpRef make_op(Work work, int weight, const std::vector<OpRef>& needs) {
    World& w = world();
    if (!w.background_started) {
        w.background_started = true;
        std::thread(background).detach();
    }
    OpRef op = std::make_shared<Op>();
    op->work = std::move(work);
    op->weight = weight;
    w.unfinished++;
    for (const OpRef& need : needs) {
        if (!need || need->done) continue;
        need->dependents.push_back(op);
        op->needs.push_back(need);
        op->unmet++;
    }
    if (op->unmet == 0) w.runnable.push_back(op);
    return op;
}

// What the next operation of a stream waits for: the one before it and, by the rules of the legacy null stream, what the
// other streams of the context have.
static std::vector<OpRef> before(Stream* stream) {
    std::vector<OpRef> needs = {stream->last};
    if (stream->is_null) {
        for (Stream* other : world().streams)
            if (other->blocking && other->context == stream->context) needs.push_back(other->last);
    } else if (stream->blocking) {
        needs.push_back(stream->context->null_stream->last);
    }
    return needs;
}

OpRef submit_op(Stream* stream, Work work, const std::vector<OpRef>& after) {
    std::vector<OpRef> needs = before(stream);
    needs.insert(needs.end(), after.begin(), after.end());
    work.device = stream->context->device;
    return stream->last = make_op(std::move(work), stream->weight, needs);
}

int submit(Stream* stream, Work work, const std::vector<OpRef>& after) {
    if (!stream->capture) {
        for (Capture* capture : world().captures) {
            const bool concerned = stream->is_null && capture->origin->blocking && capture->mode != 2;
            if (concerned && capture->origin->context == stream->context) {
                capture->invalid = true;
                return CAPTURE_IMPLICIT;
            }
        }
        submit_op(stream, std::move(work), after);
        return OK;
    }
    if (stream->capture->invalid) return CAPTURE_INVALIDATED;
    work.device = stream->context->device;
    Graph& graph = *stream->capture->graph;
    graph.nodes.push_back({std::move(work), stream->captured_last});
    stream->captured_last = {(int)graph.nodes.size() - 1};
    return OK;
}

int launch_graph(GraphExec* exec, Stream* stream) {
    std::vector<OpRef> first = before(stream), made, all;
    first.push_back(exec->last);
    for (const Node& node : exec->nodes) {
        std::vector<OpRef> needs;
        for (int need : node.needs) needs.push_back(made[need]);
        // Each node is as free as its dependencies leave it, whatever stream it was recorded from.
        const int weights[] = {1, 4, 16};
        made.push_back(make_op(node.work, weights[random_below(3)], node.needs.empty() ? first : needs));
    }
    all = made.empty() ? first : made;
    Work end;
    end.name = "end of a graph";
    end.device = stream->context->device;
    exec->last = stream->last = make_op(end, stream->weight, all);
    return OK;
}

Stream* stream_of(void* handle, int* error) {
    *error = OK;
    if (!current_context) {
        *error = INVALID_CONTEXT;
        return nullptr;
    }
    if (handle == nullptr || handle == (void*)1) return current_context->null_stream;
    if (world().streams.count((Stream*)handle)) return (Stream*)handle;
    *error = INVALID_HANDLE;
    return nullptr;
}

int forbidden_in_capture() {
    int error = OK;
    for (Capture* capture : world().captures) {
        const bool here = capture->mode == 0 || (capture->mode == 1 && capture->thread == this_thread());
        if (!here) continue;
        capture->invalid = true;
        error = CAPTURE_UNSUPPORTED;
    }
    return error;
}

Call::Call(const char* function, Needs needs, const std::string& detail) : lock(world().lock), error(OK) {
    World& w = world();
    if (in_host_function) {
        error = NOT_PERMITTED;
        return;
    }
    w.last_call = std::chrono::steady_clock::now();
    if (w.verbose) fprintf(stderr, "fake CUDA: %s %s\n", function, detail.c_str());
    // Now and then something runs though nobody waits for it.
    if (random_below(4) == 0)
        for (unsigned i = random_below(4); i > 0; i--) step(lock);
    error = count_call(function, detail);
    if (error) {
        on_purpose = true;
        if (is_sticky(error)) break_device(device(), error, std::string("on purpose, by ") + function + " " + detail);
        return;
    }
    if (needs >= Init && !w.initialized) error = NOT_INITIALIZED;
    else if (needs == Current && !current_context) error = INVALID_CONTEXT;
    else if (needs == Current) error = w.devices[device()].error;
}

}  // namespace fake

// ---------------------------------------------------------------------------------------------------- controls of tests

// Sets what the variable PARAFT_FAKE_CUDA_<name> sets. SEED also waits for all that runs and starts the sequence anew;
// DEVICES must come before cuInit. Returns 0, or 1: there is no such setting or it cannot have this value.
FAKE_API int fake_cuda_set(const char* name, const char* value) {
    fake::Lock lock(fake::world().lock);
    const int devices = (int)fake::world().devices.size();
    for (int i = 0; i < devices && std::string(name) == "SEED"; i++) fake::wait_for_all(lock, i);
    return fake::configure(name, value) ? 0 : 1;
}

// How often a function was called; with "cuLaunchKernel NAME" how often for this kernel.
FAKE_API long fake_cuda_calls(const char* function) {
    fake::Lock lock(fake::world().lock);
    const auto& calls = fake::world().calls;
    const auto found = calls.find(function);
    return found == calls.end() ? 0 : found->second;
}

// Bytes that are allocated on a device.
FAKE_API size_t fake_cuda_used(int device) {
    fake::Lock lock(fake::world().lock);
    const auto& devices = fake::world().devices;
    return device >= 0 && device < (int)devices.size() ? devices[device].used : 0;
}

// Operations that were submitted and have not run to their end.
FAKE_API size_t fake_cuda_unfinished() {
    fake::Lock lock(fake::world().lock);
    return fake::world().unfinished;
}

// The text of the last error of a device, cut to `capacity`. Returns its length.
FAKE_API size_t fake_cuda_last_error(char* out, size_t capacity) {
    fake::Lock lock(fake::world().lock);
    const std::string& text = fake::world().last_error;
    if (capacity) snprintf(out, capacity, "%s", text.c_str());
    return text.size();
}

// Mends all devices, so that the next test of the process begins with sound ones; the injected faults are forgotten.
FAKE_API void fake_cuda_mend() {
    fake::Lock lock(fake::world().lock);
    for (auto& device : fake::world().devices) device.error = 0, device.why.clear();
    fake::world().faults.clear();
    fake::world().last_error.clear();
}
