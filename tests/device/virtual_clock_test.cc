#include <gtest/gtest.h>

#include <vector>

#include "test_support.h"

namespace ebbtide::device {
namespace {

constexpr std::uint64_t kCopyBytes = 1000;

// One second for a copy over the link and a tenth of one within the device, after a quarter of latency.
Options slow(Mode mode = Mode::kLazy) {
  return {.devices = 2, .mode = mode, .link_bytes_per_s = 1000, .device_bytes_per_s = 10000, .copy_latency_s = 0.25};
}

class Clock : public testing::Test {
 protected:
  void expect_copy(std::size_t index, CopyKind kind, double begin_s, double end_s) {
    const std::vector<CopyRecord> copies = rig.device.copies();
    ASSERT_LT(index, copies.size());
    EXPECT_EQ(copies[index].kind, kind) << index;
    EXPECT_DOUBLE_EQ(copies[index].begin_s, begin_s) << index;
    EXPECT_DOUBLE_EQ(copies[index].end_s, end_s) << index;
  }

  Rig rig{slow()};
  unsigned char* const block = rig.allocate();
  unsigned char* const other = rig.allocate();
  unsigned char* const host = rig.pin();
};

TEST_F(Clock, CopiesOfAStreamFollowEachOther) {
  rig.device.copy(host, block, kCopyBytes, rig.main);
  rig.device.copy(block, host, kCopyBytes, rig.main);
  rig.device.copy(other, block, kCopyBytes, rig.main);
  expect_copy(0, CopyKind::kD2H, 0, 1.25);
  expect_copy(1, CopyKind::kH2D, 1.25, 2.5);
  expect_copy(2, CopyKind::kD2D, 2.5, 2.85);
  EXPECT_DOUBLE_EQ(rig.device.clock_s(rig.main), 2.85);
  EXPECT_DOUBLE_EQ(rig.device.clock_s(rig.side), 0);
}

TEST_F(Clock, StreamsShareALinkPerDirectionAndDevice) {
  void* const elsewhere = rig.device.allocate(kCopyBytes, {1, 0});
  rig.device.copy(host, block, kCopyBytes, rig.main);
  rig.device.copy(host, other, kCopyBytes, rig.side);
  rig.device.copy(block, host, kCopyBytes, rig.device.new_stream(0));
  rig.device.copy(host, elsewhere, kCopyBytes, {1, 0});
  expect_copy(0, CopyKind::kD2H, 0, 1.25);
  expect_copy(1, CopyKind::kD2H, 1.25, 2.5);
  expect_copy(2, CopyKind::kH2D, 0, 1.25);
  expect_copy(3, CopyKind::kD2H, 0, 1.25);
}

TEST_F(Clock, KernelsTakeTheirTimeAndWaitsCarryIt) {
  rig.device.kernel(
      "k", rig.main, {}, [] {}, 5);
  const EventId event = rig.device.new_event();
  rig.device.record(event, rig.main);
  rig.device.kernel(
      "k", rig.main, {}, [] {}, 3);
  rig.device.wait(rig.side, event);
  rig.device.copy(host, block, kCopyBytes, rig.side);
  expect_copy(0, CopyKind::kD2H, 5, 6.25);
  EXPECT_DOUBLE_EQ(rig.device.clock_s(rig.main), 8);
  rig.device.wait(rig.main, event);
  EXPECT_DOUBLE_EQ(rig.device.clock_s(rig.main), 8) << "went back";
}

TEST_F(Clock, WhatIsQueuedAfterASynchronizeBeginsNoEarlier) {
  rig.device.kernel(
      "k", rig.main, {}, [] {}, 5);
  rig.device.synchronize(rig.main);
  rig.device.copy(host, block, kCopyBytes, rig.side);
  expect_copy(0, CopyKind::kD2H, 5, 6.25);
  const EventId event = rig.device.new_event();
  rig.device.record(event, rig.side);
  rig.device.synchronize(event);
  rig.device.kernel(
      "k", rig.main, {}, [] {}, 1);
  EXPECT_DOUBLE_EQ(rig.device.clock_s(rig.main), 7.25);
}

TEST_F(Clock, AQueryTakesNoTime) {
  rig.device.kernel(
      "k", rig.main, {}, [] {}, 5);
  EXPECT_TRUE(rig.device.query(rig.main));
  rig.device.copy(host, block, kCopyBytes, rig.side);
  expect_copy(0, CopyKind::kD2H, 0, 1.25);
}

TEST_F(Clock, LogsCopiesAsTheyAreQueued) {
  rig.device.copy(host + 8, block + 16, kCopyBytes, rig.side);
  rig.device.copy(host, block, 0, rig.side);
  const std::vector<CopyRecord> copies = rig.device.copies();
  ASSERT_EQ(copies.size(), 1U);
  EXPECT_EQ(copies[0].nbytes, kCopyBytes);
  EXPECT_EQ(copies[0].stream, rig.side);
  EXPECT_EQ(copies[0].dst, reinterpret_cast<std::uintptr_t>(host + 8));
  EXPECT_EQ(copies[0].src, reinterpret_cast<std::uintptr_t>(block + 16));
  rig.device.clear_copies();
  EXPECT_TRUE(rig.device.copies().empty());
}

TEST_F(Clock, TellsTheKindsOfHostMemoryApartByAddress) {
  std::vector<unsigned char> pageable(kCopyBytes);
  rig.device.copy(pageable.data(), block, kCopyBytes, rig.main);
  rig.device.copy(host, pageable.data(), kCopyBytes, rig.main);
  expect_copy(0, CopyKind::kD2H, 0, 1.25);
  expect_copy(1, CopyKind::kH2H, 1.25, 2.5);
  EXPECT_EQ(rig.device.queued(rig.main), 0U);
}

TEST(ClockOnce, IsTheSameInEveryMode) {
  std::vector<std::vector<double>> times;
  for (const Mode mode : {Mode::kLazy, Mode::kWorker}) {
    Rig rig(slow(mode));
    unsigned char* const block = rig.allocate();
    unsigned char* const host = rig.pin();
    unsigned char* const other = rig.pin();
    rig.order(rig.main, rig.side);
    for (int i = 0; i < 20; ++i) {
      const bool first = i % 3 == 0;
      rig.device.copy(first ? host : other, block, kCopyBytes, first ? rig.main : rig.side);
      if (i % 4 == 0) rig.order(rig.main, rig.side);
      if (i % 5 == 0)
        rig.device.kernel(
            "k", rig.main, {}, [] {}, 0.5);
    }
    times.emplace_back();
    for (const CopyRecord& copy : rig.device.copies()) times.back().push_back(copy.begin_s);
  }
  EXPECT_EQ(times[0], times[1]);
}

}  // namespace
}  // namespace ebbtide::device
