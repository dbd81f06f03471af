#include "ebbtide/view_meta.h"

#include <algorithm>
#include <cstddef>

#include "ebbtide/error.h"

namespace ebbtide {
namespace {

[[noreturn]] void refuse(const ViewMeta& view, const std::string& why) {
  throw Error(ErrorKind::kUsage, "[extent] " + to_string(view) + ": " + why);
}

[[noreturn]] void refuse_overflow(const ViewMeta& view) {
  refuse(view, "its bytes overflow 63 bits, no storage is as large: check sizes, strides and storage_offset");
}

std::int64_t checked_add(std::int64_t a, std::int64_t b, const ViewMeta& view) {
  std::int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) refuse_overflow(view);
  return sum;
}

std::int64_t checked_mul(std::int64_t a, std::int64_t b, const ViewMeta& view) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) refuse_overflow(view);
  return product;
}

std::string to_string(const std::vector<std::int64_t>& numbers) {
  std::string text = "[";
  for (const std::int64_t number : numbers) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(number);
  }
  return text + "]";
}

}  // namespace

ByteRange extent(const ViewMeta& view) {
  if (view.sizes.size() != view.strides.size()) refuse(view, "pass one stride per size");
  if (view.itemsize < 0) refuse(view, "pass an itemsize of 0 or more bytes");
  if (std::ranges::any_of(view.sizes, [](std::int64_t size) { return size < 0; })) {
    refuse(view, "pass sizes of 0 or more elements");
  }
  if (view.itemsize == 0 || std::ranges::find(view.sizes, 0) != view.sizes.end()) return {};

  std::int64_t first = view.storage_offset;
  std::int64_t last = view.storage_offset;
  for (std::size_t dim = 0; dim < view.sizes.size(); ++dim) {
    const std::int64_t reach = checked_mul(view.sizes[dim] - 1, view.strides[dim], view);
    std::int64_t& end = reach < 0 ? first : last;
    end = checked_add(end, reach, view);
  }
  if (first < 0) refuse(view, "it starts before its storage: check storage_offset and negative strides");

  const std::int64_t begin = checked_mul(first, view.itemsize, view);
  const std::int64_t end = checked_mul(checked_add(last, 1, view), view.itemsize, view);
  return {static_cast<std::uint64_t>(begin), static_cast<std::uint64_t>(end)};
}

std::string to_string(const ViewMeta& view) {
  return "view of sizes " + to_string(view.sizes) + ", strides " + to_string(view.strides) + ", storage_offset " +
         std::to_string(view.storage_offset) + ", itemsize " + std::to_string(view.itemsize) + ", kind " +
         std::to_string(view.kind);
}

}  // namespace ebbtide
