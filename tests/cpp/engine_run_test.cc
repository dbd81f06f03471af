// Runs: groups whose storages leave and come back when the caller says so.
#include <gtest/gtest.h>

#include <vector>

#include "engine_test_support.h"
#include "stream_driver.h"

namespace ebbtide::testing {
namespace {

// Nothing leaves or comes by itself, but what is outside of runs and over 64 bytes.
constexpr EngineConfig kByHand{.keep_last_bytes = 64, .in_flight_bytes = UINT64_MAX};

std::vector<Saved> save_run(Driver& driver, EpochId epoch, RunId run, int count = 2, SavedIn in = {}) {
  std::vector<Saved> saved;
  for (int i = 0; i < count; ++i) {
    in.run = run;
    const auto seed = static_cast<std::uint8_t>(16 * value(run) + static_cast<std::uint64_t>(i));
    saved.push_back(driver.pack(filled(driver, 64, seed), bytes_view(0, 64), epoch, {}, nullptr, 1, in));
  }
  return saved;
}

void unpack_and_drop(Driver& driver, std::vector<Saved> saved, PassId pass) {
  for (auto one = saved.rbegin(); one != saved.rend(); ++one) {
    EXPECT_NE(driver.unpack(*one, pass), nullptr);
    driver.drop(*one);
  }
  driver.end_pass(pass);
}

class EngineRun : public ::testing::Test {
 protected:
  Driver driver{{.config = kByHand}};
  const EpochId epoch = driver.begin_epoch();
  const RunId run = driver.open_run();
};

TEST_F(EngineRun, NothingLeavesBeforeItIsTold) {
  const std::vector<Saved> saved = save_run(driver, epoch, run, 4);
  driver.end_epoch(epoch);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 0u);
  EXPECT_EQ(driver.engine.run_state(run).scheduled, 4u);
  driver.offload_run(run);
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 4u * 64);
  EXPECT_EQ(driver.engine.run_state(run).away, 4u);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  unpack_and_drop(driver, saved, kPass);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 4u * 64);
  driver.expect_at_rest();
}

TEST_F(EngineRun, NeverToldToLeaveIsALiveHitAndCountedAsLast) {
  unpack_and_drop(driver, save_run(driver, epoch, run), kPass);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.live_hits, 2u);
  EXPECT_EQ(stats.kept[static_cast<std::size_t>(KeepReason::kLast)], 2u);
  EXPECT_EQ(stats.d2h_bytes + stats.h2d_bytes, 0u);
  driver.end_epoch(epoch);
  driver.expect_at_rest();
}

TEST_F(EngineRun, ComesBackWhenItIsTold) {
  const std::vector<Saved> saved = save_run(driver, epoch, run, 3);
  driver.offload_run(run);
  driver.end_epoch(epoch);
  driver.load_run(run);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 3u * 64);
  EXPECT_EQ(driver.engine.run_state(run).back, 3u);
  unpack_and_drop(driver, saved, kPass);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.h2d_bytes, 3u * 64) << "loaded once";
  EXPECT_EQ(stats.prefetch_hits, 3u);
  EXPECT_EQ(stats.prefetch_misses, 0u);
  driver.expect_at_rest();
}

TEST(EngineRunConfigured, IsNotLoadedOnAGuess) {
  Driver driver({.config = {.prefetch_bytes = 1 << 20, .in_flight_bytes = UINT64_MAX}});
  const EpochId epoch = driver.begin_epoch();
  const RunId run = driver.open_run();
  const std::vector<Saved> saved = save_run(driver, epoch, run, 3);
  driver.offload_run(run);
  driver.end_epoch(epoch);
  EXPECT_NE(driver.unpack(saved.back(), kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 64u);
  unpack_and_drop(driver, saved, kPass);
  driver.expect_at_rest();
}

TEST_F(EngineRun, WhatOneRunLoadedStaysWhileABackwardOfAnotherEnds) {
  const RunId first = driver.open_run();
  const RunId second = driver.open_run();
  const std::vector<Saved> of_first = save_run(driver, epoch, first);
  const std::vector<Saved> of_second = save_run(driver, epoch, second);
  driver.offload_run(first);
  driver.offload_run(second);
  driver.end_epoch(epoch);
  driver.load_run(second);
  driver.load_run(first);
  unpack_and_drop(driver, of_second, kPass);
  EXPECT_EQ(driver.engine.run_state(first).back, 2u);
  unpack_and_drop(driver, of_first, kNextPass);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 4u * 64);
  driver.expect_at_rest();
}

TEST(EngineRunConfigured, TwoRunsOfOneGroupKeepTheirBytesApart) {
  Driver driver({.config = kByHand});
  std::vector<std::vector<Saved>> saved;
  std::vector<RunId> runs;
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
    const EpochId epoch = driver.begin_epoch();
    runs.push_back(driver.open_run(1));
    saved.push_back(save_run(driver, epoch, runs.back()));
    driver.offload_run(runs.back());
    driver.end_epoch(epoch);
  }
  EXPECT_EQ(driver.engine.group_stats().at(1).runs, 3u);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    driver.load_run(runs[i]);
    unpack_and_drop(driver, saved[i], PassId{i + 1});
  }
  driver.expect_at_rest();
}

TEST_F(EngineRun, AStorageOfTwoRunsLeavesWithTheLastAndComesBackWithTheFirstLoaded) {
  const RunId first = driver.open_run(1);
  const RunId second = driver.open_run(2);
  Storage shared = filled(driver, 64);
  const Saved one = driver.pack(shared, bytes_view(0, 64), epoch, {}, nullptr, 1, {.run = first});
  const Saved two = driver.pack(std::move(shared), bytes_view(0, 32), epoch, {}, nullptr, 2, {.run = second});
  driver.offload_run(first);
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 0u);
  driver.offload_run(second);
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 64u);
  driver.load_run(second);
  driver.load_run(first);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 64u);
  EXPECT_NE(driver.unpack(two, kPass), nullptr);
  driver.drop(two);
  EXPECT_NE(driver.unpack(one, kPass), nullptr);
  driver.drop(one);
  driver.end_pass(kPass);
  driver.end_epoch(epoch);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 64u);
  driver.expect_at_rest();
}

TEST(EngineRunConfigured, SavedAgainInARunWhatWasAboutToLeaveWaits) {
  Driver driver({.config = {.in_flight_bytes = UINT64_MAX}});
  const EpochId epoch = driver.begin_epoch();
  Storage held = filled(driver, 64);
  const Saved outside = driver.pack(held, bytes_view(0, 64), epoch);
  EXPECT_EQ(driver.engine.stats().parked, 1u);
  const RunId run = driver.open_run();
  const Saved inside = driver.pack(std::move(held), bytes_view(0, 64), epoch, {}, nullptr, 1, {.run = run});
  EXPECT_EQ(driver.engine.stats().parked, 0u);
  driver.end_epoch(epoch);
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 0u);
  driver.offload_run(run);
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 64u);
  driver.drop(outside);
  driver.drop(inside);
  driver.expect_at_rest();
}

TEST_F(EngineRun, ToldAgainItLooksAtWhatOthersHeld) {
  Storage held = filled(driver, 64);
  const Saved saved = driver.pack(held, bytes_view(0, 64), epoch, {}, nullptr, 1, {.run = run});
  driver.offload_run(run);
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 0u);
  EXPECT_EQ(driver.engine.run_state(run).leaving, 1u);
  held.reset();
  driver.offload_run(run);
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 64u);
  driver.end_epoch(epoch);
  unpack_and_drop(driver, {saved}, kPass);
  driver.expect_at_rest();
}

TEST_F(EngineRun, OnRequestOnlyWhatIsNamedLeaves) {
  const SavedIn on_request{.run = run, .on_request = true};
  Storage named = filled(driver, 64, 3);
  const std::uint64_t identity = named->ref.identity;
  const Saved wanted = driver.pack(std::move(named), bytes_view(0, 64), epoch, {}, nullptr, 1, on_request);
  const std::vector<Saved> others = save_run(driver, epoch, run, 2, on_request);
  driver.request(run, identity);
  driver.offload_run(run);
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 64u);
  EXPECT_EQ(driver.engine.run_state(run).staying, 2u);
  EXPECT_EQ(driver.engine.stats().kept[static_cast<std::size_t>(KeepReason::kPolicy)], 2u);
  driver.end_epoch(epoch);
  unpack_and_drop(driver, others, kPass);
  unpack_and_drop(driver, {wanted}, kNextPass);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 64u);
  driver.expect_at_rest();
}

TEST_F(EngineRun, NamedBeforeItIsSavedItLeavesToo) {
  Storage named = filled(driver, 64);
  driver.request(run, named->ref.identity);
  const SavedIn on_request{.run = run, .on_request = true};
  const Saved saved = driver.pack(std::move(named), bytes_view(0, 64), epoch, {}, nullptr, 1, on_request);
  driver.offload_run(run);
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 64u);
  driver.end_epoch(epoch);
  unpack_and_drop(driver, {saved}, kPass);
  driver.expect_at_rest();
}

TEST_F(EngineRun, ClosedItIsForgottenAndItsTicketsAreNot) {
  const std::vector<Saved> saved = save_run(driver, epoch, run);
  driver.offload_run(run);
  driver.load_run(run);
  driver.close_run(run);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_EQ(driver.engine.run_state(run).away, 0u);
  driver.end_epoch(epoch);
  unpack_and_drop(driver, saved, kPass);
  driver.expect_at_rest();
}

TEST_F(EngineRun, ClosedBeforeItWasToldToLeaveItStays) {
  const std::vector<Saved> saved = save_run(driver, epoch, run);
  driver.close_run(run);
  driver.end_epoch(epoch);
  unpack_and_drop(driver, saved, kPass);
  EXPECT_EQ(driver.engine.stats().live_hits, 2u);
  driver.expect_at_rest();
}

TEST_F(EngineRun, KeptStaysOnTheDevice) {
  const std::vector<Saved> saved = save_run(driver, epoch, run);
  driver.keep_run(run);
  driver.offload_run(run);
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 0u);
  EXPECT_EQ(driver.engine.run_state(run).staying, 2u);
  driver.end_epoch(epoch);
  unpack_and_drop(driver, saved, kPass);
  driver.expect_at_rest();
}

TEST_F(EngineRun, ReleasedGoesBackToTheTierAlone) {
  const std::vector<Saved> saved = save_run(driver, epoch, run);
  driver.offload_run(run);
  driver.load_run(run);
  EXPECT_EQ(driver.device.used_bytes(), 2u * 64);
  driver.release_run(run);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_EQ(driver.engine.run_state(run).away, 2u);
  driver.end_epoch(epoch);
  unpack_and_drop(driver, saved, kPass);
  driver.expect_at_rest();
}

TEST(EngineRunConfigured, ReleasedWhileItLoadsIsLetGoOfWhenItIsThere) {
  Driver driver({.config = kByHand, .hold_copies = true});
  const EpochId epoch = driver.begin_epoch();
  const RunId run = driver.open_run();
  const std::vector<Saved> saved = save_run(driver, epoch, run, 1);
  driver.offload_run(run);
  driver.complete_all();
  driver.load_run(run);
  EXPECT_EQ(driver.engine.loads_of(run).size(), 1u);
  driver.release_run(run);
  driver.complete_all();
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  driver.end_epoch(epoch);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EngineRunConfigured, GraphsDroppedWhileTheyLoadLeaveNothing) {
  Driver driver({.config = kByHand, .hold_copies = true});
  const EpochId epoch = driver.begin_epoch();
  const RunId run = driver.open_run();
  const std::vector<Saved> saved = save_run(driver, epoch, run);
  driver.offload_run(run);
  driver.complete_all();
  driver.load_run(run);
  for (const Saved& one : saved) driver.drop(one);
  driver.complete_all();
  driver.end_epoch(epoch);
  driver.expect_at_rest();
  EXPECT_EQ(driver.engine.run_state(run).coming, 0u);
}

TEST(EngineRunConfigured, LettingGoWaitsForSynchronousCopies) {
  Driver driver({.config = kByHand, .hold_copies = true});
  const EpochId epoch = driver.begin_epoch();
  const RunId run = driver.open_run();
  const std::vector<Saved> saved = save_run(driver, epoch, run);
  driver.offload_run(run);
  EXPECT_EQ(driver.device.used_bytes(), 2u * 64);
  driver.let_go_run(run);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  driver.end_epoch(epoch);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST_F(EngineRun, OneThatFindsNoMemoryIsLoadedWhenItIsAskedFor) {
  const std::vector<Saved> saved = save_run(driver, epoch, run);
  driver.offload_run(run);
  driver.end_epoch(epoch);
  driver.fail_allocation(1);
  driver.load_run(run);
  EXPECT_EQ(driver.engine.run_state(run).back, 1u);
  unpack_and_drop(driver, saved, kPass);
  driver.expect_at_rest();
}

TEST(EngineRunConfigured, ATierWithoutRoomInTheMiddleLeavesTheRestOnTheDevice) {
  Driver driver({.config = {.in_flight_bytes = UINT64_MAX, .max_tier_bytes = 128}});
  const EpochId epoch = driver.begin_epoch();
  const RunId run = driver.open_run();
  const std::vector<Saved> saved = save_run(driver, epoch, run, 4);
  driver.offload_run(run);
  EXPECT_EQ(driver.engine.run_state(run).away, 2u);
  EXPECT_EQ(driver.engine.run_state(run).staying, 2u);
  EXPECT_EQ(driver.engine.stats().kept[static_cast<std::size_t>(KeepReason::kHostFull)], 2u);
  driver.load_run(run);
  driver.end_epoch(epoch);
  unpack_and_drop(driver, saved, kPass);
  driver.expect_at_rest();
}

TEST(EngineRunConfigured, PackedARunCrossesInOneCopyEachWay) {
  Driver driver({.config = {.in_flight_bytes = UINT64_MAX, .pack_below_bytes = 1024}});
  const EpochId epoch = driver.begin_epoch();
  std::vector<std::vector<Saved>> saved;
  std::vector<RunId> runs;
  for (int i = 0; i < 2; ++i) {
    runs.push_back(driver.open_run());
    saved.push_back(save_run(driver, epoch, runs.back(), 4));
    driver.offload_run(runs.back());
  }
  EXPECT_EQ(driver.engine.stats().d2h_copies, 2u);
  driver.end_epoch(epoch);
  driver.load_run(runs[1]);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 1u);
  unpack_and_drop(driver, saved[1], kPass);
  driver.load_run(runs[0]);
  unpack_and_drop(driver, saved[0], kNextPass);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 2u);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 8u * 64);
  driver.expect_at_rest();
}

TEST(EngineRunConfigured, OfWhatNobodyKnowsNothingIsAsked) {
  Driver driver({.config = kByHand});
  const RunId unknown{77};
  driver.offload_run(unknown);
  driver.load_run(unknown);
  driver.let_go_run(unknown);
  driver.release_run(unknown);
  driver.keep_run(unknown);
  EXPECT_TRUE(driver.engine.loads_of(unknown).empty());
  driver.expect_at_rest();
}

TEST(EngineRunConfigured, AJournalWithRunsIsReplayed) {
  const DriverOptions options{.config = kByHand, .record = true};
  Driver driver(options);
  const EpochId epoch = driver.begin_epoch();
  const RunId run = driver.open_run();
  const std::vector<Saved> saved = save_run(driver, epoch, run, 2, {.on_request = true});
  driver.request(run, 1);
  driver.offload_run(run);
  driver.let_go_run(run);
  driver.end_epoch(epoch);
  driver.load_run(run);
  driver.order_after_run(run, {});
  driver.release_run(run);
  driver.keep_run(run);
  unpack_and_drop(driver, saved, kPass);
  Engine anew(options.config, std::make_shared<FakeSpace>(options.tier_capacity, options.tier));
  EXPECT_FALSE(replay(driver.journal, anew).has_value());
}

// --- on streams

TEST(EngineRunOnStreams, LettingGoDoesNotWait) {
  StreamDriver driver({.config = kByHand, .hold_copies = true});
  const EpochId epoch = driver.begin_epoch();
  const RunId run = driver.open_run();
  const Saved saved = driver.pack(driver.filled(64), bytes_view(0, 64), epoch, kMain, nullptr, 1, {.run = run});
  driver.offload_run(run);
  ASSERT_EQ(driver.held().size(), 1u);
  driver.let_go_run(run);
  EXPECT_EQ(driver.held().size(), 1u) << "the copy is still on its way";
  EXPECT_EQ(driver.engine.stats().device_bytes, 0u);
  driver.end_epoch(epoch);
  driver.load_run(run);
  driver.order_after_run(run, kMain);
  EXPECT_NE(driver.unpack(saved, kPass, kMain), nullptr);
  driver.drop(saved);
  driver.end_pass(kPass);
  driver.complete_all();
  driver.expect_at_rest();
}

}  // namespace
}  // namespace ebbtide::testing
