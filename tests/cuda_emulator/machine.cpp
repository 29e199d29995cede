// SPDX-License-Identifier: Apache-2.0
// Fibers and their scheduler.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>

#include "inside.h"

// Saves what a function must keep on the stack, changes stacks, takes it back.
asm(R"(
.text
.globl emulated_switch
.hidden emulated_switch
.type emulated_switch,@function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulated_switch,.-emulated_switch
)");
extern "C" __attribute__((visibility("hidden"))) void emulated_switch(void** save, void* load);

namespace emulated {

Thread* current;
Index3 block_dim, grid_dim;

Cluster* cluster;

namespace {

constexpr size_t kStack = 256 << 10;

struct Stopped {};

void* home;
std::deque<Launch> launches;
std::string failure, text_of_failure;
uint64_t state = 1;

// Stacks are kept: the kernel gives their pages when they are touched.
unsigned char* stack_of(size_t set, size_t number) {
    static std::vector<unsigned char*> kept[2];
    std::vector<unsigned char*>& stacks = kept[set];
    while (stacks.size() <= number) {
        void* p = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) std::abort();
        mprotect(p, 4096, PROT_NONE);
        stacks.push_back(static_cast<unsigned char*>(p));
    }
    return stacks[number];
}

Warp& warp_of(const Thread& t) { return t.block->warps[t.index.x / kWarpLanes]; }

void wake(Thread* t) {
    Warp& warp = warp_of(*t);
    warp.ready |= 1u << t->index.x % kWarpLanes;
    if (!warp.queued) warp.queued = true, cluster->queue.push_back(&warp);
}

}  // namespace

uint32_t chance(uint32_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return uint32_t((state >> 32) * below >> 32);
}

void wake_all(std::vector<Thread*>& waiting) {
    for (Thread* t : waiting) wake(t);
    waiting.clear();
}

void park(const char* reason) {
    current->waits_for = reason;
    if (cluster->landing == Landing::any && chance(8) == 0) await_copies(0);
    emulated_switch(&current->stack_pointer, home);
}

namespace {

void finish_meeting(Warp& warp, size_t number) {
    Meeting meeting = warp.meetings[number];
    warp.meetings.erase(warp.meetings.begin() + long(number));
    meeting.all(meeting.lanes);
    for (int lane = 0; lane < kWarpLanes; ++lane)
        if (meeting.arrived >> lane & 1) {
            Thread* t = &warp.block->threads[size_t(warp.number * kWarpLanes + lane)];
            if (t != current) wake(t);
        }
}

void complete(Barrier& barrier) {
    barrier.result = barrier.any, barrier.any = 0, barrier.arrived = 0, barrier.expected = 0;
    wake_all(barrier.waiting);
}

void complete_cluster() {
    ++cluster->phase, cluster->arrived = 0;
    wake_all(cluster->waiting);
}

// A thread has ended: those that wait for it need not any more.
void leave() {
    Thread* t = current;
    Block& block = *t->block;
    Warp& warp = warp_of(*t);
    await_copies(0);
    t->done = true;
    --block.alive, --cluster->alive;
    warp.alive &= ~(1u << t->index.x % kWarpLanes);
    for (size_t i = 0; i < warp.meetings.size();) {
        Meeting& meeting = warp.meetings[i];
        if (meeting.arrived == (meeting.mask & warp.alive)) finish_meeting(warp, i), i = 0;
        else ++i;
    }
    Barrier& all = block.barriers[0];
    if (all.arrived > 0 && all.expected == 0 && all.arrived == block.alive) complete(all);
    if (t->at_cluster && t->cluster_phase == cluster->phase) --cluster->arrived;  // it ended without waiting
    if (cluster->alive > 0 && cluster->arrived == cluster->alive) complete_cluster();
    if (block.alive == 0) {
        check_guard(block);
        std::memset(block.memory, 0xff, shared_bytes());  // nobody may read it any more
    }
}

void entry() {
    current->block->cluster->launch->kernel();
    leave();
    void* nowhere;
    emulated_switch(&nowhere, home);
    std::abort();
}

void start(Thread& t, size_t set, size_t number) {
    auto* top = reinterpret_cast<void**>(stack_of(set, number) + kStack);
    for (int i = 0; i < 3; ++i) *--top = nullptr;  // at its first instruction a function finds the stack at 16 n + 8
    *--top = reinterpret_cast<void*>(&entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    t.stack_pointer = top;
}

void resume(Thread* t) {
    current = t;
    emulated_switch(&home, t->stack_pointer);
    current = nullptr;
}

void land_one(size_t number) {
    Copy copy = std::move(cluster->copies[number]);
    cluster->copies[number] = std::move(cluster->copies.back());
    cluster->copies.pop_back();
    land(copy);
}

void report_deadlock() {
    std::map<std::string, int> counts;
    for (const Block& block : cluster->blocks)
        for (const Thread& t : block.threads)
            if (!t.done) {
                char text[160];
                std::snprintf(text, sizeof text, "block (%u, %u, %u), warp %u: %s", block.index.x, block.index.y, block.index.z, t.index.x / 32, t.waits_for);
                ++counts[text];
            }
    failure = "deadlock: nobody can go on;";
    int lines = 0;
    for (const auto& [text, count] : counts) {
        if (++lines > 12) break;
        failure += " " + std::to_string(count) + " threads of " + text + ";";
    }
    if (lines > 12) failure += " and more";
}

// A warp's lanes go on, for a while.
void run_warp(size_t number) {
    std::vector<Warp*>& queue = cluster->queue;
    Warp* warp = queue[number];
    const bool falling = chance(2) != 0;
    for (uint32_t rounds = 1 + chance(64); warp->ready != 0 && rounds > 0 && failure.empty(); --rounds) {
        for (unsigned ready = std::exchange(warp->ready, 0); ready != 0 && failure.empty();) {
            const int lane = falling ? 31 - __builtin_clz(ready) : __builtin_ctz(ready);
            ready &= ~(1u << lane);
            resume(&warp->block->threads[size_t(warp->number * kWarpLanes + lane)]);
        }
    }
    if (warp->ready != 0) return;
    warp->queued = false;
    queue[number] = queue.back();  // what was added meanwhile lies behind
    queue.pop_back();
}

// To its end, or of a cluster that is ahead as far as it can.
void run_cluster(Cluster& c) {
    cluster = &c, grid_dim = c.launch->grid, block_dim = c.launch->block;
    while (c.alive > 0 && failure.empty()) {
        if (c.queue.empty()) {
            if (c.ahead && (c.copies.empty() || chance(4) == 0)) return;
            if (c.copies.empty()) return report_deadlock();
            land_one(chance(uint32_t(c.copies.size())));
            continue;
        }
        if (c.landing == Landing::any && !c.copies.empty() && chance(16) == 0) land_one(chance(uint32_t(c.copies.size())));
        run_warp(chance(uint32_t(c.queue.size())));
    }
    if (failure.empty() && !c.copies.empty()) failure = "a copy was not awaited before its block ended";
}

// Clusters of two launches may be there at once, with memory and stacks of one set or the other.
std::unique_ptr<Cluster> make_cluster(const Launch& launch, unsigned number, size_t set, bool ahead) {
    static std::vector<std::unique_ptr<unsigned char[]>> kept[2];
    std::vector<std::unique_ptr<unsigned char[]>>& memories = kept[set];
    auto made = std::make_unique<Cluster>();
    Cluster& c = *made;
    const unsigned threads = launch.block.x, each = unsigned(launch.cluster), columns = launch.grid.x / each;
    c.launch = &launch, c.landing = Landing(chance(3)), c.ahead = ahead;
    c.blocks.resize(each), c.alive = int(threads * each);
    cluster = &c;
    for (unsigned rank = 0; rank < each; ++rank) {
        if (memories.size() <= rank) memories.emplace_back(new unsigned char[(512 << 10) + 1024]);
        Block& block = c.blocks[rank];
        block.cluster = &c, block.rank = int(rank), block.alive = int(threads);
        block.index = {number % columns * each + rank, number / columns % launch.grid.y, number / columns / launch.grid.y};
        block.memory = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(memories[rank].get()) + 1023) & ~uintptr_t(1023));
        std::memset(block.memory, 0xff, shared_bytes());
        block.threads.resize(threads), block.warps.resize((threads + 31) / 32), block.groups.resize((threads + 127) / 128);
        for (size_t w = 0; w < block.warps.size(); ++w) {
            const unsigned lanes = std::min(32u, threads - unsigned(w) * 32);
            const unsigned mask = lanes == 32 ? ~0u : (1u << lanes) - 1;
            block.warps[w] = Warp{&block, int(w), mask, mask, true, {}};
            c.queue.push_back(&block.warps[w]);
        }
        for (unsigned t = 0; t < threads; ++t) {
            block.threads[t].block = &block, block.threads[t].index = {t, 0, 0};
            start(block.threads[t], set, rank * threads + t);
        }
    }
    return made;
}

std::vector<unsigned> order_of(const Launch& launch) {
    std::vector<unsigned> order(launch.grid.x / unsigned(launch.cluster) * launch.grid.y * launch.grid.z);
    for (unsigned i = 0; i < order.size(); ++i) order[i] = i, std::swap(order[i], order[chance(i + 1)]);
    return order;
}

// All launches; of each that may begin early its first cluster before the one before it.
void run_all() {
    std::unique_ptr<Cluster> ahead;
    std::vector<unsigned> order = order_of(launches[0]), next;
    for (size_t n = 0; n < launches.size(); ++n, order = std::move(next)) {
        std::unique_ptr<Cluster> first = std::move(ahead);
        if (n + 1 < launches.size()) next = order_of(launches[n + 1]);
        if (n + 1 < launches.size() && launches[n + 1].early) {
            ahead = make_cluster(launches[n + 1], next[0], (n + 1) % 2, true);
            run_cluster(*ahead);
        }
        for (const unsigned number : order) {
            if (first == nullptr) first = make_cluster(launches[n], number, n % 2, false);
            cluster = first.get();
            first->ahead = false;
            wake_all(first->awaiting_launch);
            run_cluster(*first);
            first = nullptr;
            if (!failure.empty()) return;
        }
    }
}

}  // namespace

const char* last_failure() { return text_of_failure.c_str(); }

void failed(const std::string& text) {
    if (failure.empty()) {
        failure = text;
        if (current != nullptr) {
            const Block& block = *current->block;
            failure += " (block " + std::to_string(block.index.x) + ", " + std::to_string(block.index.y) + ", thread " + std::to_string(current->index.x) + ")";
        }
    }
    if (current == nullptr) throw Stopped();  // the scheduler, while something lands
    for (;;) emulated_switch(&current->stack_pointer, home);  // nobody resumes it
}

void enqueue(Launch launch) { launches.push_back(std::move(launch)); }

bool finish() {
    static const uint64_t seed = [] {
        const char* given = std::getenv("CEDAR_EMULATOR_SEED");
        return given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
    }();
    static uint64_t calls = 0;
    if (launches.empty()) return true;
    state = (seed + 1) * 0x9e3779b97f4a7c15u + ++calls * 0xbf58476d1ce4e5b9u | 1;
    for (int i = 0; i < 8; ++i) chance(2);
    failure.clear();
    try {
        run_all();
    } catch (const Stopped&) {
    }
    cluster = nullptr, current = nullptr;
    launches.clear();
    text_of_failure = failure;
    return failure.empty();
}

void meet(unsigned mask, const char* kind, void* mine, void (*all)(void* const*)) {
    Warp& warp = warp_of(*current);
    const int lane = int(current->index.x % kWarpLanes);
    if (!(mask >> lane & 1)) failed(std::string(kind) + ": the mask lacks the lane itself");
    size_t number = 0;
    while (number < warp.meetings.size() && warp.meetings[number].mask != mask) ++number;
    if (number == warp.meetings.size()) warp.meetings.push_back(Meeting{mask, 0, kind, {}, all});
    Meeting& meeting = warp.meetings[number];
    if (meeting.all != all) failed(std::string(kind) + ": other lanes of the warp are at " + meeting.kind);
    meeting.arrived |= 1u << lane;
    meeting.lanes[lane] = mine;
    if (meeting.arrived == (mask & warp.alive)) return finish_meeting(warp, number);
    park(kind);
}

void meet_group(const char* kind, void* mine, void (*all)(void* const*)) {
    Group& group = current->block->groups[current->index.x / 128];
    if (group.arrived > 0 && group.kind != kind) failed(std::string(kind) + ": others of the warp group are at " + group.kind);
    group.kind = kind;
    group.threads[current->index.x % 128] = mine;
    if (++group.arrived < 128) {
        group.waiting.push_back(current);
        return park(kind);
    }
    group.arrived = 0;
    all(group.threads);
    wake_all(group.waiting);
}

unsigned block_barrier(int number, int threads, bool value) {
    if (number < 0 || number >= kNamedBarriers) failed("a barrier's number is not 0 to 15");
    Block& block = *current->block;
    Barrier& barrier = block.barriers[number];
    if (threads % kWarpLanes != 0) failed("a barrier's threads are not whole warps");
    if (barrier.arrived > 0 && barrier.expected != threads) failed("threads expect different numbers at a barrier");
    barrier.expected = threads, barrier.any |= value;
    if (++barrier.arrived == (threads == 0 ? block.alive : threads)) {
        complete(barrier);
        return barrier.result;
    }
    barrier.waiting.push_back(current);
    park("a barrier of the block");
    return barrier.result;
}

void await_launch() {
    while (cluster->ahead) cluster->awaiting_launch.push_back(current), park("griddepcontrol.wait");
}

void arrive_cluster() {
    if (current->at_cluster) failed("arrived twice at the cluster's barrier");
    current->at_cluster = true, current->cluster_phase = cluster->phase;
    if (++cluster->arrived == cluster->alive) complete_cluster();
}

void await_cluster() {
    if (!current->at_cluster) failed("waits at the cluster's barrier without having arrived");
    while (cluster->phase == current->cluster_phase) cluster->waiting.push_back(current), park("the cluster's barrier");
    current->at_cluster = false;
}

}  // namespace emulated
