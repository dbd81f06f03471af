#include "saving.h"

#include <cstdint>
#include <utility>

#include "bindings.h"
#include "collected.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

void bind_saving(nb::module_& m) {
  nb::class_<Saving>(m, "Saving", nb::type_slots(Collected<Saving>::slots), nb::is_final())
      .def(
          "__init__",
          [](Saving* self, std::uint64_t epoch, nb::object weights, nb::object policy, bool inputs_only,
             bool on_request) {
            new (self) Saving{.epoch = EpochId{epoch},
                              .weights = std::move(weights),
                              .policy = std::move(policy),
                              .inputs_only = inputs_only,
                              .on_request = on_request};
          },
          nb::arg("epoch"), nb::arg("weights"), nb::arg("policy") = nb::none(), nb::arg("inputs_only") = false,
          nb::arg("on_request") = false,
          nb::sig("def __init__(self, epoch: int, weights: object, policy: typing.Callable[[typing.Any], typing.Any] | "
                  "None = None, inputs_only: bool = False, on_request: bool = False) -> None"))
      .def_prop_rw(
          "epoch", [](const Saving& saving) { return value(saving.epoch); },
          [](Saving& saving, std::uint64_t epoch) { saving.epoch = EpochId{epoch}; })
      .def_rw("inputs_only", &Saving::inputs_only)
      .def_rw("label", &Saving::label)
      .def_prop_rw(
          "run", [](const Saving& saving) { return value(saving.run); },
          [](Saving& saving, std::uint64_t run) { saving.run = RunId{run}; });
}

}  // namespace ebbtide::bindings
