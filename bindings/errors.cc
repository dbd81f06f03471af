#include "bindings.h"
#include "ebbtide/error.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

const char* class_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUsage:
      return "UsageError";
    case ErrorKind::kHostMemory:
      return "HostMemoryError";
    case ErrorKind::kDevice:
      return "DeviceError";
    case ErrorKind::kSpill:
      return "SpillError";
    case ErrorKind::kCorruption:
      return "CorruptionError";
  }
  return "EbbtideError";
}

nb::object make(const Error& error) {
  nb::object object = nb::module_::import_("ebbtide.errors").attr(class_name(error.kind()))(error.what());
  if (error.os_error() != 0) object.attr("errno") = error.os_error();
  return object;
}

}  // namespace

nb::object to_python(const std::exception_ptr& error) {
  if (!error) return nb::none();
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return make(e);
  } catch (const nb::python_error& e) {
    return nb::borrow(e.value());
  } catch (const nb::builtin_exception& e) {
    return nb::steal(PyObject_CallFunction(PyExc_LookupError, "s", e.what()));
  } catch (const std::exception& e) {
    return nb::steal(PyObject_CallFunction(PyExc_RuntimeError, "s", e.what()));
  }
}

bool is_told(const std::exception_ptr& error) {
  return nb::isinstance(to_python(error), nb::module_::import_("ebbtide.errors").attr("EbbtideError"));
}

void bind_errors(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      const nb::object object = make(e);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())), object.ptr());
    }
  });
}

}  // namespace ebbtide::bindings
