#include "command_runner.h"

#include <nanobind/stl/vector.h>

#include <exception>
#include <utility>

#include "bindings.h"
#include "commands.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

// A probe of a storage that another thread is just saving: look again later. More holders than there can be leases.
constexpr ProbeAnswer kHeld{.holders = std::uint64_t{1} << 32};
// The storage could not be looked at: it stays on the device.
constexpr ProbeAnswer kUnknown{.holders = 1, .same = false};

// Names of attributes of ebbtide.saved.StorageEntry.
struct Names {
  static nb::object make(const char* name) { return nb::steal(PyUnicode_InternFromString(name)); }
  nb::object leases = make("leases"), ref = make("ref"), witnesses = make("witnesses"), restored = make("restored"),
             restored_weak = make("restored_weak"), load_started = make("load_started");
};

const Names& names() {
  static const Names* const all = new Names;  // never destroyed: the interpreter may be gone by then
  return *all;
}

nb::object get(nb::handle object, const nb::object& name) {
  return nb::steal(nb::detail::raise_if_null(PyObject_GetAttr(object.ptr(), name.ptr())));
}

void set(nb::handle object, const nb::object& name, nb::handle value) {
  if (PyObject_SetAttr(object.ptr(), name.ptr(), value.ptr()) != 0) nb::raise_python_error();
}

nb::handle item(const nb::object& tuple, Py_ssize_t index) { return PyTuple_GET_ITEM(tuple.ptr(), index); }

nb::object last_of(nb::handle list) {
  const Py_ssize_t size = PyList_GET_SIZE(list.ptr());
  return size == 0 ? nb::object() : nb::borrow(PyList_GET_ITEM(list.ptr(), size - 1));
}

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

// One that may be caught with `except Exception`, in Python's words.
bool is_ordinary(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (nb::python_error& python) {
    return python.matches(PyExc_Exception);
  } catch (...) {
    return true;
  }
}

// Runs the second also where the first throws, and passes on what was thrown first.
template <class First, class Second>
void finally(First&& first, Second&& second) {
  std::exception_ptr failure;
  try {
    first();
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    second();
  } catch (...) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

CommandRunner::CommandRunner(const nb::object& engine, const nb::object& framework, nb::dict entries,
                             nb::dict elsewhere, const nb::object& copies)
    : engine_object_(engine),
      engine_(nb::cast<Engine&>(engine)),
      copies_object_(copies),
      copies_(copies.is_none() ? nullptr : &nb::cast<StreamCopies&>(copies)),
      entries_(std::move(entries)),
      elsewhere_(std::move(elsewhere)),
      framework_(framework),
      streams_(framework.attr("streams")),
      unmoved_(framework.attr("unmoved")),
      holders_(framework.attr("holders")),
      version_(framework.attr("version")),
      address_(framework.attr("address")),
      weak_(framework.attr("weak")),
      storage_ref_(framework.attr("storage_ref")) {
  if (streams_.is_none()) return;
  on_ = streams_.attr("on");
  current_ = streams_.attr("current");
}

void CommandRunner::run(const Commands& commands) {
  std::exception_ptr failure;
  for (const Command& command : commands) {
    try {
      const nb::int_ kind(static_cast<int>(command.kind));
      const nb::handle other = PyDict_GetItemWithError(elsewhere_.ptr(), kind.ptr());
      if (other.is_valid()) {
        other(self(), command);
      } else {
        carry_out(command);
      }
    } catch (...) {
      if (!failure) failure = std::current_exception();
      if (!is_ordinary(std::current_exception())) cut_short();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void CommandRunner::carry_out(const Command& command) {
  switch (command.kind) {
    case CommandKind::kProbe:
      return probe(command);
    case CommandKind::kGather:
      return run(engine_.gather());
    case CommandKind::kRecord:
      return record(command);
    case CommandKind::kCopy:
      return copy(command);
    case CommandKind::kWait:
      return wait(command);
    case CommandKind::kAlloc:
      return allocate_ahead(command);
    case CommandKind::kReleaseLease:
      return release_lease(command);
    case CommandKind::kReleaseRestored:
      return release_restored(command);
    case CommandKind::kForget:
      return forget(command);
    case CommandKind::kRecordStream:
    case CommandKind::kGrow:
    case CommandKind::kLoadFailed:
    case CommandKind::kTierFull:
      break;
  }
  throw nb::key_error("a command that nobody carries out");
}

void CommandRunner::run_dropped(Dropped& dropped) {
  while (std::optional<Command> command = dropped.pop()) {
    Commands one;
    one.push_back(std::move(*command));
    run(one);
  }
}

void CommandRunner::cut_short() { self().attr("cut_short")(); }

nb::object CommandRunner::find(StorageId storage) const {
  const nb::int_ key(value(storage));
  PyObject* entry = PyDict_GetItemWithError(entries_.ptr(), key.ptr());
  if (entry == nullptr && PyErr_Occurred() != nullptr) nb::raise_python_error();
  return nb::borrow(entry);
}

// --- probes and completions

// How many of the in-place counters moved since the saves.
std::uint64_t CommandRunner::moved(nb::handle witnesses) const {
  std::uint64_t moved = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(witnesses.ptr()); ++i) {
    const nb::object witness = nb::borrow(PyList_GET_ITEM(witnesses.ptr(), i));
    if (!version_(item(witness, 0)).equal(item(witness, 1))) ++moved;
  }
  return moved;
}

bool CommandRunner::intact(nb::handle entry) const { return moved(get(entry, names().witnesses)) == 0; }

ProbeAnswer CommandRunner::inspect(nb::handle entry) const {
  const nb::object leases = get(entry, names().leases);
  ProbeAnswer answer;
  {
    const nb::object lease = last_of(leases);
    if (!lease.is_valid()) return kHeld;  // released
    answer.same = nb::cast<bool>(unmoved_(lease, get(entry, names().ref)));
  }
  const nb::object witnesses = get(entry, names().witnesses);
  const std::uint64_t changed = moved(witnesses);
  answer.intact = changed == 0;
  answer.spoiled = changed > 0 && changed == static_cast<std::uint64_t>(PyList_GET_SIZE(witnesses.ptr()));
  // The list of leases is to be a lease's only holder here.
  try {
    const nb::object holders = holders_(leases);
    answer.counted = !holders.is_none();
    answer.holders = answer.counted ? nb::cast<std::uint64_t>(holders) : 0;
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_IndexError)) throw;
    return kHeld;
  }
  return answer;
}

void CommandRunner::probe(const Command& command) {
  ProbeAnswer answer = kUnknown;
  finally(
      [&] {
        const nb::object entry = find(command.storage);
        answer = entry.is_valid() ? inspect(entry) : kHeld;
      },
      [&] { run(engine_.probed(command.storage, answer)); });
}

void CommandRunner::settle() {
  if (copies_ == nullptr) return;
  while (const std::optional<Completion> done = copies_->pop()) complete(*done);
}

void CommandRunner::complete(const Completion& done) {
  std::vector<ProbeAnswer> answers;
  const bool ok = done.error.is_none();
  finally(
      [&] {
        if (!ok)
          self().attr("note_error")(value(done.copy), static_cast<int>(done.hop), numbers(done.storages), done.error);
        if (done.hop != Hop::kOffload) return;
        for (const StorageId storage : done.storages) {
          const nb::object entry = find(storage);
          answers.push_back(entry.is_valid() ? inspect(entry) : kUnknown);
        }
      },
      [&] {
        const Commands commands = engine_.completed(done.copy, ok, answers);
        expected_.erase(done.copy);
        run(commands);
      });
}

// --- copies

void CommandRunner::record(const Command& command) { copies_->record(command.storage, command.event, command.stream); }

void CommandRunner::copy(const Command& command) {
  const bool loads = command.hop == Hop::kLoad;
  if (copies_ == nullptr || (!loads && command.hop != Hop::kOffload)) {
    self().attr("copy_by_threads")(command);
    return;
  }
  std::vector<nb::object> entries;
  for (const StorageId storage : command.storages) {
    nb::object entry = find(storage);
    if (!entry.is_valid()) {  // saving it was cut short
      run(engine_.completed(command.copy, false, std::vector<ProbeAnswer>(command.storages.size(), kUnknown)));
      return;
    }
    entries.push_back(std::move(entry));
  }
  std::exception_ptr failure;
  try {
    const nb::int_ key(value(command.copy));
    DeviceStorages storages;
    for (const nb::object& entry : entries) {
      nb::object storage = loads ? get(entry, names().restored)[key] : last_of(get(entry, names().leases));
      if (!storage.is_valid()) throw nb::key_error("a storage to copy was let go of");
      const auto address = nb::cast<std::uint64_t>(address_(storage));
      storages.emplace_back(address, std::move(storage));
    }
    const nb::object ref = get(entries.front(), names().ref);
    copies_->submit(command, storages, nb::cast<std::int64_t>(item(ref, 0)));
  } catch (...) {
    failure = std::current_exception();
  }
  if (!failure) {
    if (!loads) return;
    const nb::int_ number(value(command.copy));
    for (const nb::object& entry : entries) set(entry, names().load_started, number);
    return;
  }
  // Interrupted after it was queued, it is reported as any other.
  if (!copies_->started(command.copy)) {
    complete({command.copy, command.hop, command.storages, to_python(failure)});
  }
  if (!loads || !is_ordinary(failure)) std::rethrow_exception(failure);
}

void CommandRunner::wait(const Command& command) {
  if (value(command.stream) == 0 || !copies_->started(command.copy)) self().attr("wait_for")(command);
  if (value(command.stream) != 0) copies_->order(command.copy, command.stream);
}

// --- memory

nb::object CommandRunner::restore(TicketId ticket, PassId pass, bool live, bool shared, StreamRef stream) {
  const StreamIs current(stream);
  RestoreVerdict verdict = engine_.restore(ticket, pass, live, shared, stream);
  const bool there = verdict.outcome == RestoreOutcome::kLive || verdict.outcome == RestoreOutcome::kShared;
  if (there) run(verdict.commands);
  const nb::object commands = there ? nb::none() : nb::cast(std::move(verdict.commands));
  return nb::make_tuple(static_cast<int>(verdict.outcome), value(verdict.load), verdict.allocating, verdict.nbytes,
                        verdict.residue, value(verdict.stream), commands);
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

void bind_command_runner(nb::module_& m) {
  nb::class_<Commands>(m, "Commands")
      .def("__len__", [](const Commands& commands) { return commands.size(); })
      .def(
          "__getitem__",
          [](const Commands& commands, std::size_t index) {
            if (index >= commands.size()) throw nb::index_error();
            return commands[index];
          },
          nb::arg("index"));
  nb::class_<CommandRunner>(m, "CommandRunner", nb::is_weak_referenceable())
      .def(nb::init<const nb::object&, const nb::object&, nb::dict, nb::dict, const nb::object&>(), nb::arg("engine"),
           nb::arg("framework"), nb::arg("entries"), nb::arg("elsewhere"), nb::arg("copies").none(),
           nb::sig("def __init__(self, engine: Engine, framework: object, entries: object, elsewhere: object, "
                   "copies: StreamCopies | None) -> None"))
      .def("run", &CommandRunner::run, nb::arg("commands"))
      .def("carry_out", &CommandRunner::carry_out, nb::arg("command"))
      .def("settle_streams", &CommandRunner::settle)
      .def(
          "complete",
          [](CommandRunner& runner, std::uint64_t copy, int hop, const std::vector<std::uint64_t>& storages,
             nb::object error) {
            Completion done{CopyId{copy}, static_cast<Hop>(hop), {}, std::move(error)};
            for (const std::uint64_t storage : storages) done.storages.push_back(StorageId{storage});
            runner.complete(done);
          },
          nb::arg("copy"), nb::arg("hop"), nb::arg("storages"), nb::arg("error").none())
      .def(
          "restore",
          [](CommandRunner& runner, std::uint64_t ticket, std::uint64_t pass_id, bool live, bool shared,
             std::uint64_t stream) {
            return runner.restore(TicketId{ticket}, PassId{pass_id}, live, shared, StreamRef{stream});
          },
          nb::arg("ticket"), nb::arg("pass_id"), nb::arg("live"), nb::arg("shared"), nb::arg("stream"),
          nb::sig("def restore(self, ticket: int, pass_id: int, live: bool, shared: bool, stream: int) "
                  "-> tuple[int, int, bool, int, int, int, Commands | None]"))
      .def(
          "allocate",
          [](CommandRunner& runner, std::uint64_t storage, std::uint64_t load, std::int64_t device,
             std::uint64_t nbytes, std::uint64_t residue, std::uint64_t stream) {
            return runner.allocate(StorageId{storage}, CopyId{load}, device, nbytes, residue, StreamRef{stream});
          },
          nb::arg("storage"), nb::arg("load"), nb::arg("device"), nb::arg("nbytes"), nb::arg("residue"),
          nb::arg("stream"))
      .def(
          "adopt",
          [](CommandRunner& runner, nb::handle entry, std::uint64_t storage, std::uint64_t load,
             const nb::object& memory, std::uint64_t stream) {
            runner.adopt(entry, StorageId{storage}, CopyId{load}, memory, StreamRef{stream});
          },
          nb::arg("entry"), nb::arg("storage"), nb::arg("load"), nb::arg("memory"), nb::arg("stream"))
      .def(
          "expect", [](CommandRunner& runner, std::uint64_t copy) { runner.expect(CopyId{copy}); }, nb::arg("copy"))
      .def(
          "expects", [](const CommandRunner& runner, std::uint64_t copy) { return runner.expects(CopyId{copy}); },
          nb::arg("copy"))
      .def(
          "expect_only",
          [](CommandRunner& runner, const std::vector<std::uint64_t>& copies) {
            runner.expect_nothing();
            for (const std::uint64_t copy : copies) runner.expect(CopyId{copy});
          },
          nb::arg("copies"))
      .def("intact", &CommandRunner::intact, nb::arg("entry"));
}

}  // namespace ebbtide::bindings
