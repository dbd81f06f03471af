#include "ebbtide/host_executor.h"

#include <nanobind/stl/shared_ptr.h>

#include "bindings.h"
#include "ebbtide/command.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

void bind_host_executor(nb::module_& m) {
  nb::class_<CompletionQueue>(m, "CompletionQueue")
      .def(nb::init<>())
      .def_prop_ro("ready", &CompletionQueue::ready)
      .def(
          "pop",
          [](CompletionQueue& queue) -> nb::object {
            const std::optional<Completion> completion = queue.pop();
            if (!completion) return nb::none();
            return nb::make_tuple(value(completion->copy), to_python(completion->error));
          },
          nb::sig("def pop(self) -> tuple[int, BaseException | None] | None"));
  nb::class_<HostExecutor>(m, "HostExecutor")
      .def(
          "__init__",
          [](HostExecutor* self, unsigned threads, unsigned queue_depth, std::uint64_t inline_bytes) {
            new (self) HostExecutor(HostExecutor::Options{threads, queue_depth, inline_bytes});
          },
          nb::arg("threads"), nb::arg("queue_depth"), nb::arg("inline_bytes"))
      .def(
          "submit",
          [](HostExecutor& executor, const Command& command, std::shared_ptr<SpillFile> file,
             std::shared_ptr<CompletionQueue> queue) {
            executor.submit(command.copy, command.plan, std::move(file), std::move(queue));
          },
          nb::arg("command"), nb::arg("file").none(), nb::arg("queue"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "wait",
          [](HostExecutor& executor, std::uint64_t copy, const CompletionQueue& queue) {
            executor.wait(CopyId{copy}, queue);
          },
          nb::arg("copy"), nb::arg("queue"), nb::call_guard<nb::gil_scoped_release>())
      .def("drain", &HostExecutor::drain, nb::arg("queue"), nb::call_guard<nb::gil_scoped_release>())
      .def("shutdown", &HostExecutor::shutdown, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("pending", &HostExecutor::pending)
      .def_prop_ro("running_threads", &HostExecutor::running_threads);
}

}  // namespace ebbtide::bindings
