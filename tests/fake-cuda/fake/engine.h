// The machine behind the fake CUDA libraries: devices, memory, and the operations of streams, which run late and in a
// seeded random order that respects nothing but stream order, events and the rules of the null stream.
//
// Everything is under one lock. An operation is run by whoever waits for something, by any call now and then, and by a
// thread of its own where nobody calls for a while.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace fake {

// ------------------------------------------------------------------------------------------------------- error codes

// The CUresult values that the fakes use.
enum : int {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    LAUNCH_FAILED = 719,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};

// --------------------------------------------------------------------------------------------------------- operations

enum class Step { Done, Pending };
// `state` lives from the operation's first step to its last: a graph runs the same closure again and again.
using Run = std::function<Step(std::shared_ptr<void>& state)>;

struct Stream;
struct Op;
using OpRef = std::shared_ptr<Op>;

// What is asked of a stream, or recorded in a graph.
struct Work {
    std::string name;
    int device = 0;
    Run run;                      // under the lock; empty: only an order
    std::function<void()> host;   // without the lock, instead of `run`
};

struct Op {
    Work work;
    std::shared_ptr<void> state;
    int weight = 1;
    int unmet = 0;
    bool done = false, polled = false;
    uint64_t mark = 0;
    double finished_ms = 0;
    std::vector<OpRef> dependents;
    std::vector<std::weak_ptr<Op>> needs;
};

struct Node {
    Work work;
    std::vector<int> needs;
};
struct Graph {
    std::vector<Node> nodes;
};
struct GraphExec {
    std::vector<Node> nodes;
    OpRef last;  // an instance does not run beside itself
};

struct Capture {
    Stream* origin = nullptr;
    int mode = 0;  // CUstreamCaptureMode: 0 global, 1 of this thread, 2 relaxed
    uint64_t thread = 0;
    bool invalid = false;
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
    std::set<Stream*> streams;
};

struct Context {
    int device = 0;
    int retained = 0;
    unsigned flags = 0;
    Stream* null_stream = nullptr;
};

struct Stream {
    Context* context = nullptr;
    bool blocking = false;  // waits for the null stream and is waited for
    bool is_null = false;
    unsigned flags = 0;
    int priority = 0, weight = 1;
    uint64_t id = 0;
    OpRef last;
    std::shared_ptr<Capture> capture;
    std::vector<int> captured_last;
};

struct Event {
    Context* context = nullptr;
    unsigned flags = 0;
    OpRef marker;
    std::shared_ptr<Capture> capture;
    std::vector<int> captured;
};

// ------------------------------------------------------------------------------------------------------------- memory

struct Allocation {
    uintptr_t at = 0;
    size_t bytes = 0, mapped = 0;
    char* base = nullptr;
    int device = -1;  // -1: of the host
    bool registered = false;  // the program's own memory
    unsigned flags = 0;
};

struct Device {
    size_t used = 0;
    int error = 0;  // a sticky one: all that follows fails with it
    std::string why;
    Context primary;
};

// ---------------------------------------------------------------------------------------------------------- the world

struct Fault {
    std::string function, detail;
    long nth;
    int code;
    long seen = 0;
};

struct World {
    std::mutex lock;
    std::condition_variable progress;

    // Settings: PARAFT_FAKE_CUDA_<NAME>, or fake_cuda_set.
    uint64_t seed = 1;
    int device_count = 1;
    size_t memory = (size_t)8 << 30;
    int driver_version = 13000;
    int compute = 90;  // 10 * major + minor
    int schedule = 2;
    bool background = true;
    bool verbose = false;
    std::vector<Fault> faults;

    bool initialized = false;
    uint64_t random = 1;
    std::vector<Device> devices;
    std::map<uintptr_t, Allocation> memory_map;  // by address, device and pinned
    std::vector<Allocation> freed;               // poisoned, looked at for writes, oldest first
    size_t freed_bytes = 0;
    std::set<Context*> contexts;
    std::set<Stream*> streams;
    std::vector<std::pair<int, OpRef>> orphans;  // the last operations of streams that are gone, by device
    std::set<Event*> events;
    std::set<Capture*> captures;
    std::vector<OpRef> runnable, waiting;  // `waiting`: begun, and for something from outside
    size_t unfinished = 0, executing = 0;
    uint64_t next_mark = 0, next_stream = 1;
    std::map<std::string, long> calls;     // of functions, and of kernels as "kernel NAME"
    std::chrono::steady_clock::time_point last_call;
    bool background_started = false;
    std::string last_error;
};

World& world();
using Lock = std::unique_lock<std::mutex>;

uint64_t random_u64();
unsigned random_below(unsigned n);
double now_ms();
uint64_t this_thread();

// Sets one of the settings. Returns false: there is no such setting, or not this value.
bool configure(const std::string& name, const std::string& value);

// Counts a call and says which error it is to return: 0, or that of a Fault.
int count_call(const char* function, const std::string& detail = "");
// Whether an error stays for all later calls, as on a device.
bool is_sticky(int code);
// Puts an error on a device, told on standard error; the first one stays.
void break_device(int device, int code, const std::string& why);

// --------------------------------------------------------------------------------------------------------- engine.cpp

// The stream of a handle in the thread's current context; null with `error` set.
Stream* stream_of(void* handle, int* error);
// Puts work into a stream, or into the graph that it captures. `after`: what it waits for besides.
int submit(Stream* stream, Work work, const std::vector<OpRef>& after = {});
OpRef submit_op(Stream* stream, Work work, const std::vector<OpRef>& after = {});
// Runs operations until `op` is done.
void wait_for(Lock& lock, const OpRef& op);
void wait_for_all(Lock& lock, int device);
// Runs one operation, if one can run.
bool step(Lock& lock, uint64_t only_mark = 0);
int launch_graph(GraphExec* exec, Stream* stream);
// Whether the calling thread may make a call that a capture forbids; else the captures are invalidated.
int forbidden_in_capture();

extern thread_local bool in_host_function;
extern thread_local Context* current_context;

// --------------------------------------------------------------------------------------------------------- memory.cpp

// The allocation, of a device or pinned, that holds all of the range; null: there is none, or it was freed.
Allocation* find(const void* at, size_t bytes);
// Whether the range is usable on this device; if not, says why.
bool usable(const void* at, size_t bytes, int device, std::string* why);
int allocate(int device, size_t bytes, void** out);
int allocate_host(size_t bytes, unsigned flags, void** out);
void release(uintptr_t at);
// Looks for writes outside of allocations or into freed ones; breaks the device if there are any.
void check_guards(int device, const std::string& who);

// ----------------------------------------------------------------------------------------------------------- the entry

// What each function of the driver does first: takes the lock, counts, fails on purpose, lets operations run.
class Call {
  public:
    enum Needs { Nothing, Init, Current };
    Call(const char* function, Needs needs = Current, const std::string& detail = "");
    Lock lock;
    int error;
    bool on_purpose = false;  // the error is one that a test asked for
    int device() const { return current_context ? current_context->device : 0; }
};
inline Call::Needs needs(Call::Needs what = Call::Current) { return what; }
#define ENTER(...)                                    \
    fake::Call call(__func__, fake::needs(__VA_ARGS__)); \
    if (call.error) return call.error

}  // namespace fake
