#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "test_support.h"

namespace ebbtide::device {
namespace {

std::string failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const DeviceFailure& failure) {
    return failure.what();
  }
  return "";
}

TEST(Fault, TheNthCallFailsAndNoOther) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  const EventId event = rig.device.new_event();
  const std::vector<std::pair<Operation, std::function<void()>>> calls{
      {Operation::kCopy, [&] { rig.device.copy(host, block, kBytes, rig.main); }},
      {Operation::kRecord, [&] { rig.device.record(event, rig.main); }},
      {Operation::kWait, [&] { rig.device.wait(rig.side, event); }},
      {Operation::kSynchronize, [&] { rig.device.synchronize(rig.main); }},
      {Operation::kSynchronize, [&] { rig.device.synchronize(event); }},
      {Operation::kSynchronize, [&] { rig.device.synchronize(0); }},
  };
  for (const auto& [operation, call] : calls) {
    rig.device.fail(operation, 2);
    for (const auto& [other, other_call] : calls) {
      if (other != operation) other_call();
    }
    call();
    EXPECT_THROW(call(), DeviceFailure);
    call();
  }
}

TEST(Fault, AFailedCallQueuesNothing) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.device.fail(Operation::kCopy, 1);
  EXPECT_THROW(rig.device.copy(host, block, kBytes, rig.main), DeviceFailure);
  EXPECT_EQ(rig.device.queued(rig.main), 0U);
  EXPECT_TRUE(rig.device.copies().empty());
}

TEST(Fault, MemoryFailsItsOwnWay) {
  Rig rig;
  rig.device.fail(Operation::kAllocate, 1);
  EXPECT_THROW(rig.allocate(), OutOfMemory);
  rig.allocate();
  rig.device.fail(Operation::kPin, 1);
  EXPECT_EQ(rig.pin(), nullptr);
  EXPECT_NE(rig.pin(), nullptr);
  rig.device.fail(Operation::kAllocate, 1);
  rig.device.clear_faults();
  rig.allocate();
}

TEST(Fault, AStickyFailureLosesTheDevice) {
  Rig rig;
  rig.device.fail(Operation::kRecord, 1, true);
  const EventId event = rig.device.new_event();
  EXPECT_THROW(rig.device.record(event, rig.main), DeviceFailure);
  const std::string later = failure_of([&] { rig.device.synchronize(0); });
  EXPECT_NE(later.find("call 1 of record"), std::string::npos) << later;
  rig.device.lose();
  EXPECT_EQ(failure_of([&] { rig.device.synchronize(0); }), later) << "the first cause counts";
}

TEST(Fault, ALostDeviceRefusesAllButFrees) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  const EventId event = rig.device.new_event();
  rig.fill(block, 1, rig.main);
  rig.device.copy(host, block, kBytes, rig.main);
  rig.device.record(event, rig.main);
  rig.device.lose();
  const std::vector<std::function<void()>> calls{
      [&] { rig.allocate(); },
      [&] { rig.pin(); },
      [&] { rig.device.copy(host, block, kBytes, rig.main); },
      [&] { rig.fill(block, 1, rig.main); },
      [&] { rig.device.record(event, rig.main); },
      [&] { rig.device.wait(rig.side, event); },
      [&] { static_cast<void>(rig.device.query(event)); },
      [&] { static_cast<void>(rig.device.query(rig.main)); },
      [&] { rig.device.synchronize(event); },
      [&] { rig.device.synchronize(rig.main); },
      [&] { rig.device.synchronize(0); },
  };
  for (std::size_t i = 0; i < calls.size(); ++i) EXPECT_THROW(calls[i](), DeviceFailure) << i;
  rig.device.used_on(block, rig.side);
  rig.device.free(block);
  rig.device.destroy_event(event);
  EXPECT_EQ(rig.device.memory(0).used_bytes, 0U);
  EXPECT_TRUE(rig.holds(host, kPoisoned)) << "a lost device moved bytes";
  rig.device.unpin(host);
  rig.device.recover();
  rig.device.synchronize(0);
  EXPECT_TRUE(rig.holds(block, 1)) << "a lost device poisoned";
}

TEST(Fault, ADeviceThatIsBackWorks) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.order(rig.side, rig.main);
  rig.device.copy(host, block, kBytes, rig.side);
  const EventId event = rig.device.new_event();
  rig.device.record(event, rig.side);
  rig.device.lose();
  rig.device.free(block);
  rig.device.clear_races();
  rig.device.recover();
  unsigned char* const next = rig.allocate();
  EXPECT_EQ(next, block);
  rig.fill(next, 2, rig.main);
  rig.device.copy(host, next, kBytes, rig.main);
  rig.device.synchronize(rig.main);
  EXPECT_TRUE(rig.holds(host, 2));
  EXPECT_EQ(rig.races(), "");
  EXPECT_TRUE(rig.device.query(event)) << "what was queued counts as done";
  EXPECT_TRUE(rig.device.query(rig.side));
}

TEST(Fault, AFailureOfAQueuedCopyIsThrownByALaterCall) {
  for (const Mode mode : {Mode::kLazy, Mode::kWorker}) {
    Rig rig({.mode = mode});
    unsigned char* const block = rig.allocate();
    unsigned char* const host = rig.pin();
    rig.device.fail(Operation::kRunCopy, 2);
    rig.device.copy(host, block, kBytes, rig.main);
    rig.device.synchronize(rig.main);
    const std::string failure = failure_of([&] {
      rig.device.copy(host, block, kBytes, rig.main);
      rig.device.synchronize(rig.main);
    });
    EXPECT_NE(failure.find("call 2 of run copy"), std::string::npos) << failure;
    EXPECT_THROW(static_cast<void>(rig.device.query(rig.side)), DeviceFailure);
  }
}

TEST(Fault, LosingTheDeviceEndsEveryWait) {
  Rig rig({.mode = Mode::kWorker, .queue_depth = 1});
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.device.synchronize(rig.main);
  std::atomic<bool> in_gate = false;
  std::atomic<bool> open_gate = false;
  const Stream gate = rig.device.new_stream(0);
  std::thread holder([&] {
    rig.device.kernel("gate", gate, {}, [&] {
      in_gate = true;
      while (!open_gate) std::this_thread::yield();
    });
  });
  while (!in_gate) std::this_thread::yield();
  rig.order(gate, rig.side);
  std::atomic<int> failures = 0;
  std::vector<std::thread> waiting;
  const std::vector<std::function<void()>> calls{
      [&] { rig.device.synchronize(rig.side); },
      [&] { rig.device.synchronize(gate); },
      [&] { rig.device.copy(host, block, kBytes, rig.side); },
      [&] { rig.fill(block, 1, rig.side); },
      [&] { rig.device.synchronize(0); },
  };
  for (const auto& call : calls) {
    waiting.emplace_back([&failures, &call] { failures += failure_of(call).empty() ? 0 : 1; });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  rig.device.lose();
  open_gate = true;
  for (std::thread& thread : waiting) thread.join();
  holder.join();
  EXPECT_EQ(failures, 5);
}

}  // namespace
}  // namespace ebbtide::device
