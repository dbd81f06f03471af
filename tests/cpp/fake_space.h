// A BlockSpace for tests: first fit in one slab, blocks poisoned when handed out and when freed. May have to be grown
// by its owner; as a file it is read as it was written. Thread safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "ebbtide/block_space.h"

namespace ebbtide::testing {

// Not readable as activations by accident.
inline constexpr std::uint8_t kPoison = 0xdd;

class FakeSpace final : public BlockSpace {
 public:
  // Blocks start at multiples of this.
  static constexpr std::uint64_t kAlignment = 64;

  // Memory of its own, that places name by numbers which are no addresses.
  explicit FakeSpace(std::uint64_t capacity, Tier tier = Tier::kHost);
  // Somebody else's memory; `poison` overwrites a part of it.
  FakeSpace(std::uint8_t* memory, std::uint64_t capacity, std::function<void(std::uint8_t*, std::uint64_t)> poison);

  // Until `grow` adds memory there is none.
  void start_empty();
  void grow(std::uint64_t nbytes);

  [[nodiscard]] Tier tier() const override { return tier_; }
  [[nodiscard]] std::optional<Block> allocate(std::uint64_t nbytes, std::uint64_t limit) override;
  [[nodiscard]] std::uint64_t growth(std::uint64_t nbytes, std::uint64_t limit) const override;
  void free(const Block& block) override;
  [[nodiscard]] std::uint64_t used_bytes() const override;
  [[nodiscard]] std::uint64_t reserved_bytes() const override;

  // The bytes of a place, for a copy; fails the test where some of them are in no block, and where a file is not read
  // as it was written.
  std::uint8_t* at(const Place& place, std::uint64_t nbytes, bool for_writing);

 private:
  void poison(std::uint64_t byte_offset, std::uint64_t nbytes);
  [[nodiscard]] std::uint64_t used_locked() const;

  const Tier tier_;
  std::vector<std::uint8_t> own_;
  std::uint8_t* const memory_;
  const std::uint64_t base_;
  const std::uint64_t capacity_;
  const std::function<void(std::uint8_t*, std::uint64_t)> poison_;
  mutable std::mutex mutex_;
  bool grows_ = false;
  std::uint64_t added_;
  std::map<std::uint64_t, std::uint64_t> blocks_;   // byte offset → nbytes
  std::map<std::uint64_t, std::uint64_t> written_;  // kFile: what was written as one piece
};

}  // namespace ebbtide::testing
