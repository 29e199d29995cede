// SPDX-License-Identifier: Apache-2.0
// A GPU of one thread: every CUDA thread is a fiber, the blocks of a cluster run together, clusters one after the other. Fibers
// change only where they wait, in an order that a seed chooses; what is asynchronous on a GPU lands late, or at any time between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace emulated {

constexpr int kWarpLanes = 32, kNamedBarriers = 16;
constexpr uint32_t kClusterWindow = 1u << 24;  // an address of block r's shared memory, for the cluster: (r + 1) * this + offset
constexpr size_t kMostShared = 227 * 1024, kReserved = 1024, kSharedWithoutLeave = 48 * 1024;

struct Index3 {
    unsigned x, y, z;
};
struct Block;
struct Cluster;

// What has been started and has not landed: bytes from memory, or these bytes themselves.
struct Copy {
    unsigned char* to;
    const void* from;
    uint32_t bytes, zeros;     // zeros follow the bytes
    unsigned char value[16];   // where from is NULL
    uint64_t* barrier;         // that the bytes are announced to; NULL: none
    std::function<void()> box; // in place of all this: a copy of a tensor's box
};

struct Thread {
    void* stack_pointer = nullptr;
    Block* block = nullptr;
    Index3 index{};
    bool done = false;
    const char* waits_for = "";
    std::vector<std::vector<Copy>> groups;  // cp.async, the last of them not closed
    uint64_t cluster_phase = 0;
    bool at_cluster = false;
    uint64_t products = 0;                    // wgmma: started,
    std::vector<uint64_t> closed_products;    // and of the groups, how many up to each
};

struct Barrier {
    int arrived = 0, expected = 0;
    unsigned any = 0, result = 0;
    std::vector<Thread*> waiting;
};

struct Phases {  // an mbarrier
    int expected = 0, pending = 0;
    int64_t bytes = 0;
    uint32_t phase = 0;
    std::vector<Thread*> waiting;
};

// Lanes of a warp, or the threads of a warp group, on their way to an instruction that they carry out together.
struct Meeting {
    unsigned mask = 0, arrived = 0;
    const char* kind = nullptr;
    void* lanes[kWarpLanes] = {};
    void (*all)(void* const*) = nullptr;
};

struct Warp {
    Block* block;
    int number;
    unsigned alive, ready;
    bool queued;
    std::vector<Meeting> meetings;
};

struct Group {  // four warps
    int arrived = 0;
    const char* kind = nullptr;
    void* threads[128] = {};
    std::vector<Thread*> waiting;
    std::deque<std::function<void()>> products;  // not carried out yet
    uint64_t carried_out = 0;
    std::map<float*, std::shared_ptr<struct Sums>> sums;  // that products change, by the first thread's registers
};

struct Block {
    Cluster* cluster;
    int rank, alive;
    Index3 index;
    unsigned char* memory;  // offset 0 of shared memory
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Group> groups;
    Barrier barriers[kNamedBarriers];
    std::unordered_map<uint32_t, Phases> phases;  // by offset
};

// When what a cluster starts lands: as late as its waits allow, at once, or at any time between.
enum class Landing { late, early, any };

struct Launch {
    Index3 grid, block;
    size_t shared, allowed;
    int cluster;
    bool early;  // its blocks may begin before the launch before has ended
    std::function<void()> kernel;
};

// Where a launch's variables lie in shared memory.
struct Places {
    size_t dynamic_at = 0, statics_end = 0;
    std::map<std::string, size_t> statics;
};

struct Cluster {
    const Launch* launch;
    Landing landing;
    bool ahead;  // the launch before has not ended
    Places places;
    std::vector<Warp*> queue;  // with lanes that can go on
    std::vector<Thread*> awaiting_launch;
    std::vector<Block> blocks;
    std::vector<Copy> copies;  // that no thread, but a barrier, awaits
    int alive = 0, arrived = 0;
    uint64_t phase = 0;
    std::vector<Thread*> waiting;
};

extern Thread* current;
extern Index3 block_dim, grid_dim;

// ---- what threads do ----

// Stop the launch with this text. Of a thread: never returns.
[[noreturn]] void failed(const std::string& text);

// All lanes in the mask that have not ended meet; the last calls all(their values), by lane.
void meet(unsigned mask, const char* kind, void* mine, void (*all)(void* const*));
// The same for the four warps of a warp group, by thread; none of them has ended.
void meet_group(const char* kind, void* mine, void (*all)(void* const*));
template <class T, class All>
void together(unsigned mask, const char* kind, T& mine, All) {  // All: a lambda without captures
    meet(mask, kind, &mine, [](void* const* lanes) { All()(reinterpret_cast<T* const*>(lanes)); });
}

// All threads of the block that have not ended (threads 0), or so many, at a named barrier: is `value` true of any?
unsigned block_barrier(int number, int threads, bool value);
void await_launch();
void arrive_cluster();
void await_cluster();

Phases& phases_at(uint32_t address, bool make = false);
void arrive_phase(uint32_t address, int count, int64_t bytes);
void await_phase(uint32_t address, uint32_t parity);

// Where an address of shared memory lies, of the block or the cluster, `bytes` of it inside of that memory.
unsigned char* shared_at(uint32_t address, size_t bytes);
uint32_t address_of(const void* p);
unsigned char* in_block(const void* mine, unsigned rank);

void start_copy(Copy copy);  // of the thread's open group
void close_copies();
void await_copies(size_t left);
void arrive_after_copies(uint32_t barrier);  // all those of the thread that have not landed
void start_announced_copy(Copy copy);
// Should what was just started land at once?
bool lands_early();

unsigned char* dynamic_shared(size_t alignment);
unsigned char* static_shared(const char* key, size_t bytes, size_t alignment);

template <class T, size_t Alignment>
T* dynamic_memory() {
    return reinterpret_cast<T*>(dynamic_shared(Alignment < alignof(T) ? alignof(T) : Alignment));
}
template <class T, size_t Alignment>
T& static_memory(const char* key) {
    return *reinterpret_cast<T*>(static_shared(key, sizeof(T), Alignment < alignof(T) ? alignof(T) : Alignment));
}

// ---- the host's side ----

// A launch waits until all are carried out: in their order, but for one cluster of a launch that may begin early, which goes as far as
// it can before the launch before begins.
void enqueue(Launch launch);
// Whether all ended well; else last_failure() tells why not.
bool finish();
const char* last_failure();

}  // namespace emulated
