#include "scheduler.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

namespace ebbtide::device {

Scheduler::~Scheduler() {
  Lock lock(mutex);
  lose("the device is gone");
  stop_workers(lock);
}

Lane& Scheduler::add(DeviceIndex device, Actor actor) {
  std::deque<Lane>& all = lanes(device);
  Lane& lane = all.emplace_back();
  lane.id = {device, all.size() - 1};
  lane.actor = actor;
  return lane;
}

std::deque<Lane>& Scheduler::lanes(DeviceIndex device) {
  if (device < 0 || static_cast<std::size_t>(device) >= devices_.size()) {
    throw std::invalid_argument("[Device] no device " + std::to_string(device));
  }
  return devices_[static_cast<std::size_t>(device)];
}

Lane& Scheduler::lane(Stream stream) {
  std::deque<Lane>& all = lanes(stream.device);
  if (stream.number >= all.size()) {
    throw std::invalid_argument("[Device] device " + std::to_string(stream.device) + " has no stream " +
                                std::to_string(stream.number));
  }
  return all[stream.number];
}

std::uint64_t Scheduler::push(Lane& lane, Task task) {
  task.seq = ++lane.issued;
  if (task.version && task.kind == Task::Kind::kRecord) {
    task.version->lane = &lane;
    task.version->seq = task.seq;
  }
  if (task.kind == Task::Kind::kPoison) ++lane.poisons;
  lane.tasks.push_back(std::move(task));
  start_worker(lane);
  changed_.notify_all();
  return lane.issued;
}

void Scheduler::wait_for_room(Lock& lock, Lane& lane) {
  while (queue_depth_ > 0 && queued(lane) >= queue_depth_) {
    if (mode_ == Mode::kWorker && !mine(lane)) {
      changed_.wait(lock);
    } else if (!step(lock, lane)) {
      return;
    }
  }
}

void Scheduler::finish(Lock& lock, Lane& lane, std::uint64_t seq) {
  std::vector<Goal> goals{{&lane, seq}};
  while (!goals.empty()) advance(lock, goals);
}

bool Scheduler::step(Lock& lock, Lane& lane) {
  const auto is_poison = [](const Task& task) { return task.kind == Task::Kind::kPoison; };
  const auto first = std::find_if_not(lane.tasks.begin(), lane.tasks.end(), is_poison);
  const bool found = first != lane.tasks.end();
  const std::uint64_t before = lane.done;
  finish(lock, lane, found ? first->seq : lane.issued);
  return found && lane.done > before;
}

// A task whose wait is not over makes the task that it waits for the next goal.
void Scheduler::advance(Lock& lock, std::vector<Goal>& goals) {
  const auto [lane, seq] = goals.back();
  if (lane->done >= seq) return goals.pop_back();
  const bool inside = mine(*lane);
  const bool stuck = lane->tasks.empty() || lane->tasks.front().kind == Task::Kind::kKernel;
  // Inside a kernel there is no waiting for that kernel, nor for those that wait for it.
  if (inside && stuck) return goals.pop_back();
  if (stuck || (lane->depth > 0 && !inside) || (mode_ == Mode::kWorker && !inside)) return changed_.wait(lock);
  const Task& front = lane->tasks.front();
  if (blocked(front)) {
    goals.push_back({front.version->lane, front.version->seq});
  } else {
    run_front(lock, *lane);
  }
}

bool Scheduler::blocked(const Task& task) { return task.kind == Task::Kind::kWait && !task.version->done; }

void Scheduler::run_front(Lock& lock, Lane& lane) {
  const Task task = std::move(lane.tasks.front());
  lane.tasks.pop_front();
  if (task.kind == Task::Kind::kPoison) --lane.poisons;
  if (task.kind == Task::Kind::kRecord) task.version->done = true;
  if (task.kind == Task::Kind::kWait || task.kind == Task::Kind::kRecord) return complete(lane, task.seq);

  enter(lane);
  std::string failure;
  const bool delayed = mode_ == Mode::kWorker && task.kind == Task::Kind::kCopy && delay_us_ > 0;
  const std::chrono::microseconds delay(delay_us_);
  lock.unlock();
  try {
    if (delayed) std::this_thread::sleep_for(delay);
    run_(task);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  lock.lock();
  leave(lane, task.seq);
  if (!failure.empty()) lose(failure);
}

bool Scheduler::run_kernel(Lock& lock, Lane& lane, const std::function<void()>& work) {
  std::uint64_t seq = lane.issued;
  if (mine(lane)) {
    finish(lock, lane, seq);
  } else {
    seq = push(lane, {.kind = Task::Kind::kKernel});
    finish(lock, lane, seq - 1);
    const auto turn = [&] { return lane.depth == 0 && !lane.tasks.empty() && lane.tasks.front().seq == seq; };
    changed_.wait(lock, [&] { return turn() || lane.done >= seq; });
    if (!turn()) return false;
    lane.tasks.pop_front();
  }

  enter(lane);
  lock.unlock();
  std::exception_ptr error;
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  leave(lane, seq);
  if (error) std::rethrow_exception(error);
  return true;
}

void Scheduler::enter(Lane& lane) {
  lane.runner = std::this_thread::get_id();
  ++lane.depth;
}

void Scheduler::leave(Lane& lane, std::uint64_t seq) {
  --lane.depth;
  complete(lane, seq);
}

void Scheduler::complete(Lane& lane, std::uint64_t seq) {
  lane.done = idle(lane) ? lane.issued : std::max(lane.done, seq);
  changed_.notify_all();
}

void Scheduler::work(Lane& lane, std::uint64_t generation) {
  Lock lock(mutex);
  const auto runnable = [&] {
    return lane.depth == 0 && !lane.tasks.empty() && lane.tasks.front().kind != Task::Kind::kKernel &&
           !blocked(lane.tasks.front());
  };
  while (true) {
    changed_.wait(lock, [&] { return generation != generation_ || runnable(); });
    if (generation != generation_) return;
    run_front(lock, lane);
  }
}

void Scheduler::configure(Lock& lock, const Options& options) {
  each_lane([&](Lane& lane) { finish(lock, lane, lane.issued); });
  mode_ = options.mode;
  queue_depth_ = options.queue_depth;
  delay_us_ = options.delay_us;
  stop_workers(lock);
  each_lane([&](Lane& lane) {
    if (!lane.tasks.empty()) start_worker(lane);
  });
}

void Scheduler::start_worker(Lane& lane) {
  if (mode_ != Mode::kWorker || lane.worker.joinable()) return;
  lane.worker = std::thread([this, &lane, generation = generation_] { work(lane, generation); });
}

void Scheduler::stop_workers(Lock& lock) {
  ++generation_;
  std::vector<std::thread> workers;
  each_lane([&](Lane& lane) { workers.push_back(std::exchange(lane.worker, {})); });
  changed_.notify_all();
  lock.unlock();
  for (std::thread& worker : workers) {
    if (worker.joinable()) worker.join();
  }
  lock.lock();
}

// What is queued is dropped, yet counts as done: nobody waits for it any more.
void Scheduler::lose(const std::string& cause) {
  if (!lost_) lost_ = cause;
  each_lane([](Lane& lane) {
    for (const Task& task : lane.tasks) {
      if (task.kind == Task::Kind::kRecord) task.version->done = true;
    }
    lane.tasks.clear();
    lane.poisons = 0;
    if (lane.depth == 0) lane.done = lane.issued;
  });
  changed_.notify_all();
}

}  // namespace ebbtide::device
