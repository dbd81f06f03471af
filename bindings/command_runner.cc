#include "command_runner.h"

#include <nanobind/stl/vector.h>

#include <exception>
#include <utility>

#include "bindings.h"
#include "commands.h"
#include "runner_parts.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

bool is_ordinary(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (nb::python_error& python) {
    return python.matches(PyExc_Exception);
  } catch (...) {
    return true;
  }
}

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
      lock_(framework.attr("lock")),
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
      cut_short();
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
    case CommandKind::kRecordStream:
      return record_stream(command);
    case CommandKind::kReleaseLease:
      return release_lease(command);
    case CommandKind::kReleaseRestored:
      return release_restored(command);
    case CommandKind::kForget:
      return forget(command);
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

void CommandRunner::cut_short() {
  interrupted_ = true;
  if (copies_ != nullptr) copies_->drain();
}

EntryRef CommandRunner::find(StorageId storage) const {
  const nb::int_ key(value(storage));
  PyObject* entry = PyDict_GetItemWithError(entries_.ptr(), key.ptr());
  if (entry == nullptr && PyErr_Occurred() != nullptr) nb::raise_python_error();
  return EntryRef(nb::borrow(entry));
}

EntryRef CommandRunner::add(EntryRef entry) {
  const nb::int_ key(value(entry->storage));
  PyObject* kept = PyDict_SetDefault(entries_.ptr(), key.ptr(), entry.object().ptr());
  return EntryRef(nb::borrow(nb::detail::raise_if_null(kept)));
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
           nb::sig("def __init__(self, engine: Engine, framework: object, entries: object, elsewhere: "
                   "object, copies: StreamCopies | None) -> None"))
      .def("run", &CommandRunner::run, nb::arg("commands"))
      .def("carry_out", &CommandRunner::carry_out, nb::arg("command"))
      .def("settle_streams", &CommandRunner::settle)
      .def("cut_short", &CommandRunner::cut_short)
      .def_prop_rw("interrupted", &CommandRunner::interrupted, &CommandRunner::set_interrupted)
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
          nb::arg("copies"));
}

}  // namespace ebbtide::bindings
