// Values in Python objects that may be part of a cycle.
#pragma once

#include <nanobind/nanobind.h>

namespace ebbtide::bindings {

// The slots of such a type for the garbage collector, to be given to nanobind as
// nb::type_slots(Collected<Value>::slots). `Value` has `each(visit)`, which calls `visit` with every object that it
// holds, and `clear()`, which lets go of those that a cycle can go through.
template <class Value>
struct Collected {
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    int stopped = 0;
    if (!nanobind::inst_ready(self)) return stopped;
    nanobind::inst_ptr<Value>(self)->each([&](nanobind::handle object) {
      if (stopped == 0 && object.is_valid()) stopped = visit(object.ptr(), arg);
    });
    return stopped;
  }

  static int clear(PyObject* self) {
    nanobind::inst_ptr<Value>(self)->clear();
    return 0;
  }

  static inline PyType_Slot slots[] = {
      {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)}, {0, nullptr}};
};

}  // namespace ebbtide::bindings
