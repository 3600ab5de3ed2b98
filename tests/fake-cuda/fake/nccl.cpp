// libnccl: collectives between processes (or threads), as operations of the stream they are given. A rank that is gone
// leaves the others waiting, as NCCL does, until the communicator is aborted.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "engine.h"
#include "nccl_link.h"
#include "numbers.h"

using namespace fake;

namespace {

enum {
    SUCCESS = 0,
    UNHANDLED_CUDA_ERROR = 1,
    SYSTEM_ERROR = 2,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
    IN_PROGRESS = 7
};
enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, SEND, RECV };
enum { SUM, PROD, MAX, MIN, AVG };

struct UniqueId {
    char internal[128];
};

struct Comm {
    std::shared_ptr<Link> link = std::make_shared<Link>();
    bool blocking = true, finalizing = false;
    uint64_t next = 0;                       // of collectives
    std::map<int, uint64_t> sent, received;  // of sends and receives, by peer
    int unfinished = 0;                      // under the world's lock
    int ask_again = 0;                       // how often ncclCommGetAsyncError says that it is in progress
};
using CommRef = std::shared_ptr<Comm>;

// By handle. Under the world's lock.
std::map<void*, CommRef>& comms() {
    static auto* all = new std::map<void*, CommRef>();
    return *all;
}
CommRef comm_of(void* handle) {
    const auto found = comms().find(handle);
    return found == comms().end() ? nullptr : found->second;
}

thread_local int group_depth = 0;
thread_local std::vector<CommRef> group_inits;
thread_local std::string last_error;

// -------------------------------------------------------------------------------------------------------------- numbers

size_t size_of(int type) {
    switch (type) {
        case 0: case 1: return 1;           // int8, uint8
        case 6: case 9: return 2;           // float16, bfloat16
        case 2: case 3: case 7: return 4;   // int32, uint32, float32
        case 4: case 5: case 8: return 8;   // int64, uint64, float64
        default: return 0;
    }
}

template <class T>
T combine(T a, T b, int op) {
    switch (op) {
        case PROD: return (T)(a * b);
        case MAX: return a > b ? a : b;
        case MIN: return a < b ? a : b;
        default: return (T)(a + b);
    }
}

// out[i] = the values of all ranks combined, in the order of the ranks on every rank; computed in W, kept in T.
template <class T, class W, class Load, class Store>
void reduce_as(const std::vector<const char*>& in, char* out, size_t count, int op, Load load, Store store) {
    for (size_t i = 0; i < count; i++) {
        W sum = load(((const T*)in[0])[i]);
        for (size_t r = 1; r < in.size(); r++) sum = combine<W>(sum, load(((const T*)in[r])[i]), op);
        if (op == AVG) sum = (W)(sum / (W)in.size());
        ((T*)out)[i] = store(sum);
    }
}
template <class T>
void reduce_plain(const std::vector<const char*>& in, char* out, size_t count, int op) {
    reduce_as<T, T>(in, out, count, op, [](T x) { return x; }, [](T x) { return x; });
}

void reduce(const std::vector<const char*>& in, char* out, size_t count, int type, int op) {
    switch (type) {
        case 0: return reduce_plain<int8_t>(in, out, count, op);
        case 1: return reduce_plain<uint8_t>(in, out, count, op);
        case 2: return reduce_plain<int32_t>(in, out, count, op);
        case 3: return reduce_plain<uint32_t>(in, out, count, op);
        case 4: return reduce_plain<int64_t>(in, out, count, op);
        case 5: return reduce_plain<uint64_t>(in, out, count, op);
        case 6: return reduce_as<uint16_t, float>(in, out, count, op, from_f16, to_f16);
        case 7: return reduce_plain<float>(in, out, count, op);
        case 8: return reduce_plain<double>(in, out, count, op);
        default: return reduce_as<uint16_t, float>(in, out, count, op, from_bf16, to_bf16);
    }
}

// ----------------------------------------------------------------------------------------------------------- collectives

struct Collective {
    CommRef comm;
    Signature signature;
    uint64_t tag;
    const char* send;
    char* recv;
    int device, peer;

    size_t bytes() const { return signature.count * size_of(signature.type); }
    size_t send_bytes() const {
        const int what = signature.what;
        const bool gives = what != RECV && !(what == BROADCAST && comm->link->rank != signature.root);
        return gives ? bytes() * (what == REDUCE_SCATTER ? comm->link->ranks : 1) : 0;
    }
    size_t recv_bytes() const {
        const int what = signature.what;
        const bool takes = what != SEND && !(what == REDUCE && comm->link->rank != signature.root);
        return takes ? bytes() * (what == ALL_GATHER ? comm->link->ranks : 1) : 0;
    }
    // Whose message is waited for.
    bool needs(int from) const {
        const Link& link = *comm->link;
        switch (signature.what) {
            case BROADCAST: return from == signature.root && link.rank != signature.root;
            case REDUCE: return link.rank == signature.root && from != link.rank;
            case SEND: return false;
            case RECV: return from == peer;
            default: return from != link.rank;
        }
    }

    // Under the link's mutex.
    void give() const {
        Link& link = *comm->link;
        for (int to = 0; to < link.ranks; to++) {
            const bool to_self = to == link.rank;
            switch (signature.what) {
                case ALL_REDUCE: case ALL_GATHER:
                    if (!to_self) link.send(to, tag, signature, send, bytes());
                    break;
                case REDUCE_SCATTER:
                    if (!to_self) link.send(to, tag, signature, send + to * bytes(), bytes());
                    break;
                case BROADCAST:
                    if (!to_self && link.rank == signature.root) link.send(to, tag, signature, send, bytes());
                    break;
                case REDUCE:
                    if (!to_self && to == signature.root) link.send(to, tag, signature, send, bytes());
                    break;
                case SEND:
                    if (to == peer) link.send(to, tag, signature, send, bytes());
                    break;
            }
        }
        link.wake();
    }

    bool all_there() const {
        for (int from = 0; from < comm->link->ranks; from++)
            if (needs(from) && !comm->link->inbox.count({from, tag})) return false;
        return true;
    }

    // Whether the others asked for the same.
    bool agreed() const {
        Link& link = *comm->link;
        for (int from = 0; from < link.ranks; from++) {
            if (!needs(from)) continue;
            Signature other = link.inbox[{from, tag}].signature;
            if (other.what == SEND && signature.what == RECV) other.what = RECV;
            if (other == signature) continue;
            if (!link.error)
                fprintf(stderr, "fake NCCL: ranks %d and %d ask for different collectives\n", link.rank, from);
            link.fail(INVALID_USAGE, "the ranks ask for different collectives");
            return false;
        }
        return true;
    }

    void take() const {
        Link& link = *comm->link;
        std::vector<Message> all(link.ranks);
        std::vector<const char*> in(link.ranks);
        for (int from = 0; from < link.ranks; from++) {
            if (!needs(from)) continue;
            const auto found = link.inbox.find({from, tag});
            all[from] = std::move(found->second);
            link.inbox.erase(found);
            in[from] = all[from].data.data();
        }
        const std::vector<char> own(send, send + send_bytes());  // `recv` may be `send`
        in[link.rank] = own.data() + (signature.what == REDUCE_SCATTER ? link.rank * bytes() : 0);
        switch (signature.what) {
            case ALL_REDUCE: case REDUCE_SCATTER:
                return reduce(in, recv, signature.count, signature.type, signature.op);
            case REDUCE:
                if (link.rank == signature.root) reduce(in, recv, signature.count, signature.type, signature.op);
                return;
            case ALL_GATHER:
                for (int from = 0; from < link.ranks && bytes(); from++) memcpy(recv + from * bytes(), in[from], bytes());
                return;
            case BROADCAST:
                if (bytes()) memmove(recv, link.rank == signature.root ? send : in[signature.root], bytes());
                return;
            case RECV:
                if (bytes()) memcpy(recv, in[peer], bytes());
                return;
        }
    }

    Step step(std::shared_ptr<void>& given) const {
        Link& link = *comm->link;
        std::string why;
        const size_t out = send_bytes(), in = recv_bytes();
        if ((out && !usable(send, out, device, &why)) || (in && !usable(recv, in, device, &why))) {
            break_device(device, ILLEGAL_ADDRESS, "a collective: " + why);
            return Step::Done;
        }
        std::lock_guard<std::mutex> lock(link.mutex);
        if (link.aborted) {
            // What a collective that was cut short leaves is anything.
            if (in) memset(recv, 0xff, in);
            return Step::Done;
        }
        if (!given) {
            given = std::make_shared<int>(1);
            give();
        }
        if (!all_there() || !agreed()) return Step::Pending;
        take();
        return Step::Done;
    }
};

// Counts, and answers with an error that a test asked for.
int entry(const char* name) {
    Lock lock(world().lock);
    world().last_call = std::chrono::steady_clock::now();
    return count_call(name);
}

int start(const char* name, void* handle, void* stream_handle, int what, const void* send, void* recv, size_t count, int type,
          int op, int root) {
    Call call(name);
    if (call.error) return call.on_purpose ? call.error : UNHANDLED_CUDA_ERROR;
    const CommRef comm = comm_of(handle);
    if (!comm) return INVALID_ARGUMENT;
    Link& link = *comm->link;
    int error;
    Stream* stream = stream_of(stream_handle, &error);
    if (!stream || size_of(type) == 0 || op < SUM || op > AVG || root < 0 || root >= link.ranks) return INVALID_ARGUMENT;
    if (stream->context->device != link.device) return INVALID_ARGUMENT;
    {
        std::lock_guard<std::mutex> lock(link.mutex);
        last_error = link.text;
        if (link.aborted || comm->finalizing) return INVALID_USAGE;
        if (link.error) return link.error;
        if (link.state != Link::Ready) return INVALID_ARGUMENT;
    }
    if (group_depth == 0 && comm->ask_again > 0) {
        last_error = "Attempt to use communicator before the previous operation returned ncclSuccess";
        return INVALID_ARGUMENT;
    }
    Collective c = {comm, {what, type, op, root, count}, 0, (const char*)send, (char*)recv, link.device, root};
    if (what == SEND) c.tag = comm->sent[root]++ << 1 | 1;
    else if (what == RECV) c.tag = comm->received[root]++ << 1 | 1;
    else c.tag = comm->next++ << 1;
    // The peer is no part of what both must agree upon: each names the other.
    if (what == SEND || what == RECV) c.signature.root = 0;
    std::string why;
    if ((c.send_bytes() && !usable(send, c.send_bytes(), link.device, &why)) ||
        (c.recv_bytes() && !usable(recv, c.recv_bytes(), link.device, &why))) {
        last_error = why;
        return INVALID_ARGUMENT;
    }
    const bool captured = stream->capture != nullptr;
    Work work;
    work.name = name;
    if (captured) {
        // Each launch of the graph is a collective of its own, numbered when it begins.
        work.run = [c](std::shared_ptr<void>& state) mutable {
            if (!state) c.tag = c.comm->next++ << 1;
            return c.step(state);
        };
    } else {
        comm->unfinished++;
        work.run = [c](std::shared_ptr<void>& state) {
            const Step step = c.step(state);
            if (step == Step::Done) c.comm->unfinished--;
            return step;
        };
    }
    if (submit(stream, work)) return UNHANDLED_CUDA_ERROR;
    if (comm->blocking || random_below(3) > 0) return SUCCESS;
    comm->ask_again = 1 + (int)random_below(2);
    return IN_PROGRESS;
}

// ---------------------------------------------------------------------------------------------------------- communicators

int result_of_init(const Comm& comm) {
    std::lock_guard<std::mutex> lock(comm.link->mutex);
    if (comm.link->aborted) return INVALID_USAGE;
    last_error = comm.link->text;
    return comm.link->state == Link::Connecting ? IN_PROGRESS : comm.link->error;
}

// A communicator that could not be made is gone at once.
int wait_for_init(Comm& comm) {
    while (true) {
        const int result = result_of_init(comm);
        if (result == SUCCESS) return result;
        if (result != IN_PROGRESS) {
            {
                std::lock_guard<std::mutex> lock(comm.link->mutex);
                comm.link->aborted = true;
                comm.link->wake();
            }
            Lock lock(world().lock);
            comms().erase(&comm);
            return result;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

int init(void** out, int ranks, const UniqueId& id, int rank, bool blocking, int device) {
    const std::string prefix = "paraft:";
    if (!out || ranks < 1 || rank < 0 || rank >= ranks || memcmp(id.internal, prefix.data(), prefix.size()) != 0)
        return INVALID_ARGUMENT;
    CommRef comm = std::make_shared<Comm>();
    comm->blocking = blocking;
    comm->link->rank = rank;
    comm->link->ranks = ranks;
    comm->link->device = device;
    comm->link->id = std::string(id.internal + prefix.size(), strnlen(id.internal + prefix.size(), 64));
    {
        Lock lock(world().lock);
        comms()[comm.get()] = comm;
        *out = comm.get();
    }
    Link::start(comm->link);
    if (group_depth > 0) {
        group_inits.push_back(comm);
        return blocking ? SUCCESS : IN_PROGRESS;
    }
    return blocking ? wait_for_init(*comm) : IN_PROGRESS;
}

int current_device(int* device) {
    Lock lock(world().lock);
    if (!current_context) return INVALID_ARGUMENT;
    *device = current_context->device;
    return SUCCESS;
}

// Runs the collectives of a communicator to their end.
void finish(const CommRef& comm) {
    Lock lock(world().lock);
    comm->finalizing = true;
    while (comm->unfinished > 0) {
        {
            std::lock_guard<std::mutex> link(comm->link->mutex);
            if (comm->link->aborted) return;
        }
        // On a device that has failed nothing runs any more.
        if (world().devices[comm->link->device].error) return;
        if (!step(lock)) world().progress.wait_for(lock, std::chrono::milliseconds(1));
    }
}

void say_goodbye(Comm& comm) {
    std::lock_guard<std::mutex> lock(comm.link->mutex);
    comm.link->closing = true;
    comm.link->wake();
}

CommRef known(void* handle) {
    Lock lock(world().lock);
    return comm_of(handle);
}

}  // namespace

#define ENTER_NCCL() \
    if (const int code = entry(__func__)) return code

FAKE_API int ncclGetVersion(int* version) {
    ENTER_NCCL();
    if (!version) return INVALID_ARGUMENT;
    *version = 23007;
    return SUCCESS;
}

FAKE_API int ncclGetUniqueId(UniqueId* id) {
    ENTER_NCCL();
    if (!id) return INVALID_ARGUMENT;
    unsigned char random[16];
    FILE* file = fopen("/dev/urandom", "rb");
    const bool read = file && fread(random, sizeof random, 1, file) == 1;
    if (file) fclose(file);
    if (!read) return SYSTEM_ERROR;
    memset(id, 0, sizeof *id);
    char* at = id->internal + snprintf(id->internal, sizeof id->internal, "paraft:");
    for (unsigned char byte : random) at += snprintf(at, 3, "%02x", byte);
    return SUCCESS;
}

FAKE_API int ncclCommInitRank(void** comm, int ranks, UniqueId id, int rank) {
    ENTER_NCCL();
    int device;
    if (const int error = current_device(&device)) return error;
    return init(comm, ranks, id, rank, true, device);
}

// The begin of every ncclConfig_t since 2.17.
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

FAKE_API int ncclCommInitRankConfig(void** comm, int ranks, UniqueId id, int rank, const Config* config) {
    ENTER_NCCL();
    int device;
    if (const int error = current_device(&device)) return error;
    if (config && (config->magic != 0xcafebeef || config->size < sizeof(Config))) return INVALID_ARGUMENT;
    // INT_MIN: not set, which is blocking.
    if (config && config->blocking != 0 && config->blocking != 1 && config->blocking != INT32_MIN) return INVALID_ARGUMENT;
    return init(comm, ranks, id, rank, !config || config->blocking != 0, device);
}

FAKE_API int ncclCommInitAll(void** out, int count, const int* devices) {
    ENTER_NCCL();
    UniqueId id;
    if (const int error = ncclGetUniqueId(&id)) return error;
    group_depth++;
    int error = SUCCESS;
    for (int i = 0; i < count && !error; i++) error = init(&out[i], count, id, i, true, devices ? devices[i] : i);
    group_depth--;
    std::vector<CommRef> all;
    all.swap(group_inits);
    for (const CommRef& comm : all)
        if (!error) error = wait_for_init(*comm);
    return error;
}

FAKE_API int ncclCommGetAsyncError(void* handle, int* error) {
    ENTER_NCCL();
    const CommRef comm = known(handle);
    if (!comm || !error) return INVALID_ARGUMENT;
    *error = result_of_init(*comm);
    Lock lock(world().lock);
    if (*error == SUCCESS && (comm->ask_again > 0 || (comm->finalizing && comm->unfinished > 0))) {
        comm->ask_again = std::max(0, comm->ask_again - 1);
        *error = IN_PROGRESS;
        step(lock);
    }
    return SUCCESS;
}

FAKE_API int ncclCommCount(void* handle, int* count) {
    ENTER_NCCL();
    const CommRef comm = known(handle);
    if (!comm) return INVALID_ARGUMENT;
    *count = comm->link->ranks;
    return SUCCESS;
}
FAKE_API int ncclCommUserRank(void* handle, int* rank) {
    ENTER_NCCL();
    const CommRef comm = known(handle);
    if (!comm) return INVALID_ARGUMENT;
    *rank = comm->link->rank;
    return SUCCESS;
}
FAKE_API int ncclCommCuDevice(void* handle, int* device) {
    ENTER_NCCL();
    const CommRef comm = known(handle);
    if (!comm) return INVALID_ARGUMENT;
    *device = comm->link->device;
    return SUCCESS;
}

// Its collectives end without a result; the other ranks see a rank that is gone.
FAKE_API int ncclCommAbort(void* handle) {
    ENTER_NCCL();
    const CommRef comm = known(handle);
    if (!comm) return INVALID_ARGUMENT;
    {
        std::lock_guard<std::mutex> lock(comm->link->mutex);
        comm->link->aborted = true;
        comm->link->wake();
    }
    Lock lock(world().lock);
    comms().erase(handle);
    return SUCCESS;
}

FAKE_API int ncclCommFinalize(void* handle) {
    ENTER_NCCL();
    const CommRef comm = known(handle);
    if (!comm) return INVALID_ARGUMENT;
    if (!comm->blocking) {
        Lock lock(world().lock);
        comm->finalizing = true;
        return comm->unfinished > 0 ? IN_PROGRESS : SUCCESS;
    }
    finish(comm);
    say_goodbye(*comm);
    return SUCCESS;
}

// Waits for what is under way: for ever, where a rank is gone.
FAKE_API int ncclCommDestroy(void* handle) {
    ENTER_NCCL();
    const CommRef comm = known(handle);
    if (!comm) return INVALID_ARGUMENT;
    finish(comm);
    say_goodbye(*comm);
    Lock lock(world().lock);
    comms().erase(handle);
    return SUCCESS;
}

FAKE_API int ncclGroupStart() {
    ENTER_NCCL();
    group_depth++;
    return SUCCESS;
}
FAKE_API int ncclGroupEnd() {
    ENTER_NCCL();
    if (group_depth == 0) return INVALID_USAGE;
    if (--group_depth > 0) return SUCCESS;
    std::vector<CommRef> all;
    all.swap(group_inits);
    int result = SUCCESS;
    for (const CommRef& comm : all) {
        const int one = comm->blocking ? wait_for_init(*comm) : IN_PROGRESS;
        if (result == SUCCESS) result = one;
    }
    return result;
}

FAKE_API int ncclAllReduce(const void* send, void* recv, size_t count, int type, int op, void* comm, void* stream) {
    return start(__func__, comm, stream, ALL_REDUCE, send, recv, count, type, op, 0);
}
// `count` of what each rank receives.
FAKE_API int ncclReduceScatter(const void* send, void* recv, size_t count, int type, int op, void* comm, void* stream) {
    return start(__func__, comm, stream, REDUCE_SCATTER, send, recv, count, type, op, 0);
}
// `count` of what each rank sends.
FAKE_API int ncclAllGather(const void* send, void* recv, size_t count, int type, void* comm, void* stream) {
    return start(__func__, comm, stream, ALL_GATHER, send, recv, count, type, SUM, 0);
}
FAKE_API int ncclBroadcast(const void* send, void* recv, size_t count, int type, int root, void* comm, void* stream) {
    return start(__func__, comm, stream, BROADCAST, send, recv, count, type, SUM, root);
}
FAKE_API int ncclBcast(void* buffer, size_t count, int type, int root, void* comm, void* stream) {
    return start(__func__, comm, stream, BROADCAST, buffer, buffer, count, type, SUM, root);
}
FAKE_API int ncclReduce(const void* send, void* recv, size_t count, int type, int op, int root, void* comm, void* stream) {
    return start(__func__, comm, stream, REDUCE, send, recv, count, type, op, root);
}
FAKE_API int ncclSend(const void* send, size_t count, int type, int peer, void* comm, void* stream) {
    return start(__func__, comm, stream, SEND, send, nullptr, count, type, SUM, peer);
}
FAKE_API int ncclRecv(void* recv, size_t count, int type, int peer, void* comm, void* stream) {
    return start(__func__, comm, stream, RECV, nullptr, recv, count, type, SUM, peer);
}

FAKE_API const char* ncclGetErrorString(int code) {
    const char* const texts[] = {"no error",
                                 "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
                                 "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                                 "internal error - please report this issue to the NCCL developers",
                                 "invalid argument (run with NCCL_DEBUG=WARN for details)",
                                 "invalid usage (run with NCCL_DEBUG=WARN for details)",
                                 "remote process exited or there was a network error",
                                 "NCCL operation in progress"};
    return code >= 0 && code < 8 ? texts[code] : "unknown result code";
}

FAKE_API const char* ncclGetLastError(void* handle) {
    const CommRef comm = known(handle);
    if (comm) {
        std::lock_guard<std::mutex> lock(comm->link->mutex);
        last_error = comm->link->text;
    }
    return last_error.c_str();
}
