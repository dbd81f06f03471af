#include "ebbtide/malloc_threshold.h"

#include "bindings.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

void bind_malloc_threshold(nb::module_& m) { m.def("fix_malloc_threshold", &fix_malloc_threshold, nb::arg("nbytes")); }

}  // namespace ebbtide::bindings
