// The device's controls for Python. Streams go by their device's index and their id; nothing here holds the GIL while
// the device works.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "torch_shell.h"

namespace py = pybind11;

PYBIND11_MODULE(_tide, module) {
  using namespace ebbtide::device;
  constexpr auto kFree = py::call_guard<py::gil_scoped_release>();

  py::enum_<Mode>(module, "Mode").value("lazy", Mode::kLazy).value("worker", Mode::kWorker);
  py::enum_<Reuse>(module, "Reuse").value("at_once", Reuse::kAtOnce).value("delayed", Reuse::kDelayed);
  py::enum_<CopyKind>(module, "CopyKind")
      .value("h2d", CopyKind::kH2D)
      .value("d2h", CopyKind::kD2H)
      .value("d2d", CopyKind::kD2D)
      .value("h2h", CopyKind::kH2H);
  py::enum_<Operation>(module, "Operation")
      .value("allocate", Operation::kAllocate)
      .value("pin", Operation::kPin)
      .value("copy", Operation::kCopy)
      .value("record", Operation::kRecord)
      .value("wait", Operation::kWait)
      .value("synchronize", Operation::kSynchronize)
      .value("run_copy", Operation::kRunCopy);

  py::class_<Options>(module, "Options")
      .def(py::init<>())
      .def(py::init<const Options&>())
      .def_readonly("devices", &Options::devices)
      .def_readonly("capacity_bytes", &Options::capacity_bytes)
      .def_readwrite("mode", &Options::mode)
      .def_readwrite("reuse", &Options::reuse)
      .def_readwrite("poison", &Options::poison)
      .def_readwrite("queue_depth", &Options::queue_depth)
      .def_readwrite("delay_us", &Options::delay_us)
      .def_readwrite("link_bytes_per_s", &Options::link_bytes_per_s)
      .def_readwrite("device_bytes_per_s", &Options::device_bytes_per_s)
      .def_readwrite("copy_latency_s", &Options::copy_latency_s);
  module.def("options", [] { return the_device().options(); });
  module.def(
      "set_options", [](const Options& options) { the_device().set_options(options); }, kFree);

  py::class_<CopyRecord>(module, "Copy")
      .def_readonly("kind", &CopyRecord::kind)
      .def_readonly("nbytes", &CopyRecord::nbytes)
      .def_property_readonly("device", [](const CopyRecord& copy) { return copy.stream.device; })
      .def_property_readonly("stream_id", [](const CopyRecord& copy) { return copy.stream.number; })
      .def_readonly("dst", &CopyRecord::dst)
      .def_readonly("src", &CopyRecord::src)
      .def_readonly("begin_s", &CopyRecord::begin_s)
      .def_readonly("end_s", &CopyRecord::end_s);
  module.def(
      "copies", [] { return the_device().copies(); }, kFree);
  module.def(
      "clear_copies", [] { the_device().clear_copies(); }, kFree);

  py::class_<Race>(module, "Race")
      .def_readonly("first", &Race::first)
      .def_readonly("second", &Race::second)
      .def_readonly("begin", &Race::begin)
      .def_readonly("end", &Race::end)
      .def("__str__", [](const Race& race) { return to_string(race); })
      .def("__repr__", [](const Race& race) { return to_string(race); });
  module.def(
      "races", [] { return the_device().races(); }, kFree);
  module.def(
      "clear_races", [] { the_device().clear_races(); }, kFree);
  module.def(
      "set_checking", [](bool happens_before) { the_device().set_checking(happens_before); }, kFree);

  module.def(
      "step",
      [](int device, std::uint64_t id) {
        return the_device().step({device, id});
      },
      kFree);
  module.def(
      "queued",
      [](int device, std::uint64_t id) {
        return the_device().queued({device, id});
      },
      kFree);
  module.def(
      "clock_s",
      [](int device, std::uint64_t id) {
        return the_device().clock_s({device, id});
      },
      kFree);
  module.def(
      "streams", [](int device) { return the_device().streams(device); }, kFree);

  module.def(
      "fail", [](Operation operation, std::uint64_t nth, bool sticky) { the_device().fail(operation, nth, sticky); },
      kFree);
  module.def(
      "clear_faults", [] { the_device().clear_faults(); }, kFree);
  module.def(
      "lose", [] { the_device().lose(); }, kFree);
  module.def(
      "recover", [] { the_device().recover(); }, kFree);

  py::class_<MemoryStats>(module, "Memory")
      .def_readonly("used_bytes", &MemoryStats::used_bytes)
      .def_readonly("peak_bytes", &MemoryStats::peak_bytes)
      .def_readonly("pending_bytes", &MemoryStats::pending_bytes)
      .def_readonly("allocations", &MemoryStats::allocations)
      .def_readonly("pinned_bytes", &MemoryStats::pinned_bytes)
      .def_readonly("pin_allocations", &MemoryStats::pin_allocations);
  module.def(
      "memory", [](int device) { return the_device().memory(device); }, kFree);
  module.def(
      "set_limit", [](int device, std::uint64_t nbytes) { the_device().set_limit(device, nbytes); }, kFree);

  module.def(
      "owns", [](std::uint64_t address) { return the_device().owns(reinterpret_cast<void*>(address)); }, kFree);
  // An access of the host to pinned memory, for the check only.
  module.def(
      "host_access",
      [](std::uint64_t address, std::uint64_t nbytes, bool write) {
        the_device().host_access("by the test", {{reinterpret_cast<void*>(address), nbytes, write}}, [] {});
      },
      kFree);

  module.def("current_device", [] { return static_cast<int>(current_index()); });
  module.def("set_device", [](int index) { set_current_index(static_cast<c10::DeviceIndex>(index)); });
  module.def("capturing", [] { return capturing().load(); });
  module.def("set_capturing", [](bool answer) { capturing() = answer; });
}
