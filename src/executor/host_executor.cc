#include "ebbtide/host_executor.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "ebbtide/error.h"
#include "ebbtide/host_pool.h"

namespace ebbtide {
namespace {

std::string name(CopyId copy) { return "copy " + std::to_string(value(copy)); }

HostExecutor::Options checked(HostExecutor::Options options) {
  if (options.threads > 0 && options.queue_depth > 0) return options;
  throw Error(ErrorKind::kUsage, "[HostExecutor] " + std::to_string(options.threads) + " threads and queue_depth " +
                                     std::to_string(options.queue_depth) + " asked: both must be at least 1");
}

void* address(const Place& place) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(place.position())); }

void copy_span(const CopySpan& span, SpillFile* file) {
  const bool from_file = span.src.tier == Tier::kFile;
  const bool to_file = span.dst.tier == Tier::kFile;
  if (!from_file && !to_file) {
    if (span.nbytes > 0) std::memcpy(address(span.dst), address(span.src), span.nbytes);
    return;
  }
  if (from_file && to_file) {
    throw Error(ErrorKind::kUsage, "[HostExecutor] " + to_string(span) + ": copy by way of host memory");
  }
  if (file == nullptr)
    throw Error(ErrorKind::kUsage, "[HostExecutor] " + to_string(span) + ": submit it with its file");
  if (to_file) {
    file->write(span.dst.position(), address(span.src), span.nbytes);
  } else {
    file->read(span.src.position(), address(span.dst), span.nbytes);
  }
}

bool stages_for_file(const CopySpan& span) {
  return (span.src.tier == Tier::kStaging && span.dst.tier == Tier::kFile) ||
         (span.src.tier == Tier::kFile && span.dst.tier == Tier::kStaging);
}

}  // namespace

// Staging memory of one thread, kept from job to job.
class HostExecutor::Staging {
 public:
  // The plan with staging places that are memory: valid until the next call.
  Plan place(Plan plan) {
    const std::uint64_t nbytes = staging_bytes(plan);
    if (nbytes == 0) return plan;
    if (!reserve(nbytes)) {
      // A file knows checksums of whole pieces only, so nothing can be read or written there range by range.
      if (std::none_of(plan.begin(), plan.end(), stages_for_file)) return unstaged(plan);
      throw Error(ErrorKind::kHostMemory, "[HostExecutor] the system has no " + format_bytes(nbytes) +
                                              " to stage a copy by way of a file in: free host memory");
    }
    const auto base = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(memory_.get()));
    for (CopySpan& span : plan) {
      for (Place* const end : {&span.src, &span.dst}) {
        if (end->tier == Tier::kStaging) end->base = base;
      }
    }
    return plan;
  }
  // A worker may be idle for long, so that it keeps little.
  void trim() {
    if (memory_ && memory_.get_deleter().nbytes > kKeptBytes) memory_.reset();
  }

 private:
  static constexpr std::uint64_t kKeptBytes = std::uint64_t{16} << 20;

  struct Release {
    SlabSource* pages;
    std::uint64_t nbytes;
    void operator()(void* address) const { pages->release(address, nbytes); }
  };

  bool reserve(std::uint64_t nbytes) {
    if (memory_ && nbytes <= memory_.get_deleter().nbytes) return true;
    if (!pages_) pages_ = make_pageable_slab_source();
    memory_.reset();
    memory_ = {pages_->allocate(nbytes), Release{pages_.get(), nbytes}};
    return memory_ != nullptr;
  }

  std::unique_ptr<SlabSource> pages_;
  std::unique_ptr<void, Release> memory_{nullptr, Release{nullptr, 0}};
};

std::optional<Completion> CompletionQueue::pop() {
  const std::lock_guard lock(mutex_);
  if (completions_.empty()) return std::nullopt;
  Completion completion = std::move(completions_.front());
  completions_.pop_front();
  ready_.store(!completions_.empty(), std::memory_order_release);
  return completion;
}

void CompletionQueue::push(Completion completion) {
  const std::lock_guard lock(mutex_);
  completions_.push_back(std::move(completion));
  ready_.store(true, std::memory_order_release);
}

HostExecutor::HostExecutor(Options options) : options_(checked(options)) {}

HostExecutor::~HostExecutor() { shutdown(); }

void HostExecutor::submit(CopyId copy, Plan plan, std::shared_ptr<SpillFile> file,
                          std::shared_ptr<CompletionQueue> queue) {
  if (queue == nullptr) {
    throw Error(ErrorKind::kUsage, "[HostExecutor.submit] " + name(copy) + " has no completion queue: pass one");
  }
  const Key key{queue.get(), copy};
  std::unique_lock lock(mutex_);
  space_available_.wait(lock, [this] { return stopping_ || queue_.size() < options_.queue_depth; });
  if (stopping_) throw Error(ErrorKind::kUsage, "[HostExecutor.submit] " + name(copy) + " came after shutdown");
  if (find_queued(key) != queue_.end() || running_.contains(key)) {
    throw Error(ErrorKind::kUsage,
                "[HostExecutor.submit] " + name(copy) + " is still pending: give each copy its own id");
  }
  const bool small = plan_bytes(plan) <= options_.inline_bytes && options_.inline_bytes > 0;
  const bool alone = !small && !start_threads();
  queue_.push_back({key, std::move(plan), std::move(file), std::move(queue)});
  if (small || alone) return run(std::prev(queue_.end()), lock);
  work_available_.notify_one();
}

void HostExecutor::wait(CopyId copy, const CompletionQueue& queue) {
  const Key key{&queue, copy};
  std::unique_lock lock(mutex_);
  if (const auto queued = find_queued(key); queued != queue_.end()) return run(queued, lock);
  copy_done_.wait(lock, [&] { return !running_.contains(key); });
}

void HostExecutor::drain(const CompletionQueue& queue) {
  const auto of_client = [&queue](const Job& job) { return job.key.first == &queue; };
  const auto running = [&queue](const Key& key) { return key.first == &queue; };
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto queued = std::find_if(queue_.begin(), queue_.end(), of_client);
    if (queued == queue_.end()) break;
    run(queued, lock);
  }
  copy_done_.wait(lock, [&] { return std::none_of(running_.begin(), running_.end(), running); });
}

std::uint64_t HostExecutor::pending() const {
  const std::lock_guard lock(mutex_);
  return queue_.size() + running_.size();
}

unsigned HostExecutor::running_threads() const {
  const std::lock_guard lock(mutex_);
  return static_cast<unsigned>(threads_.size());
}

void HostExecutor::shutdown() {
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  work_available_.notify_all();
  space_available_.notify_all();
  for (std::thread& thread : threads) thread.join();
  // What is left is run by a `wait`, or by threads that another shutdown joins.
  std::unique_lock lock(mutex_);
  copy_done_.wait(lock, [this] { return queue_.empty() && running_.empty(); });
}

bool HostExecutor::start_threads() {
  try {
    while (threads_.size() < options_.threads) threads_.emplace_back(&HostExecutor::work, this);
  } catch (const std::system_error&) {
    // The system gives no more threads now: whoever submits does the work itself.
  }
  return !threads_.empty();
}

void HostExecutor::work() {
  Staging staging;
  std::unique_lock lock(mutex_);
  for (;;) {
    work_available_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    run(queue_.begin(), lock, staging);
  }
}

std::deque<HostExecutor::Job>::iterator HostExecutor::find_queued(const Key& key) {
  return std::find_if(queue_.begin(), queue_.end(), [&key](const Job& job) { return job.key == key; });
}

void HostExecutor::run(std::deque<Job>::iterator queued, std::unique_lock<std::mutex>& lock) {
  Staging staging;
  run(queued, lock, staging);
}

void HostExecutor::run(std::deque<Job>::iterator queued, std::unique_lock<std::mutex>& lock, Staging& staging) {
  running_.insert(queued->key);
  Job job = std::move(*queued);
  queue_.erase(queued);
  // All of them: the one that wakes up may throw and leave the room to another.
  space_available_.notify_all();
  lock.unlock();
  std::exception_ptr error;
  try {
    for (const CopySpan& span : staging.place(std::move(job.plan))) copy_span(span, job.file.get());
  } catch (...) {
    error = std::current_exception();
  }
  staging.trim();
  job.file.reset();  // may close the file, so not under the lock
  lock.lock();
  job.queue->push({job.key.second, std::move(error)});
  running_.erase(job.key);
  copy_done_.notify_all();
}

}  // namespace ebbtide
