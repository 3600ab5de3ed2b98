// Device and pinned memory: poisoned, guarded, and looked after once it is freed. See engine.h.
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "engine.h"

namespace fake {

namespace {

constexpr size_t GUARD = 1024;
// Of it this much is looked at after every kernel.
constexpr size_t LOOK_AT_GUARD = 256;
// NaN in f32, bf16 and f16, and not the 0xFF of fresh memory.
constexpr uint32_t GUARD_WORD = 0xfff5fff5u;
constexpr uint32_t FREED_WORD = 0xfff7fff7u;
// Freed memory is kept this long, so that a late write can be seen.
constexpr size_t KEEP_BYTES = 8 << 20, KEEP_BLOCKS = 64;
// Of larger freed blocks only the ends are looked at.
constexpr size_t LOOK_AT = 4096;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

void fill(char* from, char* to, uint32_t word) {
    for (char* p = from; p < to; p += 4) memcpy(p, &word, (size_t)(to - p) < 4 ? to - p : 4);
}
bool holds(const char* from, const char* to, uint32_t word) {
    for (; from + 4 <= to; from += 4)
        if (memcmp(from, &word, 4) != 0) return false;
    return memcmp(from, &word, to - from) == 0;
}

bool map_block(size_t bytes, Allocation* a) {
    a->bytes = bytes;
    a->mapped = round_up(GUARD + round_up(bytes, 256) + GUARD, 4096);
    void* base = mmap(nullptr, a->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return false;
    a->base = (char*)base;
    a->at = (uintptr_t)base + GUARD;
    char *data = (char*)a->at, *end = data + bytes;
    fill(a->base, data, GUARD_WORD);
    memset(data, 0xff, bytes);
    fill(end, a->base + a->mapped, GUARD_WORD);
    return true;
}

// Where the guards were written to; null: nowhere.
const char* broken_guard(const Allocation& a) {
    if (a.registered || !a.base) return nullptr;
    const char *data = (const char*)a.at, *end = data + a.bytes;
    if (!holds(data - LOOK_AT_GUARD, data, GUARD_WORD)) return "before";
    if (!holds(end, end + LOOK_AT_GUARD, GUARD_WORD)) return "after";
    return nullptr;
}

bool freed_was_written(const Allocation& a) {
    const char* data = (const char*)a.at;
    if (a.bytes <= 2 * LOOK_AT) return !holds(data, data + a.bytes, FREED_WORD);
    const char* tail = data + (a.bytes - LOOK_AT) / 4 * 4;
    return !holds(data, data + LOOK_AT, FREED_WORD) || !holds(tail, data + a.bytes, FREED_WORD);
}

}  // namespace

Allocation* find(const void* at, size_t bytes) {
    auto& map = world().memory_map;
    auto above = map.upper_bound((uintptr_t)at);
    if (above == map.begin()) return nullptr;
    Allocation& a = std::prev(above)->second;
    const size_t offset = (uintptr_t)at - a.at;
    return offset <= a.bytes && bytes <= a.bytes - offset ? &a : nullptr;
}

bool usable(const void* at, size_t bytes, int device, std::string* why) {
    char text[160];
    const Allocation* a = find(at, bytes);
    // What is pinned is mapped; peers may read each other.
    if (a) return true;
    (void)device;
    for (const Allocation& old : world().freed) {
        if ((uintptr_t)at < old.at || (uintptr_t)at >= old.at + old.bytes) continue;
        snprintf(text, sizeof text, "%zu bytes at %p are of memory that was freed", bytes, at);
        *why = text;
        return false;
    }
    const Allocation* begins = find(at, 0);
    if (begins)
        snprintf(text, sizeof text, "%zu bytes at %p: only %zu of %zu are left there", bytes, at,
                 begins->bytes - ((uintptr_t)at - begins->at), begins->bytes);
    else
        snprintf(text, sizeof text, "%zu bytes at %p are no memory of a device, nor pinned", bytes, at);
    *why = text;
    return false;
}

int allocate(int device, size_t bytes, void** out) {
    World& w = world();
    if (bytes == 0) return INVALID_VALUE;
    Device& d = w.devices[device];
    const size_t taken = round_up(bytes, 512);
    if (taken > w.memory || d.used > w.memory - taken) return OUT_OF_MEMORY;
    Allocation a;
    a.device = device;
    if (!map_block(bytes, &a)) return OUT_OF_MEMORY;
    d.used += taken;
    w.memory_map[a.at] = a;
    *out = (void*)a.at;
    return OK;
}

int allocate_host(size_t bytes, unsigned flags, void** out) {
    if (bytes == 0) return INVALID_VALUE;
    Allocation a;
    a.flags = flags;
    if (!map_block(bytes, &a)) return OUT_OF_MEMORY;
    world().memory_map[a.at] = a;
    *out = (void*)a.at;
    return OK;
}

void release(uintptr_t at) {
    World& w = world();
    auto found = w.memory_map.find(at);
    if (found == w.memory_map.end()) return;
    Allocation a = found->second;
    w.memory_map.erase(found);
    if (a.device >= 0) w.devices[a.device].used -= round_up(a.bytes, 512);
    if (const char* where = broken_guard(a)) {
        char text[128];
        snprintf(text, sizeof text, "somebody wrote %s an allocation of %zu bytes that is freed now", where, a.bytes);
        break_device(a.device < 0 ? 0 : a.device, ILLEGAL_ADDRESS, text);
    }
    if (a.registered) return;
    fill((char*)a.at, (char*)a.at + a.bytes, FREED_WORD);
    w.freed.push_back(a);
    w.freed_bytes += a.mapped;
    while (w.freed.size() > KEEP_BLOCKS || (w.freed_bytes > KEEP_BYTES && w.freed.size() > 1)) {
        w.freed_bytes -= w.freed[0].mapped;
        munmap(w.freed[0].base, w.freed[0].mapped);
        w.freed.erase(w.freed.begin());
    }
}

void check_guards(int device, const std::string& who) {
    char text[256];
    for (auto& one : world().memory_map) {
        const char* where = broken_guard(one.second);
        if (!where) continue;
        snprintf(text, sizeof text, "%s wrote %s an allocation of %zu bytes", who.c_str(), where, one.second.bytes);
        break_device(device, ILLEGAL_ADDRESS, text);
        // Told once.
        fill(one.second.base, (char*)one.second.at, GUARD_WORD);
        fill((char*)one.second.at + one.second.bytes, one.second.base + one.second.mapped, GUARD_WORD);
    }
    for (Allocation& a : world().freed) {
        if (!freed_was_written(a)) continue;
        snprintf(text, sizeof text, "%s wrote to memory of %zu bytes that was freed", who.c_str(), a.bytes);
        break_device(device, ILLEGAL_ADDRESS, text);
        fill((char*)a.at, (char*)a.at + a.bytes, FREED_WORD);
    }
}

}  // namespace fake
