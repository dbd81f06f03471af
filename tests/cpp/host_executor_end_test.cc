// Ends: what shutdown and drain wait for, and of which client.
#include <gtest/gtest.h>

#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "host_executor_support.h"

namespace ebbtide {
namespace {

TEST(HostExecutor, ShutdownRunsWhatIsQueued) {
  Executor executor;
  Gate gate(executor, CopyId{1});
  std::vector<HostCopy> copies;
  for (std::uint64_t id = 2; id <= 9; ++id) copies.emplace_back(id);
  for (const auto& copy : copies) executor.submit(copy.id, copy.plan(), nullptr);
  std::thread opener([&] { gate.open(); });
  executor.shutdown();
  opener.join();
  for (const auto& copy : copies) EXPECT_TRUE(copy.done());
  EXPECT_EQ(executor.pending(), 0u);
  EXPECT_EQ(executor.running_threads(), 0u);
  EXPECT_EQ(pop_all(executor).size(), 9u);

  expect_usage_error([&] { executor.submit(CopyId{10}, {}, nullptr); });
  executor.wait(CopyId{10});
  executor.shutdown();
  EXPECT_EQ(executor.running_threads(), 0u);
}

TEST(HostExecutor, DestructorRunsWhatIsQueued) {
  std::vector<HostCopy> copies;
  for (std::uint64_t id = 1; id <= 20; ++id) copies.emplace_back(id, 50'000);
  {
    Executor executor({.threads = 2});
    for (const auto& copy : copies) executor.submit(copy.id, copy.plan(), nullptr);
  }
  for (const auto& copy : copies) EXPECT_TRUE(copy.done());
}

TEST(HostExecutor, ShutdownWakesABlockedSubmit) {
  Executor executor({.threads = 1, .queue_depth = 1});
  Gate gate(executor, CopyId{1});
  executor.submit(CopyId{2}, {}, nullptr);
  std::thread submitter([&] { expect_usage_error([&] { executor.submit(CopyId{3}, {}, nullptr); }); });
  std::thread stopper([&] { executor.shutdown(); });
  submitter.join();  // the queue stays full, so only the shutdown can have ended the submit
  gate.open();
  stopper.join();
  EXPECT_EQ(pop_all(executor), (std::vector{CopyId{1}, CopyId{2}}));
}

TEST(HostExecutor, ShutdownWaitsForACopyThatAWaitRuns) {
  Executor executor;
  Gate gate(executor, CopyId{1});
  std::latch entered(1);
  std::latch leave(1);
  executor.submit(CopyId{2}, {}, on_letting_go([&] {
                    entered.count_down();
                    leave.wait();
                  }));
  std::thread waiter([&] { executor.wait(CopyId{2}); });
  entered.wait();
  gate.open();
  std::thread leaver([&] {
    give_way();
    leave.count_down();
  });
  executor.shutdown();
  EXPECT_EQ(executor.pending(), 0u);
  leaver.join();
  waiter.join();
}

TEST(HostExecutor, ClientsMayUseTheSameCopyIds) {
  HostExecutor executor;
  const auto one = std::make_shared<CompletionQueue>();
  const auto two = std::make_shared<CompletionQueue>();
  HostCopy copy(1);
  executor.submit(copy.id, copy.plan(), nullptr, one);
  executor.submit(copy.id, {{{Tier::kFile}, place_of(copy.dst), 10}}, nullptr, two);
  executor.wait(copy.id, *one);
  executor.wait(copy.id, *two);
  const auto good = one->pop();
  const auto failed = two->pop();
  ASSERT_TRUE(good && failed);
  EXPECT_EQ(good->error, nullptr);
  EXPECT_TRUE(failed->error);
  EXPECT_TRUE(copy.done());
  EXPECT_FALSE(one->ready() || two->ready());
  expect_usage_error([&] { executor.submit(copy.id, {}, nullptr, nullptr); });
}

TEST(HostExecutor, DrainRunsTheCopiesOfOneClient) {
  Executor executor;
  const auto other = std::make_shared<CompletionQueue>();
  Gate gate(executor, CopyId{1});
  std::vector<HostCopy> copies;
  for (std::uint64_t id = 1; id <= 5; ++id) copies.emplace_back(id);
  for (const auto& copy : copies) executor.HostExecutor::submit(copy.id, copy.plan(), nullptr, other);
  executor.submit(CopyId{2}, {}, nullptr);
  executor.drain(*other);  // returns though the worker is still held
  for (const auto& copy : copies) {
    EXPECT_TRUE(copy.done());
    EXPECT_EQ(other->pop().value().copy, copy.id);
  }
  EXPECT_EQ(executor.pending(), 2u);
}

TEST(HostExecutor, DrainWaitsForACopyThatAWorkerHas) {
  HostExecutor executor;
  const auto queue = std::make_shared<CompletionQueue>();
  std::latch entered(1);
  std::latch leave(1);
  executor.submit(CopyId{1}, {}, on_letting_go([&] {
                    entered.count_down();
                    leave.wait();
                  }),
                  queue);
  entered.wait();
  std::thread leaver([&] {
    give_way();
    leave.count_down();
  });
  executor.drain(*queue);
  EXPECT_TRUE(queue->ready());
  EXPECT_EQ(executor.pending(), 0u);
  leaver.join();
  executor.shutdown();
}

}  // namespace
}  // namespace ebbtide
