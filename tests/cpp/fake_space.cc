#include "fake_space.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

namespace ebbtide::testing {

namespace {

constexpr std::uint64_t kSlabBase = 0x10000000;

std::uint64_t aligned(std::uint64_t nbytes) {
  return (nbytes + FakeSpace::kAlignment - 1) / FakeSpace::kAlignment * FakeSpace::kAlignment;
}

void poison_directly(std::uint8_t* memory, std::uint64_t nbytes) { std::memset(memory, kPoison, nbytes); }

}  // namespace

FakeSpace::FakeSpace(std::uint64_t capacity, Tier tier)
    : tier_(tier),
      own_(capacity),
      memory_(own_.data()),
      base_(tier == Tier::kFile ? 0 : kSlabBase),
      capacity_(capacity),
      poison_(poison_directly),
      added_(capacity) {}

FakeSpace::FakeSpace(std::uint8_t* memory, std::uint64_t capacity,
                     std::function<void(std::uint8_t*, std::uint64_t)> poison)
    : tier_(Tier::kHost),
      memory_(memory),
      base_(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(memory))),
      capacity_(capacity),
      poison_(std::move(poison)),
      added_(capacity) {}

void FakeSpace::start_empty() {
  grows_ = true;
  added_ = 0;
}

void FakeSpace::grow(std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  added_ += nbytes;
  EXPECT_LE(added_, capacity_) << "more was asked for than there is";
}

std::optional<Block> FakeSpace::allocate(std::uint64_t nbytes, std::uint64_t limit) {
  const std::lock_guard lock(mutex_);
  EXPECT_GT(nbytes, 0u);
  if (nbytes > limit || used_locked() > limit - nbytes) return std::nullopt;
  std::uint64_t begin = 0;
  for (const auto& [block_begin, block_nbytes] : blocks_) {
    if (begin + nbytes <= block_begin) break;
    begin = block_begin + aligned(block_nbytes);
  }
  if (begin + nbytes > added_) return std::nullopt;
  blocks_[begin] = nbytes;
  poison(begin, nbytes);
  return Block{{tier_, base_, begin}, nbytes};
}

std::uint64_t FakeSpace::growth(std::uint64_t nbytes, std::uint64_t limit) const {
  const std::lock_guard lock(mutex_);
  const std::uint64_t more = aligned(nbytes);
  return grows_ && added_ + more <= std::min(limit, capacity_) ? more : 0;
}

void FakeSpace::free(const Block& block) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t begin = block.place.byte_offset;
  const auto found = blocks_.find(begin);
  if (found == blocks_.end() || found->second != block.nbytes) {
    ADD_FAILURE() << "freed a block that was not handed out: " << to_string(block.place);
    return;
  }
  poison(begin, block.nbytes);
  blocks_.erase(found);
  written_.erase(written_.lower_bound(begin), written_.lower_bound(begin + block.nbytes));
}

std::uint64_t FakeSpace::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_locked();
}

std::uint64_t FakeSpace::reserved_bytes() const {
  const std::lock_guard lock(mutex_);
  return grows_ ? added_ : used_locked();
}

std::uint64_t FakeSpace::used_locked() const {
  std::uint64_t used = 0;
  for (const auto& [begin, nbytes] : blocks_) used += nbytes;
  return used;
}

void FakeSpace::poison(std::uint64_t byte_offset, std::uint64_t nbytes) { poison_(memory_ + byte_offset, nbytes); }

std::uint8_t* FakeSpace::at(const Place& place, std::uint64_t nbytes, bool for_writing) {
  const std::lock_guard lock(mutex_);
  // Neighbouring blocks may be read as one piece.
  for (std::uint64_t byte = place.byte_offset; byte < place.byte_offset + nbytes;) {
    auto block = blocks_.upper_bound(byte);
    if (block == blocks_.begin() || (--block)->first + aligned(block->second) <= byte) {
      ADD_FAILURE() << "a copy touches a block that is free: " << to_string(place) << ", " << nbytes << " bytes";
      return nullptr;
    }
    byte = block->first + aligned(block->second);
  }
  if (tier_ == Tier::kFile) {
    if (for_writing) written_[place.byte_offset] = nbytes;
    const auto piece = written_.find(place.byte_offset);
    if (piece == written_.end() || piece->second != nbytes) {
      ADD_FAILURE() << "a file is read otherwise than it was written: " << to_string(place) << ", " << nbytes;
      return nullptr;
    }
  }
  return memory_ + place.byte_offset;
}

}  // namespace ebbtide::testing
