// What holds memory: leases of saved storages, and restored ones.
#include <exception>
#include <utility>

#include "command_runner.h"
#include "commands.h"
#include "finally.h"
#include "runner_parts.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

// While it lives, this thread issues work on the stream, but inside of `on`: for that the framework need not be asked.
class StreamIs {
 public:
  explicit StreamIs(StreamRef stream) : before_(std::exchange(stream_, stream)) {}
  StreamIs(const StreamIs&) = delete;
  StreamIs& operator=(const StreamIs&) = delete;
  ~StreamIs() { stream_ = before_; }

  static bool known(StreamRef stream) { return value(stream) != 0 && stream_ == stream; }

 private:
  static thread_local StreamRef stream_;
  const StreamRef before_;
};

thread_local StreamRef StreamIs::stream_{};

}  // namespace

// The saved storage, if it is still there.
nb::object CommandRunner::unmoved(const StorageEntry& entry) const {
  nb::object lease = entry.lease();
  if (lease.is_valid()) return lease;
  nb::object storage = lock_(entry.weak);
  const bool same = !storage.is_none() && nb::cast<bool>(unmoved_(storage, entry.ref));
  return same ? storage : nb::none();
}

std::optional<Restored> CommandRunner::restore(const StorageEntry& entry, TicketId ticket, PassId pass, bool allow_live,
                                               StreamRef stream) {
  nb::object live = allow_live ? unmoved(entry) : nb::none();
  const nb::object weak = entry.restored_weak;
  nb::object shared = !live.is_none() || weak.is_none() ? nb::none() : lock_(weak);
  if (live.is_none() && allow_live && !intact(entry)) return std::nullopt;
  const StreamIs current(stream);
  RestoreVerdict verdict = engine_.restore(ticket, pass, !live.is_none(), !shared.is_none(), stream);
  if (verdict.outcome == RestoreOutcome::kLive) {
    run(verdict.commands);
    return Restored{std::move(verdict), std::move(live)};
  }
  if (verdict.outcome == RestoreOutcome::kShared) {
    run(verdict.commands);
    // Another thread loaded it anew meanwhile, or failed to.
    if (entry.failed(verdict.load) || !entry.restored_weak.is(weak)) shared = nb::none();
  }
  return Restored{std::move(verdict), std::move(shared)};
}

nb::object CommandRunner::allocate(StorageId storage, CopyId load, std::int64_t device, std::uint64_t nbytes,
                                   std::uint64_t residue, StreamRef stream) {
  try {
    if (copies_ == nullptr || StreamIs::known(stream) || nb::cast<std::uint64_t>(current_(device)) == value(stream)) {
      return framework_.attr("allocate")(nbytes, residue, device);
    }
    const StreamIs other(StreamRef{});
    const nb::object context = on_(value(stream));
    context.attr("__enter__")();
    nb::object memory;
    finally([&] { memory = framework_.attr("allocate")(nbytes, residue, device); },
            [&] { context.attr("__exit__")(nb::none(), nb::none(), nb::none()); });
    return memory;
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    run(engine_.allocation_failed(storage, load));
    std::rethrow_exception(failure);
  }
}

void CommandRunner::allocate_ahead(const Command& command) {
  const EntryRef entry = find(command.storage);
  if (!entry) return run(engine_.allocation_failed(command.storage, command.copy));
  nb::object memory;
  try {
    memory = allocate(command.storage, command.copy, entry->device, command.nbytes, command.residue, command.stream);
  } catch (nb::python_error& error) {
    // Nobody has asked for it yet: a failure only cancels it.
    if (!error.matches(PyExc_MemoryError)) throw;
    return;
  }
  adopt(*entry, command.copy, memory, command.stream);
}

void CommandRunner::adopt(StorageEntry& entry, CopyId load, const nb::object& memory, StreamRef stream) {
  entry.restored.emplace_back(load, memory);
  const nb::object weak = weak_(memory);
  const StorageRef restored = storage_ref(nb::cast<nb::tuple>(storage_ref_(memory)));
  const Commands commands = engine_.allocated(entry.storage, load, restored, stream);
  const bool refused = commands.size() == 1 && commands.front().kind == CommandKind::kReleaseRestored;
  if (!refused) const nb::object before = std::exchange(entry.restored_weak, weak);
  run(commands);
}

void CommandRunner::release_lease(const Command& command) {
  if (const EntryRef entry = find(command.storage)) entry->let_go_of_lease();
}

void CommandRunner::release_restored(const Command& command) {
  if (const EntryRef entry = find(command.storage)) entry->let_go_of_restored(command.copy);
}

void CommandRunner::forget(const Command& command) {
  if (copies_ != nullptr) copies_->forget(command.storage);
  const EntryRef entry = find(command.storage);
  if (!entry) return;  // saving failed before it was made
  const nb::int_ key(value(command.storage));
  if (PyDict_DelItem(entries_.ptr(), key.ptr()) != 0) nb::raise_python_error();
  entry->let_go();
}

}  // namespace ebbtide::bindings
