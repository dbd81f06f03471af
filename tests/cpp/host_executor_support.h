// What the tests of the host executor share: copies between vectors, one client, jobs that hold a worker.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "ebbtide/error.h"
#include "ebbtide/host_executor.h"

namespace ebbtide {

using Bytes = std::vector<std::uint8_t>;

inline Place place_of(const Bytes& bytes, Tier tier = Tier::kHost) {
  return {tier, reinterpret_cast<std::uintptr_t>(bytes.data()), 0};
}

inline Bytes some_bytes(std::size_t nbytes, unsigned seed = 1) {
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
inline std::shared_ptr<SpillFile> on_letting_go(std::function<void()> call) {
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

inline std::shared_ptr<SpillFile> make_file() {
  return std::make_shared<SpillFile>(::testing::TempDir(), SpillOptions{.allow_tmpfs = true, .keep_free_bytes = 0});
}

// Gives a call that should block, and does not, the time to be found out. No test needs it to pass.
inline void give_way() {
  for (int turn = 0; turn < 1000; ++turn) std::this_thread::yield();
}

inline ErrorKind kind_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& thrown) {
    return thrown.kind();
  }
}

inline void expect_usage_error(const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
  }
}

inline std::vector<CopyId> pop_all(Executor& executor) {
  std::vector<CopyId> copies;
  while (const auto completion = executor.pop_completion()) {
    EXPECT_EQ(completion->error, nullptr);
    copies.push_back(completion->copy);
  }
  return copies;
}

}  // namespace ebbtide
