// Runs the commands that come for every moved storage; what is rare is left to Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <unordered_set>
#include <vector>

#include "dropped.h"
#include "ebbtide/engine.h"
#include "storage_entry.h"
#include "stream_copies.h"

namespace ebbtide::bindings {

struct Restored {
  RestoreVerdict verdict;
  nanobind::object storage;  // kLive, kShared; None where another thread loads it anew: ask again
};

// Calls the functions of ebbtide.framework for one engine, and reports back to it. The base class of
// ebbtide.transfers.Transfers.
//
// `entries` are the StorageEntry objects by storage. `elsewhere` says which kinds of commands Python carries out, by
// whom: called with the object and the command. `copies` are None for memory whose work is synchronous; such copies,
// and those between host memory and files, are what the method `copy_by_threads` is for.
//
// Any thread may call, with the GIL; every call into Python may let other threads in. Nothing here decides.
class CommandRunner {
 public:
  CommandRunner(const nanobind::object& engine, const nanobind::object& framework, nanobind::dict entries,
                nanobind::dict elsewhere, const nanobind::object& copies);
  CommandRunner(const CommandRunner&) = delete;
  CommandRunner& operator=(const CommandRunner&) = delete;

  // Runs every command, also after one has failed; then throws the first failure. One that failed cuts the call short.
  void run(const Commands& commands);
  // As `run`, whoever else would carry the command out.
  void carry_out(const Command& command);
  // What the ends of tickets left to do.
  void run_dropped(Dropped& dropped);

  // Reports every copy on streams that is done.
  void settle();
  // Reports a copy; `error` is None where every byte was copied.
  void complete(const Completion& done);
  // A copy by threads that is expected is so until the engine was told of it: before what follows from that is run.
  void expect(CopyId copy) { expected_.insert(copy); }
  void expect_nothing() { expected_.clear(); }
  [[nodiscard]] bool expects(CopyId copy) const { return expected_.contains(copy); }

  // For what is there the verdict's commands were run. Nothing where a counter of the entry moved and its storage is
  // gone. With `allow_live` the saved storage will do.
  [[nodiscard]] std::optional<Restored> restore(const StorageEntry& entry, TicketId ticket, PassId pass,
                                                bool allow_live, StreamRef stream);
  // Memory for a load that the engine has begun; tells the engine where there is none.
  [[nodiscard]] nanobind::object allocate(StorageId storage, CopyId load, std::int64_t device, std::uint64_t nbytes,
                                          std::uint64_t residue, StreamRef stream);
  // Hands new memory to the engine, which starts the load when it can.
  void adopt(StorageEntry& entry, CopyId load, const nanobind::object& memory, StreamRef stream);
  // An exception ends a call early that was about to report to the engine, such as one out of a signal handler. What it
  // was about to tell the allocator of is over before anything else is let go of; what nobody will report is given up
  // when no thread is in a call, see Transfers.recover.
  void cut_short();
  [[nodiscard]] bool interrupted() const { return interrupted_; }
  void set_interrupted(bool interrupted) { interrupted_ = interrupted; }

  // Whether no in-place counter of the entry moved since the saves.
  [[nodiscard]] bool intact(const StorageEntry& entry) const;

  [[nodiscard]] Engine& engine() const { return engine_; }
  [[nodiscard]] EntryRef find(StorageId storage) const;
  // The entry, unless another thread added one for the same storage meanwhile: then that.
  [[nodiscard]] EntryRef add(EntryRef entry);

 private:
  [[nodiscard]] nanobind::object self() { return nanobind::find(this); }
  [[nodiscard]] nanobind::object unmoved(const StorageEntry& entry) const;
  [[nodiscard]] std::uint64_t moved(const StorageEntry& entry) const;
  [[nodiscard]] ProbeAnswer inspect(const StorageEntry& entry) const;
  void probe(const Command& command);
  void record(const Command& command);
  void copy(const Command& command);
  void wait(const Command& command);
  void allocate_ahead(const Command& command);
  void record_stream(const Command& command);
  void release_lease(const Command& command);
  void release_restored(const Command& command);
  void forget(const Command& command);

  nanobind::object engine_object_;
  Engine& engine_;
  nanobind::object copies_object_;
  StreamCopies* copies_;
  bool interrupted_ = false;
  std::unordered_set<CopyId> expected_;
  nanobind::dict entries_, elsewhere_;
  nanobind::object framework_, streams_, on_, current_;
  nanobind::object unmoved_, holders_, version_, address_, weak_, lock_, storage_ref_;
};

}  // namespace ebbtide::bindings
