// HostExecutor: runs copies between host memory and files on worker threads.
//
// Workers copy bytes and note the completion; they never touch a framework object, the engine or Python. Whoever
// submits a copy keeps its source and destination alive until the completion has been seen.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "ebbtide/plan.h"
#include "ebbtide/spill_file.h"
#include "ebbtide/types.h"

namespace ebbtide {

struct Completion {
  CopyId copy{};
  std::exception_ptr error;  // null when every byte was copied
};

// Where a client of the executor finds its completions, in the order of completion. Thread safe.
class CompletionQueue {
 public:
  // Oldest completion not yet taken, each given out once. Never blocks on a copy.
  [[nodiscard]] std::optional<Completion> pop();
  // Whether pop has something to give, as seen without a lock.
  [[nodiscard]] bool ready() const { return ready_.load(std::memory_order_acquire); }
  void push(Completion completion);

 private:
  std::mutex mutex_;
  std::deque<Completion> completions_;
  std::atomic<bool> ready_{false};
};

// Serves any number of clients, each with its own CompletionQueue and copy ids of its own. Thread safe. Threads start
// at the first submit. Not for use, nor for destruction, in a forked child.
class HostExecutor {
 public:
  struct Options {
    unsigned threads = 1;
    unsigned queue_depth = 64;  // copies waiting for a worker
    // Copies of at most so many bytes are made by the thread that submits them: handing them over would take longer.
    std::uint64_t inline_bytes = 0;
  };

  // Throws Error(kUsage) when an option is 0.
  explicit HostExecutor(Options options);
  HostExecutor() : HostExecutor(Options{}) {}
  HostExecutor(const HostExecutor&) = delete;
  HostExecutor& operator=(const HostExecutor&) = delete;
  // Runs what is queued, then joins the threads.
  ~HostExecutor();

  // Queues the copy, or makes it at once when it is small or no thread can be started. Where the system has no memory
  // for the plan's staging, host memory is copied without, and a copy by way of a file fails. `file` is needed when a
  // place of the plan is in a file; it is kept alive until the copy is done and let go just before the completion can
  // be seen. While the queue is full, blocks the calling thread (which must hold no lock). Throws Error(kUsage) after
  // shutdown, and for a copy that is still queued or running.
  void submit(CopyId copy, Plan plan, std::shared_ptr<SpillFile> file, std::shared_ptr<CompletionQueue> queue);

  // Blocks until the client's copy is done: a copy still queued is run on the calling thread, one that a worker has is
  // waited for. Returns at once for copies that are done or unknown. Leaves the completion in the queue.
  void wait(CopyId copy, const CompletionQueue& queue);
  // Blocks until the client has no copy queued or running.
  void drain(const CompletionQueue& queue);

  // Copies queued or running.
  [[nodiscard]] std::uint64_t pending() const;
  [[nodiscard]] unsigned running_threads() const;

  // Runs what is queued and joins the threads; later submits throw. Idempotent.
  void shutdown();

 private:
  // A copy of a client.
  using Key = std::pair<const CompletionQueue*, CopyId>;
  struct Job {
    Key key;
    Plan plan;
    std::shared_ptr<SpillFile> file;
    std::shared_ptr<CompletionQueue> queue;
  };

  class Staging;

  // Whether there is a worker; the caller holds the lock.
  [[nodiscard]] bool start_threads();
  void work();
  [[nodiscard]] std::deque<Job>::iterator find_queued(const Key& key);
  // Takes the job out of the queue and runs it; `lock` is released while bytes move.
  void run(std::deque<Job>::iterator queued, std::unique_lock<std::mutex>& lock, Staging& staging);
  void run(std::deque<Job>::iterator queued, std::unique_lock<std::mutex>& lock);

  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable work_available_;
  std::condition_variable space_available_;
  std::condition_variable copy_done_;
  std::deque<Job> queue_;
  std::set<Key> running_;  // taken from the queue and not done
  std::vector<std::thread> threads_;
  bool stopping_ = false;
};

}  // namespace ebbtide
