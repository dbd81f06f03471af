#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

#include "device.h"

namespace ebbtide::device {

struct Span {
  double begin_s = 0;
  double end_s = 0;
};

// When the work queued would run on a machine of the given bandwidths. Computed as work is queued, in program order, so
// that it depends neither on the mode nor on threads; a link serves its copies in that order.
class VirtualClock {
 public:
  // The time before which nothing queued from now on begins.
  [[nodiscard]] double host_s() const { return host_s_; }
  void lift_host(double time_s) { host_s_ = std::max(host_s_, time_s); }

  [[nodiscard]] Span copy(const Options& options, CopyKind kind, DeviceIndex device, std::uint64_t nbytes,
                          double ready_s) {
    const bool linked = kind == CopyKind::kH2D || kind == CopyKind::kD2H;
    const double bytes_per_s = kind == CopyKind::kD2D ? options.device_bytes_per_s : options.link_bytes_per_s;
    double begin_s = std::max(ready_s, host_s_);
    if (linked) begin_s = std::max(begin_s, link_free_s_[{device, kind}]);
    const double end_s = begin_s + options.copy_latency_s + static_cast<double>(nbytes) / bytes_per_s;
    if (linked) link_free_s_[{device, kind}] = end_s;
    return {begin_s, end_s};
  }

 private:
  double host_s_ = 0;
  std::map<std::pair<DeviceIndex, CopyKind>, double> link_free_s_;
};

}  // namespace ebbtide::device
