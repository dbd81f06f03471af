#include "ticket.h"

#include <utility>

#include "bindings.h"
#include "collected.h"
#include "command_runner.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

Ticket::~Ticket() {
  if (!usable()) return;
  for (Command& command : dropped_->engine.drop(id)) dropped_->commands.push_back(std::move(command));
  if (dropped_->commands.empty()) return;
  in_destructor([this] {
    const nb::object runner = dropped_->on_drop();
    CommandRunner* here = nullptr;
    if (nb::try_cast(runner, here) && here != nullptr) here->run_dropped(*dropped_);
  });
}

void bind_ticket(nb::module_& m) {
  nb::class_<Ticket>(m, "Ticket", nb::type_slots(Collected<Ticket>::slots), nb::is_final())
      .def_prop_ro(
          "entry", [](const Ticket& ticket) { return ticket.entry.object(); },
          nb::sig("def entry(self) -> StorageEntry"))
      .def_ro("view", &Ticket::view, nb::for_getter(nb::sig("def view(self) -> typing.Any")))
      .def_ro("witness", &Ticket::witness, nb::for_getter(nb::sig("def witness(self) -> typing.Any")))
      .def_ro("version", &Ticket::version);
  nb::class_<Tickets>(m, "Tickets")
      .def(
          "__init__",
          [](Tickets* self, nb::object engine, nb::object on_drop) {
            Engine& core = nb::cast<Engine&>(engine);
            new (self) Tickets{std::make_shared<Dropped>(Dropped{std::move(engine), std::move(on_drop), core, {}})};
          },
          nb::arg("engine"), nb::arg("on_drop"), nb::sig("def __init__(self, engine: Engine, on_drop: object) -> None"))
      .def(
          "run_dropped", [](Tickets& tickets, CommandRunner& runner) { runner.run_dropped(*tickets.dropped); },
          nb::arg("runner"));
}

}  // namespace ebbtide::bindings
