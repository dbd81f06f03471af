#include "ebbtide/stats.h"

namespace ebbtide {

void Stats::reset() {
  Stats fresh;
  fresh.parked = parked;
  fresh.entries = entries;
  fresh.device_bytes = device_bytes;
  fresh.tier_bytes = tier_bytes;
  fresh.peak_tier_bytes = tier_bytes;
  fresh.backing_bytes = backing_bytes;
  fresh.peak_backing_bytes = backing_bytes;
  *this = fresh;
}

}  // namespace ebbtide
