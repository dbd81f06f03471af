#include "ebbtide/checksum.h"

#include <bit>
#include <cstring>
#include <initializer_list>

namespace ebbtide {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5;
constexpr std::size_t kStripeBytes = 32;

// The spec reads little-endian words at any address.
std::uint64_t load64(const std::uint8_t* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
  return word;
}

std::uint32_t load32(const std::uint8_t* at) {
  std::uint32_t word;
  std::memcpy(&word, at, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap32(word);
  return word;
}

std::uint64_t mix(std::uint64_t lane, std::uint64_t word) { return std::rotl(lane + word * kPrime2, 31) * kPrime1; }

std::uint64_t merge(std::uint64_t hash, std::uint64_t lane) { return (hash ^ mix(0, lane)) * kPrime1 + kPrime4; }

// Consumes whole stripes and moves `at` past them.
std::uint64_t hash_stripes(const std::uint8_t*& at, const std::uint8_t* end, std::uint64_t seed) {
  // Four separate lanes keep four multiplications in flight.
  std::uint64_t lane1 = seed + kPrime1 + kPrime2;
  std::uint64_t lane2 = seed + kPrime2;
  std::uint64_t lane3 = seed;
  std::uint64_t lane4 = seed - kPrime1;
  for (; static_cast<std::size_t>(end - at) >= kStripeBytes; at += kStripeBytes) {
    lane1 = mix(lane1, load64(at));
    lane2 = mix(lane2, load64(at + 8));
    lane3 = mix(lane3, load64(at + 16));
    lane4 = mix(lane4, load64(at + 24));
  }
  std::uint64_t hash = std::rotl(lane1, 1) + std::rotl(lane2, 7) + std::rotl(lane3, 12) + std::rotl(lane4, 18);
  for (std::uint64_t lane : {lane1, lane2, lane3, lane4}) hash = merge(hash, lane);
  return hash;
}

std::uint64_t hash_tail(std::uint64_t hash, const std::uint8_t* at, const std::uint8_t* end) {
  for (; end - at >= 8; at += 8) hash = std::rotl(hash ^ mix(0, load64(at)), 27) * kPrime1 + kPrime4;
  if (end - at >= 4) {
    hash = std::rotl(hash ^ (load32(at) * kPrime1), 23) * kPrime2 + kPrime3;
    at += 4;
  }
  for (; at != end; ++at) hash = std::rotl(hash ^ (*at * kPrime5), 11) * kPrime1;
  return hash;
}

std::uint64_t avalanche(std::uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace

std::uint64_t checksum(const void* data, std::size_t nbytes, std::uint64_t seed) {
  if (nbytes == 0) return avalanche(seed + kPrime5);  // `data` may be null
  const auto* at = static_cast<const std::uint8_t*>(data);
  const std::uint8_t* end = at + nbytes;
  const std::uint64_t hash = nbytes >= kStripeBytes ? hash_stripes(at, end, seed) : seed + kPrime5;
  return avalanche(hash_tail(hash + nbytes, at, end));
}

}  // namespace ebbtide
