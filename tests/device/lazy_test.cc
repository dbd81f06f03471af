#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "test_support.h"

namespace ebbtide::device {
namespace {

TEST(Lazy, ACopyRunsWhenItsStreamIsSynchronized) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.fill(block, 1, rig.main);
  rig.device.copy(host, block, kBytes, rig.main);
  EXPECT_TRUE(rig.holds(host, kPoisoned));
  rig.device.synchronize(rig.side);
  EXPECT_TRUE(rig.holds(host, kPoisoned));
  rig.device.synchronize(rig.main);
  EXPECT_TRUE(rig.holds(host, 1));
}

TEST(Lazy, AMissingWaitBeforeAFreeShowsInTheBytes) {
  for (const bool right : {false, true}) {
    Rig rig;
    unsigned char* const block = rig.allocate();
    unsigned char* const host = rig.pin();
    rig.fill(block, 1, rig.main);
    rig.order(rig.main, rig.side);
    rig.device.copy(host, block, kBytes, rig.side);
    if (right) rig.order(rig.side, rig.main);
    rig.device.free(block);
    unsigned char* const next = rig.allocate();
    ASSERT_EQ(next, block);
    rig.fill(next, 2, rig.main);
    rig.device.synchronize(rig.side);
    EXPECT_TRUE(rig.holds(host, right ? 1 : 2));
    EXPECT_EQ(rig.device.races().empty(), right);
  }
}

TEST(Lazy, AMissingWaitAfterH2DShowsInTheBytes) {
  for (const bool right : {false, true}) {
    Rig rig;
    unsigned char* const host = rig.pin();
    std::memset(host, 5, kBytes);
    unsigned char* const block = rig.allocate(kBytes, rig.main);
    rig.order(rig.main, rig.side);
    rig.device.copy(block, host, kBytes, rig.side);
    if (right) rig.order(rig.side, rig.main);
    bool seen = false;
    rig.device.kernel("look", rig.main, {{block, kBytes, false}}, [&] { seen = rig.holds(block, 5); });
    EXPECT_EQ(seen, right);
    EXPECT_EQ(rig.device.races().empty(), right);
  }
}

TEST(Lazy, AKernelRunsAtOnceBehindItsStreamAlone) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  rig.use(block, rig.main);
  unsigned char* const mine = rig.pin();
  unsigned char* const others = rig.pin();
  rig.device.copy(mine, block, kBytes, rig.main);
  rig.device.copy(others, block, kBytes, rig.side);
  std::memset(mine, 0, kBytes);
  std::memset(others, 0, kBytes);
  bool ran = false;
  rig.device.kernel("k", rig.main, {}, [&] { ran = true; });
  EXPECT_TRUE(ran);
  EXPECT_TRUE(rig.holds(mine, kPoisoned));
  EXPECT_TRUE(rig.holds(others, 0));
}

TEST(Lazy, AskingRunsNothing) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  const EventId event = rig.device.new_event();
  EXPECT_TRUE(rig.device.query(event)) << "never recorded";
  rig.fill(block, 1, rig.main);
  rig.device.copy(host, block, kBytes, rig.main);
  rig.device.record(event, rig.main);
  EXPECT_FALSE(rig.device.query(event));
  EXPECT_FALSE(rig.device.query(rig.main));
  EXPECT_EQ(rig.device.queued(rig.main), 2U);
  EXPECT_TRUE(rig.holds(host, kPoisoned));
  rig.device.synchronize(event);
  EXPECT_TRUE(rig.device.query(event));
  EXPECT_TRUE(rig.device.query(rig.main));
  EXPECT_TRUE(rig.holds(host, 1));
}

TEST(Lazy, SynchronizingAnEventRunsNoMoreThanItMust) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const first = rig.pin();
  unsigned char* const second = rig.pin();
  rig.fill(block, 1, rig.main);
  const EventId event = rig.device.new_event();
  rig.device.copy(first, block, kBytes, rig.main);
  rig.device.record(event, rig.main);
  rig.device.copy(second, block, kBytes, rig.main);
  rig.device.synchronize(event);
  EXPECT_TRUE(rig.holds(first, 1));
  EXPECT_TRUE(rig.holds(second, kPoisoned));
}

TEST(Lazy, AWaitIsForTheVersionRecordedLast) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const first = rig.pin();
  unsigned char* const second = rig.pin();
  rig.fill(block, 1, rig.main);
  const EventId event = rig.device.new_event();
  rig.device.copy(first, block, kBytes, rig.main);
  rig.device.record(event, rig.main);
  rig.device.wait(rig.side, event);
  rig.device.copy(second, block, kBytes, rig.main);
  rig.device.record(event, rig.main);

  rig.device.synchronize(rig.side);
  EXPECT_TRUE(rig.holds(first, 1));
  EXPECT_TRUE(rig.holds(second, kPoisoned)) << "waited for a version that was recorded later";
  EXPECT_FALSE(rig.device.query(event)) << "told of an older version";
  rig.device.wait(rig.side, event);
  rig.device.destroy_event(event);
  rig.device.synchronize(rig.side);
  EXPECT_TRUE(rig.holds(second, 1));
}

TEST(Lazy, AWaitRunsWhatItWaitsForThroughOtherStreams) {
  Rig rig;
  const Stream third = rig.device.new_stream(0);
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.fill(block, 1, rig.main);
  rig.device.copy(host, block, kBytes, rig.main);
  rig.order(rig.main, rig.side);
  rig.order(rig.side, third);
  rig.device.kernel("k", third, {}, [&] { EXPECT_TRUE(rig.holds(host, 1)); });
}

TEST(Lazy, LongChainsOfWaitsAreNoRecursion) {
  Rig rig;
  for (int i = 0; i < 50000; ++i) rig.order(i % 2 == 0 ? rig.main : rig.side, i % 2 == 0 ? rig.side : rig.main);
  rig.device.synchronize(rig.main);
  EXPECT_TRUE(rig.device.query(rig.main));
}

TEST(Lazy, StepsRunOneTaskAndWhatItWaitsFor) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  rig.fill(block, 1, rig.main);
  std::vector<unsigned char*> hosts{rig.pin(), rig.pin(), rig.pin()};
  rig.device.copy(hosts[0], block, kBytes, rig.main);
  rig.device.copy(hosts[1], block, kBytes, rig.main);
  EXPECT_TRUE(rig.device.step(rig.main));
  EXPECT_TRUE(rig.holds(hosts[0], 1));
  EXPECT_TRUE(rig.holds(hosts[1], kPoisoned));

  rig.order(rig.main, rig.side);
  rig.device.copy(hosts[2], block, kBytes, rig.side);
  EXPECT_TRUE(rig.device.step(rig.side));
  EXPECT_TRUE(rig.holds(hosts[1], 1));
  EXPECT_TRUE(rig.holds(hosts[2], kPoisoned));
  EXPECT_TRUE(rig.device.step(rig.side));
  EXPECT_TRUE(rig.holds(hosts[2], 1));
  EXPECT_FALSE(rig.device.step(rig.side));
}

TEST(Lazy, PoisonIsNoStepOfItsOwn) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  std::memset(host, 1, kBytes);
  EXPECT_EQ(rig.device.queued(rig.main), 0U);
  rig.device.copy(host, block, kBytes, rig.main);
  EXPECT_TRUE(rig.device.step(rig.main));
  EXPECT_TRUE(rig.holds(host, kPoisoned));
  rig.device.free(block);
  EXPECT_FALSE(rig.device.step(rig.main));
}

TEST(Lazy, AFullQueueRunsItsOldest) {
  Rig rig({.queue_depth = 2});
  unsigned char* const block = rig.allocate();
  rig.fill(block, 1, rig.main);
  std::vector<unsigned char*> hosts{rig.pin(), rig.pin(), rig.pin()};
  rig.device.copy(hosts[0], block, kBytes, rig.main);
  rig.device.copy(hosts[1], block, kBytes, rig.main);
  EXPECT_TRUE(rig.holds(hosts[0], kPoisoned));
  rig.device.copy(hosts[2], block, kBytes, rig.main);
  EXPECT_TRUE(rig.holds(hosts[0], 1));
  EXPECT_TRUE(rig.holds(hosts[1], kPoisoned));
  EXPECT_EQ(rig.device.queued(rig.main), 2U);
}

TEST(Lazy, PageableMemoryMakesACopyRunBeforeTheCallReturns) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const pinned = rig.pin();
  std::vector<unsigned char> host(kBytes, 4);
  rig.fill(block, 1, rig.main);
  rig.device.copy(pinned, block, kBytes, rig.main);
  rig.device.copy(block, host.data(), kBytes, rig.main);
  EXPECT_TRUE(rig.holds(pinned, 1)) << "overtook what the stream had queued";
  EXPECT_TRUE(rig.holds(block, 4));
  rig.fill(block, 6, rig.main);
  rig.device.copy(host.data(), block, kBytes, rig.main);
  EXPECT_EQ(host, std::vector<unsigned char>(kBytes, 6));
}

TEST(Lazy, OptionsChangeAfterAllIsRun) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.fill(block, 1, rig.main);
  rig.device.copy(host, block, kBytes, rig.main);
  rig.device.set_options({.devices = 5, .capacity_bytes = 1, .poison = false});
  EXPECT_TRUE(rig.holds(host, 1));
  EXPECT_FALSE(rig.device.options().poison);
  EXPECT_EQ(rig.device.options().devices, 1);
  EXPECT_EQ(rig.device.options().capacity_bytes, Options().capacity_bytes);
}

}  // namespace
}  // namespace ebbtide::device
