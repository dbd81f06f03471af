#include <atomic>

#include "bindings.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

std::atomic<bool> is_usable{true};

}  // namespace

bool usable() { return is_usable.load(); }

void bind_lifetime(nb::module_& m) {
  // Objects that a forked child may not even destroy are leaked on purpose.
  nb::set_leak_warnings(false);
  m.def("stop_destructors", [] { is_usable.store(false); });
  m.def(
      "keep_forever", [](nb::handle object) { object.inc_ref(); }, nb::arg("object").none());
}

}  // namespace ebbtide::bindings
