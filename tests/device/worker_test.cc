#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "test_support.h"

namespace ebbtide::device {
namespace {

constexpr std::uint64_t kDelayUs = 20000;

Options workers(std::uint64_t delay_us = 0, std::uint64_t queue_depth = 0) {
  return {.mode = Mode::kWorker, .queue_depth = queue_depth, .delay_us = delay_us};
}

template <typename Condition>
bool soon(Condition condition) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > limit) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

TEST(Worker, CopiesRunByThemselves) {
  Rig rig(workers());
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.fill(block, 1, rig.main);
  rig.device.copy(host, block, kBytes, rig.main);
  const EventId event = rig.device.new_event();
  rig.device.record(event, rig.main);
  EXPECT_TRUE(soon([&] { return rig.device.query(event); }));
  EXPECT_TRUE(rig.holds(host, 1));
}

TEST(Worker, CopiesTakeTheirDelay) {
  Rig rig(workers(kDelayUs));
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  const auto begin = std::chrono::steady_clock::now();
  rig.device.copy(host, block, kBytes, rig.main);
  EXPECT_FALSE(rig.device.query(rig.main));
  rig.device.copy(host, block, kBytes, rig.main);
  rig.device.synchronize(rig.main);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::microseconds(2 * kDelayUs));
}

TEST(Worker, AStreamWaitsForAnother) {
  Rig rig(workers(kDelayUs));
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  std::memset(host, 1, kBytes);
  rig.order(rig.main, rig.side);
  rig.device.copy(block, host, kBytes, rig.side);
  rig.order(rig.side, rig.main);
  rig.device.kernel("look", rig.main, {{block, kBytes, false}}, [&] { EXPECT_TRUE(rig.holds(block, 1)); });
  EXPECT_EQ(rig.races(), "");
}

TEST(Worker, AFullQueueBlocksItsCallerAndNobodyElse) {
  Rig rig(workers(0, 2));
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.device.synchronize(rig.main);
  const Stream gate = rig.device.new_stream(0);
  std::atomic<bool> in_gate = false;
  std::atomic<bool> open_gate = false;
  std::thread holder([&] {
    rig.device.kernel("gate", gate, {}, [&] {
      in_gate = true;
      while (!open_gate) std::this_thread::yield();
    });
  });
  ASSERT_TRUE(soon([&] { return in_gate.load(); }));
  rig.order(gate, rig.side);
  rig.device.copy(host, block, kBytes, rig.side);
  std::atomic<bool> queued = false;
  std::thread blocked([&] {
    rig.device.copy(host, block, kBytes, rig.side);
    queued = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(queued);
  EXPECT_EQ(rig.device.queued(rig.side), 2U);
  rig.fill(block, 1, rig.main);
  rig.device.synchronize(rig.main);
  open_gate = true;
  blocked.join();
  holder.join();
  EXPECT_TRUE(queued);
}

TEST(Worker, KernelsOfOneStreamRunInTheOrderOfTheirCalls) {
  Rig rig(workers());
  std::atomic<bool> entered = false;
  std::atomic<int> running = 0;
  std::atomic<int> most = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 50; ++k) {
        rig.device.kernel("k", rig.main, {}, [&] {
          entered = true;
          const int now = ++running;
          most = std::max(most.load(), now);
          std::this_thread::yield();
          --running;
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(entered);
  EXPECT_EQ(most, 1);
}

class BothModes : public testing::TestWithParam<Mode> {};
INSTANTIATE_TEST_SUITE_P(Worker, BothModes, testing::Values(Mode::kLazy, Mode::kWorker),
                         [](const auto& info) { return info.param == Mode::kLazy ? "Lazy" : "Worker"; });

TEST_P(BothModes, AKernelMayQueueAndWaitOnItsOwnStream) {
  Rig rig({.mode = GetParam(), .queue_depth = 1});
  unsigned char* const block = rig.allocate();
  unsigned char* const pinned = rig.pin();
  std::vector<unsigned char> host(kBytes);
  bool inner = false;
  rig.device.kernel("outer", rig.main, {{block, kBytes, true}}, [&] {
    rig.device.synchronize(rig.main);
    std::memset(block, 3, kBytes);
    for (int i = 0; i < 3; ++i) rig.device.copy(pinned, block, kBytes, rig.main);
    rig.device.copy(host.data(), block, kBytes, rig.main);
    rig.device.kernel("inner", rig.main, {}, [&] { inner = true; });
    rig.device.synchronize(rig.main);
  });
  EXPECT_TRUE(inner);
  EXPECT_EQ(host, std::vector<unsigned char>(kBytes, 3));
}

TEST_P(BothModes, NothingOfAStreamRunsWhileAnotherThreadIsInItsKernel) {
  Rig rig({.mode = GetParam()});
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  std::atomic<bool> in_gate = false;
  std::atomic<bool> open_gate = false;
  std::thread holder([&] {
    rig.device.kernel("gate", rig.main, {{block, kBytes, true}}, [&] {
      // What a kernel queues itself and waits for does not let others pass it.
      rig.device.copy(host, block, kBytes, rig.main);
      rig.device.synchronize(rig.main);
      in_gate = true;
      while (!open_gate) std::this_thread::yield();
      std::memset(block, 1, kBytes);
    });
  });
  ASSERT_TRUE(soon([&] { return in_gate.load(); }));
  std::atomic<bool> passed = false;
  std::thread copy([&] {
    rig.device.copy(host, block, kBytes, rig.main);
    rig.device.synchronize(rig.main);
    passed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::thread kernel([&] { rig.device.kernel("k", rig.main, {}, [&] { passed = true; }); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(passed);
  open_gate = true;
  kernel.join();
  copy.join();
  holder.join();
  EXPECT_TRUE(rig.holds(host, 1));
}

TEST(Worker, ThrowsWhatAKernelThrows) {
  Rig rig(workers());
  EXPECT_THROW(rig.device.kernel("k", rig.main, {}, [] { throw std::out_of_range("k"); }), std::out_of_range);
  rig.device.synchronize(rig.main);
}

TEST(Worker, IsGoneInGoodOrderWithCopiesQueued) {
  Rig rig(workers(1000));
  unsigned char* const block = rig.allocate();
  rig.order(rig.main, rig.side);
  unsigned char* const host = rig.pin();
  unsigned char* const other = rig.pin();
  for (int i = 0; i < 50; ++i) {
    rig.device.copy(host, block, kBytes, rig.main);
    rig.device.copy(other, block, kBytes, rig.side);
  }
}

TEST(Worker, ModesChangeWithCopiesQueued) {
  Rig rig(workers(100));
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  for (int round = 0; round < 10; ++round) {
    rig.fill(block, round, rig.main);
    for (int i = 0; i < 5; ++i) rig.device.copy(host, block, kBytes, rig.main);
    rig.device.set_options(round % 2 == 0 ? Options{} : workers(100));
    EXPECT_TRUE(rig.holds(host, round));
  }
}

TEST(Worker, ThreadsMayUseItAtOnce) {
  Rig rig(workers(10, 4));
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&rig, i] {
      const Stream stream = rig.device.new_stream(0);
      const EventId event = rig.device.new_event();
      unsigned char* const host = rig.pin();
      for (int round = 0; round < 50; ++round) {
        unsigned char* const block = rig.allocate(kBytes, stream);
        rig.fill(block, i + 1, stream);
        rig.order(stream, rig.side);
        rig.device.copy(host, block, kBytes, rig.side);
        rig.device.record(event, rig.side);
        rig.device.used_on(block, rig.side);
        rig.device.free(block);
        rig.device.synchronize(event);
        ASSERT_TRUE(rig.holds(host, i + 1));
      }
      rig.device.unpin(host);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(rig.races(), "");
}

}  // namespace
}  // namespace ebbtide::device
