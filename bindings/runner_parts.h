// What the files of CommandRunner share: Python objects by name, and answers for those that are gone.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>

#include "ebbtide/engine.h"

namespace ebbtide::bindings {

// A probe of a storage that another thread is just saving: look again later. More holders than there can be leases.
inline constexpr ProbeAnswer kHeld{.holders = std::uint64_t{1} << 32};
// The storage could not be looked at: it stays on the device.
inline constexpr ProbeAnswer kUnknown{.holders = 1, .same = false};

// Names of attributes of ebbtide.saved.StorageEntry.
struct Names {
  static nanobind::object make(const char* name) { return nanobind::steal(PyUnicode_InternFromString(name)); }
  nanobind::object leases = make("leases"), ref = make("ref"), witnesses = make("witnesses"),
                   restored = make("restored"), restored_weak = make("restored_weak"),
                   load_started = make("load_started"), weak = make("weak"), load_errors = make("load_errors");
};

inline const Names& names() {
  static const Names* const all = new Names;  // never destroyed: the interpreter may be gone by then
  return *all;
}

inline nanobind::object get(nanobind::handle object, const nanobind::object& name) {
  return nanobind::steal(nanobind::detail::raise_if_null(PyObject_GetAttr(object.ptr(), name.ptr())));
}

inline void set(nanobind::handle object, const nanobind::object& name, nanobind::handle value) {
  if (PyObject_SetAttr(object.ptr(), name.ptr(), value.ptr()) != 0) nanobind::raise_python_error();
}

inline nanobind::handle item(const nanobind::object& tuple, Py_ssize_t index) {
  return PyTuple_GET_ITEM(tuple.ptr(), index);
}

inline nanobind::object last_of(nanobind::handle list) {
  const Py_ssize_t size = PyList_GET_SIZE(list.ptr());
  return size == 0 ? nanobind::object() : nanobind::borrow(PyList_GET_ITEM(list.ptr(), size - 1));
}

// One that may be caught with `except Exception`, in Python's words.
bool is_ordinary(const std::exception_ptr& error);

}  // namespace ebbtide::bindings
