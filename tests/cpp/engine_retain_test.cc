// What is still on its way out when backward begins: it stays until backward has asked for it.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "engine_test_support.h"
#include "stream_driver.h"

namespace ebbtide::testing {
namespace {

constexpr std::uint64_t kBytes = 64;

class EngineRetain : public ::testing::Test {
 protected:
  // Storage 0 is copied; 1, 2 and 3 are on their way.
  void SetUp() override {
    saved.push_back(pack());
    driver.complete_all();
    for (int i = 0; i < 3; ++i) saved.push_back(pack());
    ASSERT_EQ(driver.held(Hop::kOffload).size(), 3u);
    ASSERT_EQ(driver.device.used_bytes(), 3 * kBytes);
  }
  void TearDown() override { EXPECT_EQ(driver.races(), std::vector<std::string>{}); }
  Saved pack(EpochId epoch = EpochId{1}) {
    return driver.pack(driver.filled(kBytes, ++seed), bytes_view(0, kBytes), epoch, kMain);
  }
  // A backward that asks for storage 3, whose copy is of no use any more; the others are copied meanwhile.
  void begin_backward() {
    EXPECT_NE(driver.unpack(saved[3], kPass, kMain), nullptr);
    driver.drop(saved[3]);
    saved.pop_back();
    for (const CopyId copy : driver.held(Hop::kOffload)) driver.complete(copy);
  }
  void finish() {
    for (; !saved.empty(); saved.pop_back()) {
      EXPECT_NE(driver.unpack(saved.back(), kPass, kMain), nullptr);
      driver.drop(saved.back());
    }
    driver.end_pass(kPass);
    driver.complete_all();
    driver.expect_at_rest();
  }

  StreamDriver driver{{.config = {.in_flight_bytes = 4 * kBytes}}};
  std::vector<Saved> saved;
  std::uint8_t seed = 0;
};

TEST_F(EngineRetain, WhatBackwardIsAboutToAskForIsNotLoaded) {
  begin_backward();
  EXPECT_EQ(driver.device.used_bytes(), 2 * kBytes);
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 4 * kBytes) << "the copies are used all the same";
  EXPECT_NE(driver.unpack(saved[2], kPass, kMain), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), kBytes) << "asked for, it is whoever's that got it";
  EXPECT_NE(driver.unpack(saved[1], kPass, kMain), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 0u);
  EXPECT_NE(driver.unpack(saved[2], kNextPass, kMain), nullptr) << "from its copy";
  EXPECT_EQ(driver.engine.stats().h2d_bytes, kBytes);
  finish();
}

TEST_F(EngineRetain, ItGoesWithItsTicket) {
  begin_backward();
  for (; saved.size() > 1; saved.pop_back()) driver.drop(saved.back());
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  finish();
}

TEST_F(EngineRetain, OfATicketThatIsDroppedUnaskedTheOthersClaimsDecide) {
  begin_backward();
  const Saved& one = saved[2];
  Storage live = driver.unpack(one, PassId{}, kMain);
  const Saved again = driver.pack(live, bytes_view(0, kBytes / 2), EpochId{1}, kMain, one.counter);
  ASSERT_EQ(again.storage, one.storage);
  live.reset();
  EXPECT_NE(driver.unpack(again, kPass, kMain), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 2 * kBytes);
  driver.drop(one);
  saved.pop_back();
  EXPECT_EQ(driver.device.used_bytes(), kBytes) << "nobody else will ask in this pass";
  driver.drop(again);
  finish();
}

TEST_F(EngineRetain, TheEndOfThePassLetsGoOfTheRest) {
  begin_backward();
  driver.end_pass(kPass);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  finish();
}

TEST_F(EngineRetain, AnotherBackwardThatRunsKeepsIt) {
  begin_backward();
  EXPECT_NE(driver.unpack(saved[2], kNextPass, kMain), nullptr);
  driver.end_pass(kPass);
  EXPECT_EQ(driver.device.used_bytes(), kBytes);
  driver.end_pass(kNextPass);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  finish();
}

TEST_F(EngineRetain, NothingIsRetainedForAnotherForward) {
  const Saved other = pack(EpochId{2});
  begin_backward();
  EXPECT_EQ(driver.device.used_bytes(), 2 * kBytes);
  driver.drop(other);
  finish();
}

TEST_F(EngineRetain, NorWhatWasSavedAfterWhatBackwardHasComeTo) {
  EXPECT_NE(driver.unpack(saved[1], kPass, kMain), nullptr);
  driver.complete(driver.held(Hop::kOffload)[1]);
  driver.complete(driver.held(Hop::kOffload)[1]);
  EXPECT_EQ(driver.device.used_bytes(), kBytes) << "storage 1, which was given out under its copy";
  driver.complete_all();
  finish();
}

TEST_F(EngineRetain, ItMakesRoomForCopiesBeforeAnybodyWaitsForOne) {
  begin_backward();
  std::vector<Saved> others = {pack(), pack()};
  EXPECT_EQ(driver.device.used_bytes(), 4 * kBytes);
  others.push_back(pack());
  EXPECT_EQ(driver.device.used_bytes(), 4 * kBytes) << "no more than in_flight_bytes";
  EXPECT_EQ(driver.held(Hop::kOffload).size(), 3u) << "none was waited for";
  EXPECT_NE(driver.unpack(saved[2], kPass, kMain), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 0u) << "what is needed last went first";
  for (const Saved& one : others) driver.drop(one);
  finish();
}

TEST_F(EngineRetain, NothingIsRetainedBeyondTheBound) {
  StreamDriver small({.config = {.in_flight_bytes = kBytes}});
  std::vector<Saved> some;
  for (int i = 0; i < 2; ++i) {
    some.push_back(small.pack(small.filled(kBytes), bytes_view(0, kBytes), EpochId{1}, kMain));
  }
  EXPECT_NE(small.unpack(some[1], kPass, kMain), nullptr);
  small.complete_all();
  EXPECT_LE(small.device.used_bytes(), kBytes);
  for (const Saved& one : some) small.drop(one);
  small.expect_at_rest();
  finish();
}

TEST_F(EngineRetain, WhenMemoryIsShortItGoes) {
  begin_backward();
  driver.fail_allocation(1);
  EXPECT_NE(driver.unpack(saved[0], kPass, kMain), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  finish();
}

TEST_F(EngineRetain, WhenMemoryIsShortWhatIsInFlightIsNotRetainedEither) {
  driver.complete(driver.held(Hop::kOffload).back());
  driver.fail_allocation(1);
  EXPECT_NE(driver.unpack(saved[3], kPass, kMain), nullptr);
  EXPECT_TRUE(driver.held(Hop::kOffload).empty()) << "waited for";
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  finish();
}

TEST_F(EngineRetain, ACutShortBackwardLeavesNone) {
  begin_backward();
  driver.recover();
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  finish();
}

TEST_F(EngineRetain, AViewThatComesLateIsCopiedToo) {
  const Saved half = driver.pack(driver.filled(kBytes, 77), bytes_view(0, kBytes / 2), EpochId{1}, kMain);
  const Saved last = pack();
  EXPECT_NE(driver.unpack(last, kPass, kMain), nullptr);
  for (const CopyId copy : driver.held(Hop::kOffload)) driver.complete(copy);
  Storage live = driver.unpack(half, PassId{}, kMain);
  const Saved other = driver.pack(live, bytes_view(kBytes / 2, kBytes), EpochId{1}, kMain, half.counter);
  ASSERT_EQ(other.storage, half.storage);
  live.reset();
  driver.end_epoch(EpochId{1});
  driver.complete_all();
  driver.end_pass(kPass);
  EXPECT_NE(driver.unpack(other, kNextPass, kMain), nullptr);
  EXPECT_NE(driver.unpack(half, kNextPass, kMain), nullptr);
  for (const Saved& one : {half, last, other}) driver.drop(one);
  driver.end_pass(kNextPass);
  finish();
}

TEST_F(EngineRetain, AnotherStreamThatReadsItIsOrderedBeforeItsMemoryIsUsedAgain) {
  begin_backward();
  Storage live = driver.unpack(saved[2], PassId{}, kMain);
  driver.user_order(kMain, kSide);
  const Saved again = driver.pack(live, bytes_view(0, kBytes), EpochId{1}, kSide, saved[2].counter);
  EXPECT_EQ(again.outcome, SaveOutcome::kDuplicate);
  (void)driver.device.read(*live, {0, kBytes}, kSide);
  live.reset();
  driver.drop(again);
  driver.drop(saved[2]);
  saved.pop_back();
  (void)driver.filled(kBytes, 99);
}

}  // namespace
}  // namespace ebbtide::testing
