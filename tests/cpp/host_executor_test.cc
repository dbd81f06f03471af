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

namespace ebbtide {
namespace {

using Bytes = std::vector<std::uint8_t>;

Place place_of(const Bytes& bytes, Tier tier = Tier::kHost) {
  return {tier, reinterpret_cast<std::uintptr_t>(bytes.data()), 0};
}

Bytes some_bytes(std::size_t nbytes, unsigned seed = 1) {
  Bytes bytes(nbytes);
  std::minstd_rand random(seed);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random() >> 8);
  return bytes;
}

// One copy between two vectors.
struct HostCopy {
  explicit HostCopy(std::uint64_t id, std::size_t nbytes = 1000)
      : id{id}, src(some_bytes(nbytes, static_cast<unsigned>(id))), dst(nbytes) {}

  [[nodiscard]] Plan plan() const { return {{place_of(src, Tier::kDevice), place_of(dst), src.size()}}; }
  [[nodiscard]] bool done() const { return src == dst; }

  CopyId id;
  Bytes src;
  Bytes dst;
};

// The executor lets go of a job's file on the thread that ran it, before it publishes the completion. A file that is
// nothing but a deleter therefore tells where a job runs, and can hold it there.
std::shared_ptr<SpillFile> on_letting_go(std::function<void()> call) {
  return {static_cast<SpillFile*>(nullptr), [call = std::move(call)](SpillFile*) { call(); }};
}

// An executor with its one client.
class Executor : public HostExecutor {
 public:
  using HostExecutor::HostExecutor;

  void submit(CopyId copy, Plan plan, std::shared_ptr<SpillFile> file) {
    HostExecutor::submit(copy, std::move(plan), std::move(file), queue_);
  }
  void wait(CopyId copy) { HostExecutor::wait(copy, *queue_); }
  [[nodiscard]] std::optional<Completion> pop_completion() { return queue_->pop(); }
  [[nodiscard]] bool has_completions() const { return queue_->ready(); }

 private:
  const std::shared_ptr<CompletionQueue> queue_ = std::make_shared<CompletionQueue>();
};

// A job that keeps one worker busy from construction until `open`, at the latest until destruction.
class Gate {
 public:
  Gate(Executor& executor, CopyId copy) {
    executor.submit(copy, {}, on_letting_go([latches = latches_] {
                      latches->entered.count_down();
                      latches->opened.wait();
                    }));
    latches_->entered.wait();
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() {
    if (!is_open()) open();
  }
  void open() { latches_->opened.count_down(); }
  [[nodiscard]] bool is_open() const { return latches_->opened.try_wait(); }

 private:
  struct Latches {
    std::latch entered{1};
    std::latch opened{1};
  };
  // Shared with the job, which may still be inside `wait` when the gate goes.
  const std::shared_ptr<Latches> latches_ = std::make_shared<Latches>();
};

std::shared_ptr<SpillFile> make_file() {
  return std::make_shared<SpillFile>(::testing::TempDir(), SpillOptions{.allow_tmpfs = true, .keep_free_bytes = 0});
}

// Gives a call that should block, and does not, the time to be found out. No test needs it to pass.
void give_way() {
  for (int turn = 0; turn < 1000; ++turn) std::this_thread::yield();
}

ErrorKind kind_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& thrown) {
    return thrown.kind();
  }
}

void expect_usage_error(const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
  }
}

std::vector<CopyId> pop_all(Executor& executor) {
  std::vector<CopyId> copies;
  while (const auto completion = executor.pop_completion()) {
    EXPECT_EQ(completion->error, nullptr);
    copies.push_back(completion->copy);
  }
  return copies;
}

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
