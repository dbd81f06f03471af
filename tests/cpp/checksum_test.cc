#include "ebbtide/checksum.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <string_view>
#include <vector>

namespace ebbtide {
namespace {

constexpr std::uint64_t kPrime32 = 0x9E3779B1;

// The bytes that xxHash's own sanity check hashes (tests/sanity_test_vectors_generator.c there).
std::vector<std::uint8_t> sanity_bytes(std::size_t nbytes) {
  std::vector<std::uint8_t> bytes(nbytes);
  std::uint64_t generator = kPrime32;
  for (auto& byte : bytes) {
    byte = static_cast<std::uint8_t>(generator >> 56);
    generator *= 0x9E3779B185EBCA8D;
  }
  return bytes;
}

TEST(Checksum, MatchesThePublishedSanityVectors) {
  struct Vector {
    std::size_t nbytes;
    std::uint64_t seed;
    std::uint64_t sum;
  };
  constexpr Vector kVectors[] = {
      {0, 0, 0xEF46DB3751D8E999},         {0, kPrime32, 0xAC75FDA2929B17EF}, {1, 0, 0xE934A84ADB052768},
      {1, kPrime32, 0x5014607643A9B4C3},  {4, 0, 0x9136A0DCA57457EE},        {14, 0, 0x8282DCC4994E35C8},
      {14, kPrime32, 0xC3BD6BF63DEB6DF0}, {222, 0, 0xB641AE8CB691C174},      {222, kPrime32, 0x20CB8AB7AE10C14A},
  };
  const auto bytes = sanity_bytes(222);
  for (const auto& vector : kVectors) {
    EXPECT_EQ(checksum(bytes.data(), vector.nbytes, vector.seed), vector.sum) << vector.nbytes << " " << vector.seed;
  }
}

// From python-xxhash, over the sanity bytes: every path of the tail, without, with one and with two stripes.
TEST(Checksum, MatchesTheReferenceAtEveryShortLength) {
  constexpr std::uint64_t kSums[] = {
      0xEF46DB3751D8E999, 0xE934A84ADB052768, 0x5D48CD60A77E23FF, 0xFF7E1959CB50794A, 0x9136A0DCA57457EE,
      0x9B046FB1397F09A5, 0xC72565B7154268A8, 0x6C83909A9F01ED25, 0xCDBCF538E71D1348, 0x554B1AE991EDA6B6,
      0x5D00E7351392EA84, 0x6345D5746F35DA70, 0x0723BF50086EAD9A, 0xC2E5013E3C40BCF7, 0x8282DCC4994E35C8,
      0x180719316D622D84, 0x98C90B57FDFCB55C, 0x0D39A2D051A30C2C, 0x33E84A4333B2B2EB, 0xE91C6EF31FC08F82,
      0x5F8C68355769439E, 0x42B0B8EE353AC461, 0x65C935C6978098B1, 0xD2460ECC840B74DD, 0xF75A6DEA42DC5BF4,
      0x52FAA43C3F20B994, 0x8DB7831EC345F9A3, 0x88945AA08051FC2D, 0x64CD9E8C96A9E2DD, 0x8C8F345B634AC2B9,
      0xE2677241D4C46CAF, 0x299B39A290E6D783, 0x18B216492BB44B70, 0x55C8DC3E578F5B59, 0xD0CE7CBAE371BEB2,
      0xCB0AA8E2A7A29707, 0x0AE67584084DC6A4, 0x292F5332C92B73CE, 0x5F398E2A8478BED3, 0xB888CAF07592B1B3,
      0x23B3810D7D8B1731, 0x5342C966C7F3D5F4, 0x77454B74F1DBBF63, 0x9904C9350F597190, 0x24EC2B3D0E442641,
      0x4EC307EBE0A650A4, 0x7DD1C5514B2240EF, 0x84A42E167CBD1FEF, 0xFD0FEEAC7A939933, 0xA91BFF78A7185B66,
      0xDFFE9F293DDD101D, 0x2332585C18D7483A, 0x5A0056511F9DD653, 0x4426A2F5C8D59469, 0x39EAF8893520636A,
      0xAFEA98CC4E92F7E1, 0xB7A6414B8D3E2597, 0xF33D64569CD4B1C0, 0x93FA072F0E8FE7CA, 0x4F2890576949D6ED,
      0x3378C44F459C290B, 0x40D486FDDDAD5CB7, 0x21664C60C551CC87, 0xA9EFBE0FA0F3F4E7, 0xEF558F8ACAC2B5CD};
  static_assert(std::size(kSums) == 65);
  const auto bytes = sanity_bytes(64);
  for (std::size_t nbytes = 0; nbytes < std::size(kSums); ++nbytes) {
    EXPECT_EQ(checksum(bytes.data(), nbytes), kSums[nbytes]) << nbytes;
  }
}

TEST(Checksum, MatchesTheReferenceOnText) {
  struct Vector {
    std::string_view text;
    std::uint64_t sum;
    std::uint64_t sum_of_seed_1;
  };
  constexpr Vector kVectors[] = {
      {"a", 0xD24EC4F1A98C6E5B, 0xDEC2BC81C3CD46C6},
      {"abc", 0x44BC2CF5AD770999, 0xBEA9CA8199328908},
      {"message digest", 0x066ED728FCEEB3BE, 0xCBA434B6417DD0FD},
      {"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1, 0x43F425448D954DB6},
  };
  for (const auto& vector : kVectors) {
    EXPECT_EQ(checksum(vector.text.data(), vector.text.size()), vector.sum) << vector.text;
    EXPECT_EQ(checksum(vector.text.data(), vector.text.size(), 1), vector.sum_of_seed_1) << vector.text;
  }
}

TEST(Checksum, MatchesTheReferenceOnLongInput) {
  struct Vector {
    std::size_t nbytes;
    std::uint64_t sum;
    std::uint64_t sum_of_largest_seed;
  };
  constexpr Vector kVectors[] = {
      {1000, 0x52BD1358F22E9EF7, 0xF681D3B0E9E495AE},
      {4096, 0xAB77F4AF85F4E70B, 0x59C4456E9749EF15},
      {65537, 0x3AA92E8233E07002, 0xBD6DFACED5062396},
      {1 << 20, 0x9F8B6862E54AAF54, 0x5D076F685D2E1A47},
  };
  const auto bytes = sanity_bytes(1 << 20);
  for (const auto& vector : kVectors) {
    EXPECT_EQ(checksum(bytes.data(), vector.nbytes), vector.sum) << vector.nbytes;
    EXPECT_EQ(checksum(bytes.data(), vector.nbytes, ~std::uint64_t{0}), vector.sum_of_largest_seed) << vector.nbytes;
  }
}

TEST(Checksum, DoesNotDependOnTheAddress) {
  const auto bytes = sanity_bytes(100);
  std::vector<std::uint8_t> moved(bytes.size() + 8);
  for (std::size_t shift = 0; shift < 8; ++shift) {
    std::memcpy(moved.data() + shift, bytes.data(), bytes.size());
    EXPECT_EQ(checksum(moved.data() + shift, bytes.size()), checksum(bytes.data(), bytes.size())) << shift;
  }
}

TEST(Checksum, SeesEveryFlippedBit) {
  auto bytes = sanity_bytes(75);
  const auto sum = checksum(bytes.data(), bytes.size());
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    const auto mask = static_cast<std::uint8_t>(1u << (bit % 8));
    bytes[bit / 8] ^= mask;
    EXPECT_NE(checksum(bytes.data(), bytes.size()), sum) << bit;
    bytes[bit / 8] ^= mask;
  }
}

TEST(Checksum, OfNothingNeedsNoAddress) { EXPECT_EQ(checksum(nullptr, 0), 0xEF46DB3751D8E999); }

}  // namespace
}  // namespace ebbtide
