#include "ebbtide/host_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ebbtide/error.h"

namespace ebbtide {
namespace {

constexpr std::uint64_t kKiB = std::uint64_t{1} << 10;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

// What a source did; outlives the pool that owns the source.
struct SourceLog {
  std::map<void*, std::uint64_t> live;
  std::uint64_t calls = 0;
  std::uint64_t refuse_from = kNoLimit;  // calls before this one succeed
  std::uint64_t refuse_until = kNoLimit;

  [[nodiscard]] std::uint64_t live_bytes() const {
    std::uint64_t total = 0;
    for (const auto& [address, nbytes] : live) total += nbytes;
    return total;
  }
};

// Real pages that are never touched, so that large pools cost address space alone.
class LoggedSource final : public SlabSource {
 public:
  explicit LoggedSource(SourceLog& log) : log_(log) {}

  void* allocate(std::uint64_t nbytes) override {
    const std::uint64_t call = log_.calls++;
    if (call >= log_.refuse_from && call < log_.refuse_until) return nullptr;
    void* const address = pages_->allocate(nbytes);
    if (address != nullptr) log_.live[address] = nbytes;
    return address;
  }
  void release(void* address, std::uint64_t nbytes) override {
    const auto it = log_.live.find(address);
    ASSERT_NE(it, log_.live.end());
    EXPECT_EQ(it->second, nbytes);
    log_.live.erase(it);
    pages_->release(address, nbytes);
  }

 private:
  SourceLog& log_;
  std::unique_ptr<SlabSource> pages_ = make_pageable_slab_source();
};

std::unique_ptr<SlabSource> logged(SourceLog& log) { return std::make_unique<LoggedSource>(log); }

Block must_allocate(HostPool& pool, std::uint64_t nbytes, std::uint64_t limit = kNoLimit) {
  const std::optional<Block> block = pool.allocate(nbytes, limit);
  EXPECT_TRUE(block.has_value()) << nbytes << " bytes";
  return block.value_or(Block{});
}

void free_all(HostPool& pool, std::vector<Block>& blocks) {
  for (const Block& block : blocks) pool.free(block);
  blocks.clear();
}

void* memory_of(const Block& block) { return reinterpret_cast<void*>(block.place.position()); }

TEST(PageableSlabSource, GivesZeroedPages) {
  const auto source = make_pageable_slab_source();
  auto* const bytes = static_cast<unsigned char*>(source->allocate(3 * 4096));
  ASSERT_NE(bytes, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes) % 4096, 0u);
  EXPECT_EQ(bytes[0] + bytes[3 * 4096 - 1], 0);
  bytes[3 * 4096 - 1] = 1;
  source->release(bytes, 3 * 4096);
}

TEST(PageableSlabSource, RefusesWhatNoMachineHas) {
  EXPECT_EQ(make_pageable_slab_source()->allocate(kNoLimit - 4095), nullptr);
}

TEST(HostPool, CarvesBlocksOutOfOneSlab) {
  SourceLog log;
  HostPool pool(logged(log), kMiB);
  const Block a = must_allocate(pool, 1000);
  const Block b = must_allocate(pool, 2000);
  EXPECT_EQ(pool.tier(), Tier::kHost);
  EXPECT_EQ(a.place.tier, Tier::kHost);
  EXPECT_EQ(a.nbytes, 1000u);
  EXPECT_EQ(a.place.base, b.place.base);
  EXPECT_EQ(pool.used_bytes(), 3000u);
  EXPECT_EQ(pool.reserved_bytes(), kMiB);
  EXPECT_EQ(pool.slab_allocations(), 1u);
  pool.free(a);
  pool.free(b);
  EXPECT_EQ(pool.used_bytes(), 0u);
  EXPECT_EQ(pool.reserved_bytes(), kMiB);
}

TEST(HostPool, OversizeBlocksGetASlabExactlyAsLarge) {
  SourceLog log;
  HostPool pool(logged(log), kMiB);
  const Block block = must_allocate(pool, 3 * kMiB + 64);
  EXPECT_EQ(pool.reserved_bytes(), 3 * kMiB + 64);
  EXPECT_EQ(block.place.byte_offset, 0u);
  must_allocate(pool, 4 * kMiB + 1);
  EXPECT_EQ(pool.reserved_bytes(), 7 * kMiB + 128);
}

TEST(HostPool, NeverReservesAboveTheCap) {
  SourceLog log;
  HostPool pool(logged(log), kMiB);
  std::vector<Block> blocks;
  while (const auto block = pool.allocate(100 * kKiB, 5 * kMiB / 2)) blocks.push_back(*block);
  // Two slabs of ten blocks, then slabs of one block each in the half MiB that remains.
  EXPECT_EQ(blocks.size(), 25u);
  EXPECT_EQ(pool.reserved_bytes(), 2 * kMiB + 500 * kKiB);
  EXPECT_EQ(pool.allocate(3 * kMiB, 5 * kMiB / 2), std::nullopt);
  EXPECT_EQ(log.live_bytes(), pool.reserved_bytes());
  EXPECT_TRUE(pool.allocate(100 * kKiB, 3 * kMiB).has_value()) << "a higher limit has room again";
}

TEST(HostPool, NearTheCapASlabIsAsSmallAsItsBlock) {
  SourceLog log;
  HostPool pool(logged(log), kMiB);
  must_allocate(pool, 64 * kKiB, 128 * kKiB);
  EXPECT_EQ(pool.reserved_bytes(), 64 * kKiB);
  must_allocate(pool, 64 * kKiB, 128 * kKiB);
  EXPECT_EQ(pool.allocate(1, 128 * kKiB), std::nullopt);
}

TEST(HostPool, NearTheCapEmptySlabsGiveWay) {
  SourceLog log;
  HostPool pool(logged(log), kMiB);
  pool.free(must_allocate(pool, 64));
  EXPECT_EQ(pool.reserved_bytes(), kMiB);
  const Block large = must_allocate(pool, 2 * kMiB, 2 * kMiB);
  EXPECT_EQ(pool.reserved_bytes(), 2 * kMiB);
  EXPECT_EQ(log.live.size(), 1u);
  pool.free(large);
}

TEST(HostPool, EmptySlabsStayWhereGivingThemBackDoesNotHelp) {
  SourceLog log;
  HostPool pool(logged(log), kMiB);
  pool.free(must_allocate(pool, 64));
  EXPECT_EQ(pool.allocate(3 * kMiB, 2 * kMiB), std::nullopt);
  EXPECT_EQ(pool.reserved_bytes(), kMiB);
}

TEST(HostPool, TinyCapsDoNotMakeASlabPerBlock) {
  SourceLog log;
  HostPool pool(logged(log), 64 * kMiB);
  for (int i = 0; i < 100'000; ++i) must_allocate(pool, 1, 63 * kMiB);
  EXPECT_LE(log.live.size(), 64u);
}

TEST(HostPool, ManyTinyBlocksShareSlabs) {
  SourceLog log;
  HostPool pool(logged(log), kMiB);
  std::vector<Block> blocks;
  for (int i = 0; i < 100'000; ++i) blocks.push_back(must_allocate(pool, 1));
  EXPECT_EQ(pool.slab_allocations(), (100'000 * 64 + kMiB - 1) / kMiB);
  EXPECT_EQ(pool.used_bytes(), 100'000u);
  free_all(pool, blocks);
  EXPECT_EQ(pool.used_bytes(), 0u);
}

TEST(HostPool, HugeRequestsAreRefused) {
  SourceLog log;
  HostPool pool(logged(log), kMiB);
  for (const std::uint64_t nbytes : {kNoLimit, kNoLimit - 63, kNoLimit - 64, kNoLimit / 2}) {
    EXPECT_EQ(pool.allocate(nbytes, kNoLimit), std::nullopt);
  }
  EXPECT_EQ(pool.reserved_bytes(), 0u);
}

TEST(HostPool, TrimGivesBackEmptySlabsOnly) {
  SourceLog log;
  HostPool pool(logged(log), kMiB);
  const Block kept = must_allocate(pool, kMiB);
  const Block dropped = must_allocate(pool, 2 * kMiB);
  EXPECT_EQ(pool.trim(), 0u);
  pool.free(dropped);
  EXPECT_EQ(pool.trim(), 2 * kMiB);
  EXPECT_EQ(pool.reserved_bytes(), kMiB);
  EXPECT_EQ(log.live_bytes(), kMiB);
  pool.free(kept);
  EXPECT_EQ(pool.trim(), kMiB);
  EXPECT_EQ(pool.trim(), 0u);
  EXPECT_TRUE(log.live.empty());
  must_allocate(pool, 64);
  EXPECT_EQ(pool.slab_allocations(), 3u);
}

TEST(HostPool, GivesEverySlabBackAtTheEnd) {
  SourceLog log;
  {
    HostPool pool(logged(log), kMiB);
    must_allocate(pool, 64);
    must_allocate(pool, 5 * kMiB);
    EXPECT_EQ(log.live.size(), 2u);
  }
  EXPECT_TRUE(log.live.empty());
}

TEST(HostPool, RefusesForeignAndFreedBlocks) {
  SourceLog log;
  HostPool pool(logged(log), kMiB);
  const Block block = must_allocate(pool, 100);
  must_allocate(pool, 100);
  pool.free(block);
  EXPECT_THROW(pool.free(block), Error);
  EXPECT_THROW(pool.free({{Tier::kHost, 0x1000, 0}, 64}), Error);
  EXPECT_EQ(pool.used_bytes(), 100u);
}

// Enough distinct sizes to mix shared slabs, slabs of their own and oversize slabs.
std::uint64_t random_nbytes(std::mt19937_64& random, std::uint64_t slab_bytes) {
  const std::uint64_t scale[] = {256, slab_bytes / 16, slab_bytes / 3, 2 * slab_bytes};
  return 1 + random() % scale[random() % 4];
}

class HostPoolRandom : public testing::TestWithParam<std::uint64_t> {};

TEST_P(HostPoolRandom, BlocksAreDisjointAndKeepTheirBytes) {
  SCOPED_TRACE("seed " + std::to_string(GetParam()));
  std::mt19937_64 random(GetParam());
  SourceLog log;
  constexpr std::uint64_t kSlab = 16 * kKiB;
  constexpr std::uint64_t kCap = 40 * kSlab;
  // Every third seed: the source fails now and then.
  const bool fails = GetParam() % 3 == 0;
  {
    HostPool pool(logged(log), kSlab);
    std::map<std::uint64_t, Block> live;  // by address
    std::uint64_t used = 0;
    for (int step = 0; step < 1500 && !HasFailure(); ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      if (fails && step % 100 == 0) {
        log.refuse_from = log.calls + random() % 8;
        log.refuse_until = log.refuse_from + random() % 8;
      }
      if (random() % 50 == 0) pool.trim();
      // Waves, so that the cap is reached as well as an empty pool.
      const bool filling = step / 150 % 2 == 0;
      if (live.empty() || random() % 4 < (filling ? 3 : 1)) {
        const std::uint64_t nbytes = random_nbytes(random, kSlab);
        if (const auto block = pool.allocate(nbytes, kCap)) {
          const std::uint64_t address = block->place.position();
          ASSERT_EQ(block->nbytes, nbytes);
          ASSERT_EQ(address % 64, 0u);
          const auto next = live.lower_bound(address);
          if (next != live.end()) {
            ASSERT_LE(address + nbytes, next->first);
          }
          if (next != live.begin()) {
            ASSERT_LE(std::prev(next)->first + std::prev(next)->second.nbytes, address);
          }
          std::memset(memory_of(*block), static_cast<int>(address >> 6) & 0xff, nbytes);
          live.emplace(address, *block);
          used += nbytes;
        }
      } else {
        const auto it = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
        const auto [address, block] = *it;
        const auto* const bytes = static_cast<const unsigned char*>(memory_of(block));
        ASSERT_TRUE(
            std::all_of(bytes, bytes + block.nbytes, [&](unsigned char b) { return b == ((address >> 6) & 0xff); }));
        pool.free(block);
        live.erase(it);
        used -= block.nbytes;
      }
      ASSERT_EQ(pool.used_bytes(), used);
      ASSERT_EQ(pool.reserved_bytes(), log.live_bytes());
      ASSERT_LE(pool.reserved_bytes(), kCap);
    }
    for (const auto& [address, block] : live) pool.free(block);
    EXPECT_EQ(pool.used_bytes(), 0u);
    pool.trim();
    EXPECT_EQ(pool.reserved_bytes(), 0u);
    EXPECT_TRUE(log.live.empty());
  }
  EXPECT_TRUE(log.live.empty());
}

TEST_P(HostPoolRandom, RepeatedStepsAskTheSourceForNothing) {
  SCOPED_TRACE("seed " + std::to_string(GetParam()));
  SourceLog log;
  HostPool pool(logged(log), 64 * kKiB);
  std::uint64_t after_first_step = 0;
  for (int step = 0; step < 4; ++step) {
    std::mt19937_64 random(GetParam());
    std::vector<Block> blocks;
    for (int i = 0; i < 400; ++i) {
      if (!blocks.empty() && random() % 3 == 0) {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        pool.free(blocks.back());
        blocks.pop_back();
      } else {
        blocks.push_back(must_allocate(pool, random_nbytes(random, 64 * kKiB)));
      }
    }
    std::shuffle(blocks.begin(), blocks.end(), random);
    free_all(pool, blocks);
    if (step == 0) after_first_step = log.calls;
    ASSERT_EQ(log.calls, after_first_step) << "in step " << step;
  }
}

TEST_P(HostPoolRandom, LittleIsWastedAboveOneMebibyte) {
  SCOPED_TRACE("seed " + std::to_string(GetParam()));
  std::mt19937_64 random(GetParam());
  SourceLog log;
  HostPool pool(logged(log));
  // Each seed has its own range of sizes: the worst ones are just above a fraction of the slab.
  const std::uint64_t smallest = kMiB + random() % (40 * kMiB);
  const std::uint64_t spread = 1 + random() % (30 * kMiB);
  while (pool.used_bytes() < 20 * HostPool::kDefaultSlabBytes) must_allocate(pool, smallest + random() % spread);
  // The slab now being filled is no waste.
  const double full = static_cast<double>(pool.reserved_bytes() - HostPool::kDefaultSlabBytes);
  EXPECT_GE(static_cast<double>(pool.used_bytes()), 0.8 * full) << smallest << " to " << smallest + spread << " bytes";
}

INSTANTIATE_TEST_SUITE_P(Seeds, HostPoolRandom, testing::Range<std::uint64_t>(0, 24));

TEST(HostPool, EqualBlocksOfAnySizeWasteLittle) {
  for (std::uint64_t nbytes = kMiB; nbytes <= 70 * kMiB; nbytes += kMiB / 2 + 4096) {
    SourceLog log;
    HostPool pool(logged(log));
    while (pool.used_bytes() < 20 * HostPool::kDefaultSlabBytes) must_allocate(pool, nbytes);
    const double full = static_cast<double>(pool.reserved_bytes() - HostPool::kDefaultSlabBytes);
    EXPECT_GE(static_cast<double>(pool.used_bytes()), 0.8 * full) << nbytes << " bytes";
  }
}

class HostPoolRefusal : public testing::TestWithParam<std::uint64_t> {};

TEST_P(HostPoolRefusal, OfTheSourceCountsAsFull) {
  SourceLog log;
  {
    log.refuse_from = GetParam();
    HostPool pool(logged(log), 256 * kKiB);
    std::vector<Block> blocks;
    std::optional<Block> block;
    while ((block = pool.allocate(200 * kKiB, kNoLimit))) blocks.push_back(*block);
    EXPECT_EQ(blocks.size(), GetParam());
    EXPECT_EQ(pool.used_bytes(), GetParam() * 200 * kKiB);
    EXPECT_EQ(pool.reserved_bytes(), log.live_bytes());
    EXPECT_EQ(pool.slab_allocations(), GetParam());

    if (!blocks.empty()) {
      pool.free(blocks.back());
      EXPECT_TRUE(pool.allocate(200 * kKiB, kNoLimit).has_value()) << "blocks that came back are served all the same";
    }
    log.refuse_until = 0;
    EXPECT_TRUE(pool.allocate(200 * kKiB, kNoLimit).has_value()) << "a refusal does not last";
  }
  EXPECT_TRUE(log.live.empty());
}

INSTANTIATE_TEST_SUITE_P(Calls, HostPoolRefusal, testing::Values(0, 1, 2, 5));

TEST(HostPool, RefusedSlabsAreTriedSmaller) {
  SourceLog log;
  HostPool pool(logged(log), kMiB);
  log.refuse_from = 0;
  log.refuse_until = 1;
  must_allocate(pool, 100 * kKiB);
  EXPECT_EQ(pool.reserved_bytes(), 100 * kKiB);
}

TEST(HostPool, ServesSeveralThreads) {
  constexpr std::uint64_t kSlab = 256 * kKiB;
  constexpr std::uint64_t kCap = 4 * kSlab;
  HostPool pool(make_pageable_slab_source(), kSlab);
  std::atomic<bool> intact{true};
  std::vector<std::thread> threads;
  for (unsigned char id = 1; id <= 4; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937_64 random(id);
      std::vector<Block> blocks;
      for (int i = 0; i < 2000; ++i) {
        if (random() % 2 == 0) {
          if (const auto block = pool.allocate(1 + random() % (16 * kKiB), kCap)) {
            std::memset(memory_of(*block), id, block->nbytes);
            blocks.push_back(*block);
          }
        } else if (!blocks.empty()) {
          const Block block = blocks.back();
          blocks.pop_back();
          const auto* const bytes = static_cast<const unsigned char*>(memory_of(block));
          if (!std::all_of(bytes, bytes + block.nbytes, [&](unsigned char b) { return b == id; })) intact = false;
          pool.free(block);
        }
        if (i % 64 == 0) pool.trim();
        if (pool.reserved_bytes() > kCap) intact = false;
      }
      free_all(pool, blocks);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(intact);
  EXPECT_EQ(pool.used_bytes(), 0u);
  pool.trim();
  EXPECT_EQ(pool.reserved_bytes(), 0u);
}

}  // namespace
}  // namespace ebbtide
