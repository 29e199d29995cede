// SPDX-License-Identifier: Apache-2.0
// Shared memory, copies that land later, and barriers that count their bytes.
#include "inside.h"

namespace emulated {
namespace {

constexpr size_t kGuard = 256, kStatic = 64 << 10;

// Offsets in a block's memory: dynamic shared memory begins in the second KiB, then what nobody may write, then static variables.
size_t guard_at() { return cluster->places.dynamic_at + cluster->launch->shared; }
size_t statics_at() { return (2 * kReserved + cluster->launch->shared + kGuard + 1023) / 1024 * 1024; }

}  // namespace

size_t shared_bytes() { return statics_at() + kStatic; }

void check_guard(const Block& block) {
    for (size_t i = guard_at(); i < guard_at() + kGuard; ++i)
        if (block.memory[i] != 0xff) failed("wrote behind the end of shared memory");
}

unsigned char* dynamic_shared(size_t alignment) {
    size_t& dynamic_at = cluster->places.dynamic_at;
    // aligned to what is asked for and no more, as it may lie behind static shared memory
    if (dynamic_at == 0) dynamic_at = kReserved + alignment % kReserved;
    if (dynamic_at % alignment != 0) failed("dynamic shared memory is declared with two alignments");
    return current->block->memory + dynamic_at;
}

unsigned char* static_shared(const char* key, size_t bytes, size_t alignment) {
    auto& [dynamic_at, statics_end, statics] = cluster->places;
    const Launch& launch = *cluster->launch;
    const auto [place, is_new] = statics.try_emplace(key, 0);
    if (is_new) {
        place->second = (statics_end + alignment - 1) / alignment * alignment;
        statics_end = place->second + bytes;
        if (statics_end > kSharedWithoutLeave) failed("more than 48 KiB of static shared memory");
        if (statics_end + launch.shared > kMostShared) failed("more shared memory than there is");
        if (statics_end + launch.shared > kSharedWithoutLeave && launch.allowed < launch.shared)
            failed("more than 48 KiB of shared memory without leave");
    }
    return current->block->memory + statics_at() + place->second;
}

unsigned char* shared_at(uint32_t address, size_t bytes) {
    const uint32_t rank = address / kClusterWindow, offset = address % kClusterWindow;
    if (rank > cluster->blocks.size()) failed("an address of shared memory is of no block of the cluster");
    if (offset < kReserved || offset + bytes > shared_bytes()) failed("an address is outside of shared memory");
    Block& block = rank == 0 ? *current->block : cluster->blocks[rank - 1];
    if (block.alive == 0) failed("shared memory of a block that has ended");
    return block.memory + offset;
}

uint32_t address_of(const void* p) {
    const auto* byte = static_cast<const unsigned char*>(p);
    for (const Block& block : cluster->blocks)
        if (byte >= block.memory && byte < block.memory + shared_bytes())
            return uint32_t(byte - block.memory) + (&block == current->block ? 0 : uint32_t(block.rank + 1) * kClusterWindow);
    failed("an address of shared memory was asked of other memory");
}

unsigned char* in_block(const void* mine, unsigned rank) {
    if (rank >= cluster->blocks.size()) failed("no such block in the cluster");
    return cluster->blocks[rank].memory + address_of(mine) % kClusterWindow;
}

// ---- what lands later ----

bool lands_early() { return cluster->landing == Landing::early || (cluster->landing == Landing::any && chance(3) == 0); }

void land(Copy& copy) {
    if (copy.box) return copy.box();
    if (copy.from != nullptr) std::memcpy(copy.to, copy.from, copy.bytes);
    else if (copy.bytes > 0) std::memcpy(copy.to, copy.value, copy.bytes);
    std::memset(copy.to + copy.bytes, 0, copy.zeros);
    if (copy.barrier == nullptr) return;
    for (Block& block : cluster->blocks) {
        const auto* byte = reinterpret_cast<unsigned char*>(copy.barrier);
        if (byte < block.memory || byte >= block.memory + shared_bytes()) continue;
        arrive_phase(uint32_t(block.rank + 1) * kClusterWindow + uint32_t(byte - block.memory), 0, -int64_t(copy.bytes));
    }
}

void start_copy(Copy copy) {
    if (lands_early()) return land(copy);
    if (current->groups.empty()) current->groups.emplace_back();
    current->groups.back().push_back(std::move(copy));
}

void close_copies() {
    if (current->groups.empty()) current->groups.emplace_back();
    current->groups.emplace_back();
}

// The last group is the open one, which is not counted, and has not to land unless all are awaited at a thread's end.
void await_copies(size_t left) {
    auto& groups = current->groups;
    while (groups.size() > left + 1) {
        for (Copy& copy : groups.front()) land(copy);
        groups.erase(groups.begin());
    }
}

void arrive_after_copies(uint32_t barrier) {
    phases_at(barrier);
    const uint32_t there = uint32_t(current->block->rank + 1) * kClusterWindow + barrier % kClusterWindow;
    std::vector<Copy> copies;
    for (auto& group : current->groups)
        for (Copy& copy : group) copies.push_back(std::move(copy));
    current->groups.clear();
    Copy all{};
    all.box = [copies, there]() mutable {
        for (Copy& copy : copies) land(copy);
        arrive_phase(there, 1, 0);
    };
    start_announced_copy(std::move(all));
}

void start_announced_copy(Copy copy) {
    if (lands_early()) return land(copy);
    cluster->copies.push_back(std::move(copy));
}

// ---- mbarriers ----

Phases& phases_at(uint32_t address, bool make) {
    const uint32_t rank = address / kClusterWindow, offset = address % kClusterWindow;
    Block& block = rank == 0 ? *current->block : cluster->blocks.at(rank - 1);
    if (offset % 8 != 0) failed("a barrier is not aligned");
    if (!make && block.phases.count(offset) == 0) failed("a barrier that nobody initialised");
    if (block.alive == 0) failed("a barrier of a block that has ended");
    return block.phases[offset];
}

void arrive_phase(uint32_t address, int count, int64_t bytes) {
    Phases& barrier = phases_at(address);
    barrier.bytes += bytes, barrier.pending -= count;
    if (barrier.pending < 0) failed("more arrivals at a barrier than it expects");
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    barrier.phase ^= 1, barrier.pending = barrier.expected;
    wake_all(barrier.waiting);
}

void await_phase(uint32_t address, uint32_t parity) {
    while (phases_at(address).phase == (parity & 1)) phases_at(address).waiting.push_back(current), park("a phase of an mbarrier");
}

}  // namespace emulated
