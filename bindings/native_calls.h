// A framework's own C functions and attributes, called without a frame of Python in between.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>

namespace ebbtide::bindings {

// A callable with positional arguments.
class Function {
 public:
  Function() = default;
  explicit Function(nanobind::object function) : function_(std::move(function)) {}
  Function(nanobind::handle of, const char* name) : function_(of.attr(name)) {}

  template <class... Arguments>
  nanobind::object operator()(const Arguments&... arguments) const {
    // The place before the first argument is the callee's to use.
    const std::array<PyObject*, sizeof...(Arguments) + 1> all{nullptr, arguments.ptr()...};
    PyObject* result = PyObject_Vectorcall(function_.ptr(), all.data() + 1,
                                           sizeof...(Arguments) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    return nanobind::steal(nanobind::detail::raise_if_null(result));
  }

  // The last argument goes by the name in the tuple `keyword`.
  template <class... Arguments>
  nanobind::object named(nanobind::handle keyword, const Arguments&... arguments) const {
    const std::array<PyObject*, sizeof...(Arguments) + 1> all{nullptr, arguments.ptr()...};
    PyObject* result = PyObject_Vectorcall(function_.ptr(), all.data() + 1,
                                           (sizeof...(Arguments) - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, keyword.ptr());
    return nanobind::steal(nanobind::detail::raise_if_null(result));
  }

  [[nodiscard]] bool is_none() const { return function_.is_none(); }

 private:
  nanobind::object function_ = nanobind::none();
};

// An attribute that a class of a framework defines in C, of objects of that class.
class Attribute {
 public:
  Attribute(nanobind::handle of, const char* name)
      : descriptor_(of.attr(name)), get_(Py_TYPE(descriptor_.ptr())->tp_descr_get) {}

  [[nodiscard]] nanobind::object get(nanobind::handle object) const {
    PyObject* found = get_(descriptor_.ptr(), object.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
    return nanobind::steal(nanobind::detail::raise_if_null(found));
  }
  void set(nanobind::handle object, nanobind::handle value) const {
    const descrsetfunc set = Py_TYPE(descriptor_.ptr())->tp_descr_set;
    if (set(descriptor_.ptr(), object.ptr(), value.ptr()) != 0) nanobind::raise_python_error();
  }

 private:
  nanobind::object descriptor_;
  descrgetfunc get_;
};

[[noreturn]] inline void raise(const nanobind::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  nanobind::raise_python_error();
}

inline bool is_true(const nanobind::object& object) {
  const int answer = PyObject_IsTrue(object.ptr());
  if (answer < 0) nanobind::raise_python_error();
  return answer != 0;
}

inline std::uint64_t unsigned_of(nanobind::handle number) { return nanobind::cast<std::uint64_t>(number); }
inline std::int64_t signed_of(nanobind::handle number) { return nanobind::cast<std::int64_t>(number); }

}  // namespace ebbtide::bindings
