#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ebbtide/error.h"
#include "ebbtide/host_pool.h"

namespace ebbtide {
namespace {

constexpr std::uint64_t kKiB = std::uint64_t{1} << 10;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

// The owner of a pool's slabs. A slab that it has freed is found by the address sanitizer where the pool touches it.
class Owner {
 public:
  explicit Owner(HostPool& pool) : pool_(pool) {}

  std::uint64_t add(std::uint64_t nbytes) {
    Memory memory(static_cast<char*>(::operator new (nbytes, std::align_val_t{64})));
    const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(memory.get()));
    pool_.add_slab(memory.get(), nbytes);
    slabs_[address] = {std::move(memory), nbytes};
    return address;
  }
  // What the owner does for a block that the pool has no room for; whether it helps.
  bool grow(std::uint64_t nbytes, std::uint64_t limit) {
    const std::uint64_t growth = pool_.growth(nbytes, limit);
    if (growth == 0) return false;
    for (const std::uint64_t address : pool_.take_empty_slabs(limit - growth)) {
      EXPECT_EQ(slabs_.erase(address), 1u);
    }
    add(growth);
    return true;
  }
  [[nodiscard]] std::uint64_t nbytes() const {
    std::uint64_t total = 0;
    for (const auto& [address, slab] : slabs_) total += slab.nbytes;
    return total;
  }
  // Bytes of the slabs that have any of `blocks`.
  [[nodiscard]] std::uint64_t nbytes_of(const std::map<std::uint64_t, Block>& blocks) const {
    std::map<std::uint64_t, std::uint64_t> slabs;
    for (const auto& [address, block] : blocks) slabs[block.place.base] = slabs_.at(block.place.base).nbytes;
    std::uint64_t total = 0;
    for (const auto& [address, nbytes] : slabs) total += nbytes;
    return total;
  }
  [[nodiscard]] bool holds(const Block& block) const {
    const auto slab = slabs_.find(block.place.base);
    return slab != slabs_.end() && block.place.byte_offset + block.nbytes <= slab->second.nbytes;
  }
  [[nodiscard]] std::vector<std::uint64_t> addresses() const {
    std::vector<std::uint64_t> all;
    for (const auto& [address, slab] : slabs_) all.push_back(address);
    return all;
  }

 private:
  struct Free {
    void operator()(char* memory) const { ::operator delete (memory, std::align_val_t{64}); }
  };
  using Memory = std::unique_ptr<char, Free>;
  struct Slab {
    Memory memory;
    std::uint64_t nbytes = 0;
  };

  HostPool& pool_;
  std::map<std::uint64_t, Slab> slabs_;
};

void expect_usage_error(HostPool& pool, void* address, std::uint64_t nbytes) {
  try {
    pool.add_slab(address, nbytes);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
  }
}

TEST(DonatedHostPool, HasNothingBeforeItsOwnerGivesIt) {
  HostPool pool(kMiB);
  EXPECT_EQ(pool.allocate(1, kNoLimit), std::nullopt);
  EXPECT_EQ(pool.reserved_bytes(), 0u);
  EXPECT_TRUE(pool.take_empty_slabs(0).empty());
}

TEST(DonatedHostPool, CarvesBlocksOutOfItsSlabs) {
  HostPool pool(kMiB);
  Owner owner(pool);
  const std::uint64_t slab = owner.add(kMiB);
  EXPECT_EQ(pool.reserved_bytes(), kMiB);
  const Block a = pool.allocate(1000, kNoLimit).value();
  const Block b = pool.allocate(kMiB - 1024, kNoLimit).value();
  EXPECT_EQ(a.place, (Place{Tier::kHost, slab, 0}));
  EXPECT_EQ(b.place, (Place{Tier::kHost, slab, 1024}));
  EXPECT_EQ(pool.allocate(1, kNoLimit), std::nullopt);
  EXPECT_EQ(pool.used_bytes(), 1000 + kMiB - 1024);
  pool.free(a);
  pool.free(b);
  EXPECT_EQ(pool.used_bytes(), 0u);
  EXPECT_TRUE(pool.allocate(kMiB, kNoLimit).has_value());
  EXPECT_EQ(pool.slab_allocations(), 0u);
}

TEST(DonatedHostPool, GrowsByPowersOfTwo) {
  const HostPool pool(kMiB);
  EXPECT_EQ(pool.growth(1, kNoLimit), kMiB);
  EXPECT_EQ(pool.growth(kMiB, kNoLimit), kMiB);
  EXPECT_EQ(pool.growth(kMiB + 1, kNoLimit), 2 * kMiB);
  EXPECT_EQ(pool.growth(5 * kMiB, kNoLimit), 8 * kMiB);
  EXPECT_EQ(pool.growth(5 * kMiB, 8 * kMiB), 8 * kMiB);
  EXPECT_EQ(HostPool(768 * kKiB).growth(1, kNoLimit), kMiB);
}

TEST(DonatedHostPool, GrowsLessNearTheCap) {
  const HostPool pool(kMiB);
  EXPECT_EQ(pool.growth(1, kMiB - 1), 512 * kKiB);
  EXPECT_EQ(pool.growth(600 * kKiB, 700 * kKiB), 600 * kKiB);
  EXPECT_EQ(pool.growth(600 * kKiB - 63, 700 * kKiB), 600 * kKiB) << "padded";
  EXPECT_EQ(pool.growth(5 * kMiB, 8 * kMiB - 1), 5 * kMiB);
  EXPECT_EQ(pool.growth(1, 64), 64u);
}

TEST(DonatedHostPool, SaysThatNoGrowthWouldHelp) {
  HostPool pool(kMiB);
  EXPECT_EQ(pool.growth(1, 63), 0u);
  EXPECT_EQ(pool.growth(1, 0), 0u);
  EXPECT_EQ(pool.growth(2 * kMiB + 1, 2 * kMiB), 0u);
  EXPECT_EQ(pool.growth(kNoLimit, kNoLimit - 64), 0u);
  Owner owner(pool);
  owner.add(kMiB);
  const Block block = pool.allocate(64, kNoLimit).value();
  EXPECT_EQ(pool.growth(kMiB, 2 * kMiB), kMiB);
  EXPECT_EQ(pool.growth(kMiB + 1, 2 * kMiB), 0u);
  EXPECT_EQ(pool.growth(1, kMiB / 2), 0u) << "more is reserved than the limit";
  pool.free(block);
}

TEST(DonatedHostPool, NamesARequestLargerThanAnyPowerOfTwo) {
  const HostPool pool(kMiB);
  const std::uint64_t nbytes = (std::uint64_t{1} << 63) + 64;
  EXPECT_EQ(pool.growth(nbytes, kNoLimit), nbytes);
}

TEST(DonatedHostPool, CountsEmptySlabsAsGivenBack) {
  HostPool pool(kMiB);
  Owner owner(pool);
  owner.add(kMiB);
  EXPECT_EQ(pool.allocate(2 * kMiB, 2 * kMiB), std::nullopt);
  EXPECT_EQ(pool.reserved_bytes(), kMiB) << "only its owner may free a slab";
  EXPECT_EQ(pool.growth(2 * kMiB, 2 * kMiB), 2 * kMiB);
  EXPECT_TRUE(owner.grow(2 * kMiB, 2 * kMiB));
  EXPECT_EQ(pool.reserved_bytes(), 2 * kMiB);
  EXPECT_TRUE(pool.allocate(2 * kMiB, 2 * kMiB).has_value());
}

TEST(DonatedHostPool, ForgetsTheOldestEmptySlabs) {
  HostPool pool(kMiB);
  Owner owner(pool);
  std::vector<std::uint64_t> slabs;
  std::vector<Block> blocks;
  for (int i = 0; i < 5; ++i) {
    slabs.push_back(owner.add(kMiB));
    blocks.push_back(pool.allocate(kMiB, kNoLimit).value());
  }
  for (int i : {4, 3, 1, 0}) pool.free(blocks[static_cast<std::size_t>(i)]);
  EXPECT_TRUE(pool.take_empty_slabs(5 * kMiB).empty());
  EXPECT_EQ(pool.take_empty_slabs(4 * kMiB - 1), (std::vector{slabs[0], slabs[1]}));
  EXPECT_EQ(pool.reserved_bytes(), 3 * kMiB);
  EXPECT_EQ(pool.take_empty_slabs(0), (std::vector{slabs[3], slabs[4]})) << "one slab has a block";
  EXPECT_EQ(pool.reserved_bytes(), kMiB);
  EXPECT_EQ(pool.allocate(1, kNoLimit), std::nullopt);
  pool.free(blocks[2]);
  EXPECT_EQ(pool.take_empty_slabs(0), std::vector{slabs[2]});
}

TEST(DonatedHostPool, TakesASlabAgainThatItHasForgotten) {
  HostPool pool(kMiB);
  alignas(64) char memory[256];
  pool.add_slab(memory, sizeof memory);
  expect_usage_error(pool, memory, sizeof memory);
  EXPECT_EQ(pool.reserved_bytes(), sizeof memory);
  EXPECT_EQ(pool.take_empty_slabs(0).size(), 1u);
  pool.add_slab(memory, sizeof memory);
  EXPECT_TRUE(pool.allocate(sizeof memory, kNoLimit).has_value());
}

TEST(DonatedHostPool, TrimsNothing) {
  HostPool pool(kMiB);
  Owner owner(pool);
  owner.add(kMiB);
  EXPECT_EQ(pool.trim(), 0u);
  EXPECT_EQ(pool.reserved_bytes(), kMiB);
}

TEST(DonatedHostPool, LeavesItsSlabsAloneAtTheEnd) {
  alignas(4096) static char memory[2 * 4096];
  std::memset(memory, 7, sizeof memory);
  {
    HostPool pool(kMiB);
    pool.add_slab(memory, 4096);
    pool.add_slab(memory + 4096, 4096);
    EXPECT_TRUE(pool.allocate(100, kNoLimit).has_value());
  }
  EXPECT_TRUE(std::all_of(memory, memory + sizeof memory, [](char byte) { return byte == 7; }));
}

TEST(HostPool, WithASourceTakesNoSlabs) {
  HostPool pool(make_pageable_slab_source(), kMiB);
  alignas(64) char memory[64];
  expect_usage_error(pool, memory, sizeof memory);
  EXPECT_EQ(pool.growth(1, kNoLimit), 0u);
  pool.free(pool.allocate(64, kNoLimit).value());
  EXPECT_TRUE(pool.take_empty_slabs(0).empty());
  EXPECT_EQ(pool.reserved_bytes(), kMiB);
}

class DonatedHostPoolRandom : public testing::TestWithParam<std::uint64_t> {};

TEST_P(DonatedHostPoolRandom, GrowthIsEnoughAndWithinTheCap) {
  SCOPED_TRACE("seed " + std::to_string(GetParam()));
  std::mt19937_64 random(GetParam());
  constexpr std::uint64_t kSlab = 16 * kKiB;
  const std::uint64_t cap = 10 * kSlab + random() % (10 * kSlab);
  HostPool pool(kSlab);
  Owner owner(pool);
  std::map<std::uint64_t, Block> live;  // by address
  int refused = 0;
  for (int step = 0; step < 1500; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const bool filling = step / 150 % 2 == 0;
    if (live.empty() || random() % 4 < (filling ? 3 : 1)) {
      const std::uint64_t scale[] = {256, kSlab / 4, 3 * kSlab};
      const std::uint64_t nbytes = 1 + random() % scale[random() % 3];
      auto block = pool.allocate(nbytes, cap);
      if (!block && owner.grow(nbytes, cap)) {
        block = pool.allocate(nbytes, cap);
        ASSERT_TRUE(block.has_value()) << nbytes << " bytes";
      }
      if (!block) {
        ASSERT_GT(owner.nbytes_of(live) + (nbytes + 63) / 64 * 64, cap);
        ++refused;
        continue;
      }
      const std::uint64_t address = block->place.position();
      ASSERT_TRUE(owner.holds(*block));
      ASSERT_EQ(address % 64, 0u);
      const auto next = live.lower_bound(address);
      if (next != live.end()) {
        ASSERT_LE(address + nbytes, next->first);
      }
      if (next != live.begin()) {
        ASSERT_LE(std::prev(next)->first + std::prev(next)->second.nbytes, address);
      }
      std::memset(reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), 1, nbytes);
      live.emplace(address, *block);
    } else {
      const auto it = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
      pool.free(it->second);
      live.erase(it);
    }
    ASSERT_EQ(pool.reserved_bytes(), owner.nbytes());
    ASSERT_LE(pool.reserved_bytes(), cap);
  }
  EXPECT_GT(refused, 0) << "the cap was never met";
  for (const auto& [address, block] : live) pool.free(block);
  EXPECT_EQ(pool.used_bytes(), 0u);
  std::vector<std::uint64_t> taken = pool.take_empty_slabs(0);
  std::sort(taken.begin(), taken.end());
  EXPECT_EQ(taken, owner.addresses());
  EXPECT_EQ(pool.reserved_bytes(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Seeds, DonatedHostPoolRandom, testing::Range<std::uint64_t>(0, 24));

}  // namespace
}  // namespace ebbtide
