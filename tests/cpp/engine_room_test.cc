// A space that is small: memory that its owner adds, and a file behind it.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "engine_test_support.h"
#include "stream_driver.h"

namespace ebbtide::testing {
namespace {

constexpr std::uint64_t kBytes = 64;
constexpr std::uint64_t kCap = 4 * kBytes;

std::uint64_t kept_for(const Driver& driver, KeepReason reason) {
  return driver.engine.stats().kept[static_cast<std::size_t>(reason)];
}

std::uint64_t host_full(const Driver& driver) { return kept_for(driver, KeepReason::kHostFull); }

std::uint64_t disk_full(const Driver& driver) { return kept_for(driver, KeepReason::kDiskFull); }

TEST(EngineGrow, ASpaceThatIsFullIsGrownAndTheStoragesThatWaitedCross) {
  Driver driver({.grows = true});
  const std::vector<Saved> saved = pack_storages(driver, 3);
  EXPECT_EQ(driver.growths, 3);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 3u);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  restore_and_drop(driver, saved);
}

TEST(EngineGrow, NothingIsAskedForTwiceWhileTheSpaceGrows) {
  Engine engine(kUnbounded, [] {
    auto space = std::make_shared<FakeSpace>(1 << 20);
    space->start_empty();
    return space;
  }());
  for (std::uint64_t id = 1; id <= 3; ++id) {
    (void)engine.save(request(id, kBytes));
    EXPECT_EQ(kinds(engine.probed(StorageId{id}, kFree)),
              id == 1 ? std::vector{CommandKind::kGrow} : std::vector<CommandKind>{});
  }
  EXPECT_EQ(engine.stats().device_bytes, 3 * kBytes);
  const Commands refused = engine.grown(false);
  EXPECT_EQ(kinds(refused), std::vector{CommandKind::kTierFull});
  EXPECT_EQ(engine.stats().kept[static_cast<std::size_t>(KeepReason::kHostFull)], 3u);
}

TEST(EngineGrow, RefusedItIsAskedForAgainInTheNextEpoch) {
  Driver driver({.grows = true});
  driver.growths_allowed = 2;
  std::vector<Saved> saved = pack_storages(driver, 5, driver.begin_epoch());
  EXPECT_EQ(driver.growths, 3) << "not again after it was refused";
  EXPECT_EQ(driver.engine.stats().d2h_copies, 2u);
  EXPECT_EQ(host_full(driver), 3u);
  EXPECT_EQ(driver.device.used_bytes(), 3 * kBytes);
  for (const Saved& one : saved) EXPECT_NE(driver.unpack(one, kPass), nullptr);
  driver.growths_allowed = 100;
  for (const Saved& one : pack_storages(driver, 2, driver.begin_epoch())) saved.push_back(one);
  EXPECT_EQ(driver.growths, 5);
  EXPECT_EQ(host_full(driver), 3u);
  restore_and_drop(driver, saved);
}

TEST(EngineGrow, AboveTheCapItIsNotAskedFor) {
  Driver driver({.config = {.max_tier_bytes = 2 * kBytes}, .grows = true});
  const std::vector<Saved> saved = pack_storages(driver, 3);
  EXPECT_EQ(driver.growths, 2);
  EXPECT_EQ(host_full(driver), 1u);
  EXPECT_EQ(driver.space->reserved_bytes(), 2 * kBytes);
  restore_and_drop(driver, saved);
}

TEST(EngineGrow, GivenUpWhenTheSessionIsCutShort) {
  auto space = std::make_shared<FakeSpace>(1 << 20);
  space->start_empty();
  Engine engine(kUnbounded, space);
  const SaveVerdict saved = engine.save(request(1, kBytes));
  ASSERT_EQ(kinds(engine.probed(saved.storage, kFree)), std::vector{CommandKind::kGrow});
  EXPECT_EQ(kinds(engine.recover({})), std::vector{CommandKind::kGrow}) << "it is asked for anew";
  space->grow(kBytes);
  EXPECT_EQ(kinds(engine.grown(true)), std::vector{CommandKind::kCopy});
}

class EngineBacking : public ::testing::TestWithParam<bool> {
 protected:
  static DriverOptions options(std::uint64_t backing = 1 << 16) {
    return {.config = {.prefetch_bytes = 2 * kBytes, .in_flight_bytes = 1 << 16, .max_tier_bytes = kCap},
            .tier_capacity = 1 << 16,
            .backing_capacity = backing,
            .hold_copies = GetParam()};
  }
};

TEST_P(EngineBacking, TheOldestMoveOnAndEverythingComesBack) {
  Driver driver(options());
  const std::vector<Saved> saved = pack_storages(driver, 12);
  driver.complete_all();
  driver.end_epoch(EpochId{1});
  driver.complete_all();
  Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.d2h_bytes, 12 * kBytes);
  EXPECT_EQ(host_full(driver), 0u);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_GE(stats.spilled_bytes, 8 * kBytes);
  EXPECT_EQ(stats.backing_bytes, driver.backing->used_bytes());
  EXPECT_EQ(stats.tier_bytes + stats.backing_bytes, 12 * kBytes) << "each byte in one place";
  restore_and_drop(driver, saved);
  stats = driver.engine.stats();
  EXPECT_EQ(stats.h2d_bytes, 12 * kBytes);
  EXPECT_LE(stats.peak_tier_bytes, kCap);
  EXPECT_GE(stats.peak_backing_bytes, 8 * kBytes);
  EXPECT_EQ(stats.prefetch_misses + stats.prefetch_hits, 12u);
}

TEST_P(EngineBacking, FullItIsAsIfItWereNotThere) {
  Driver driver(options(3 * kBytes));
  const std::vector<Saved> saved = pack_storages(driver, 12);
  driver.complete_all();
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.d2h_bytes, 7 * kBytes);
  EXPECT_EQ(disk_full(driver), 5u);
  EXPECT_EQ(host_full(driver), 0u);
  EXPECT_EQ(driver.tier_full, 1);
  // With both full there is no room to read back in until something is dropped.
  for (const std::size_t i : {11u, 10u, 9u, 8u, 7u, 6u, 5u, 4u, 3u}) {
    EXPECT_NE(driver.unpack(saved[i], kPass), nullptr);
    driver.drop(saved[i]);
  }
  restore_and_drop(driver, {saved[0], saved[1], saved[2]});
}

TEST_P(EngineBacking, WhatHasMovedOnIsNotLookedAtAgain) {
  constexpr int kStorages = 1000;
  for (const std::uint64_t backing : {kStorages * kBytes, 10 * kBytes}) {
    Driver driver(options(backing));
    std::vector<Saved> saved;
    for (int i = 0; i < kStorages; ++i) {
      saved.push_back(pack_storages(driver, 1).front());
      if (i % 3 == 0) driver.complete_all();
    }
    driver.complete_all();
    if (backing == kStorages * kBytes) {
      EXPECT_EQ(host_full(driver), 0u);
      EXPECT_LE(driver.engine.spill_looks(), 4u * kStorages);
    } else {
      EXPECT_EQ(disk_full(driver), kStorages - 10 - kCap / kBytes) << "full";
      EXPECT_EQ(host_full(driver), 0u);
      EXPECT_LE(driver.engine.spill_looks(), 16u * kStorages);
    }
    for (const Saved& one : saved) driver.drop(one);
    driver.complete_all();
    driver.expect_at_rest();
  }
}

TEST_P(EngineBacking, ABackingThatIsNearlyFullTakesWhatStillFits) {
  Driver driver(options(kBytes / 2));
  std::vector<Saved> saved = pack_storages(driver, 2);
  for (const std::uint64_t nbytes : {kBytes / 2, kBytes, kBytes}) {
    saved.push_back(driver.pack(filled(driver, nbytes), bytes_view(0, nbytes), EpochId{1}));
  }
  driver.complete_all();
  EXPECT_EQ(driver.engine.stats().spilled_bytes, kBytes / 2);
  EXPECT_EQ(host_full(driver), 0u);
  for (const Saved& one : saved) driver.drop(one);
  driver.complete_all();
  driver.expect_at_rest();
}

TEST_P(EngineBacking, AFailureToWriteLosesNothing) {
  Driver driver(options());
  driver.fail_next_copies(1, Hop::kSpill);
  const std::vector<Saved> saved = pack_storages(driver, 8);
  driver.complete_all();
  EXPECT_EQ(disk_full(driver), 8u - kCap / kBytes) << "it is not tried again";
  EXPECT_EQ(host_full(driver), 0u);
  EXPECT_EQ(driver.engine.stats().spilled_bytes, 0u);
  EXPECT_EQ(driver.engine.stats().backing_bytes, 0u);
  restore_and_drop(driver, saved);
}

TEST_P(EngineBacking, AFailureToReadIsToldAndTheCopyIsKept) {
  Driver driver(options());
  const std::vector<Saved> saved = pack_storages(driver, 8);
  driver.complete_all();
  driver.fail_next_copies(1, Hop::kFetch);
  EXPECT_EQ(driver.unpack(saved[0], PassId{}), nullptr);
  ASSERT_EQ(driver.load_failures.size(), 1u);
  EXPECT_NE(driver.load_failures.begin()->second.cause, CopyId{});
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_NE(driver.unpack(saved[0], PassId{}), nullptr);
  restore_and_drop(driver, saved);
}

TEST_P(EngineBacking, WithoutRoomToReadIntoItIsTold) {
  DriverOptions small = options(kBytes);
  small.config.max_tier_bytes = kBytes;
  Driver driver(small);
  const std::vector<Saved> saved = pack_storages(driver, 2);
  driver.complete_all();
  ASSERT_EQ(driver.engine.stats().tier_bytes, kBytes);
  ASSERT_EQ(driver.engine.stats().backing_bytes, kBytes);
  EXPECT_EQ(driver.unpack(saved[0], kPass), nullptr);
  ASSERT_EQ(driver.load_failures.size(), 1u);
  EXPECT_EQ(driver.load_failures.begin()->second.cause, CopyId{});
  EXPECT_EQ(driver.load_failures.begin()->second.nbytes, kBytes);
  driver.drop(saved[1]);
  restore_and_drop(driver, {saved[0]});
}

TEST_P(EngineBacking, PacksMoveOnWhole) {
  DriverOptions packing = options();
  packing.config.keep_last_groups = 0;
  packing.config.pack_below_bytes = 32;
  packing.config.prefetch_groups = 1;
  Driver driver(packing);
  const EpochId epoch = driver.begin_epoch();
  std::vector<Saved> saved;
  for (std::size_t group = 1; group <= 6; ++group) {
    driver.begin_group(epoch, group);
    for (int i = 0; i < 5; ++i) {
      const auto seed = static_cast<std::uint8_t>(31 * group + static_cast<std::size_t>(i));
      saved.push_back(driver.pack(filled(driver, 20, seed), bytes_view(0, 20), epoch, {}, nullptr, group));
    }
    driver.end_group();
  }
  driver.complete_all();
  EXPECT_GT(driver.engine.stats().backing_bytes, 0u);
  EXPECT_EQ(host_full(driver), 0u);
  restore_and_drop(driver, saved);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 600u);
  EXPECT_LE(driver.engine.stats().h2d_copies, 12u);
}

INSTANTIATE_TEST_SUITE_P(AtOnceOrLater, EngineBacking, ::testing::Bool());

TEST(EngineBackingOnStreams, BytesThatMovedOnComeBack) {
  StreamDriver driver({.config = {.prefetch_bytes = 2 * kBytes, .in_flight_bytes = 0, .max_tier_bytes = kCap},
                       .tier_capacity = 1 << 14,
                       .backing_capacity = 1 << 14});
  std::vector<Saved> saved;
  for (int i = 0; i < 10; ++i) {
    Storage storage = driver.filled(kBytes, static_cast<std::uint8_t>(20 * i));
    saved.push_back(driver.pack(std::move(storage), bytes_view(0, kBytes), EpochId{1}, kMain));
  }
  EXPECT_EQ(host_full(driver), 0u);
  for (auto one = saved.rbegin(); one != saved.rend(); ++one) {
    EXPECT_NE(driver.unpack(*one, kPass, kMain), nullptr);
    driver.drop(*one);
  }
  EXPECT_LE(driver.engine.stats().peak_tier_bytes, kCap);
  EXPECT_GT(driver.engine.stats().spilled_bytes, 0u);
  driver.end_pass(kPass);
  driver.complete_all();
  driver.expect_at_rest();
}

}  // namespace
}  // namespace ebbtide::testing
