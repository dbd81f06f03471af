// What waits while a full space moves on into the file behind it.
#include <gtest/gtest.h>

#include <vector>

#include "engine_test_support.h"

namespace ebbtide::testing {
namespace {

constexpr std::uint64_t kBytes = 64;

class EngineWaiting : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kSmallCap = 128;
  static constexpr std::uint64_t kLarge = 90;

  // Storages 0 and 1 are in the file; 2 is in the space, and leaves no room beside it.
  void SetUp() override {
    saved = pack_storages(driver, 2);
    saved.push_back(driver.pack(filled(driver, kLarge), bytes_view(0, kLarge), EpochId{1}));
    driver.complete_all();
    ASSERT_EQ(driver.engine.stats().tier_bytes, kLarge);
    ASSERT_EQ(driver.engine.stats().backing_bytes, 2 * kBytes);
  }
  // Begins to load, without waiting for anything.
  CopyId begin(std::size_t which) {
    const RestoreVerdict verdict = driver.engine.restore(saved[which].ticket, kPass, false, false);
    EXPECT_EQ(verdict.outcome, RestoreOutcome::kLoad);
    driver.adopt(saved[which].storage, verdict.load, driver.device.allocate(verdict.nbytes, verdict.residue), {});
    driver.run(verdict.commands);
    return verdict.load;
  }
  void finish() {
    driver.complete_all();
    EXPECT_LE(driver.engine.stats().peak_tier_bytes, kSmallCap);
    restore_and_drop(driver, saved);
  }

  Driver driver{{.config = {.in_flight_bytes = 1 << 16, .max_tier_bytes = kSmallCap},
                 .backing_capacity = 1 << 16,
                 .hold_copies = true}};
  std::vector<Saved> saved;
};

TEST_F(EngineWaiting, ALoadWaitsForRoomThenForItsBytes) {
  const CopyId load = begin(0);
  EXPECT_FALSE(driver.engine.running(load));
  // First the oldest in the space has to move on.
  const std::vector<CopyId> spills = driver.held(Hop::kSpill);
  ASSERT_EQ(spills.size(), 1u);
  EXPECT_EQ(driver.engine.blocker(load), spills.front());
  driver.complete(spills.front());
  const std::vector<CopyId> fetches = driver.held(Hop::kFetch);
  ASSERT_EQ(fetches.size(), 1u);
  EXPECT_EQ(driver.engine.blocker(load), fetches.front());
  EXPECT_FALSE(driver.engine.running(load));
  driver.complete(fetches.front());
  EXPECT_EQ(driver.engine.blocker(load), CopyId{});
  EXPECT_TRUE(driver.engine.running(load));
  driver.complete(load);
  finish();
}

TEST_F(EngineWaiting, AFailureToMakeRoomIsTold) {
  const CopyId load = begin(0);
  driver.complete(driver.held(Hop::kSpill).front(), false);
  ASSERT_TRUE(driver.load_failures.contains(load));
  EXPECT_EQ(driver.load_failures[load].nbytes, kBytes);
  driver.drop(saved[2]);
  saved.pop_back();
  finish();
}

TEST_F(EngineWaiting, WhatIsDroppedMeanwhileIsNotLoaded) {
  const CopyId load = begin(0);
  driver.drop(saved[0]);
  saved.erase(saved.begin());
  driver.complete_all();
  EXPECT_FALSE(driver.engine.running(load));
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_EQ(driver.engine.stats().entries, 2u);
  finish();
}

TEST_F(EngineWaiting, OthersThatAskForTheSameBytesWaitForTheSameCopies) {
  const CopyId load = begin(0);
  const RestoreVerdict other = driver.engine.restore(saved[0].ticket, kNextPass, false, false);
  EXPECT_EQ(other.outcome, RestoreOutcome::kPending);
  EXPECT_EQ(other.load, load);
  EXPECT_FALSE(other.allocating);
  EXPECT_EQ(driver.engine.blocker(other.load), driver.held(Hop::kSpill).front());
  finish();
}

TEST_F(EngineWaiting, AnOffloadWaitsForRoom) {
  saved.push_back(pack_storages(driver, 1).front());
  EXPECT_TRUE(driver.held(Hop::kOffload).empty());
  EXPECT_EQ(driver.held(Hop::kSpill).size(), 1u);
  EXPECT_EQ(driver.device.used_bytes(), kBytes);
  driver.complete(driver.held(Hop::kSpill).front());
  EXPECT_EQ(driver.held(Hop::kOffload).size(), 1u);
  driver.complete_all();
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  finish();
}

TEST_F(EngineWaiting, GivenToSomebodyOrDroppedItDoesNotWaitAnyMore) {
  for (const Saved& one : pack_storages(driver, 2)) saved.push_back(one);
  Storage live = driver.unpack(saved[3], kPass);
  driver.drop(saved[4]);
  saved.pop_back();
  driver.complete_all();
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 2 * kBytes + kLarge);
  EXPECT_EQ(driver.device.used_bytes(), kBytes);
  live.reset();
  finish();
}

TEST_F(EngineWaiting, CutShortTheLoadIsGivenUpAndBegunAnew) {
  for (const bool lost : {true, false}) {
    const CopyId load = begin(0);
    if (lost) driver.lose_copies();
    driver.recover();
    EXPECT_FALSE(driver.engine.running(load));
    EXPECT_EQ(driver.engine.blocker(load), CopyId{});
    EXPECT_EQ(driver.device.used_bytes(), 0u);
    driver.complete_all();
    EXPECT_NE(driver.unpack(saved[0], PassId{}), nullptr) << "the file still takes what makes room";
    driver.complete_all();
  }
  finish();
}

TEST_F(EngineWaiting, CutShortDuringAFetchTheBytesStayInTheFile) {
  (void)begin(0);
  driver.complete(driver.held(Hop::kSpill).front());
  const CopyId fetch = driver.held(Hop::kFetch).front();
  driver.lose_copies();
  driver.recover();
  EXPECT_FALSE(driver.engine.running(fetch));
  driver.complete_all();
  finish();
}

}  // namespace
}  // namespace ebbtide::testing
