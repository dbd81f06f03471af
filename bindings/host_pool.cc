#include "ebbtide/host_pool.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

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
      .def_static(
          "of_added_slabs", [](std::uint64_t slab_bytes) { return std::make_shared<HostPool>(slab_bytes); },
          nb::arg("slab_bytes") = HostPool::kDefaultSlabBytes)
      .def(
          "add_slab",
          [](HostPool& pool, std::uint64_t address, std::uint64_t nbytes) {
            pool.add_slab(reinterpret_cast<void*>(address), nbytes);
          },
          nb::arg("address"), nb::arg("nbytes"))
      .def("take_empty_slabs", &HostPool::take_empty_slabs, nb::arg("limit"))
      .def("trim", &HostPool::trim)
      .def_prop_ro("slab_allocations", &HostPool::slab_allocations);
}

}  // namespace ebbtide::bindings
