#include "ebbtide/spill_file.h"

#include <nanobind/stl/string.h>

#include "bindings.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

void bind_spill_file(nb::module_& m) {
  nb::class_<SpillFile, BlockSpace>(m, "SpillFile")
      .def(
          "__init__",
          [](SpillFile* self, const std::string& directory, bool allow_tmpfs) {
            SpillOptions options;
            options.allow_tmpfs = allow_tmpfs;
            new (self) SpillFile(directory, options);
          },
          nb::arg("directory"), nb::arg("allow_tmpfs") = false)
      .def("trim", &SpillFile::trim)
      .def_prop_ro("directory", &SpillFile::directory)
      .def_prop_ro("descriptor", &SpillFile::descriptor);
}

}  // namespace ebbtide::bindings
