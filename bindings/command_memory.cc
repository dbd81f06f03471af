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
nb::object CommandRunner::unmoved(nb::handle entry) const {
  nb::object lease = last_of(get(entry, names().leases));
  if (lease.is_valid()) return lease;
  nb::object storage = lock_(get(entry, names().weak));
  const bool same = !storage.is_none() && nb::cast<bool>(unmoved_(storage, get(entry, names().ref)));
  return same ? storage : nb::none();
}

nb::object CommandRunner::restore(nb::handle entry, TicketId ticket, PassId pass, bool allow_live, StreamRef stream) {
  nb::object live = allow_live ? unmoved(entry) : nb::none();
  const nb::object weak = get(entry, names().restored_weak);
  nb::object shared = !live.is_none() || weak.is_none() ? nb::none() : lock_(weak);
  if (live.is_none() && allow_live && !intact(entry)) return nb::none();
  const StreamIs current(stream);
  RestoreVerdict verdict = engine_.restore(ticket, pass, !live.is_none(), !shared.is_none(), stream);
  const bool there = verdict.outcome == RestoreOutcome::kLive || verdict.outcome == RestoreOutcome::kShared;
  if (there) run(verdict.commands);
  const nb::object commands = there ? nb::none() : nb::cast(std::move(verdict.commands));
  if (verdict.outcome == RestoreOutcome::kShared) {
    // Another thread loaded it anew meanwhile, or failed to.
    const nb::object errors = get(entry, names().load_errors);
    const int failed = PyDict_Contains(errors.ptr(), nb::int_(value(verdict.load)).ptr());
    if (failed < 0) nb::raise_python_error();
    if (failed != 0 || !get(entry, names().restored_weak).is(weak)) shared = nb::none();
  }
  return nb::make_tuple(static_cast<int>(verdict.outcome), verdict.outcome == RestoreOutcome::kLive ? live : shared,
                        value(verdict.load), verdict.allocating, verdict.nbytes, verdict.residue, value(verdict.stream),
                        commands);
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
  const nb::object entry = find(command.storage);
  if (!entry.is_valid()) return run(engine_.allocation_failed(command.storage, command.copy));
  nb::object memory;
  try {
    const nb::object ref = get(entry, names().ref);
    memory = allocate(command.storage, command.copy, nb::cast<std::int64_t>(item(ref, 0)), command.nbytes,
                      command.residue, command.stream);
  } catch (nb::python_error& error) {
    // Nobody has asked for it yet: a failure only cancels it.
    if (!error.matches(PyExc_MemoryError)) throw;
    return;
  }
  adopt(entry, command.storage, command.copy, memory, command.stream);
}

void CommandRunner::adopt(nb::handle entry, StorageId storage, CopyId load, const nb::object& memory,
                          StreamRef stream) {
  nb::cast<nb::dict>(get(entry, names().restored))[nb::int_(value(load))] = memory;
  const nb::object weak = weak_(memory);
  const StorageRef restored = storage_ref(nb::cast<nb::tuple>(storage_ref_(memory)));
  const Commands commands = engine_.allocated(storage, load, restored, stream);
  const bool refused = commands.size() == 1 && commands.front().kind == CommandKind::kReleaseRestored;
  if (!refused) set(entry, names().restored_weak, weak);
  run(commands);
}

void CommandRunner::release_lease(const Command& command) {
  const nb::object entry = find(command.storage);
  if (!entry.is_valid()) return;
  const nb::object leases = get(entry, names().leases);
  const nb::object lease = last_of(leases);
  if (!lease.is_valid()) return;
  const Py_ssize_t size = PyList_GET_SIZE(leases.ptr());
  if (PyList_SetSlice(leases.ptr(), size - 1, size, nullptr) != 0) nb::raise_python_error();
}

void CommandRunner::release_restored(const Command& command) {
  const nb::object entry = find(command.storage);
  if (!entry.is_valid()) return;
  const nb::object restored = get(entry, names().restored);
  const nb::int_ key(value(command.copy));
  const nb::object memory = nb::borrow(PyDict_GetItemWithError(restored.ptr(), key.ptr()));
  if (memory.is_valid() && PyDict_DelItem(restored.ptr(), key.ptr()) != 0) nb::raise_python_error();
}

void CommandRunner::forget(const Command& command) {
  if (copies_ != nullptr) copies_->forget(command.storage);
  const nb::object entry = find(command.storage);
  if (!entry.is_valid()) return;  // saving failed before it was made
  const nb::int_ key(value(command.storage));
  if (PyDict_DelItem(entries_.ptr(), key.ptr()) != 0) nb::raise_python_error();
  const nb::object leases = get(entry, names().leases);
  if (PyList_SetSlice(leases.ptr(), 0, PyList_GET_SIZE(leases.ptr()), nullptr) != 0) nb::raise_python_error();
  PyDict_Clear(get(entry, names().restored).ptr());
}

}  // namespace ebbtide::bindings
