#include "nccl_link.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

namespace fake {

namespace {

enum : uint32_t { HELLO = 0x4c454831, DATA = 0x41544431, BYE = 0x45594231 };
constexpr int SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6;

struct Header {
    uint32_t kind;
    int32_t rank, ranks, device;
    uint64_t tag, bytes;
    Signature signature;
};

socklen_t address_of(const std::string& id, int rank, sockaddr_un* out) {
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    // A name that begins with NUL needs no file and goes with its socket.
    const std::string name = "paraft-nccl-" + id + "-" + std::to_string(rank);
    memcpy(out->sun_path + 1, name.data(), std::min(name.size(), sizeof out->sun_path - 1));
    return (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

int new_socket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); }
void do_not_block(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

bool several_ranks_a_device() {
    const char* value = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return value && *value == '1';
}

}  // namespace

void Link::start(const std::shared_ptr<Link>& link) {
    std::lock_guard<std::mutex> lock(link->mutex);
    link->peers.resize(link->ranks);
    if (link->ranks == 1) {
        link->state = Ready;
        return;
    }
    if (pipe2(link->wake_fds, O_CLOEXEC | O_NONBLOCK) != 0) return link->fail(SYSTEM_ERROR, "no pipe");
    link->listen_for_peers();
    std::thread(run, link).detach();
}

void Link::wake() {
    const char byte = 0;
    if (wake_fds[1] >= 0 && write(wake_fds[1], &byte, 1) < 0 && errno != EAGAIN) abort();
}

void Link::fail(int code, const std::string& why) {
    if (error) return;
    error = code;
    text = why;
    if (state == Connecting) state = Failed;
}

void Link::listen_for_peers() {
    listener = new_socket();
    sockaddr_un address;
    const socklen_t length = address_of(id, rank, &address);
    if (listener < 0 || bind(listener, (sockaddr*)&address, length) != 0 || listen(listener, ranks) != 0) {
        fail(errno == EADDRINUSE ? INVALID_USAGE : SYSTEM_ERROR,
             "rank " + std::to_string(rank) + " of this id is taken, or there are no sockets: " + strerror(errno));
        return;
    }
    do_not_block(listener);
}

// To those of a lower rank; they come up in any order, so that this is tried again and again.
void Link::connect_to_peers() {
    for (int i = 0; i < rank; i++) {
        if (peers[i].fd >= 0) continue;
        sockaddr_un address;
        const socklen_t length = address_of(id, i, &address);
        const int fd = new_socket();
        if (fd < 0 || connect(fd, (sockaddr*)&address, length) != 0) {
            if (fd >= 0) close(fd);
            continue;
        }
        do_not_block(fd);
        peers[i].fd = fd;
        greet(peers[i]);
    }
}

void Link::greet(Peer& peer) {
    Header h = {};
    h.kind = HELLO;
    h.rank = rank;
    h.ranks = ranks;
    h.device = device;
    peer.out.append((const char*)&h, sizeof h);
}

void Link::send(int peer, uint64_t tag, const Signature& signature, const void* data, size_t bytes) {
    Header h = {};
    h.kind = DATA;
    h.rank = rank;
    h.tag = tag;
    h.bytes = bytes;
    h.signature = signature;
    peers[peer].out.append((const char*)&h, sizeof h);
    if (bytes) peers[peer].out.append((const char*)data, bytes);
}

void Link::write_some(Peer& peer) {
    while (peer.written < peer.out.size()) {
        const size_t left = peer.out.size() - peer.written;
        const ssize_t n = ::send(peer.fd, peer.out.data() + peer.written, left, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) break;  // to a peer that is gone nothing can be said; that it is gone is seen by reading
        peer.written += (size_t)n;
    }
    peer.out.clear();
    peer.written = 0;
}

// False: the other side has closed.
bool Link::read_some(Peer& peer) {
    char buffer[65536];
    while (true) {
        const ssize_t n = recv(peer.fd, buffer, sizeof buffer, 0);
        if (n > 0) peer.in.append(buffer, (size_t)n);
        else if (n == 0) return false;
        else if (errno == EAGAIN) return true;
        // Told once where the other side closed without reading all; what it had sent before still comes.
        else if (errno != EINTR && errno != ECONNRESET) return false;
    }
}

void Link::take_messages(int from, Peer& peer) {
    size_t at = 0;
    while (peer.in.size() - at >= sizeof(Header)) {
        Header h;
        memcpy(&h, peer.in.data() + at, sizeof h);
        if (peer.in.size() - at < sizeof h + h.bytes) break;
        const char* data = peer.in.data() + at + sizeof h;
        if (h.kind == HELLO) {
            peer.greeted = true;
            if (h.ranks != ranks) fail(INVALID_ARGUMENT, "the ranks differ in how many there are");
            if (h.device == device && !several_ranks_a_device())
                fail(INVALID_USAGE, "Duplicate GPU detected: rank " + std::to_string(rank) + " and rank " +
                                        std::to_string(h.rank) + " both on device " + std::to_string(device));
        } else if (h.kind == BYE) {
            peer.said_bye = true;
        } else {
            inbox[{from, h.tag}] = {h.signature, {data, data + h.bytes}};
        }
        at += sizeof h + h.bytes;
    }
    peer.in.erase(0, at);
}

void Link::peer_is_gone(int gone) {
    Peer& peer = peers[gone];
    close(peer.fd);
    peer.fd = -1;
    peer.out.clear();
    if (state == Connecting && !peer.greeted && gone < rank) return;  // tried again
    if (!peer.said_bye) fail(REMOTE_ERROR, "rank " + std::to_string(gone) + " is gone");
}

void Link::close_all() {
    for (Peer& peer : peers)
        if (peer.fd >= 0) close(peer.fd), peer.fd = -1;
    for (Peer& peer : strangers) close(peer.fd);
    strangers.clear();
    for (int* fd : {&listener, &wake_fds[0], &wake_fds[1]})
        if (*fd >= 0) close(*fd), *fd = -1;
}

// One turn of the thread, under the mutex; false: the end.
bool Link::turn() {
    if (aborted) return false;
    if (state == Connecting) connect_to_peers();
    for (int i = 0; i < (int)strangers.size(); i++) {
        Peer& stranger = strangers[i];
        const bool open = read_some(stranger);
        Header h = {};
        const bool named = stranger.in.size() >= sizeof h;
        if (named) memcpy(&h, stranger.in.data(), sizeof h);
        if (named && h.kind == HELLO && h.rank > rank && h.rank < ranks && peers[h.rank].fd < 0) {
            peers[h.rank] = std::move(stranger);
            greet(peers[h.rank]);
        } else if (named || !open) {
            close(stranger.fd);
            if (named) fail(INVALID_USAGE, "two ranks are the same, or there are too many");
        } else {
            continue;
        }
        strangers.erase(strangers.begin() + i--);
    }
    int ready = 0;
    bool unsaid = false;
    for (int i = 0; i < ranks; i++) {
        if (i == rank || peers[i].fd < 0) continue;
        const bool open = read_some(peers[i]);
        take_messages(i, peers[i]);
        write_some(peers[i]);
        if (!open) peer_is_gone(i);
        else unsaid |= !peers[i].out.empty();
    }
    for (const Peer& peer : peers) ready += peer.greeted;
    if (state == Connecting && ready == ranks - 1) {
        state = Ready;
        close(listener);
        listener = -1;
    }
    return !closing || unsaid;
}

void Link::run(std::shared_ptr<Link> link) {
    Link& l = *link;
    bool farewell = false;
    while (true) {
        std::vector<pollfd> fds;
        {
            std::lock_guard<std::mutex> lock(l.mutex);
            if (l.closing && !farewell) {
                farewell = true;
                Header h = {};
                h.kind = BYE;
                for (Peer& peer : l.peers)
                    if (peer.fd >= 0) peer.out.append((const char*)&h, sizeof h);
            }
            if (!l.turn()) {
                l.close_all();
                return;
            }
            fds.push_back({l.wake_fds[0], POLLIN, 0});
            if (l.listener >= 0) fds.push_back({l.listener, POLLIN, 0});
            for (const auto* group : {&l.peers, &l.strangers})
                for (const Peer& peer : *group) {
                    const short events = (short)(POLLIN | (peer.out.empty() ? 0 : POLLOUT));
                    if (peer.fd >= 0) fds.push_back({peer.fd, events, 0});
                }
        }
        bool connecting;
        {
            std::lock_guard<std::mutex> lock(l.mutex);
            connecting = l.state == Connecting;
        }
        poll(fds.data(), fds.size(), connecting ? 2 : 100);
        std::lock_guard<std::mutex> lock(l.mutex);
        char drain[64];
        while (l.wake_fds[0] >= 0 && read(l.wake_fds[0], drain, sizeof drain) > 0) {
        }
        while (l.listener >= 0) {
            const int fd = accept4(l.listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
            if (fd < 0) break;
            Peer stranger;
            stranger.fd = fd;
            l.strangers.push_back(stranger);
        }
    }
}

}  // namespace fake
