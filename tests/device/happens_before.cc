#include "happens_before.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "address.h"

namespace ebbtide::device {
namespace {

constexpr std::size_t kMaxRaces = 256;
constexpr std::size_t kFewSegments = 1024;

bool ordered(const VectorClock& clock, Actor actor, std::uint64_t tick) { return clock.at(actor) >= tick; }

}  // namespace

HappensBefore::HappensBefore() : clocks_(1), prune_at_(kFewSegments) {}

Actor HappensBefore::add_stream() {
  clocks_.emplace_back();
  return clocks_.size() - 1;
}

void HappensBefore::access(Actor actor, const std::string& name, const std::vector<Access>& accesses) {
  clocks_[actor].join(clocks_[kHost]);
  const std::uint64_t tick = clocks_[actor].tick(actor);
  if (!enabled_ || accesses.empty()) return;
  const Record record{actor, tick, std::make_shared<const std::string>(name)};
  for (const Access& access : accesses) check(clocks_[actor], record, access);
}

void HappensBefore::access_after(Actor actor, const VectorClock& also, const std::string& name, const Access& access) {
  clocks_[actor].join(clocks_[kHost]);
  const std::uint64_t tick = clocks_[actor].tick(actor);
  if (!enabled_) return;
  VectorClock clock = clocks_[actor];
  clock.join(also);
  check(clock, {actor, tick, std::make_shared<const std::string>(name)}, access);
}

void HappensBefore::set_enabled(bool enabled) {
  enabled_ = enabled;
  // Records with a gap after them would tell of order that is not there.
  if (!enabled) segments_.clear();
}

void HappensBefore::check(const VectorClock& clock, const Record& record, const Access& access) {
  if (access.nbytes == 0) return;
  const std::uint64_t begin = address_of(access.begin);
  const std::uint64_t end = begin + access.nbytes;
  split(begin);
  split(end);
  if (access.write) {
    check_write(clock, record, begin, end);
  } else {
    check_read(clock, record, begin, end);
  }
  if (segments_.size() > prune_at_) prune();
}

void HappensBefore::check_write(const VectorClock& clock, const Record& record, std::uint64_t begin,
                                std::uint64_t end) {
  auto it = segments_.lower_bound(begin);
  while (it != segments_.end() && it->first < end) {
    const Segment& segment = it->second;
    if (segment.write) compare(clock, *segment.write, record, it);
    for (const Record& read : segment.reads) compare(clock, read, record, it);
    it = segments_.erase(it);
  }
  segments_.emplace_hint(it, begin, Segment{end, record, {}});
}

void HappensBefore::check_read(const VectorClock& clock, const Record& record, std::uint64_t begin, std::uint64_t end) {
  auto it = segments_.lower_bound(begin);
  while (begin < end) {
    if (it == segments_.end() || it->first > begin) {
      const std::uint64_t gap_end = it == segments_.end() ? end : std::min(end, it->first);
      segments_.emplace_hint(it, begin, Segment{gap_end, std::nullopt, {record}});
      begin = gap_end;
      continue;
    }
    Segment& segment = it->second;
    if (segment.write) compare(clock, *segment.write, record, it);
    // What comes after this read comes after those too.
    std::erase_if(segment.reads, [&](const Record& read) { return ordered(clock, read.actor, read.tick); });
    segment.reads.push_back(record);
    begin = segment.end;
    ++it;
  }
}

void HappensBefore::compare(const VectorClock& clock, const Record& earlier, const Record& now,
                            const Segments::const_iterator& at) {
  if (ordered(clock, earlier.actor, earlier.tick)) return;
  Race race{*earlier.name, *now.name, at->first, at->second.end};
  for (Race& known : races_) {
    if (known.first != race.first || known.second != race.second) continue;
    if (known.begin <= race.begin && race.end <= known.end) return;
    if (known.end == race.begin) {
      known.end = race.end;
      return;
    }
  }
  if (races_.size() < kMaxRaces) races_.push_back(std::move(race));
}

void HappensBefore::split(std::uint64_t address) {
  auto it = segments_.upper_bound(address);
  if (it == segments_.begin()) return;
  it = std::prev(it);
  if (it->first == address || it->second.end <= address) return;
  Segment rest = it->second;
  it->second.end = address;
  segments_.emplace_hint(std::next(it), address, std::move(rest));
}

// What the host has seen comes before all that is still to be queued.
void HappensBefore::prune() {
  const VectorClock& host = clocks_[kHost];
  const auto seen = [&](const Record& record) { return ordered(host, record.actor, record.tick); };
  for (auto it = segments_.begin(); it != segments_.end();) {
    Segment& segment = it->second;
    if (segment.write && seen(*segment.write)) segment.write.reset();
    std::erase_if(segment.reads, seen);
    it = !segment.write && segment.reads.empty() ? segments_.erase(it) : std::next(it);
  }
  prune_at_ = std::max(kFewSegments, 2 * segments_.size());
}

}  // namespace ebbtide::device
