#include "ebbtide/plan.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ebbtide/error.h"

namespace ebbtide {
namespace {

constexpr Place kStorage{Tier::kDevice, 0x1000, 0};
constexpr Place kHostBlock{Tier::kHost, 0x7f0000, 128};
constexpr Place kFileBlock{Tier::kFile, 0, 4096};

TEST(Text, OfValueTypes) {
  EXPECT_EQ(to_string(Tier::kDevice), "device");
  EXPECT_EQ(to_string(Tier::kHost), "host");
  EXPECT_EQ(to_string(Tier::kFile), "file");
  EXPECT_EQ(to_string(Tier::kStaging), "staging");
  EXPECT_EQ(to_string(ByteRange{0, 16}), "[0, 16)");
  EXPECT_EQ(to_string(kStorage), "device:0x1000+0");
  EXPECT_EQ(to_string(kFileBlock), "file:0+4096");
  EXPECT_EQ(to_string(Place{Tier::kHost, UINT64_MAX, UINT64_MAX}), "host:0xffffffffffffffff+18446744073709551615");
}

TEST(Text, OfByteCounts) {
  EXPECT_EQ(format_bytes(0), "0 bytes");
  EXPECT_EQ(format_bytes(1), "1 byte");
  EXPECT_EQ(format_bytes(12), "12 bytes");
  EXPECT_EQ(format_bytes(1023), "1023 bytes");
  EXPECT_EQ(format_bytes(1024), "1.0 KiB");
  EXPECT_EQ(format_bytes(640 << 10), "640 KiB");
  EXPECT_EQ(format_bytes((1 << 20) - 1), "1.0 MiB");
  EXPECT_EQ(format_bytes((std::uint64_t{3} << 30) / 2), "1.5 GiB");
  EXPECT_EQ(format_bytes(std::uint64_t{2} << 30), "2.0 GiB");
  EXPECT_EQ(format_bytes(std::uint64_t{102350} << 10), "100 MiB");
  EXPECT_EQ(format_bytes(UINT64_MAX), "16.0 EiB");
}

TEST(Plan, OffloadPacksTheMissingRanges) {
  EXPECT_EQ(to_string(plan_offload(kStorage, {{512, 1024}, {0, 64}, {2048, 2052}}, kFileBlock)),
            "device:0x1000+0 -> file:0+4096, 64 bytes\n"
            "device:0x1000+512 -> file:0+4160, 512 bytes\n"
            "device:0x1000+2048 -> file:0+4672, 4 bytes\n");
}

TEST(Plan, OffloadStartsWhereTheStorageStarts) {
  EXPECT_EQ(to_string(plan_offload(kStorage.advanced(256), {{64, 128}}, kHostBlock)),
            "device:0x1000+320 -> host:0x7f0000+128, 64 bytes\n");
}

TEST(Plan, RestoreMirrorsOffload) {
  const auto copied = copied_spans({{0, 64}, {512, 1024}}, kHostBlock);
  const Place restored{Tier::kDevice, 0x9000, 512};
  EXPECT_EQ(to_string(plan_restore(copied, restored)),
            "host:0x7f0000+128 -> device:0x9000+512, 64 bytes\n"
            "host:0x7f0000+192 -> device:0x9000+1024, 512 bytes\n");
}

TEST(Plan, RestoreKeepsSpansApartThatTouch) {
  auto copied = copied_spans({{0, 64}}, kFileBlock);
  copied.push_back({{64, 128}, kFileBlock.advanced(64)});
  EXPECT_EQ(to_string(plan_restore(copied, kStorage)),
            "file:0+4096 -> device:0x1000+0, 64 bytes\n"
            "file:0+4160 -> device:0x1000+64, 64 bytes\n");
}

TEST(Plan, OfNothingIsEmpty) {
  EXPECT_TRUE(plan_offload(kStorage, {}, kHostBlock).empty());
  EXPECT_TRUE(plan_restore({}, kStorage).empty());
  EXPECT_EQ(plan_bytes({}), 0u);
  EXPECT_EQ(to_string(Plan{}), "");
}

void run(const Plan& plan) {
  for (const CopySpan& span : plan) {
    std::memcpy(reinterpret_cast<void*>(span.dst.position()), reinterpret_cast<const void*>(span.src.position()),
                span.nbytes);
  }
}

Place place_of(Tier tier, std::vector<char>& bytes) {
  return {tier, reinterpret_cast<std::uintptr_t>(bytes.data()), 0};
}

class PlanRandom : public testing::TestWithParam<std::uint64_t> {};

TEST_P(PlanRandom, RoundTripBringsBackTheWantedBytes) {
  SCOPED_TRACE("seed " + std::to_string(GetParam()));
  std::mt19937_64 random(GetParam());
  constexpr std::size_t kBytes = 1024;
  ByteRanges wanted;
  for (int i = 0; i < 12; ++i) {
    const std::uint64_t begin = random() % kBytes;
    wanted.add({begin, begin + random() % (kBytes - begin)});
    // Ranges keep gaps: else the union is soon one range.
    const std::uint64_t gap = random() % kBytes;
    wanted.subtract({gap, gap + 48});
  }
  std::vector<char> storage(kBytes);
  for (char& byte : storage) byte = static_cast<char>(random());
  // Just as many bytes as missing: a plan that writes past its block is found by the address sanitizer.
  std::vector<char> block(wanted.nbytes());
  std::vector<char> restored(kBytes, 0);
  std::vector<char> expected(kBytes, 0);
  for (const ByteRange& range : wanted.ranges()) {
    std::memcpy(&expected[range.begin], &storage[range.begin], range.nbytes());
  }

  const Place block_place = place_of(Tier::kHost, block);
  const Plan offload = plan_offload(place_of(Tier::kDevice, storage), wanted, block_place);
  const Plan restore = plan_restore(copied_spans(wanted, block_place), place_of(Tier::kDevice, restored));
  run(offload);
  run(restore);

  EXPECT_EQ(restored, expected);
  EXPECT_EQ(plan_bytes(offload), wanted.nbytes());
  EXPECT_EQ(plan_bytes(restore), wanted.nbytes());
  ASSERT_EQ(offload.size(), restore.size());
  for (std::size_t i = 0; i < offload.size(); ++i) EXPECT_EQ(offload[i].dst, restore[i].src);
}

INSTANTIATE_TEST_SUITE_P(Seeds, PlanRandom, testing::Range<std::uint64_t>(0, 50));

}  // namespace
}  // namespace ebbtide
