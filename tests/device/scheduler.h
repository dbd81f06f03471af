// The queues of the streams, and what runs them: the caller that must have a task (lazy), or a thread per stream.
//
// Every function but the constructor and the destructor wants `mutex` held, through the Lock it is given where it may
// wait; tasks and kernels run without it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"
#include "vector_clock.h"

namespace ebbtide::device {

using Lock = std::unique_lock<std::mutex>;

struct Lane;

// A version of an event.
struct Version {
  Lane* lane = nullptr;
  std::uint64_t seq = 0;  // the task that completes it
  bool done = false;
  VectorClock clock;
  double time_s = 0;
};

struct Task {
  enum class Kind { kCopy, kPoison, kWait, kRecord, kKernel };
  Kind kind = Kind::kCopy;
  std::uint64_t dst = 0;
  std::uint64_t src = 0;
  std::uint64_t nbytes = 0;
  std::shared_ptr<Version> version = nullptr;
  std::uint64_t seq = 0;  // set by `push`
};

// A stream.
struct Lane {
  Stream id;
  Actor actor = kHost;
  double time_s = 0;
  std::deque<Task> tasks;
  std::uint64_t poisons = 0;  // in `tasks`
  std::uint64_t issued = 0;   // the task queued last
  std::uint64_t done = 0;     // all tasks up to this one have run
  // Who runs a task of it; a kernel's own thread may queue and run more of the same stream from inside.
  std::thread::id runner;
  int depth = 0;
  std::thread worker;
};

class Scheduler {
 public:
  // `run` moves the bytes of a copy or poison task; what it throws is the end of the device.
  Scheduler(int devices, std::function<void(const Task&)> run)
      : run_(std::move(run)), devices_(static_cast<std::size_t>(devices)) {}
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;
  ~Scheduler();

  std::mutex mutex;

  Lane& add(DeviceIndex device, Actor actor);
  [[nodiscard]] Lane& lane(Stream stream);
  [[nodiscard]] std::deque<Lane>& lanes(DeviceIndex device);
  template <typename Function>
  void each_lane(Function function) {
    for (auto& lanes : devices_) {
      for (Lane& lane : lanes) function(lane);
    }
  }

  std::uint64_t push(Lane& lane, Task task);
  // Until a task may be queued within the depth. The caller's thread or the stream's makes room.
  void wait_for_room(Lock& lock, Lane& lane);
  // Until the task has run, or the device is lost.
  void finish(Lock& lock, Lane& lane, std::uint64_t seq);
  bool step(Lock& lock, Lane& lane);
  // Runs the kernel as a task of its own, behind what is queued. False, and not run, when the device is lost before.
  bool run_kernel(Lock& lock, Lane& lane, const std::function<void()>& work);
  [[nodiscard]] static bool idle(const Lane& lane) { return lane.tasks.empty() && lane.depth == 0; }
  // Idle but for the kernel that the caller is in.
  [[nodiscard]] static bool settled(const Lane& lane) { return lane.tasks.empty() && (lane.depth == 0 || mine(lane)); }
  [[nodiscard]] static std::uint64_t queued(const Lane& lane) { return lane.tasks.size() - lane.poisons; }

  // Runs all that is queued, then goes on with these.
  void configure(Lock& lock, const Options& options);

  void lose(const std::string& cause);
  void recover() { lost_.reset(); }
  [[nodiscard]] const std::optional<std::string>& lost() const { return lost_; }

 private:
  struct Goal {
    Lane* lane = nullptr;
    std::uint64_t seq = 0;
  };

  [[nodiscard]] static bool blocked(const Task& task);
  [[nodiscard]] static bool mine(const Lane& lane) {
    return lane.depth > 0 && lane.runner == std::this_thread::get_id();
  }
  void advance(Lock& lock, std::vector<Goal>& goals);
  void run_front(Lock& lock, Lane& lane);
  void enter(Lane& lane);
  void leave(Lane& lane, std::uint64_t seq);
  void complete(Lane& lane, std::uint64_t seq);
  void work(Lane& lane, std::uint64_t generation);
  void start_worker(Lane& lane);
  void stop_workers(Lock& lock);

  std::function<void(const Task&)> run_;
  std::condition_variable changed_;
  std::vector<std::deque<Lane>> devices_;
  Mode mode_ = Mode::kLazy;
  std::uint64_t queue_depth_ = 0;
  std::uint64_t delay_us_ = 0;
  std::uint64_t generation_ = 0;  // of workers: those of an older one end
  std::optional<std::string> lost_;
};

}  // namespace ebbtide::device
