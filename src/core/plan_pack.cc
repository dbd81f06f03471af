#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <span>
#include <utility>

#include "ebbtide/plan.h"

namespace ebbtide {
namespace {

constexpr Place kStaging{Tier::kStaging, 0, 0};

// The first offset from `byte_offset` on that lies within its word as `address` does.
std::uint64_t aligned_as(std::uint64_t address, std::uint64_t byte_offset) {
  return byte_offset + (address - byte_offset) % kPackAlignmentBytes;
}

// The widest word, of at most kPackAlignmentBytes, that bytes at `address` are a whole number of.
std::uint64_t word_bytes(std::uint64_t address, std::uint64_t nbytes) {
  const std::uint64_t both = address | nbytes | kPackAlignmentBytes;
  return both & ~(both - 1);
}

bool same_memory(const Place& a, const Place& b) { return a.tier == b.tier && a.base == b.base; }

std::uint64_t end_of(const Place& place, std::uint64_t nbytes) { return place.byte_offset + nbytes; }

bool holds(const Block& block, const CopySpan& load) {
  return same_memory(block.place, load.src) && block.place.byte_offset <= load.src.byte_offset &&
         end_of(load.src, load.nbytes) <= end_of(block.place, block.nbytes);
}

// Whether `load`, which does not start before `piece`, may be copied with it.
bool neighbours(const Block& piece, const CopySpan& load) {
  return load.src.tier == Tier::kHost && same_memory(piece.place, load.src) &&
         load.src.byte_offset <= end_of(piece.place, piece.nbytes);
}

const Block* find_holder(const std::vector<Block>& sorted, const CopySpan& load) {
  const auto after = std::upper_bound(sorted.begin(), sorted.end(), load.src,
                                      [](const Place& place, const Block& block) { return place < block.place; });
  return after != sorted.begin() && holds(*std::prev(after), load) ? &*std::prev(after) : nullptr;
}

// Bytes that cross the link as one, and the loads that need them.
struct Piece {
  Block source;
  std::span<const CopySpan> loads;
};

// The piece that starts with the first of the sorted `loads`.
Piece first_piece(std::span<const CopySpan> loads, const std::vector<Block>& whole) {
  const Block* const holder = find_holder(whole, loads.front());
  Block source = holder != nullptr ? *holder : Block{loads.front().src, loads.front().nbytes};
  std::size_t count = 1;
  for (; count < loads.size(); ++count) {
    const CopySpan& load = loads[count];
    if (find_holder(whole, load) != holder) break;
    if (holder != nullptr) continue;
    if (!neighbours(source, load)) break;
    source.nbytes = std::max(source.nbytes, end_of(load.src, load.nbytes) - source.place.byte_offset);
  }
  return {source, loads.first(count)};
}

}  // namespace

PackLayout pack_layout(const std::vector<PackPart>& parts) {
  PackLayout layout;
  layout.parts.reserve(parts.size());
  // By the word they come in, the widest first: then every one lies at a multiple of its word, and nothing is padded.
  std::map<std::uint64_t, std::vector<PackedRange*>, std::greater<>> by_word;
  for (const PackPart& part : parts) {
    std::vector<PackedRange>& packed = layout.parts.emplace_back();
    packed.reserve(part.ranges.ranges().size());
    for (const ByteRange& range : part.ranges.ranges()) {
      packed.push_back({range, 0});
      by_word[word_bytes(part.storage.position() + range.begin, range.nbytes())].push_back(&packed.back());
    }
  }
  for (const auto& [word, ranges] : by_word) {
    for (PackedRange* packed : ranges)
      packed->byte_offset = std::exchange(layout.nbytes, layout.nbytes + packed->range.nbytes());
  }
  return layout;
}

Plan plan_packed_offload(const std::vector<PackPart>& parts, const PackLayout& layout, const Place& block) {
  Plan plan;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (const PackedRange& packed : layout.parts[i]) {
      plan.push_back({parts[i].storage.advanced(packed.range.begin), kStaging.advanced(packed.byte_offset),
                      packed.range.nbytes()});
    }
  }
  if (layout.nbytes > 0) plan.push_back({kStaging, block, layout.nbytes});
  return plan;
}

Plan plan_packed_restore(const std::vector<LoadPart>& parts, const std::vector<Block>& whole) {
  Plan loads;
  for (const LoadPart& part : parts) {
    const Plan of_part = plan_restore(part.spans, part.storage);
    loads.insert(loads.end(), of_part.begin(), of_part.end());
  }
  std::sort(loads.begin(), loads.end());  // by source
  std::vector<Block> blocks = whole;
  std::sort(blocks.begin(), blocks.end());

  // All that crosses the link comes first, so that no scatter holds it up.
  Plan plan;
  Plan scatters;
  std::uint64_t staged = 0;
  for (std::span<const CopySpan> rest = loads; !rest.empty();) {
    const auto [source, of_piece] = first_piece(rest, blocks);
    rest = rest.subspan(of_piece.size());
    if (of_piece.size() == 1 && of_piece.front().nbytes == source.nbytes) {
      plan.push_back(of_piece.front());
      continue;
    }
    const Place staging = kStaging.advanced(aligned_as(source.place.position(), staged));
    staged = end_of(staging, source.nbytes);
    plan.push_back({source.place, staging, source.nbytes});
    for (const CopySpan& load : of_piece) {
      scatters.push_back({staging.advanced(load.src.byte_offset - source.place.byte_offset), load.dst, load.nbytes});
    }
  }
  plan.insert(plan.end(), scatters.begin(), scatters.end());
  return plan;
}

Plan unstaged(const Plan& plan) {
  Plan direct;
  std::map<std::uint64_t, CopySpan> staged;  // by offset in staging; a plan writes no byte of it twice
  for (const CopySpan& span : plan) {
    if (span.dst.tier == Tier::kStaging) {
      staged.emplace(span.dst.byte_offset, span);
      continue;
    }
    if (span.src.tier != Tier::kStaging) {
      direct.push_back(span);
      continue;
    }
    const ByteRange read{span.src.byte_offset, end_of(span.src, span.nbytes)};
    auto it = staged.upper_bound(read.begin);
    if (it != staged.begin()) --it;
    for (; it != staged.end() && it->first < read.end; ++it) {
      const auto& [offset, written] = *it;
      const ByteRange common{std::max(offset, read.begin), std::min(offset + written.nbytes, read.end)};
      if (common.empty()) continue;
      direct.push_back(
          {written.src.advanced(common.begin - offset), span.dst.advanced(common.begin - read.begin), common.nbytes()});
    }
  }
  return direct;
}

std::uint64_t staging_bytes(const Plan& plan) {
  std::uint64_t nbytes = 0;
  for (const CopySpan& span : plan) {
    for (const Place& place : {span.src, span.dst}) {
      if (place.tier == Tier::kStaging) nbytes = std::max(nbytes, end_of(place, span.nbytes));
    }
  }
  return nbytes;
}

std::uint64_t crossing_copies(const Plan& plan) {
  const auto is_outside = [](const Place& place) { return place.tier == Tier::kHost || place.tier == Tier::kFile; };
  return static_cast<std::uint64_t>(std::count_if(
      plan.begin(), plan.end(), [&](const CopySpan& span) { return is_outside(span.src) || is_outside(span.dst); }));
}

}  // namespace ebbtide
