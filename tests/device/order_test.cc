#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "test_support.h"

namespace ebbtide::device {
namespace {

// Each test leaves one edge out and sees it found; with the edge nothing is found.
class Order : public testing::TestWithParam<bool> {
 protected:
  void expect(const std::string& races) const { EXPECT_EQ(rig.races(), edge ? "" : races); }

  const bool edge = GetParam();
  Rig rig;
};
INSTANTIATE_TEST_SUITE_P(Device, Order, testing::Bool(),
                         [](const auto& info) { return info.param ? "WithTheEdge" : "WithoutTheEdge"; });

TEST_P(Order, ComputeBeforeD2H) {
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.order(rig.main, rig.side);
  rig.fill(block, 1, rig.main);
  if (edge) rig.order(rig.main, rig.side);
  rig.device.copy(host, block, kBytes, rig.side);
  rig.device.synchronize(rig.side);
  EXPECT_TRUE(rig.holds(host, 1)) << "right by luck: kernels run when they are called";
  expect("kernel fill on stream 0:0 | copy D2H on stream 0:1\n");
}

TEST_P(Order, AllocationBeforeH2D) {
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  if (edge) rig.order(rig.main, rig.side);
  rig.device.copy(block, host, kBytes, rig.side);
  expect("allocation on stream 0:0 | copy H2D on stream 0:1\n");
}

TEST_P(Order, H2DBeforeCompute) {
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.order(rig.main, rig.side);
  rig.device.copy(block, host, kBytes, rig.side);
  if (edge) rig.order(rig.side, rig.main);
  rig.use(block, rig.main);
  expect("copy H2D on stream 0:1 | kernel use on stream 0:0\n");
}

TEST_P(Order, D2HBeforeTheBlockIsWrittenAgain) {
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.order(rig.main, rig.side);
  rig.device.copy(host, block, kBytes, rig.side);
  if (edge) rig.order(rig.side, rig.main);
  rig.fill(block, 1, rig.main);
  expect("copy D2H on stream 0:1 | kernel fill on stream 0:0\n");
}

TEST_P(Order, D2HBeforeFree) {
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.order(rig.main, rig.side);
  rig.device.copy(host, block, kBytes, rig.side);
  if (edge) rig.device.used_on(block, rig.side);
  rig.device.free(block);
  expect("copy D2H on stream 0:1 | free on stream 0:0\n");
}

TEST_P(Order, AHostBlockIsReusedAfterTheCopyOutOfIt) {
  const Stream third = rig.device.new_stream(0);
  unsigned char* const a = rig.allocate();
  unsigned char* const b = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.order(rig.main, rig.side);
  rig.order(rig.main, third);
  rig.device.copy(a, host, kBytes, rig.side);
  if (edge) rig.order(rig.side, third);
  rig.device.copy(host, b, kBytes, third);
  expect("copy H2D on stream 0:1 | copy D2H on stream 0:2\n");
}

TEST_P(Order, TheHostReadsAfterSynchronize) {
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.device.copy(host, block, kBytes, rig.main);
  rig.device.synchronize(edge ? rig.main : rig.side);
  rig.device.host_access("read by the host", {{host, kBytes, false}}, [] {});
  expect("copy D2H on stream 0:0 | read by the host\n");
}

TEST_P(Order, TheHostWritesAfterAnEvent) {
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  const EventId early = rig.device.new_event();
  const EventId late = rig.device.new_event();
  rig.device.record(early, rig.main);
  rig.device.copy(block, host, kBytes, rig.main);
  rig.device.record(late, rig.main);
  rig.device.synchronize(edge ? late : early);
  rig.device.host_access("write by the host", {{host, kBytes, true}}, [] {});
  expect("copy H2D on stream 0:0 | write by the host\n");
}

TEST_P(Order, AQueryThatSaidYesIsAnEdge) {
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  const EventId event = rig.device.new_event();
  rig.device.copy(host, block, kBytes, rig.main);
  rig.device.record(event, rig.main);
  if (edge) {
    while (rig.device.step(rig.main)) continue;
  }
  EXPECT_EQ(rig.device.query(event), edge);
  rig.device.host_access("read by the host", {{host, kBytes, false}}, [] {});
  expect("copy D2H on stream 0:0 | read by the host\n");
}

TEST_P(Order, AQueryOfAStreamIsAnEdgeToo) {
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.device.copy(host, block, kBytes, rig.main);
  while (rig.device.step(rig.main)) continue;
  EXPECT_EQ(edge && rig.device.query(rig.main), edge);
  rig.device.host_access("read by the host", {{host, kBytes, false}}, [] {});
  expect("copy D2H on stream 0:0 | read by the host\n");
}

TEST_P(Order, WhatTheHostDidComesBeforeWhatIsQueuedLater) {
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.order(rig.main, rig.side);
  if (edge) rig.device.host_access("write by the host", {{host, kBytes, true}}, [] {});
  rig.device.copy(block, host, kBytes, rig.side);
  if (!edge) rig.device.host_access("write by the host", {{host, kBytes, true}}, [] {});
  expect("copy H2D on stream 0:1 | write by the host\n");
}

TEST_P(Order, CopiesBeforeUnpin) {
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.device.copy(host, block, kBytes, rig.main);
  if (edge) rig.device.synchronize(0);
  rig.device.unpin(host);
  expect("copy D2H on stream 0:0 | unpin\n");
}

TEST_P(Order, AnEventTellsOfWhatItsStreamHadByThen) {
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  const EventId event = rig.device.new_event();
  if (!edge) rig.device.record(event, rig.main);
  rig.fill(block, 1, rig.main);
  if (edge) rig.device.record(event, rig.main);
  rig.device.wait(rig.side, event);
  rig.device.record(event, rig.main);
  rig.device.copy(host, block, kBytes, rig.side);
  expect("kernel fill on stream 0:0 | copy D2H on stream 0:1\n");
}

TEST_P(Order, ACopyIntoPageableMemoryIsASynchronize) {
  unsigned char* const block = rig.allocate();
  unsigned char* const pinned = rig.pin();
  std::vector<unsigned char> pageable(kBytes);
  rig.device.copy(pinned, block, kBytes, rig.main);
  if (edge) {
    rig.device.copy(pageable.data(), block, kBytes, rig.main);
  } else {
    rig.device.copy(block, pageable.data(), kBytes, rig.main);
  }
  rig.device.host_access("read by the host", {{pinned, kBytes, false}}, [] {});
  expect("copy D2H on stream 0:0 | read by the host\n");
}

TEST_P(Order, SwitchedOffItFindsNothing) {
  unsigned char* const block = rig.allocate();
  rig.device.set_checking(!edge);
  rig.fill(block, 1, rig.main);
  rig.fill(block, 1, rig.side);
  expect("kernel fill on stream 0:0 | kernel fill on stream 0:1\n");
}

TEST(OrderOnce, ABlockThatWasWaitedForIsCleanOnItsStreamAlone) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.order(rig.main, rig.side);
  rig.device.copy(host, block, kBytes, rig.side);
  rig.device.used_on(block, rig.side);
  rig.device.free(block);
  while (rig.device.step(rig.side)) continue;
  ASSERT_EQ(rig.allocate(), block);
  EXPECT_EQ(rig.races(), "");
  // The allocator's look at the copy is no edge for what it does not own.
  rig.device.host_access("read by the host", {{host, kBytes, false}}, [] {});
  EXPECT_EQ(rig.races(), "copy D2H on stream 0:1 | read by the host\n");
}

TEST(OrderOnce, AddressesThatAreFreedAndHandedOutAgainAreOrderedByTheirStream) {
  Rig rig;
  for (int i = 0; i < 3; ++i) {
    unsigned char* const block = rig.allocate();
    rig.fill(block, i, rig.main);
    rig.device.free(block);
  }
  EXPECT_EQ(rig.races(), "");
  unsigned char* const block = rig.allocate();
  rig.use(block, rig.side);
  EXPECT_EQ(rig.races(), "allocation on stream 0:0 | kernel use on stream 0:1\n");
}

TEST(OrderOnce, RacesCanBeCleared) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  rig.use(block, rig.side);
  EXPECT_EQ(rig.device.races().size(), 1U);
  rig.device.clear_races();
  EXPECT_TRUE(rig.device.races().empty());
}

}  // namespace
}  // namespace ebbtide::device
