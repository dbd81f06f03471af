// Finds accesses to the same bytes that nothing orders, whatever order they happened to run in.
//
// One vector clock per stream and one for the host; per byte range the last write and the reads since. Accesses come in
// program order, as they are queued. Not thread safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device.h"
#include "vector_clock.h"

namespace ebbtide::device {

class HappensBefore {
 public:
  HappensBefore();

  [[nodiscard]] Actor add_stream();
  // What the actor's next access comes after.
  [[nodiscard]] const VectorClock& clock(Actor actor) const { return clocks_[actor]; }
  void join(Actor actor, const VectorClock& clock) { clocks_[actor].join(clock); }

  // Comes after all that the host has seen.
  void access(Actor actor, const std::string& name, const std::vector<Access>& accesses);
  // An access that waits for more than its actor does. Later ones of the actor do not, so this one must be the last to
  // the bytes until they belong to somebody else.
  void access_after(Actor actor, const VectorClock& also, const std::string& name, const Access& access);

  void set_enabled(bool enabled);
  [[nodiscard]] const std::vector<Race>& races() const { return races_; }
  void clear_races() { races_.clear(); }
  [[nodiscard]] std::size_t segments() const { return segments_.size(); }

 private:
  struct Record {
    Actor actor = kHost;
    std::uint64_t tick = 0;
    std::shared_ptr<const std::string> name;
  };
  struct Segment {
    std::uint64_t end = 0;
    std::optional<Record> write;
    std::vector<Record> reads;  // since the write; none of them ordered before another
  };
  using Segments = std::map<std::uint64_t, Segment>;  // by the first byte

  void check(const VectorClock& clock, const Record& record, const Access& access);
  void check_write(const VectorClock& clock, const Record& record, std::uint64_t begin, std::uint64_t end);
  void check_read(const VectorClock& clock, const Record& record, std::uint64_t begin, std::uint64_t end);
  void compare(const VectorClock& clock, const Record& earlier, const Record& now, const Segments::const_iterator& at);
  void split(std::uint64_t address);
  void prune();

  std::vector<VectorClock> clocks_;
  Segments segments_;
  std::size_t prune_at_;
  bool enabled_ = true;
  std::vector<Race> races_;
};

}  // namespace ebbtide::device
