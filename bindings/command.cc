#include "ebbtide/command.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

void bind_command(nb::module_& m) {
  nb::enum_<CommandKind>(m, "CommandKind", nb::is_arithmetic())
      .value("PROBE", CommandKind::kProbe)
      .value("RECORD", CommandKind::kRecord)
      .value("COPY", CommandKind::kCopy)
      .value("WAIT", CommandKind::kWait)
      .value("ALLOC", CommandKind::kAlloc)
      .value("RELEASE_LEASE", CommandKind::kReleaseLease)
      .value("RELEASE_RESTORED", CommandKind::kReleaseRestored)
      .value("FORGET", CommandKind::kForget)
      .value("TIER_FULL", CommandKind::kTierFull);
  nb::class_<Command>(m, "Command")
      .def_prop_ro("kind", [](const Command& command) { return static_cast<int>(command.kind); })
      .def_prop_ro("storage", [](const Command& command) { return value(command.storage); })
      .def_prop_ro("copy", [](const Command& command) { return value(command.copy); })
      .def_prop_ro("event", [](const Command& command) { return value(command.event); })
      .def_prop_ro("after",
                   [](const Command& command) {
                     std::vector<std::uint64_t> events;
                     for (const EventId event : command.after) events.push_back(value(event));
                     return events;
                   })
      .def_prop_ro("stream", [](const Command& command) { return value(command.stream); })
      .def_ro("to_device", &Command::to_device)
      .def_ro("nbytes", &Command::nbytes)
      .def_ro("residue", &Command::residue)
      .def("__repr__", [](const Command& command) { return "<" + to_string(command) + ">"; });
}

}  // namespace ebbtide::bindings
