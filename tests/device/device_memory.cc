#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "address.h"
#include "device.h"
#include "state.h"

namespace ebbtide::device {

DeviceMemory& Device::State::memory(DeviceIndex index) {
  if (index < 0 || static_cast<std::size_t>(index) >= memories.size()) {
    throw std::invalid_argument("[Device] no device " + std::to_string(index));
  }
  return memories[static_cast<std::size_t>(index)];
}

DeviceMemory* Device::State::holder(std::uint64_t address) {
  const auto holds = [&](const DeviceMemory& memory) { return memory.arena.holds(address); };
  const auto found = std::find_if(memories.begin(), memories.end(), holds);
  return found == memories.end() ? nullptr : &*found;
}

void* Device::allocate(std::uint64_t nbytes, Stream stream) {
  Lock lock(state_->scheduler.mutex);
  state_->fail_if_lost("allocate");
  if (const auto strike = state_->count(Operation::kAllocate)) {
    throw OutOfMemory("[Device.allocate] " + strike->cause);
  }
  Lane& lane = state_->scheduler.lane(stream);
  if (nbytes == 0) return nullptr;
  DeviceMemory& memory = state_->memory(stream.device);
  Block block;
  block.nbytes = nbytes;
  block.extent = state_->take(lock, memory, nbytes, lane);
  block.lane = &lane;
  const std::uint64_t begin = block.extent.begin;

  state_->order.access(lane.actor, "allocation on stream " + to_string(stream), {{pointer_to(begin), nbytes, true}});
  state_->poison(lane, block.extent);
  memory.live.emplace(begin, std::move(block));
  MemoryStats& stats = memory.stats;
  ++stats.allocations;
  stats.used_bytes += nbytes;
  stats.peak_bytes = std::max(stats.peak_bytes, stats.used_bytes);
  return pointer_to(begin);
}

// What an allocator does when memory runs short: takes what is done, then waits for what is not, then lets go of what
// the streams keep.
Extent Device::State::take(Lock& lock, DeviceMemory& memory, std::uint64_t nbytes, Lane& lane) {
  const auto attempt = [&]() -> std::optional<Extent> {
    const std::uint64_t taken = memory.stats.used_bytes + memory.stats.pending_bytes;
    if (taken > memory.limit || nbytes > memory.limit - taken) return std::nullopt;
    return memory.pool.take(whole_pages(nbytes), lane.id.number, options.reuse);
  };
  reclaim(memory);
  std::optional<Extent> extent = attempt();
  if (!extent && !memory.pending.empty()) {
    finish_pending(lock, memory);
    extent = attempt();
  }
  if (!extent && nbytes <= memory.limit && memory.stats.used_bytes <= memory.limit - nbytes) {
    std::deque<Lane>& lanes = scheduler.lanes(lane.id.device);
    // Other threads may go on queueing meanwhile.
    while (!std::all_of(lanes.begin(), lanes.end(), Scheduler::settled)) {
      for (std::size_t i = 0; i < lanes.size(); ++i) finish_lane(lock, lanes[i]);
    }
    for (const Lane& each : lanes) host_sees(order.clock(each.actor), each.time_s);
    memory.pool.flush();
    extent = attempt();
  }
  if (extent) return *std::move(extent);
  throw OutOfMemory("[Device.allocate] " + std::to_string(nbytes) + " bytes asked, " +
                    std::to_string(memory.stats.used_bytes) + " in use, limit " + std::to_string(memory.limit) +
                    " of " + std::to_string(memory.arena.nbytes()) + " on device " + std::to_string(lane.id.device));
}

void Device::free(void* pointer) {
  if (pointer == nullptr) return;
  const Lock lock(state_->scheduler.mutex);
  DeviceMemory* const memory = state_->holder(address_of(pointer));
  const auto found = memory == nullptr ? decltype(memory->live.begin()){} : memory->live.find(address_of(pointer));
  if (memory == nullptr || found == memory->live.end()) {
    throw std::invalid_argument("[Device.free] no block begins there: free each block once");
  }
  Block block = std::move(found->second);
  memory->live.erase(found);
  memory->stats.used_bytes -= block.nbytes;

  VectorClock after;
  for (Lane* const lane : block.used_on) {
    after.join(state_->order.clock(lane->actor));
    if (lane->done < lane->issued) block.marks.push_back({lane, lane->issued});
  }
  state_->order.access_after(block.lane->actor, after, "free on stream " + to_string(block.lane->id),
                             {pointer, block.nbytes, true});
  if (block.marks.empty()) return state_->give(*memory, std::move(block));
  memory->stats.pending_bytes += block.nbytes;
  memory->pending.push_back(std::move(block));
}

void Device::used_on(void* pointer, Stream stream) {
  const Lock lock(state_->scheduler.mutex);
  Lane& lane = state_->scheduler.lane(stream);
  Block* const block = state_->block_at(address_of(pointer));
  PinnedBlock* const pinned = state_->pinned_at(address_of(pointer));
  if (block == nullptr && pinned == nullptr) {
    throw std::invalid_argument("[Device.used_on] the address is in no block");
  }
  if (block != nullptr && block->lane == &lane) return;
  std::vector<Lane*>& lanes = block != nullptr ? block->used_on : pinned->used_on;
  if (std::find(lanes.begin(), lanes.end(), &lane) == lanes.end()) lanes.push_back(&lane);
}

Block* Device::State::block_at(std::uint64_t address) {
  DeviceMemory* const memory = holder(address);
  if (memory == nullptr) return nullptr;
  auto it = memory->live.upper_bound(address);
  if (it == memory->live.begin()) return nullptr;
  it = std::prev(it);
  return address - it->first < it->second.nbytes ? &it->second : nullptr;
}

void Device::State::reclaim(DeviceMemory& memory) {
  std::vector<Block> pending = std::exchange(memory.pending, {});
  for (Block& block : pending) {
    if (over(block.marks)) {
      memory.stats.pending_bytes -= block.nbytes;
      give(memory, std::move(block));
    } else {
      memory.pending.push_back(std::move(block));
    }
  }
}

void Device::State::finish_pending(Lock& lock, DeviceMemory& memory) {
  std::vector<Mark> marks;
  for (const Block& block : memory.pending) marks.insert(marks.end(), block.marks.begin(), block.marks.end());
  for (const Mark& mark : marks) scheduler.finish(lock, *mark.lane, mark.seq);
  fail_if_lost("allocate");
  reclaim(memory);
}

void Device::State::give(DeviceMemory& memory, Block block) {
  poison(*block.lane, block.extent);
  memory.pool.give(block.lane->id.number, std::move(block.extent));
}

void Device::State::poison(Lane& lane, const Extent& extent) {
  if (!options.poison || scheduler.lost()) return;
  scheduler.push(lane, {.kind = Task::Kind::kPoison, .dst = extent.begin, .nbytes = extent.nbytes});
}

bool Device::owns(const void* address) const { return state_->holder(address_of(address)) != nullptr; }

DeviceIndex Device::device_of(const void* address) const {
  const std::deque<DeviceMemory>& memories = state_->memories;
  for (std::size_t i = 0; i < memories.size(); ++i) {
    if (memories[i].arena.holds(address_of(address))) return static_cast<DeviceIndex>(i);
  }
  throw std::invalid_argument("[Device.device_of] the address is on no device");
}

void Device::set_limit(DeviceIndex device, std::uint64_t nbytes) {
  const Lock lock(state_->scheduler.mutex);
  state_->memory(device).limit = nbytes;
}

MemoryStats Device::memory(DeviceIndex device) const {
  const Lock lock(state_->scheduler.mutex);
  MemoryStats stats = state_->memory(device).stats;
  stats.pinned_bytes = state_->pinned_bytes;
  stats.pin_allocations = state_->pin_allocations;
  return stats;
}

void Device::reset_peak(DeviceIndex device) {
  const Lock lock(state_->scheduler.mutex);
  MemoryStats& stats = state_->memory(device).stats;
  stats.peak_bytes = stats.used_bytes;
}

}  // namespace ebbtide::device
