#include "ebbtide/error.h"

#include <array>
#include <cstddef>
#include <cstdio>

namespace ebbtide {

std::string format_bytes(std::uint64_t nbytes) {
  if (nbytes < 1024) return std::to_string(nbytes) + (nbytes == 1 ? " byte" : " bytes");

  static constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  double amount = static_cast<double>(nbytes) / 1024;
  // 1023.5 and not 1024: what rounds to "1024 KiB" reads "1.0 MiB".
  while (amount >= 1023.5 && unit + 1 < kUnits.size()) {
    amount /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.*f %s", amount < 99.95 ? 1 : 0, amount, kUnits[unit]);
  return text;
}

}  // namespace ebbtide
