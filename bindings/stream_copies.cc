#include "stream_copies.h"

#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings.h"
#include "commands.h"
#include "ebbtide/error.h"
#include "ebbtide/plan.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

StreamCopies::StreamCopies(const nb::object& streams, const nb::object& pool, std::size_t most_queued)
    : most_queued_(most_queued),
      streams_(streams),
      record_(streams.attr("record")),
      wait_(streams.attr("wait")),
      issue_(streams.attr("issue")),
      done_(streams.attr("done")),
      synchronize_(streams.attr("synchronize")),
      bytes_of_(streams.attr("bytes_of")),
      part_of_(streams.attr("part_of")),
      slice_(pool.attr("slice")),
      slices_(pool.attr("slices")) {}

void StreamCopies::record(StorageId storage, EventId event, StreamRef stream) {
  events_of_[storage].push_back(event);
  try {
    nb::object recorded = record_(value(stream), take_event(stream));
    events_[event] = {std::move(recorded), stream};
  } catch (...) {
    unrecorded_[event] = stream;
    throw;
  }
}

void StreamCopies::forget(StorageId storage) {
  const auto found = events_of_.find(storage);
  if (found == events_of_.end()) return;
  const std::vector<EventId> events = std::move(found->second);
  events_of_.erase(found);
  forget(events);
}

void StreamCopies::forget(const std::vector<EventId>& events) {
  for (const EventId event : events) {
    unrecorded_.erase(event);
    const auto found = events_.find(event);
    if (found == events_.end()) continue;
    free_events_[found->second.stream].push_back(std::move(found->second.event));
    events_.erase(found);
  }
}

nb::object StreamCopies::take_event(StreamRef stream) {
  std::vector<nb::object>& free = free_events_[stream];
  if (free.empty()) return nb::none();
  nb::object event = std::move(free.back());
  free.pop_back();
  return event;
}

StreamRef StreamCopies::copy_stream(std::int64_t device, bool to_device) {
  const auto found = copy_streams_.find({device, to_device});
  if (found != copy_streams_.end()) return found->second;
  const StreamRef stream{nb::cast<std::uint64_t>(streams_.attr("copy_stream")(device, to_device))};
  return copy_streams_[{device, to_device}] = stream;
}

void StreamCopies::submit(const Command& command, const DeviceStorages& storages, std::int64_t device) {
  const StreamRef stream = copy_stream(device, command.hop == Hop::kLoad);
  Queue& queue = queues_[stream];
  if (queue.size() >= most_queued_) wait(queue[queue.size() - most_queued_].copy);
  const nb::list before = events_before(command);
  try {
    const nb::object done = issue_(value(stream), before, spans(command, storages, device, stream), take_event(stream));
    started_.insert_or_assign(command.copy, Recorded{done, stream});
    queue.push_back({command.copy, command.hop, command.storages, done});
  } catch (...) {
    // Part of it may be on its way, into memory that is given back now.
    synchronize_(record_(value(stream), nb::none()));
    throw;
  }
  forget(command.after);
}

nb::list StreamCopies::events_before(const Command& command) {
  nb::list before;
  for (const EventId event : command.after) {
    if (const auto lost = unrecorded_.find(event); lost != unrecorded_.end()) {
      // Later on its stream: after more than is needed.
      const StreamRef stream = lost->second;
      nb::object recorded = record_(value(stream), take_event(stream));
      unrecorded_.erase(event);
      events_[event] = {std::move(recorded), stream};
    }
    before.append(events_.at(event).event);
  }
  for (const CopyId copy : command.after_copies) {
    if (const auto found = started_.find(copy); found != started_.end()) before.append(found->second.event);
  }
  return before;
}

nb::object StreamCopies::host_slice(const Place& place, std::uint64_t nbytes) const {
  const nb::int_ base(place.base);
  const nb::handle of_slab = PyDict_GetItemWithError(slices_.ptr(), base.ptr());
  if (of_slab.is_valid()) {
    const nb::tuple key = nb::make_tuple(place.byte_offset, nbytes);
    const nb::handle slice = PyDict_GetItemWithError(of_slab.ptr(), key.ptr());
    if (slice.is_valid()) return nb::borrow(slice);
  }
  return slice_(base, place.byte_offset, nbytes);
}

// [(destination, source)], in order.
nb::list StreamCopies::spans(const Command& command, const DeviceStorages& storages, std::int64_t device,
                             StreamRef stream) {
  const std::uint64_t staged_bytes = staging_bytes(command.plan);
  const nb::object staged = staged_bytes > 0 ? staging(staged_bytes, device, stream) : nb::none();
  DeviceStorages whole;  // as bytes
  const auto memory = [&](const Place& place, std::uint64_t nbytes) -> nb::object {
    if (place.tier == Tier::kStaging) return part_of_(staged, place.byte_offset, nbytes);
    if (place.tier != Tier::kDevice) return host_slice(place, nbytes);
    const auto at = [&](const auto& item) { return item.first == place.base; };
    auto flat = std::ranges::find_if(whole, at);
    if (flat == whole.end()) {
      const auto storage = std::ranges::find_if(storages, at);
      if (storage == storages.end()) throw nb::key_error("no storage at this address");
      whole.emplace_back(place.base, bytes_of_(storage->second));
      flat = whole.end() - 1;
    }
    // Most are whole: a slice costs as much as the copy call.
    const bool is_whole = place.byte_offset == 0 && nb::cast<std::uint64_t>(flat->second.attr("nbytes")) == nbytes;
    return is_whole ? flat->second : part_of_(flat->second, place.byte_offset, nbytes);
  };
  nb::list spans;
  const auto append = [&](const Plan& plan) {
    for (const CopySpan& span : plan) {
      nb::object dst = memory(span.dst, span.nbytes);
      spans.append(nb::make_tuple(std::move(dst), memory(span.src, span.nbytes)));
    }
  };
  staged_bytes > 0 && staged.is_none() ? append(unstaged(command.plan)) : append(command.plan);
  return spans;
}

// None where there is no memory for it: then piece by piece.
nb::object StreamCopies::staging(std::uint64_t nbytes, std::int64_t device, StreamRef stream) {
  const nb::object context = streams_.attr("on")(value(stream));
  context.attr("__enter__")();
  nb::object memory = nb::none();
  try {
    memory = streams_.attr("staging")(nbytes, device);
  } catch (nb::python_error& error) {
    context.attr("__exit__")(nb::none(), nb::none(), nb::none());
    if (!error.matches(PyExc_MemoryError)) throw;
    return memory;
  }
  context.attr("__exit__")(nb::none(), nb::none(), nb::none());
  return memory;
}

void StreamCopies::order(CopyId copy, StreamRef stream) {
  const auto found = started_.find(copy);
  if (found == started_.end()) return;
  const nb::object event = found->second.event;
  try {
    wait_(value(stream), event);
  } catch (...) {
    // Memory may be let go of next, as if the stream came after the copy.
    wait(copy);
    throw;
  }
}

StreamRef StreamCopies::stream_of(CopyId copy) const {
  const auto found = started_.find(copy);
  return found == started_.end() ? StreamRef{} : found->second.stream;
}

void StreamCopies::wait(CopyId copy) {
  const auto found = started_.find(copy);
  if (found == started_.end()) return;
  // With all that stands before it: two threads may have queued in another order than they recorded in.
  std::vector<nb::object> events;
  for (const Queued& queued : queues_.at(found->second.stream)) {
    if (queued.copy == copy) break;
    events.push_back(queued.event);
  }
  events.push_back(found->second.event);
  for (const nb::object& event : events) synchronize(event);
}

// What fails here `pop` says.
void StreamCopies::synchronize(const nb::object& event) {
  try {
    synchronize_(event);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
  }
}

void StreamCopies::drain() {
  for (const CopyId copy : all_running()) wait(copy);
}

StreamCopies::Seen StreamCopies::look(const nb::object& event) {
  try {
    return nb::cast<bool>(done_(event)) ? Seen::kDone : Seen::kRunning;
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return Seen::kFailed;  // it will not get on
  }
}

bool StreamCopies::ready() {
  for (const auto& [stream, queue] : queues_) {
    if (queue.empty()) continue;
    const nb::object event = queue.front().event;
    if (look(event) != Seen::kRunning) return true;
  }
  return false;
}

std::optional<Completion> StreamCopies::pop() {
  for (auto& [stream, queue] : queues_) {
    if (queue.empty()) continue;
    const CopyId copy = queue.front().copy;
    const nb::object event = queue.front().event;
    const Seen seen = look(event);
    // Another thread may have taken it.
    if (seen == Seen::kRunning || queue.empty() || queue.front().copy != copy) continue;
    const Queued first = std::move(queue.front());
    queue.pop_front();
    Completion done{first.copy, first.hop, first.storages, nb::none()};
    try {
      synchronize_(event);
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_Exception)) {
        started_.erase(copy);
        throw;
      }
      const std::string text = nb::str(error.value()).c_str();
      done.error = to_python(std::make_exception_ptr(Error(ErrorKind::kDevice, "[copy] " + text)));
    }
    started_.erase(copy);
    if (done.error.is_none()) free_events_[stream].push_back(event);
    return done;
  }
  return std::nullopt;
}

std::vector<CopyId> StreamCopies::all_running() const {
  std::vector<CopyId> all;
  for (const auto& [copy, started] : started_) all.push_back(copy);
  return all;
}

void bind_stream_copies(nb::module_& m) {
  nb::class_<StreamCopies>(m, "StreamCopies")
      .def(nb::init<const nb::object&, const nb::object&, std::size_t>(), nb::arg("streams"), nb::arg("pool"),
           nb::arg("most_queued"))
      .def(
          "started", [](const StreamCopies& copies, std::uint64_t copy) { return copies.started(CopyId{copy}); },
          nb::arg("copy"))
      .def(
          "order",
          [](StreamCopies& copies, std::uint64_t copy, std::uint64_t stream) {
            copies.order(CopyId{copy}, StreamRef{stream});
          },
          nb::arg("copy"), nb::arg("stream"))
      .def(
          "stream_of",
          [](const StreamCopies& copies, std::uint64_t copy) { return value(copies.stream_of(CopyId{copy})); },
          nb::arg("copy"))
      .def(
          "wait", [](StreamCopies& copies, std::uint64_t copy) { copies.wait(CopyId{copy}); }, nb::arg("copy"))
      .def("drain", &StreamCopies::drain)
      .def_prop_ro("ready", &StreamCopies::ready)
      .def("all_running", [](const StreamCopies& copies) { return numbers(copies.all_running()); });
}

}  // namespace ebbtide::bindings
