#include "bindings.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

void bind_lifetime(nb::module_& m) {
  // Objects that a forked child may not even destroy are leaked on purpose.
  nb::set_leak_warnings(false);
  m.def(
      "keep_forever", [](nb::handle object) { object.inc_ref(); }, nb::arg("object").none());
}

}  // namespace ebbtide::bindings
