#include "ebbtide/command.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "commands.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

// (tier, base, byte offset)
nb::tuple place(const Place& place) {
  return nb::make_tuple(static_cast<int>(place.tier), place.base, place.byte_offset);
}

// [(source, destination, bytes)]
nb::list spans(const Plan& plan) {
  nb::list spans;
  for (const CopySpan& span : plan) spans.append(nb::make_tuple(place(span.src), place(span.dst), span.nbytes));
  return spans;
}

}  // namespace

void bind_command(nb::module_& m) {
  nb::enum_<CommandKind>(m, "CommandKind", nb::is_arithmetic())
      .value("PROBE", CommandKind::kProbe)
      .value("GATHER", CommandKind::kGather)
      .value("RECORD", CommandKind::kRecord)
      .value("COPY", CommandKind::kCopy)
      .value("WAIT", CommandKind::kWait)
      .value("ALLOC", CommandKind::kAlloc)
      .value("RECORD_STREAM", CommandKind::kRecordStream)
      .value("RELEASE_LEASE", CommandKind::kReleaseLease)
      .value("RELEASE_RESTORED", CommandKind::kReleaseRestored)
      .value("GROW", CommandKind::kGrow)
      .value("LOAD_FAILED", CommandKind::kLoadFailed)
      .value("FORGET", CommandKind::kForget)
      .value("TIER_FULL", CommandKind::kTierFull);
  nb::enum_<Hop>(m, "Hop", nb::is_arithmetic())
      .value("OFFLOAD", Hop::kOffload)
      .value("LOAD", Hop::kLoad)
      .value("SPILL", Hop::kSpill)
      .value("FETCH", Hop::kFetch);
  nb::enum_<Tier>(m, "Tier", nb::is_arithmetic())
      .value("DEVICE", Tier::kDevice)
      .value("HOST", Tier::kHost)
      .value("FILE", Tier::kFile)
      .value("STAGING", Tier::kStaging);
  nb::class_<Command>(m, "Command")
      .def_prop_ro("kind", [](const Command& command) { return static_cast<int>(command.kind); })
      .def_prop_ro("storage", [](const Command& command) { return value(command.storage); })
      .def_prop_ro("copy", [](const Command& command) { return value(command.copy); })
      .def_prop_ro("event", [](const Command& command) { return value(command.event); })
      .def_prop_ro("after", [](const Command& command) { return numbers(command.after); })
      .def_prop_ro("after_copies", [](const Command& command) { return numbers(command.after_copies); })
      .def(
          "ordered",
          [](Command command, const std::vector<std::uint64_t>& after, const std::vector<std::uint64_t>& after_copies) {
            command.after.clear();
            for (const std::uint64_t event : after) command.after.push_back(EventId{event});
            command.after_copies.clear();
            for (const std::uint64_t copy : after_copies) command.after_copies.push_back(CopyId{copy});
            return command;
          },
          nb::arg("after"), nb::arg("after_copies"), "The same copy, after these instead.")
      .def_prop_ro("stream", [](const Command& command) { return value(command.stream); })
      .def_prop_ro("hop", [](const Command& command) { return static_cast<int>(command.hop); })
      .def_prop_ro("storages", [](const Command& command) { return numbers(command.storages); })
      .def_prop_ro("cause", [](const Command& command) { return value(command.cause); })
      .def_prop_ro("staging_bytes", [](const Command& command) { return staging_bytes(command.plan); })
      .def(
          "spans",
          [](const Command& command, bool staged) { return spans(staged ? command.plan : unstaged(command.plan)); },
          nb::arg("staged"),
          nb::sig("def spans(self, staged: bool) -> list[tuple[tuple[int, int, int], tuple[int, int, int], int]]"))
      .def_ro("nbytes", &Command::nbytes)
      .def_ro("residue", &Command::residue)
      .def("__repr__", [](const Command& command) { return "<" + to_string(command) + ">"; });
}

}  // namespace ebbtide::bindings
