// Copies between a device and page-locked host memory, on the framework's own streams, by its own functions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ebbtide/command.h"
#include "ebbtide/types.h"

namespace ebbtide::bindings {

struct Completion {
  CopyId copy{};
  Hop hop{};
  std::vector<StorageId> storages;
  nanobind::object error;  // None: every byte was copied
};

// Storages of the device, by address.
using DeviceStorages = std::vector<std::pair<std::uint64_t, nanobind::object>>;

// The copies of one engine that are on their way. `streams` and `pool` are those of ebbtide.framework and
// ebbtide.pinned_pool; what they raise is passed on.
//
// Any thread may call, with the GIL. Every call into the framework may let other threads in: nothing is held across one
// but copies of what is needed.
class StreamCopies {
 public:
  StreamCopies(const nanobind::object& streams, const nanobind::object& pool, std::size_t most_queued);
  StreamCopies(const StreamCopies&) = delete;
  StreamCopies& operator=(const StreamCopies&) = delete;

  // For copies of the storage to come after.
  void record(StorageId storage, EventId event, StreamRef stream);
  // Events of the storage will not be waited for (again).
  void forget(StorageId storage);

  // Queues a copy. The memory of `storages` may be given to others only in device order, after the copy. Blocks, with
  // other threads running, where `most_queued` are queued in this direction.
  void submit(const Command& command, const DeviceStorages& storages, std::int64_t device);
  // Whether the copy is on its way: queued, and not taken by `pop`.
  [[nodiscard]] bool started(CopyId copy) const { return started_.contains(copy); }
  // What is issued on the stream from now on comes after the copy, which was started or is done.
  void order(CopyId copy, StreamRef stream);
  // None where it is not on its way.
  [[nodiscard]] StreamRef stream_of(CopyId copy) const;
  // Blocks until the copy is done; `pop` still gives it out. Other threads run meanwhile.
  void wait(CopyId copy);
  // The same for every copy.
  void drain();

  // Whether `pop` has something to give out. Asks one event of each stream.
  [[nodiscard]] bool ready();
  [[nodiscard]] std::optional<Completion> pop();
  [[nodiscard]] std::vector<CopyId> all_running() const;

 private:
  struct Queued {
    CopyId copy{};
    Hop hop{};
    std::vector<StorageId> storages;
    nanobind::object event;  // done with the copy
  };
  using Queue = std::deque<Queued>;  // in order; without errors, which are found out at the end
  enum class Seen { kRunning, kDone, kFailed };

  [[nodiscard]] StreamRef copy_stream(std::int64_t device, bool to_device);
  void forget(const std::vector<EventId>& events);
  [[nodiscard]] nanobind::list events_before(const Command& command);
  [[nodiscard]] nanobind::list spans(const Command& command, const DeviceStorages& storages, std::int64_t device,
                                     StreamRef stream);
  [[nodiscard]] nanobind::object host_slice(const Place& place, std::uint64_t nbytes) const;
  [[nodiscard]] nanobind::object staging(std::uint64_t nbytes, std::int64_t device, StreamRef stream);
  [[nodiscard]] Seen look(const nanobind::object& event);
  void synchronize(const nanobind::object& event);
  // An event that nobody needs any more, or None.
  [[nodiscard]] nanobind::object take_event(StreamRef stream);

  const std::size_t most_queued_;
  struct Recorded {
    nanobind::object event;
    StreamRef stream{};
  };

  nanobind::object streams_, record_, wait_, issue_, done_, synchronize_, bytes_of_, part_of_, slice_, slices_;
  std::map<StreamRef, std::vector<nanobind::object>> free_events_;
  std::map<std::pair<std::int64_t, bool>, StreamRef> copy_streams_;  // by device and whether it leads there
  std::unordered_map<EventId, Recorded> events_;                     // for copies to come after
  std::unordered_map<EventId, StreamRef> unrecorded_;                // that could not be recorded
  std::unordered_map<StorageId, std::vector<EventId>> events_of_;
  std::unordered_map<CopyId, Recorded> started_;  // what each ends with
  std::map<StreamRef, Queue> queues_;
};

}  // namespace ebbtide::bindings
