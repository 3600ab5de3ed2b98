// The connections between the ranks of a communicator: Unix sockets in the abstract namespace, named after the unique id;
// a thread per communicator connects, sends and receives.
#pragma once

#include <stdint.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fake {

// What both sides of a collective must agree upon.
struct Signature {
    int32_t what, type, op, root;
    uint64_t count;
    bool operator==(const Signature& o) const {
        return what == o.what && type == o.type && op == o.op && root == o.root && count == o.count;
    }
};

struct Message {
    Signature signature;
    std::vector<char> data;
};

// What a link knows goes under `mutex`; its thread holds the link alive.
struct Link {
    enum State { Connecting, Ready, Failed };

    std::mutex mutex;
    State state = Connecting;
    int error = 0;  // an ncclResult_t: of the connection, or since then of a peer
    std::string text;
    bool aborted = false, closing = false;
    int rank = 0, ranks = 1, device = 0;
    std::string id;
    std::map<std::pair<int, uint64_t>, Message> inbox;  // by peer and tag

    void send(int peer, uint64_t tag, const Signature& signature, const void* data, size_t bytes);  // under the mutex
    void fail(int code, const std::string& why);                                                    // under the mutex
    void wake();

    static void start(const std::shared_ptr<Link>& link);

  private:
    struct Peer {
        int fd = -1;
        bool greeted = false, said_bye = false;
        std::string in, out;
        size_t written = 0;  // of `out`
    };
    std::vector<Peer> peers;
    std::vector<Peer> strangers;  // who have not said yet which rank they are
    int listener = -1, wake_fds[2] = {-1, -1};

    static void run(std::shared_ptr<Link> link);
    void listen_for_peers();
    void connect_to_peers();
    bool turn();
    void write_some(Peer& peer);
    bool read_some(Peer& peer);
    void take_messages(int rank, Peer& peer);
    void greet(Peer& peer);
    void peer_is_gone(int rank);
    void close_all();
};

}  // namespace fake
