#include "ebbtide/host_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <string>
#include <utility>

#include "ebbtide/error.h"

namespace ebbtide {
namespace {

constexpr std::uint64_t kAlignment = 64;
// Near the cap every slab is as small as can be: a floor keeps a flood of tiny blocks from becoming as many slabs.
constexpr std::uint64_t kSmallestSlabFraction = 64;
// First fit of blocks up to 1/n of a slab fills n/(n + 1) of the slabs, all but the last: 0.8 here.
constexpr std::uint64_t kOwnSlabFraction = 4;

class PageableSlabSource final : public SlabSource {
 public:
  void* allocate(std::uint64_t nbytes) override {
    void* const address = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return address == MAP_FAILED ? nullptr : address;
  }
  void release(void* address, std::uint64_t nbytes) override { ::munmap(address, nbytes); }
};

std::uint64_t address_of(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

bool fits(std::uint64_t nbytes, std::uint64_t taken, std::uint64_t limit) {
  return taken <= limit && nbytes <= limit - taken;
}

std::uint64_t padded(std::uint64_t nbytes) { return ExtentAllocator(0, kAlignment).padded(nbytes); }

bool is_empty(const ExtentAllocator& slab) { return slab.used_bytes() == 0; }

}  // namespace

std::unique_ptr<SlabSource> make_pageable_slab_source() { return std::make_unique<PageableSlabSource>(); }

HostPool::HostPool(std::unique_ptr<SlabSource> source, std::uint64_t slab_bytes)
    : source_(std::move(source)), slab_bytes_(padded(slab_bytes)) {
  assert(source_ != nullptr);
}

HostPool::HostPool(std::uint64_t slab_bytes) : slab_bytes_(padded(slab_bytes)) {}

HostPool::~HostPool() = default;

std::optional<Block> HostPool::allocate(std::uint64_t nbytes, std::uint64_t limit) {
  assert(nbytes > 0);
  const std::lock_guard lock(mutex_);
  std::optional<Block> block = carve(nbytes);
  if (!block && source_ != nullptr && make_room(padded(nbytes), limit)) block = carve(nbytes);
  return block;
}

std::uint64_t HostPool::growth(std::uint64_t nbytes, std::uint64_t limit) const {
  if (source_ != nullptr) return 0;
  const std::lock_guard lock(mutex_);
  const std::uint64_t need = padded(nbytes);
  const std::uint64_t kept = reserved_ - empty_bytes();
  if (!fits(need, kept, limit)) return 0;
  const std::uint64_t smallest = std::max(need, slab_bytes_);
  const std::uint64_t largest = std::bit_floor(limit - kept);
  return smallest <= largest ? std::bit_ceil(smallest) : std::max(need, largest);
}

void HostPool::free(const Block& block) {
  const std::lock_guard lock(mutex_);
  const auto slab = slabs_.find(block.place.base);
  if (slab == slabs_.end()) {
    throw Error(ErrorKind::kUsage, "[HostPool.free] no slab holds " + to_string(block.place) +
                                       ": free each block once, at the pool that gave it");
  }
  slab->second.extents.free(block.place.byte_offset, block.nbytes);
  used_ -= block.nbytes;
}

std::uint64_t HostPool::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

std::uint64_t HostPool::reserved_bytes() const {
  const std::lock_guard lock(mutex_);
  return reserved_;
}

void HostPool::add_slab(void* address, std::uint64_t nbytes) {
  assert(address_of(address) % kAlignment == 0 && nbytes % kAlignment == 0);
  const std::lock_guard lock(mutex_);
  if (source_ != nullptr || slabs_.contains(address_of(address))) {
    throw Error(ErrorKind::kUsage, "[HostPool.add_slab] " + format_bytes(nbytes) + " added to a pool that has " +
                                       (source_ != nullptr ? "a source" : "this slab") +
                                       ": add each slab once, to a pool made without a source");
  }
  keep_slab({address, Release{nullptr, nbytes}}, nbytes);
}

std::vector<std::uint64_t> HostPool::take_empty_slabs(std::uint64_t limit) {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> taken;
  if (source_ != nullptr) return taken;
  taken.reserve(by_age_.size());
  for (auto slab = by_age_.begin(); slab != by_age_.end() && reserved_ > limit;) {
    if (!is_empty((*slab)->extents)) {
      ++slab;
      continue;
    }
    reserved_ -= (*slab)->extents.capacity();
    taken.push_back(address_of((*slab)->memory.get()));
    slab = by_age_.erase(slab);
    slabs_.erase(taken.back());
  }
  return taken;
}

std::uint64_t HostPool::trim() {
  const std::lock_guard lock(mutex_);
  return source_ == nullptr ? 0 : trim_locked();
}

std::uint64_t HostPool::slab_allocations() const {
  const std::lock_guard lock(mutex_);
  return slab_allocations_;
}

// The oldest slab with room, and not the best of all: then younger slabs never change where a block goes, and a step
// that repeats the requests of the one before finds a place for each.
std::optional<Block> HostPool::carve(std::uint64_t nbytes) {
  for (Slab* const slab : by_age_) {
    if (slab->extents.largest_free_bytes() < nbytes) continue;
    const std::optional<std::uint64_t> byte_offset = slab->extents.allocate(nbytes);
    if (!byte_offset) continue;
    used_ += nbytes;
    return Block{{Tier::kHost, address_of(slab->memory.get()), *byte_offset}, nbytes};
  }
  return std::nullopt;
}

bool HostPool::make_room(std::uint64_t nbytes, std::uint64_t limit) {
  // Empty slabs are given back only where that makes room: the next requests want them.
  const std::uint64_t kept = reserved_ - empty_bytes();
  if (!fits(nbytes, kept, limit)) return false;

  const std::uint64_t preferred = nbytes > slab_bytes_ / kOwnSlabFraction ? nbytes : slab_bytes_;
  if (reserve_slab(preferred, limit)) return true;
  if (trim_locked() > 0 && reserve_slab(preferred, limit)) return true;

  const std::uint64_t room = (limit - kept) / kAlignment * kAlignment;
  const std::uint64_t smaller = std::max(nbytes, std::min(padded(slab_bytes_ / kSmallestSlabFraction), room));
  return smaller < preferred && reserve_slab(smaller, limit);
}

bool HostPool::reserve_slab(std::uint64_t nbytes, std::uint64_t limit) {
  if (!fits(nbytes, reserved_, limit)) return false;
  std::unique_ptr<void, Release> memory(source_->allocate(nbytes), {source_.get(), nbytes});
  if (!memory) return false;
  keep_slab(std::move(memory), nbytes);
  ++slab_allocations_;
  return true;
}

void HostPool::keep_slab(std::unique_ptr<void, Release> memory, std::uint64_t nbytes) {
  if (by_age_.size() == by_age_.capacity()) by_age_.reserve(2 * by_age_.size() + 8);
  const std::uint64_t address = address_of(memory.get());
  Slab slab{std::move(memory), ExtentAllocator(nbytes, kAlignment)};
  by_age_.push_back(&slabs_.try_emplace(address, std::move(slab)).first->second);
  reserved_ += nbytes;
}

std::uint64_t HostPool::empty_bytes() const {
  std::uint64_t total = 0;
  for (const Slab* const slab : by_age_) {
    if (is_empty(slab->extents)) total += slab->extents.capacity();
  }
  return total;
}

std::uint64_t HostPool::trim_locked() {
  const std::uint64_t nbytes = empty_bytes();
  if (nbytes == 0) return 0;
  std::erase_if(by_age_, [](const Slab* slab) { return is_empty(slab->extents); });
  std::erase_if(slabs_, [](const auto& entry) { return is_empty(entry.second.extents); });
  reserved_ -= nbytes;
  return nbytes;
}

}  // namespace ebbtide
