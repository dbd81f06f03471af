#include <atomic>
#include <exception>
#include <functional>
#include <utility>

#include "bindings.h"
#include "owned.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

std::atomic<bool> is_usable{true};

// Calls back once: when it is called, or in its destructor. That is C++, so an exception out of a signal handler that
// comes meanwhile is not lost in it.
class AtEnd {
 public:
  explicit AtEnd(nb::object callback) : callback_(std::move(callback)) {}
  AtEnd(const AtEnd&) = delete;
  AtEnd& operator=(const AtEnd&) = delete;
  ~AtEnd() {
    if (!callback_.is_valid() || !usable()) {
      static_cast<void>(callback_.release());
      return;
    }
    in_destructor([this] { callback_(); });
  }

  void call() {
    if (!callback_.is_valid()) return;
    const nb::object callback = std::move(callback_);
    callback();
  }

 private:
  nb::object callback_;
};

}  // namespace

void in_destructor(const std::function<void()>& call) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);  // a destructor may run while an exception is on its way
  try {
    call();
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) {
      PyErr_SetInterrupt();  // not lost: it comes again outside of the destructor
    } else {
      error.restore();
      PyErr_WriteUnraisable(nullptr);
    }
  } catch (...) {
    const nb::object error = to_python(std::current_exception());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    PyErr_WriteUnraisable(nullptr);
  }
  PyErr_Restore(type, value, traceback);
}

bool usable() { return is_usable.load(); }

void bind_lifetime(nb::module_& m) {
  // Objects that a forked child may not even destroy are leaked on purpose.
  nb::set_leak_warnings(false);
  nb::class_<AtEnd>(m, "AtEnd").def(nb::init<nb::object>(), nb::arg("callback")).def("__call__", &AtEnd::call);
  nb::class_<Owned>(m, "Owned")
      .def(nb::init<nb::object, nb::object>(), nb::arg("value"), nb::arg("free"))
      .def_prop_ro("value", &Owned::value, nb::sig("def value(self, /) -> object"));
  m.def("stop_destructors", [] { is_usable.store(false); });
  m.def(
      "keep_forever", [](nb::handle object) { object.inc_ref(); }, nb::arg("object").none());
}

}  // namespace ebbtide::bindings
