#include "ebbtide/host_executor.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <latch>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ebbtide/error.h"
#include "host_executor_support.h"

namespace ebbtide {
namespace {

TEST(HostExecutor, StartsNoThreadBeforeTheFirstSubmit) {
  Executor executor({.threads = 3});
  EXPECT_EQ(executor.running_threads(), 0u);
  EXPECT_EQ(executor.pending(), 0u);
  EXPECT_FALSE(executor.has_completions());
  EXPECT_FALSE(executor.pop_completion());
  executor.submit(CopyId{1}, {}, nullptr);
  EXPECT_EQ(executor.running_threads(), 3u);
}

TEST(HostExecutor, RefusesOptionsThatCouldNotWork) {
  expect_usage_error([] { Executor({.threads = 0}); });
  expect_usage_error([] { Executor({.queue_depth = 0}); });
}

TEST(HostExecutor, CopiesEverySpanOfAPlan) {
  const Bytes src = some_bytes(4000);
  Bytes dst(4000);
  Executor executor;
  const Place from = place_of(src, Tier::kDevice);
  const Place to = place_of(dst);
  executor.submit(CopyId{1},
                  {{from, to.advanced(1000), 3000}, {from.advanced(3000), to, 1000}, {{Tier::kHost}, {Tier::kHost}, 0}},
                  nullptr);
  executor.wait(CopyId{1});
  Bytes expected = src;
  std::rotate(expected.begin(), expected.begin() + 3000, expected.end());
  EXPECT_EQ(dst, expected);
  EXPECT_EQ(pop_all(executor), std::vector{CopyId{1}});
}

TEST(HostExecutor, CopiesToAFileAndBack) {
  const auto file = make_file();
  const Bytes src = some_bytes(100'000);
  Bytes dst(src.size());
  const Place on_disk = file->allocate(src.size(), UINT64_MAX).value().place;
  Executor executor;
  executor.submit(
      CopyId{1}, {{place_of(src), on_disk, 60'000}, {place_of(src).advanced(60'000), on_disk.advanced(60'000), 40'000}},
      file);
  executor.submit(CopyId{2},
                  {{on_disk, place_of(dst, Tier::kDevice), 60'000},
                   {on_disk.advanced(60'000), place_of(dst, Tier::kDevice).advanced(60'000), 40'000}},
                  file);
  executor.shutdown();
  EXPECT_EQ(dst, src);
  EXPECT_EQ(pop_all(executor), (std::vector{CopyId{1}, CopyId{2}}));
}

TEST(HostExecutor, KeepsTheFileOnlyUntilTheCopyIsDone) {
  auto file = make_file();
  const std::weak_ptr<SpillFile> watch = file;
  const Bytes src = some_bytes(1000);
  const Place on_disk = file->allocate(src.size(), UINT64_MAX).value().place;
  Executor executor;
  Gate gate(executor, CopyId{1});
  executor.submit(CopyId{2}, {{place_of(src), on_disk, src.size()}}, std::move(file));
  EXPECT_FALSE(watch.expired());
  gate.open();
  executor.wait(CopyId{2});
  EXPECT_TRUE(watch.expired());
}

TEST(HostExecutor, GivesCompletionsInTheOrderOfTheirEnd) {
  Executor executor;
  Gate gate(executor, CopyId{1});
  for (std::uint64_t id = 2; id <= 5; ++id) executor.submit(CopyId{id}, {}, nullptr);
  EXPECT_EQ(executor.pending(), 5u);
  EXPECT_FALSE(executor.has_completions());
  executor.wait(CopyId{4});
  EXPECT_EQ(executor.pending(), 4u);
  EXPECT_TRUE(executor.has_completions());
  gate.open();
  executor.wait(CopyId{5});
  executor.wait(CopyId{3});
  executor.shutdown();
  EXPECT_EQ(executor.pending(), 0u);
  const auto copies = pop_all(executor);
  ASSERT_EQ(copies.size(), 5u);
  EXPECT_EQ(copies[0], CopyId{4});
  EXPECT_FALSE(executor.has_completions());
}

TEST(HostExecutor, OneWorkerRunsCopiesInTheOrderOfSubmission) {
  Executor executor;
  std::vector<CopyId> submitted;
  for (std::uint64_t id = 1; id <= 200; ++id) {
    executor.submit(CopyId{id}, {}, nullptr);
    submitted.push_back(CopyId{id});
  }
  executor.shutdown();
  EXPECT_EQ(pop_all(executor), submitted);
}

TEST(HostExecutor, WaitRunsAQueuedCopyOnTheCaller) {
  Executor executor;
  Gate gate(executor, CopyId{1});
  std::thread::id ran_on;
  executor.submit(CopyId{2}, {}, on_letting_go([&] { ran_on = std::this_thread::get_id(); }));
  executor.wait(CopyId{2});
  EXPECT_EQ(ran_on, std::this_thread::get_id());
  EXPECT_EQ(pop_all(executor), std::vector{CopyId{2}});
}

TEST(HostExecutor, WaitWaitsForACopyThatAWorkerHas) {
  Executor executor;
  Gate gate(executor, CopyId{1});
  std::latch waiting(1);
  std::thread waiter([&] {
    waiting.count_down();
    executor.wait(CopyId{1});
    EXPECT_TRUE(gate.is_open());
    EXPECT_TRUE(executor.has_completions());
  });
  waiting.wait();
  give_way();
  gate.open();
  waiter.join();
  EXPECT_EQ(pop_all(executor), std::vector{CopyId{1}});
}

TEST(HostExecutor, WaitReturnsAtOnceForUnknownAndDoneCopies) {
  Executor executor;
  executor.wait(CopyId{99});
  EXPECT_EQ(executor.running_threads(), 0u);
  executor.submit(CopyId{1}, {}, nullptr);
  executor.wait(CopyId{1});
  executor.wait(CopyId{1});
  Gate gate(executor, CopyId{2});
  executor.wait(CopyId{1});
  executor.wait(CopyId{99});
  EXPECT_EQ(pop_all(executor), std::vector{CopyId{1}});
  executor.wait(CopyId{1});
}

TEST(HostExecutor, SubmitBlocksWhileTheQueueIsFull) {
  Executor executor({.threads = 1, .queue_depth = 2});
  Gate gate(executor, CopyId{1});
  executor.submit(CopyId{2}, {}, nullptr);
  executor.submit(CopyId{3}, {}, nullptr);
  std::latch submitting(1);
  std::thread submitter([&] {
    submitting.count_down();
    executor.submit(CopyId{4}, {}, nullptr);
    EXPECT_TRUE(gate.is_open());
  });
  submitting.wait();
  give_way();
  EXPECT_EQ(executor.pending(), 3u);
  gate.open();
  submitter.join();
  executor.shutdown();
  EXPECT_EQ(pop_all(executor), (std::vector{CopyId{1}, CopyId{2}, CopyId{3}, CopyId{4}}));
}

TEST(HostExecutor, WaitMakesRoomInTheQueue) {
  Executor executor({.threads = 1, .queue_depth = 1});
  Gate gate(executor, CopyId{1});
  executor.submit(CopyId{2}, {}, nullptr);
  std::thread submitter([&] { executor.submit(CopyId{3}, {}, nullptr); });
  executor.wait(CopyId{2});
  submitter.join();  // returns though the worker is still held
  EXPECT_EQ(executor.pending(), 2u);
}

TEST(HostExecutor, RefusesACopyThatIsPending) {
  Executor executor;
  Gate gate(executor, CopyId{1});
  executor.submit(CopyId{2}, {}, nullptr);
  expect_usage_error([&] { executor.submit(CopyId{1}, {}, nullptr); });
  expect_usage_error([&] { executor.submit(CopyId{2}, {}, nullptr); });
  EXPECT_EQ(executor.pending(), 2u);
}

TEST(HostExecutor, DeliversAnErrorOnceAndGoesOn) {
  const auto file = make_file();
  const Bytes src = some_bytes(1000);
  Bytes dst(1000);
  const Place on_disk = file->allocate(src.size(), UINT64_MAX).value().place;
  file->write(on_disk.position(), src.data(), src.size());
  const std::uint8_t flipped = src[500] ^ 1;
  ASSERT_EQ(::pwrite(file->descriptor(), &flipped, 1, static_cast<off_t>(on_disk.position() + 500)), 1);

  HostCopy after(2);
  Executor executor;
  executor.submit(CopyId{1}, {{on_disk, place_of(dst), src.size()}}, file);
  executor.submit(after.id, after.plan(), nullptr);
  executor.shutdown();
  EXPECT_TRUE(after.done());

  const auto failed = executor.pop_completion();
  ASSERT_TRUE(failed && failed->error);
  EXPECT_EQ(failed->copy, CopyId{1});
  EXPECT_EQ(kind_of(failed->error), ErrorKind::kCorruption);
  EXPECT_EQ(pop_all(executor), std::vector{after.id});
}

TEST(HostExecutor, WaitDoesNotThrowTheErrorOfTheCopyThatItRuns) {
  Executor executor;
  Gate gate(executor, CopyId{1});
  Bytes dst(10);
  executor.submit(CopyId{2}, {{{Tier::kFile}, place_of(dst), 10}}, nullptr);
  executor.wait(CopyId{2});
  const auto failed = executor.pop_completion();
  ASSERT_TRUE(failed && failed->error);
  EXPECT_EQ(kind_of(failed->error), ErrorKind::kUsage);
}

TEST(HostExecutor, StopsAtTheFirstSpanThatFails) {
  const auto file = make_file();
  HostCopy after(2);
  Plan plan = {{{Tier::kFile}, {Tier::kFile, 0, 4096}, 10}};
  plan.push_back(after.plan().front());
  Executor executor;
  executor.submit(CopyId{1}, plan, file);
  executor.wait(CopyId{1});
  const auto failed = executor.pop_completion();
  ASSERT_TRUE(failed && failed->error);
  EXPECT_EQ(kind_of(failed->error), ErrorKind::kUsage);
  EXPECT_EQ(after.dst, Bytes(after.dst.size()));
}

TEST(HostExecutor, ServesManyThreads) {
  constexpr unsigned kThreads = 6;
  constexpr unsigned kCopies = 150;
  Executor executor({.threads = 2, .queue_depth = 4});
  const auto file = make_file();
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::minstd_rand random(thread + 1);
      for (unsigned turn = 0; turn < kCopies; ++turn) {
        const std::uint64_t id = 2 * (thread * kCopies + turn) + 1;
        HostCopy copy(id, 1 + random() % 20'000);
        const bool through_file = random() % 2 == 0;
        if (!through_file) {
          executor.submit(copy.id, copy.plan(), nullptr);
          executor.wait(copy.id);
          executor.submit(CopyId{id + 1}, {}, nullptr);
        } else {
          const Block block = file->allocate(copy.src.size(), UINT64_MAX).value();
          executor.submit(copy.id, {{place_of(copy.src), block.place, block.nbytes}}, file);
          executor.wait(copy.id);
          executor.submit(CopyId{id + 1}, {{block.place, place_of(copy.dst), block.nbytes}}, file);
          executor.wait(CopyId{id + 1});
          file->free(block);
        }
        EXPECT_TRUE(copy.done());
      }
    });
  }
  std::vector<CopyId> popped;
  const auto pop = [&] {
    const auto copies = pop_all(executor);
    popped.insert(popped.end(), copies.begin(), copies.end());
  };
  while (popped.size() < kThreads * kCopies) {
    if (executor.has_completions()) pop();
    std::this_thread::yield();
  }
  for (auto& thread : threads) thread.join();
  executor.shutdown();
  pop();
  std::sort(popped.begin(), popped.end());
  ASSERT_EQ(popped.size(), 2u * kThreads * kCopies);
  for (std::size_t i = 0; i < popped.size(); ++i) EXPECT_EQ(popped[i], CopyId{i + 1});
  EXPECT_EQ(file->used_bytes(), 0u);
}

TEST(HostExecutor, MakesASmallCopyOnTheSubmittingThreadAndStartsNoOther) {
  Executor executor({.inline_bytes = 16});
  HostCopy small(1, 16);
  executor.submit(small.id, small.plan(), nullptr);
  EXPECT_TRUE(small.done());
  EXPECT_EQ(executor.running_threads(), 0u);
  EXPECT_EQ(executor.pop_completion()->copy, small.id);
  HostCopy large(2, 17);
  executor.submit(large.id, large.plan(), nullptr);
  EXPECT_EQ(executor.running_threads(), 1u);
  executor.wait(large.id);
  EXPECT_TRUE(large.done());
}

TEST(HostExecutor, RefusesACopyWithoutACompletionQueue) {
  HostExecutor executor;
  expect_usage_error([&] { executor.submit(CopyId{1}, {}, nullptr, nullptr); });
}

}  // namespace
}  // namespace ebbtide
