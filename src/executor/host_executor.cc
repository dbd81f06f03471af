#include "ebbtide/host_executor.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "ebbtide/error.h"

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

std::exception_ptr copy_all(const Plan& plan, SpillFile* file) {
  try {
    for (const CopySpan& span : plan) copy_span(span, file);
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

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
  std::unique_lock lock(mutex_);
  for (;;) {
    work_available_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    run(queue_.begin(), lock);
  }
}

std::deque<HostExecutor::Job>::iterator HostExecutor::find_queued(const Key& key) {
  return std::find_if(queue_.begin(), queue_.end(), [&key](const Job& job) { return job.key == key; });
}

void HostExecutor::run(std::deque<Job>::iterator queued, std::unique_lock<std::mutex>& lock) {
  running_.insert(queued->key);
  Job job = std::move(*queued);
  queue_.erase(queued);
  // All of them: the one that wakes up may throw and leave the room to another.
  space_available_.notify_all();
  lock.unlock();
  std::exception_ptr error = copy_all(job.plan, job.file.get());
  job.file.reset();  // may close the file, so not under the lock
  lock.lock();
  job.queue->push({job.key.second, std::move(error)});
  running_.erase(job.key);
  copy_done_.notify_all();
}

}  // namespace ebbtide
