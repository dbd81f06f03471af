// The saved-tensor hooks of one session.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <unordered_set>

#include "command_runner.h"
#include "epoch.h"
#include "native_calls.h"
#include "saving.h"
#include "ticket.h"

namespace ebbtide::bindings {

// Turns tensors into what stands for them, and back: the base class of ebbtide.session.Session. What is rare is asked
// of its methods, by name.
//
// Any thread may call, with the GIL; every call into Python may let other threads in, and run the ends of tickets.
class SavedTensors {
 public:
  // `transfers` and `framework` are those of ebbtide; tensors below `min_bytes` are kept. `use_saved_copy`: where a
  // tensor was changed in place, the copy that was made before will do.
  SavedTensors(const nanobind::object& transfers, const nanobind::object& framework, std::uint64_t min_bytes,
               bool use_saved_copy);
  SavedTensors(const SavedTensors&) = delete;
  SavedTensors& operator=(const SavedTensors&) = delete;

  // An Epoch.
  [[nodiscard]] nanobind::object begin_epoch();
  void end_epoch(EpochId epoch);

  // A Ticket, or (tensor, in-place counter): one for every small tensor and weight, so a tuple.
  [[nodiscard]] nanobind::object pack(nanobind::handle tensor, const Saving& saving);
  // Stands in for `pack` where nothing is to be offloaded; counts nothing.
  [[nodiscard]] nanobind::object keep(nanobind::handle tensor) { return keep(tensor, KeepReason::kUnsupported); }
  // Takes what `pack` returned, gives the tensor back.
  [[nodiscard]] nanobind::object unpack(nanobind::handle saved);
  // The storage that the ticket's view lies in: with `allow_live` the saved one, or one that its bytes were loaded
  // into.
  [[nodiscard]] nanobind::object find(const Ticket& ticket, bool allow_live);
  // The running backward, 0 where none is; one that is seen for the first time is asked to tell of its end.
  PassId see_pass();
  // It is over, also by an exception: nothing is kept for it any more.
  void end_pass(PassId pass);

 private:
  [[nodiscard]] nanobind::object self() { return nanobind::find(this); }
  void require_usable(const char* place);
  void settle();
  // After a call that was cut short: once nobody is in one.
  void recover_when_alone();
  template <class Call>
  auto noting_interrupts(Call call);

  [[nodiscard]] nanobind::object decide(nanobind::handle tensor, const Saving& saving, bool& forced);
  [[nodiscard]] nanobind::object keep(nanobind::handle tensor, KeepReason reason);
  [[nodiscard]] nanobind::object save(nanobind::handle tensor, const Saving& saving, bool forced, bool spoiled);
  [[nodiscard]] nanobind::object witness(StorageEntry& entry, nanobind::handle tensor, std::uint64_t version);
  template <class Tell>
  void tell_allocator(StorageEntry& entry, StreamRef stream, Tell tell);

  [[nodiscard]] nanobind::object unpack(Ticket& ticket);
  [[nodiscard]] nanobind::object load(const EntryRef& entry, const RestoreVerdict& verdict, bool& short_of_memory);
  [[nodiscard]] StreamRef current_stream(std::int64_t device) const;

  const nanobind::object transfers_, copies_;
  CommandRunner& runner_;
  const std::shared_ptr<Dropped> dropped_;
  const std::uint64_t min_bytes_;
  const bool use_saved_copy_, threads_copy_, watches_memory_;
  const Function keep_reason_, is_region_input_, storage_bytes_, nbytes_, keep_, version_, view_meta_, storage_,
      storage_ref_, weak_, counter_owner_, witness_, replaceable_, recomputes_, make_view_, current_pass_;
  Function current_stream_, record_stream_, record_stream_of_;  // None for memory whose work is synchronous
  std::unordered_set<EpochId> epochs_;
  std::unordered_set<PassId> passes_;  // that were seen
};

}  // namespace ebbtide::bindings
