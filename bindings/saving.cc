#include "saving.h"

#include <cstdint>
#include <utility>

#include "bindings.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const Saving& saving = *nb::inst_ptr<Saving>(self);
  Py_VISIT(saving.weights.ptr());
  Py_VISIT(saving.policy.ptr());
  return 0;
}

int clear(PyObject* self) {
  Saving& saving = *nb::inst_ptr<Saving>(self);
  const nb::object weights = std::exchange(saving.weights, nb::none());
  const nb::object policy = std::exchange(saving.policy, nb::none());
  return 0;
}

PyType_Slot kSlots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)}, {0, nullptr}};

}  // namespace

void bind_saving(nb::module_& m) {
  nb::class_<Saving>(m, "Saving", nb::type_slots(kSlots), nb::is_final())
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
