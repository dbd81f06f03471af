#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "address.h"
#include "device.h"
#include "state.h"

namespace ebbtide::device {

void Unmap::operator()(void* memory) const { ::munmap(memory, nbytes); }

void* Device::pin(std::uint64_t nbytes) {
  const Lock lock(state_->scheduler.mutex);
  state_->fail_if_lost("pin");
  if (state_->count(Operation::kPin)) return nullptr;
  state_->unmap_unpinned();
  const std::uint64_t mapped = whole_pages(std::max<std::uint64_t>(nbytes, 1));
  void* const memory = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "[Device.pin] mmap");
  PinnedBlock block{{memory, {mapped}}, nbytes, {}, {}};
  if (state_->options.poison) std::memset(memory, kPoison, nbytes);
  state_->pinned.emplace(address_of(memory), std::move(block));
  state_->pinned_bytes += nbytes;
  ++state_->pin_allocations;
  return memory;
}

void Device::unpin(void* pointer) {
  if (pointer == nullptr) return;
  const Lock lock(state_->scheduler.mutex);
  const auto found = state_->pinned.find(address_of(pointer));
  if (found == state_->pinned.end()) {
    throw std::invalid_argument("[Device.unpin] no pinned block begins there: unpin each block once");
  }
  PinnedBlock block = std::move(found->second);
  state_->pinned.erase(found);
  state_->pinned_bytes -= block.nbytes;
  VectorClock after = state_->order.clock(kHost);
  bool in_use = false;
  for (Lane* const lane : block.used_on) {
    after.join(state_->order.clock(lane->actor));
    in_use = in_use || lane->done < lane->issued;
  }
  state_->order.access_after(kHost, after, "unpin", {pointer, block.nbytes, true});
  if (state_->options.poison && !in_use) std::memset(pointer, kPoison, block.nbytes);
  state_->scheduler.each_lane([&](Lane& lane) {
    if (lane.done < lane.issued) block.marks.push_back({&lane, lane.issued});
  });
  state_->unpinned.push_back(std::move(block));
  state_->unmap_unpinned();
}

bool Device::is_pinned(const void* address) const {
  const Lock lock(state_->scheduler.mutex);
  return state_->pinned_at(address_of(address)) != nullptr;
}

PinnedBlock* Device::State::pinned_at(std::uint64_t address) {
  auto it = pinned.upper_bound(address);
  if (it == pinned.begin()) return nullptr;
  it = std::prev(it);
  return address - it->first < it->second.nbytes ? &it->second : nullptr;
}

void Device::State::unmap_unpinned() {
  std::erase_if(unpinned, [](const PinnedBlock& block) { return over(block.marks); });
}

}  // namespace ebbtide::device
