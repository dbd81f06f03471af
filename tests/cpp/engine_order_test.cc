// Each edge of order between streams: with it nothing races, and without it something does.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "engine_test_support.h"
#include "stream_driver.h"

namespace ebbtide::testing {
namespace {

constexpr std::uint64_t kBytes = 64;

// What `work` does to an engine that lets go of memory at once; run twice, with everything that orders streams and
// without `edge`. Returns whether it was right, and whether the edge was missed.
struct Outcome {
  bool right = false;
  bool missed = false;
};

template <class Work>
Outcome with_and_without(Edge edge, Work work) {
  Outcome outcome;
  for (const bool whole : {true, false}) {
    StreamDriver driver({.config = {.prefetch_bytes = 2 * kBytes, .in_flight_bytes = 0}});
    if (!whole) driver.left_out = {edge};
    driver.check_bytes = whole;
    work(driver);
    driver.complete_all();
    whole ? outcome.right = driver.races().empty() : outcome.missed = !driver.races().empty();
  }
  return outcome;
}

Saved pack(StreamDriver& driver, Storage storage, StreamRef stream = kMain) {
  return driver.pack(std::move(storage), bytes_view(0, kBytes), EpochId{1}, stream);
}

void expect_needed(const Outcome& outcome) {
  EXPECT_TRUE(outcome.right);
  EXPECT_TRUE(outcome.missed);
}

TEST(EngineOrder, ACopyComesAfterItsProducer) {
  expect_needed(
      with_and_without(Edge::kEvents, [](StreamDriver& driver) { driver.drop(pack(driver, driver.filled(kBytes))); }));
}

TEST(EngineOrder, ACopyComesAfterWorkOfEveryStreamThatSavedTheStorage) {
  expect_needed(with_and_without(Edge::kEvents, [](StreamDriver& driver) {
    Storage storage = driver.filled(kBytes, 1, kSide);
    const Saved saved = pack(driver, std::move(storage), kSide);
    driver.drop(saved);
  }));
}

TEST(EngineOrder, ALoadComesAfterTheCopyThatWroteWhatItReads) {
  expect_needed(with_and_without(Edge::kAfterCopies, [](StreamDriver& driver) {
    const Saved saved = pack(driver, driver.filled(kBytes));
    (void)driver.unpack(saved, kPass, kMain);
    driver.drop(saved);
  }));
}

TEST(EngineOrder, ALoadComesAfterWorkOnTheMemoryThatItGets) {
  expect_needed(with_and_without(Edge::kEvents, [](StreamDriver& driver) {
    const Saved saved = pack(driver, driver.filled(kBytes));
    driver.complete_all();
    (void)driver.filled(kBytes, 9);  // on memory that the load gets next
    (void)driver.unpack(saved, kPass, kMain);
    driver.drop(saved);
  }));
}

TEST(EngineOrder, WorkOnALoadedStorageComesAfterTheLoad) {
  for (const StreamRef stream : {kMain, kSide}) {
    expect_needed(with_and_without(Edge::kWait, [stream](StreamDriver& driver) {
      const Saved saved = pack(driver, driver.filled(kBytes));
      driver.complete_all();
      (void)driver.unpack(saved, kPass, stream);
      driver.drop(saved);
    }));
  }
}

TEST(EngineOrder, TheSecondUserOfALoadComesAfterItToo) {
  expect_needed(with_and_without(Edge::kWait, [](StreamDriver& driver) {
    const Saved first = pack(driver, driver.filled(kBytes, 1));
    const Saved second = pack(driver, driver.filled(kBytes, 2));
    driver.complete_all();
    (void)driver.unpack(second, kPass, kMain);
    (void)driver.unpack(first, kPass, kSide);  // it was loaded ahead
    driver.drop(first);
    driver.drop(second);
  }));
}

TEST(EngineOrder, MemoryOfALoadThatNobodyUsesIsNotGivenToOthersBeforeItIsDone) {
  expect_needed(with_and_without(Edge::kWait, [](StreamDriver& driver) {
    const Saved first = pack(driver, driver.filled(kBytes, 1));
    const Saved second = pack(driver, driver.filled(kBytes, 2));
    driver.complete_all();
    Storage held = driver.unpack(second, PassId{}, kMain);
    driver.complete_all();
    (void)driver.unpack(second, kPass, kMain);  // a live one: `first` is loaded on a guess
    driver.drop(first);
    (void)driver.filled(kBytes, 9);
    driver.drop(second);
  }));
}

TEST(EngineOrder, MemoryOfALoadIsNotGivenToOthersBeforeWorkOfAnotherStreamIsDone) {
  expect_needed(with_and_without(Edge::kRecordStream, [](StreamDriver& driver) {
    const Saved saved = pack(driver, driver.filled(kBytes));
    driver.complete_all();
    (void)driver.unpack(saved, kPass, kSide);
    driver.complete_all();
    (void)driver.filled(kBytes, 9);
    driver.drop(saved);
  }));
}

TEST(EngineOrder, MemoryOfALoadIsNotGivenToOthersBeforeWorkOfAStreamThatSavedItAgain) {
  expect_needed(with_and_without(Edge::kRecordStream, [](StreamDriver& driver) {
    const EpochId epoch = driver.begin_epoch();
    const Saved saved = driver.pack(driver.filled(kBytes), bytes_view(0, kBytes), epoch, kMain);
    driver.complete_all();
    Storage restored = driver.unpack(saved, kPass, kMain);
    driver.complete_all();
    driver.user_order(kMain, kSide);
    (void)driver.device.read(*restored, {0, kBytes}, kSide);
    const Saved again = driver.pack(restored, bytes_view(0, kBytes), epoch, kSide);
    EXPECT_EQ(again.outcome, SaveOutcome::kDuplicate);
    restored.reset();
    (void)driver.filled(kBytes, 9);
    driver.drop(saved);
    driver.drop(again);
  }));
}

TEST(EngineOrder, MemoryIsNotGivenToOthersBeforeTheCopyOutOfIt) {
  expect_needed(with_and_without(Edge::kRecordStream, [](StreamDriver& driver) {
    const Saved saved = pack(driver, driver.filled(kBytes));
    (void)driver.filled(kBytes, 9);
    driver.drop(saved);
  }));
}

TEST(EngineOrder, MemoryOfADroppedGraphIsNotGivenToOthersBeforeTheCopyOutOfIt) {
  for (const bool whole : {true, false}) {
    StreamDriver driver({.config = kUnbounded});
    if (!whole) driver.left_out = {Edge::kRecordStream};
    driver.drop(pack(driver, driver.filled(kBytes)));
    (void)driver.filled(kBytes, 9);
    driver.complete_all();
    EXPECT_EQ(driver.races().empty(), whole);
  }
}

TEST(EngineOrder, MemoryReadOnAnotherStreamDuringItsCopyIsNotGivenToOthersBefore) {
  for (const bool whole : {true, false}) {
    StreamDriver driver({.config = kUnbounded});
    if (!whole) driver.left_out = {Edge::kRecordStream};
    Storage storage = driver.filled(kBytes);
    driver.user_order(kMain, kSide);
    const Saved first = pack(driver, storage);
    storage.reset();
    driver.end_epoch(EpochId{1});
    ASSERT_EQ(driver.held().size(), 1u);
    // Used and saved on the side while the copy is under way; plain autograd would hold it until backward.
    Storage live = driver.unpack(first, PassId{}, kMain);
    (void)driver.device.read(*live, {0, kBytes}, kSide);
    const Saved second = pack(driver, std::move(live), kSide);
    driver.drop(first);
    driver.drop(second);
    (void)driver.filled(kBytes, 9);
    driver.complete_all();
    EXPECT_EQ(driver.races().empty(), whole);
  }
}

TEST(EngineOrder, ACopyComesAfterAReaderOnAnotherStream) {
  for (const bool whole : {true, false}) {
    StreamDriver driver({.config = {.keep_last_bytes = kBytes, .in_flight_bytes = UINT64_MAX}});
    if (!whole) driver.left_out = {Edge::kEvents};
    Storage storage = driver.filled(kBytes);
    driver.user_order(kMain, kSide);
    const Saved first = pack(driver, storage);
    (void)driver.device.read(*storage, {0, kBytes}, kSide);
    const Saved second = pack(driver, std::move(storage), kSide);
    const Saved next = pack(driver, driver.filled(kBytes));  // pushes it out of the window
    driver.complete_all();
    EXPECT_EQ(driver.device.used_bytes(), kBytes);
    (void)driver.filled(kBytes, 9);
    EXPECT_EQ(driver.races().empty(), whole);
    for (const Saved& one : {first, second, next}) driver.drop(one);
  }
}

}  // namespace
}  // namespace ebbtide::testing
