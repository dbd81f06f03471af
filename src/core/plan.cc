#include "ebbtide/plan.h"

namespace ebbtide {

Plan plan_offload(const Place& storage, const ByteRanges& missing, const Place& block) {
  Plan plan;
  plan.reserve(missing.ranges().size());
  for (const CopiedSpan& span : copied_spans(missing, block)) {
    plan.push_back({storage.advanced(span.range.begin), span.place, span.range.nbytes()});
  }
  return plan;
}

std::vector<CopiedSpan> copied_spans(const ByteRanges& missing, const Place& block) {
  std::vector<CopiedSpan> spans;
  spans.reserve(missing.ranges().size());
  std::uint64_t byte_offset = 0;
  for (const ByteRange& range : missing.ranges()) {
    spans.push_back({range, block.advanced(byte_offset)});
    byte_offset += range.nbytes();
  }
  return spans;
}

Plan plan_restore(const std::vector<CopiedSpan>& copied, const Place& storage) {
  Plan plan;
  plan.reserve(copied.size());
  for (const CopiedSpan& span : copied) {
    plan.push_back({span.place, storage.advanced(span.range.begin), span.range.nbytes()});
  }
  return plan;
}

std::uint64_t plan_bytes(const Plan& plan) {
  std::uint64_t total = 0;
  for (const CopySpan& span : plan) total += span.nbytes;
  return total;
}

std::string to_string(const CopySpan& span) {
  return to_string(span.src) + " -> " + to_string(span.dst) + ", " + std::to_string(span.nbytes) + " bytes";
}

std::string to_string(const Plan& plan) {
  std::string text;
  for (const CopySpan& span : plan) text += to_string(span) + "\n";
  return text;
}

}  // namespace ebbtide
