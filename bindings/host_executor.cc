#include "ebbtide/host_executor.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <unordered_map>

#include "bindings.h"
#include "commands.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

// A client's queue together with the storages that its copies read and write (`kept`). They stay alive until the
// completion was taken, whatever exception cuts Python code short.
struct Copies {
  struct Running {
    nb::object kept;
    std::vector<std::uint64_t> storages;
    int hop;
  };

  std::shared_ptr<CompletionQueue> queue = std::make_shared<CompletionQueue>();
  std::unordered_map<std::uint64_t, Running> running;

  void submit(HostExecutor& executor, const Command& command, std::shared_ptr<SpillFile> file, nb::object kept) {
    const std::uint64_t copy = value(command.copy);
    running.insert_or_assign(copy, Running{std::move(kept), numbers(command.storages), static_cast<int>(command.hop)});
    try {
      const nb::gil_scoped_release release;
      executor.submit(command.copy, command.plan, std::move(file), queue);
    } catch (...) {
      running.erase(copy);
      throw;
    }
  }

  // (copy, hop, storage ids, error)
  nb::object pop() {
    const std::optional<Completion> completion = queue->pop();
    if (!completion) return nb::none();
    const auto found = running.find(value(completion->copy));
    const Running done = std::move(found->second);
    running.erase(found);
    return nb::make_tuple(value(completion->copy), done.hop, done.storages, to_python(completion->error));
  }
};

}  // namespace

void bind_host_executor(nb::module_& m) {
  nb::class_<Copies>(m, "Copies")
      .def(nb::init<>())
      .def_prop_ro("ready", [](const Copies& copies) { return copies.queue->ready(); })
      .def("all_running",
           [](const Copies& copies) {
             std::vector<std::uint64_t> all;
             for (const auto& [copy, running] : copies.running) all.push_back(copy);
             return all;
           })
      .def(
          "running", [](const Copies& copies, std::uint64_t copy) { return copies.running.contains(copy); },
          nb::arg("copy"))
      .def("pop", &Copies::pop, nb::sig("def pop(self) -> tuple[int, int, list[int], BaseException | None] | None"))
      .def("submit", &Copies::submit, nb::arg("executor"), nb::arg("command"), nb::arg("file").none(),
           nb::arg("kept").none());
  nb::class_<HostExecutor>(m, "HostExecutor")
      .def(
          "__init__",
          [](HostExecutor* self, unsigned threads, unsigned queue_depth, std::uint64_t inline_bytes) {
            new (self) HostExecutor(HostExecutor::Options{threads, queue_depth, inline_bytes});
          },
          nb::arg("threads"), nb::arg("queue_depth"), nb::arg("inline_bytes"))
      .def(
          "wait",
          [](HostExecutor& executor, std::uint64_t copy, const Copies& copies) {
            executor.wait(CopyId{copy}, *copies.queue);
          },
          nb::arg("copy"), nb::arg("copies"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "drain", [](HostExecutor& executor, const Copies& copies) { executor.drain(*copies.queue); },
          nb::arg("copies"), nb::call_guard<nb::gil_scoped_release>())
      .def("shutdown", &HostExecutor::shutdown, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("pending", &HostExecutor::pending)
      .def_prop_ro("running_threads", &HostExecutor::running_threads);
}

}  // namespace ebbtide::bindings
