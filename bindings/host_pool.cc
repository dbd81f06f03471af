#include "ebbtide/host_pool.h"

#include "bindings.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

void bind_host_pool(nb::module_& m) {
  nb::class_<BlockSpace>(m, "BlockSpace")
      .def_prop_ro("used_bytes", &BlockSpace::used_bytes)
      .def_prop_ro("reserved_bytes", &BlockSpace::reserved_bytes);
  nb::class_<HostPool, BlockSpace>(m, "HostPool")
      .def(
          "__init__",
          [](HostPool* self, std::uint64_t slab_bytes) {
            new (self) HostPool(make_pageable_slab_source(), slab_bytes);
          },
          nb::arg("slab_bytes") = HostPool::kDefaultSlabBytes)
      .def("trim", &HostPool::trim)
      .def_prop_ro("slab_allocations", &HostPool::slab_allocations);
}

}  // namespace ebbtide::bindings
