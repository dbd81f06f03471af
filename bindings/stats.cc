#include "ebbtide/stats.h"

#include "bindings.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

void bind_stats(nb::module_& m) {
  nb::class_<Stats>(m, "Stats")
      .def_ro("saved_tensors", &Stats::saved_tensors)
      .def_ro("saved_bytes", &Stats::saved_bytes)
      .def_ro("exact_duplicates", &Stats::exact_duplicates)
      .def_ro("storages", &Stats::storages)
      .def_ro("unique_bytes", &Stats::unique_bytes)
      .def_prop_ro("kept",
                   [](const Stats& stats) {
                     nb::typed<nb::dict, nb::str, nb::int_> kept;
                     for (std::size_t i = 0; i < kKeepReasonNames.size(); ++i) {
                       kept[nb::str(kKeepReasonNames[i].data())] = stats.kept[i];
                     }
                     return kept;
                   })
      .def_ro("d2h_copies", &Stats::d2h_copies)
      .def_ro("d2h_bytes", &Stats::d2h_bytes)
      .def_ro("h2d_copies", &Stats::h2d_copies)
      .def_ro("h2d_bytes", &Stats::h2d_bytes)
      .def_ro("spilled_bytes", &Stats::spilled_bytes)
      .def_ro("freed_bytes", &Stats::freed_bytes)
      .def_ro("unfreed_bytes", &Stats::unfreed_bytes)
      .def_ro("parked", &Stats::parked)
      .def_ro("live_hits", &Stats::live_hits)
      .def_ro("prefetch_hits", &Stats::prefetch_hits)
      .def_ro("prefetch_misses", &Stats::prefetch_misses)
      .def_ro("entries", &Stats::entries)
      .def_ro("device_bytes", &Stats::device_bytes)
      .def_ro("tier_bytes", &Stats::tier_bytes)
      .def_ro("peak_tier_bytes", &Stats::peak_tier_bytes)
      .def_ro("backing_bytes", &Stats::backing_bytes)
      .def_ro("peak_backing_bytes", &Stats::peak_backing_bytes);
  nb::class_<GroupStats>(m, "GroupStats")
      .def_ro("runs", &GroupStats::runs)
      .def_ro("storages", &GroupStats::storages)
      .def_ro("unique_bytes", &GroupStats::unique_bytes)
      .def_ro("d2h_bytes", &GroupStats::d2h_bytes)
      .def_ro("h2d_bytes", &GroupStats::h2d_bytes)
      .def_ro("prefetch_misses", &GroupStats::prefetch_misses);
}

}  // namespace ebbtide::bindings
