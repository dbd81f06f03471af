// Packing: storages that cross together, on their way back.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine_test_support.h"

namespace ebbtide::testing {
namespace {

constexpr EngineConfig kPacking{
    .keep_last_groups = 0, .prefetch_groups = 0, .in_flight_bytes = UINT64_MAX, .pack_below_bytes = 128};
constexpr std::uint64_t kBytes = 32;

// `count` storages that lie in one pack.
std::vector<Saved> packed(Driver& driver, EpochId epoch, int count = 4) {
  std::vector<Saved> saved;
  driver.begin_group(epoch, 1);
  for (int i = 0; i < count; ++i) {
    Storage storage = driver.device.allocate(kBytes, 64 * static_cast<std::uint64_t>(i));
    write(storage, static_cast<std::uint8_t>(10 * i + 3));
    saved.push_back(driver.pack(std::move(storage), bytes_view(0, kBytes), epoch));
  }
  driver.end_group();
  driver.complete_all();
  return saved;
}

void finish(Driver& driver, const std::vector<Saved>& saved) {
  for (const Saved& one : saved) driver.drop(one);
  driver.complete_all();
  driver.expect_at_rest();
}

TEST(EnginePackLoad, BringsBackWhatThePassStillNeeds) {
  Driver driver({.config = kPacking});
  std::vector<Saved> saved = packed(driver, driver.begin_epoch());
  driver.drop(saved[1]);
  EXPECT_NE(driver.unpack(saved[3], kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 3 * kBytes) << "not the one that was dropped";
  EXPECT_NE(driver.unpack(saved[2], kPass), nullptr);
  EXPECT_NE(driver.unpack(saved[0], kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 3 * kBytes) << "each byte once";
  EXPECT_EQ(driver.engine.stats().prefetch_hits, 2u);
  driver.end_pass(kPass);
  EXPECT_EQ(driver.device.used_bytes(), 0u);

  // Another backward over the same graph needs them all again; asking outside of one, just what is asked for.
  EXPECT_NE(driver.unpack(saved[2], PassId{}), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 4 * kBytes);
  EXPECT_NE(driver.unpack(saved[2], kNextPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 7 * kBytes);
  driver.end_pass(kNextPass);
  saved.erase(saved.begin() + 1);
  finish(driver, saved);
}

TEST(EnginePackLoad, WhatIsServedOrHeldDoesNotComeAgain) {
  Driver driver({.config = kPacking, .hold_copies = true});
  const std::vector<Saved> saved = packed(driver, driver.begin_epoch());
  Storage held = driver.unpack(saved[0], PassId{});
  driver.complete_all();
  EXPECT_EQ(driver.engine.stats().h2d_bytes, kBytes);
  EXPECT_EQ(driver.unpack(saved[0], kPass), held);
  EXPECT_NE(driver.unpack(saved[1], kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 4 * kBytes);
  held.reset();
  finish(driver, saved);
}

class EnginePackPasses : public ::testing::TestWithParam<const char*> {};

// Two micro-batches: their forwards (F, G) and backwards (f, g), step by step.
TEST_P(EnginePackPasses, OneMicroBatchDoesNotDisturbTheOther) {
  for (const bool hold : {false, true}) {
    Driver driver({.config = kPacking, .hold_copies = hold});
    std::vector<Saved> saved[2];
    std::uint64_t moved[2] = {0, 0};
    EpochId epochs[2] = {driver.begin_epoch(), driver.begin_epoch()};
    for (const char step : std::string(GetParam())) {
      const std::size_t which = step == 'F' || step == 'f' ? 0 : 1;
      if (step == 'F' || step == 'G') {
        for (const Saved& one : packed(driver, epochs[which])) saved[which].push_back(one);
        continue;
      }
      const std::uint64_t before = driver.engine.stats().h2d_bytes;
      for (std::size_t n = saved[which].size() / 2; n > 0; --n) {
        EXPECT_NE(driver.unpack(saved[which].back(), PassId{which + 1}), nullptr);
        driver.drop(saved[which].back());
        saved[which].pop_back();
      }
      moved[which] += driver.engine.stats().h2d_bytes - before;
    }
    for (const std::size_t which : {0u, 1u}) {
      while (!saved[which].empty()) {
        EXPECT_NE(driver.unpack(saved[which].back(), PassId{which + 1}), nullptr);
        driver.drop(saved[which].back());
        saved[which].pop_back();
      }
      driver.end_pass(PassId{which + 1});
    }
    const Stats stats = driver.engine.stats();
    EXPECT_EQ(stats.h2d_bytes, stats.d2h_bytes) << "something came back twice, or nobody asked for it";
    driver.complete_all();
    driver.expect_at_rest();
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, EnginePackPasses,
                         ::testing::Values("FGfg", "FGgf", "FfGg", "FfGfg", "FGfgfgf", "FGffgg", "FfFGfggf"));

TEST(EnginePackLoad, ASecondMicroBatchIsNotLoadedWithTheFirst) {
  Driver driver({.config = kPacking});
  const std::vector<Saved> first = packed(driver, driver.begin_epoch());
  const std::vector<Saved> second = packed(driver, driver.begin_epoch());
  EXPECT_NE(driver.unpack(first[3], kPass), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 3 * kBytes);
  driver.end_pass(kNextPass);
  EXPECT_EQ(driver.device.used_bytes(), 3 * kBytes) << "the end of another pass";
  EXPECT_NE(driver.unpack(second[3], kNextPass), nullptr);
  driver.end_pass(kPass);
  EXPECT_EQ(driver.device.used_bytes(), 3 * kBytes);
  driver.end_pass(kNextPass);
  for (const Saved& one : first) driver.drop(one);
  finish(driver, second);
}

TEST(EnginePackLoad, WhatAnotherForwardSavedIntoTheSamePackStaysThere) {
  EngineConfig config = kPacking;
  config.keep_last_groups = {};
  Driver driver({.config = config});
  const EpochId epochs[2] = {driver.begin_epoch(), driver.begin_epoch()};
  std::vector<Saved> saved;
  for (int i = 0; i < 4; ++i) {
    saved.push_back(
        driver.pack(filled(driver, kBytes, static_cast<std::uint8_t>(i)), bytes_view(0, kBytes), epochs[i % 2]));
  }
  driver.end_epoch(epochs[1]);
  ASSERT_EQ(driver.engine.stats().d2h_copies, 1u);
  EXPECT_NE(driver.unpack(saved[2], kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 2 * kBytes);
  finish(driver, saved);
}

TEST(EnginePackLoad, WhatFindsNoMemoryIsLeftOutAndLoadedLater) {
  for (const int nth : {2, 3, 4}) {
    Driver driver({.config = kPacking});
    const std::vector<Saved> saved = packed(driver, driver.begin_epoch());
    driver.fail_allocation(nth);
    EXPECT_NE(driver.unpack(saved[3], kPass), nullptr);
    EXPECT_EQ(driver.engine.stats().h2d_bytes, 3 * kBytes);
    for (const int i : {2, 1, 0}) EXPECT_NE(driver.unpack(saved[i], kPass), nullptr);
    EXPECT_EQ(driver.engine.stats().h2d_bytes, 4 * kBytes);
    driver.end_pass(kPass);
    finish(driver, saved);
  }
}

TEST(EnginePackLoad, WithoutMemoryForWhatWasAskedForNothingComesAndItIsTriedAgain) {
  Driver driver({.config = kPacking});
  const std::vector<Saved> saved = packed(driver, driver.begin_epoch());
  driver.fail_allocation(1);
  EXPECT_NE(driver.unpack(saved[3], kPass), nullptr) << "there was memory the second time";
  EXPECT_EQ(driver.engine.stats().h2d_copies, 1u);
  EXPECT_EQ(driver.engine.stats().prefetch_misses, 2u);
  for (const int i : {2, 1, 0}) EXPECT_NE(driver.unpack(saved[i], kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 4 * kBytes);
  finish(driver, saved);
}

TEST(EnginePackLoad, MemoryForOthersIsLetGoOfWhenItIsShort) {
  Driver driver({.config = kPacking, .device_capacity = 3 * kBytes});
  const std::vector<Saved> saved = packed(driver, driver.begin_epoch(), 3);
  const std::vector<Saved> other = packed(driver, driver.begin_epoch(), 3);
  EXPECT_NE(driver.unpack(saved[2], kPass), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 2 * kBytes);
  const Storage asked = driver.unpack(other[0], kNextPass);
  EXPECT_NE(asked, nullptr);
  const Storage more = driver.unpack(saved[0], kPass);
  EXPECT_NE(more, nullptr);
  EXPECT_NE(driver.unpack(other[1], kNextPass), nullptr);
  for (const Saved& one : other) driver.drop(one);
  for (const Saved& one : saved) driver.drop(one);
}

TEST(EnginePackLoad, AFailedCopyIsTriedAgainForEveryOne) {
  Driver driver({.config = kPacking});
  const std::vector<Saved> saved = packed(driver, driver.begin_epoch());
  driver.fail_next_copies(1);
  EXPECT_EQ(driver.unpack(saved[3], kPass), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 0u);
  for (const int i : {3, 1, 0, 2}) EXPECT_NE(driver.unpack(saved[i], kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 1u);
  finish(driver, saved);
}

TEST(EnginePackLoad, WithoutMemoryForWhatWasAskedForTheOthersGoBack) {
  Driver driver({.config = kPacking, .hold_copies = true});
  const std::vector<Saved> saved = packed(driver, driver.begin_epoch());
  const RestoreVerdict verdict = driver.engine.restore(saved[3].ticket, kPass, false, false);
  driver.run(verdict.commands);
  EXPECT_EQ(driver.device.used_bytes(), 3 * kBytes);
  EXPECT_TRUE(driver.held().empty()) << "the copy waits for the storage that was asked for";
  driver.run(driver.engine.allocation_failed(saved[3].storage, verdict.load));
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  for (const Saved& one : saved) EXPECT_NE(driver.unpack(one, kPass), nullptr);
  finish(driver, saved);
}

TEST(EnginePackLoad, MemoryThatComesTooLateIsLetGoOf) {
  Driver driver({.config = kPacking, .hold_copies = true});
  const std::vector<Saved> saved = packed(driver, driver.begin_epoch());
  const RestoreVerdict verdict = driver.engine.restore(saved[3].ticket, kPass, false, false);
  driver.run(driver.engine.allocation_failed(saved[3].storage, verdict.load));
  // Meanwhile somebody else has begun the next load of the same storages.
  const RestoreVerdict next = driver.engine.restore(saved[2].ticket, kPass, false, false);
  driver.run(verdict.commands);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  driver.run(driver.engine.allocation_failed(saved[2].storage, next.load));
  for (const Saved& one : saved) EXPECT_NE(driver.unpack(one, kPass), nullptr);
  finish(driver, saved);
}

TEST(EnginePackLoad, WhatWasDroppedBeforeTheCopyStartedIsNotCopied) {
  Driver driver({.config = kPacking, .hold_copies = true});
  std::vector<Saved> saved = packed(driver, driver.begin_epoch());
  const RestoreVerdict verdict = driver.engine.restore(saved[3].ticket, kPass, false, false);
  driver.run(verdict.commands);
  driver.drop(saved[0]);
  const Storage storage = driver.device.allocate(verdict.nbytes, verdict.residue);
  driver.run(driver.engine.allocated(saved[3].storage, verdict.load, storage->ref, {}));
  ASSERT_EQ(driver.held().size(), 1u);
  EXPECT_EQ(driver.command(verdict.load).storages.size(), 3u);
  EXPECT_EQ(driver.engine.stats().entries, 3u);
  driver.drop(saved[1]);
  EXPECT_EQ(driver.engine.stats().entries, 3u) << "a copy writes to it";
  driver.complete_all();
  EXPECT_EQ(driver.engine.stats().entries, 2u);
  driver.drop(saved[2]);
  driver.drop(saved[3]);
  EXPECT_EQ(driver.space->used_bytes(), 0u);
}

TEST(EnginePackLoad, AFileIsReadInThePiecesThatWereWritten) {
  Driver driver({.config = kPacking, .tier = Tier::kFile});
  const std::vector<Saved> saved = packed(driver, driver.begin_epoch());
  EXPECT_NE(driver.unpack(saved[2], PassId{}), nullptr);
  for (const Saved& one : saved) EXPECT_NE(driver.unpack(one, kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().spilled_bytes, 4 * kBytes);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 5 * kBytes) << "what arrives counts, not what is read";
  finish(driver, saved);
}

}  // namespace
}  // namespace ebbtide::testing
