#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ebbtide/plan.h"

namespace ebbtide {
namespace {

using Bytes = std::vector<char>;

constexpr Place kFirst{Tier::kDevice, 0x1000, 0};
constexpr Place kSecond{Tier::kDevice, 0x2000, 8};
constexpr Place kHostBlock{Tier::kHost, 0x7f0000, 128};
constexpr Place kFileBlock{Tier::kFile, 0, 4096};

// Where a pack left the ranges of one part, once it was copied to `block`.
std::vector<CopiedSpan> packed_spans(const std::vector<PackedRange>& packed, const Place& block) {
  std::vector<CopiedSpan> spans;
  for (const PackedRange& range : packed) spans.push_back({range.range, block.advanced(range.byte_offset)});
  return spans;
}

TEST(PackLayout, PutsTheWidestWordsFirst) {
  const PackLayout layout = pack_layout({{kFirst, {{0, 64}, {100, 104}}}, {kSecond, {{0, 8}}}});
  using Part = std::vector<PackedRange>;
  EXPECT_EQ(layout.parts, (std::vector<Part>{{{{0, 64}, 0}, {{100, 104}, 72}}, {{{0, 8}, 64}}}));
  EXPECT_EQ(layout.nbytes, 76u);
}

TEST(PackLayout, TakesOddAddressesAsTheyAre) {
  const PackLayout layout = pack_layout({{kSecond, {{3, 19}}}, {kFirst, {{0, 2}}}});
  EXPECT_EQ(layout.parts.at(1).at(0).byte_offset, 0u);
  EXPECT_EQ(layout.parts.at(0).at(0).byte_offset, 2u);
  EXPECT_EQ(layout.nbytes, 18u);
}

TEST(PackLayout, DoesNotPadWholeWords) {
  const PackLayout layout = pack_layout({{kFirst, {{0, 16}, {64, 4096}}}, {kFirst.advanced(8192), {{16, 48}}}});
  EXPECT_EQ(layout.nbytes, 16u + 4032u + 32u);
}

TEST(PackLayout, HasAPartForEachPart) {
  const PackLayout layout = pack_layout({{kFirst, {}}, {kSecond, {{8, 16}}}, {kFirst, {}}});
  ASSERT_EQ(layout.parts.size(), 3u);
  EXPECT_EQ(layout.parts[1].size(), 1u);
  EXPECT_EQ(layout.nbytes, 8u);
  EXPECT_EQ(pack_layout({}).nbytes, 0u);
}

TEST(PackedOffload, GathersAndCrossesOnce) {
  const std::vector<PackPart> parts = {{kFirst, {{0, 64}, {100, 104}}}, {kSecond, {{0, 8}}}};
  const Plan plan = plan_packed_offload(parts, pack_layout(parts), kFileBlock);
  EXPECT_EQ(to_string(plan),
            "device:0x1000+0 -> staging:0+0, 64 bytes\n"
            "device:0x1000+100 -> staging:0+72, 4 bytes\n"
            "device:0x2000+8 -> staging:0+64, 8 bytes\n"
            "staging:0+0 -> file:0+4096, 76 bytes\n");
  EXPECT_EQ(staging_bytes(plan), 76u);
  EXPECT_EQ(crossing_copies(plan), 1u);
  EXPECT_EQ(to_string(unstaged(plan)),
            "device:0x1000+0 -> file:0+4096, 64 bytes\n"
            "device:0x2000+8 -> file:0+4160, 8 bytes\n"
            "device:0x1000+100 -> file:0+4168, 4 bytes\n");
  EXPECT_EQ(crossing_copies(unstaged(plan)), 3u);
}

TEST(PackedRestore, CopiesNeighboursAsOne) {
  const Plan plan = plan_packed_restore({{kSecond, {{{0, 8}, kHostBlock.advanced(64)}}},
                                         {kFirst, {{{0, 64}, kHostBlock}, {{100, 104}, kHostBlock.advanced(400)}}}},
                                        {});
  // Crossing copies come first.
  EXPECT_EQ(to_string(plan),
            "host:0x7f0000+128 -> staging:0+0, 72 bytes\n"
            "host:0x7f0000+528 -> device:0x1000+100, 4 bytes\n"
            "staging:0+0 -> device:0x1000+0, 64 bytes\n"
            "staging:0+64 -> device:0x2000+8, 8 bytes\n");
  EXPECT_EQ(staging_bytes(plan), 72u);
  EXPECT_EQ(crossing_copies(plan), 2u);
  EXPECT_EQ(to_string(unstaged(plan)),
            "host:0x7f0000+528 -> device:0x1000+100, 4 bytes\n"
            "host:0x7f0000+128 -> device:0x1000+0, 64 bytes\n"
            "host:0x7f0000+192 -> device:0x2000+8, 8 bytes\n");
}

TEST(PackedRestore, StagesEachPieceWithinItsWord) {
  const Place slab{Tier::kHost, 0x7f0000, 0};
  const Plan plan = plan_packed_restore({{kFirst,
                                          {{{0, 5}, slab.advanced(3)},
                                           {{5, 10}, slab.advanced(8)},
                                           {{20, 30}, slab.advanced(1034)},
                                           {{30, 40}, slab.advanced(1044)}}}},
                                        {});
  EXPECT_EQ(to_string(plan),
            "host:0x7f0000+3 -> staging:0+3, 10 bytes\n"
            "host:0x7f0000+1034 -> staging:0+26, 20 bytes\n"
            "staging:0+3 -> device:0x1000+0, 5 bytes\n"
            "staging:0+8 -> device:0x1000+5, 5 bytes\n"
            "staging:0+26 -> device:0x1000+20, 10 bytes\n"
            "staging:0+36 -> device:0x1000+30, 10 bytes\n");
}

TEST(PackedRestore, KeepsApartWhatDoesNotTouch) {
  const Plan plan = plan_packed_restore({{kFirst, {{{0, 64}, kHostBlock}, {{64, 72}, kHostBlock.advanced(65)}}}}, {});
  EXPECT_EQ(to_string(plan),
            "host:0x7f0000+128 -> device:0x1000+0, 64 bytes\n"
            "host:0x7f0000+193 -> device:0x1000+64, 8 bytes\n");
}

TEST(PackedRestore, KeepsSlabsApart) {
  // The second slab starts just where the first span ends.
  const Place other{Tier::kHost, kHostBlock.position() + 64, 0};
  const Place same_offset{Tier::kHost, 0x8f0000, kHostBlock.byte_offset + 64};
  const Plan plan =
      plan_packed_restore({{kFirst, {{{0, 64}, kHostBlock}, {{64, 72}, other}, {{80, 96}, same_offset}}}}, {});
  EXPECT_EQ(plan.size(), 3u);
  EXPECT_EQ(staging_bytes(plan), 0u);
}

TEST(PackedRestore, ReadsAFilePieceByPiece) {
  const Plan plan = plan_packed_restore({{kFirst, {{{0, 64}, kFileBlock}, {{64, 128}, kFileBlock.advanced(64)}}}}, {});
  EXPECT_EQ(to_string(plan),
            "file:0+4096 -> device:0x1000+0, 64 bytes\n"
            "file:0+4160 -> device:0x1000+64, 64 bytes\n");
}

TEST(PackedRestore, ReadsWholeBlocksWhole) {
  const Block one{kFileBlock, 4096};
  const Block next{kFileBlock.advanced(4096), 512};
  const Plan plan = plan_packed_restore(
      {{kSecond, {{{0, 8}, kFileBlock.advanced(4088)}}}, {kFirst, {{{0, 64}, kFileBlock}, {{64, 128}, next.place}}}},
      {next, one});
  EXPECT_EQ(to_string(plan),
            "file:0+4096 -> staging:0+0, 4096 bytes\n"
            "file:0+8192 -> staging:0+4096, 512 bytes\n"
            "staging:0+0 -> device:0x1000+0, 64 bytes\n"
            "staging:0+4088 -> device:0x2000+8, 8 bytes\n"
            "staging:0+4096 -> device:0x1000+64, 64 bytes\n");
  EXPECT_EQ(to_string(unstaged(plan)),
            "file:0+4096 -> device:0x1000+0, 64 bytes\n"
            "file:0+8184 -> device:0x2000+8, 8 bytes\n"
            "file:0+8192 -> device:0x1000+64, 64 bytes\n");
}

TEST(PackedRestore, OfAWholeBlockGoesStraightToItsStorage) {
  const Plan straight = plan_packed_restore({{kFirst, {{{0, 512}, kFileBlock}}}}, {{kFileBlock, 512}});
  EXPECT_EQ(to_string(straight), "file:0+4096 -> device:0x1000+0, 512 bytes\n");
  const Plan to_two = plan_packed_restore({{kFirst, {{{0, 512}, kFileBlock}}}, {kSecond, {{{0, 512}, kFileBlock}}}},
                                          {{kFileBlock, 512}});
  EXPECT_EQ(to_string(to_two),
            "file:0+4096 -> staging:0+0, 512 bytes\n"
            "staging:0+0 -> device:0x1000+0, 512 bytes\n"
            "staging:0+0 -> device:0x2000+8, 512 bytes\n");
}

TEST(PackedRestore, LeavesOutWholeBlocksThatNobodyWants) {
  const Block wanted{kFileBlock.advanced(4096), 64};
  const Plan plan = plan_packed_restore({{kFirst, {{{0, 64}, wanted.place}}}}, {{kFileBlock, 4096}, wanted});
  EXPECT_EQ(to_string(plan), "file:0+8192 -> device:0x1000+0, 64 bytes\n");
}

TEST(PackedRestore, ReadsBehindAWholeBlockPieceByPiece) {
  const Plan plan = plan_packed_restore({{kFirst, {{{0, 64}, kFileBlock}, {{64, 128}, kFileBlock.advanced(4096)}}}},
                                        {{kFileBlock, 4096}});
  EXPECT_EQ(to_string(plan),
            "file:0+4096 -> staging:0+0, 4096 bytes\n"
            "file:0+8192 -> device:0x1000+64, 64 bytes\n"
            "staging:0+0 -> device:0x1000+0, 64 bytes\n");
}

TEST(PackedRestore, ReadsBytesThatTwoStoragesWantOnce) {
  const Plan plan =
      plan_packed_restore({{kFirst, {{{0, 64}, kHostBlock}}}, {kSecond, {{{0, 16}, kHostBlock.advanced(16)}}}}, {});
  EXPECT_EQ(to_string(plan),
            "host:0x7f0000+128 -> staging:0+0, 64 bytes\n"
            "staging:0+0 -> device:0x1000+0, 64 bytes\n"
            "staging:0+16 -> device:0x2000+8, 16 bytes\n");
}

TEST(PackedPlans, OfNothingAreEmpty) {
  EXPECT_TRUE(plan_packed_offload({}, {}, kHostBlock).empty());
  EXPECT_TRUE(plan_packed_offload({{kFirst, {}}}, pack_layout({{kFirst, {}}}), kHostBlock).empty());
  EXPECT_TRUE(plan_packed_restore({{kFirst, {}}}, {{kFileBlock, 4096}}).empty());
  EXPECT_TRUE(unstaged({}).empty());
  EXPECT_EQ(staging_bytes({}), 0u);
  EXPECT_EQ(crossing_copies({}), 0u);
}

TEST(Unstaged, LeavesOtherCopiesAsTheyAre) {
  const Plan plan = plan_offload(kFirst, {{0, 64}, {128, 256}}, kHostBlock);
  EXPECT_EQ(unstaged(plan), plan);
}

TEST(Unstaged, SplitsWhatIsStagedAndReadInDifferentPieces) {
  const Place staging{Tier::kStaging, 0, 0};
  const Plan plan =
      unstaged({{kFirst, staging, 10}, {kSecond, staging.advanced(12), 10}, {staging.advanced(5), kHostBlock, 10}});
  EXPECT_EQ(to_string(plan),
            "device:0x1000+5 -> host:0x7f0000+128, 5 bytes\n"
            "device:0x2000+8 -> host:0x7f0000+135, 3 bytes\n");
}

// --- against a model of memory

void run(const Plan& plan) {
  // Just as many bytes as the plan says it needs: more are found by the address sanitizer.
  Bytes staging(staging_bytes(plan), '\x55');
  const auto address = [&](const Place& place) {
    return place.tier == Tier::kStaging ? &staging[place.byte_offset]
                                        : reinterpret_cast<char*>(static_cast<std::uintptr_t>(place.position()));
  };
  for (const CopySpan& span : plan) std::memcpy(address(span.dst), address(span.src), span.nbytes);
}

// A file's places have no base, so that the model's file starts at address 0.
Place place_of(Tier tier, Bytes& bytes, std::uint64_t byte_offset) {
  const auto base = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(bytes.data()));
  return tier == Tier::kFile ? Place{tier, 0, base + byte_offset} : Place{tier, base, byte_offset};
}

struct Storage {
  Bytes bytes;
  Place place;
  ByteRanges ranges;
  std::vector<CopiedSpan> spans;
};

class PlanPackRandom : public testing::TestWithParam<std::uint64_t> {
 protected:
  static constexpr std::uint64_t kBytes = 512;

  // Starts at any address; on even seeds everything is in whole words.
  Storage storage(char fill) {
    const std::uint64_t start = random_() % 32 * word();
    Storage made{Bytes(kBytes + start, fill), {}, {}, {}};
    made.place = place_of(Tier::kDevice, made.bytes, start);
    return made;
  }
  Storage random_storage() {
    Storage made = storage(0);
    for (char& byte : made.bytes) byte = static_cast<char>(random_());
    for (std::uint64_t n = random_() % 6; n > 0; --n) {
      const std::uint64_t begin = random_() % (kBytes / word()) * word();
      const std::uint64_t nbytes = (1 + random_() % (100 / word())) * word();
      made.ranges.add({begin, std::min(kBytes, begin + nbytes)});
    }
    return made;
  }
  std::vector<Storage> random_storages() {
    std::vector<Storage> made;
    for (std::uint64_t n = 1 + random_() % 6; n > 0; --n) made.push_back(random_storage());
    return made;
  }
  [[nodiscard]] static std::vector<PackPart> parts_of(const std::vector<Storage>& storages) {
    std::vector<PackPart> parts;
    for (const Storage& made : storages) parts.push_back({made.place, made.ranges});
    return parts;
  }
  [[nodiscard]] std::uint64_t word() const { return GetParam() % 2 == 0 ? kPackAlignmentBytes : 1; }

  std::mt19937_64 random_{GetParam()};
};

TEST_P(PlanPackRandom, LayoutPadsNothingAndKeepsWords) {
  const std::vector<Storage> storages = random_storages();
  const PackLayout layout = pack_layout(parts_of(storages));
  ASSERT_EQ(layout.parts.size(), storages.size());
  ByteRanges pack;
  std::uint64_t nbytes = 0;
  for (std::size_t i = 0; i < storages.size(); ++i) {
    ByteRanges ranges;
    for (const auto& [range, byte_offset] : layout.parts[i]) {
      const std::uint64_t address = storages[i].place.position() + range.begin;
      std::uint64_t word = kPackAlignmentBytes;
      while (address % word != 0 || range.nbytes() % word != 0) word /= 2;
      ASSERT_EQ(byte_offset % word, 0u);
      pack.add({byte_offset, byte_offset + range.nbytes()});
      nbytes += range.nbytes();
      ranges.add(range);
    }
    EXPECT_EQ(ranges, storages[i].ranges);
  }
  EXPECT_EQ(layout.nbytes, nbytes);
  EXPECT_EQ(pack.nbytes(), nbytes);
}

// Copies that bring the marked bytes.
std::uint64_t pieces_in(const std::vector<bool>& wanted) {
  std::uint64_t pieces = 0;
  bool inside = false;
  for (const bool marked : wanted) {
    if (marked && !inside) ++pieces;
    inside = marked;
  }
  return pieces;
}

// Two packs in one slab or file. Then some of their ranges come back, into other memory.
TEST_P(PlanPackRandom, GatherAndScatterBringTheWantedBytesBack) {
  const Tier tier = GetParam() % 4 < 2 ? Tier::kHost : Tier::kFile;
  std::vector<Storage> packs[] = {random_storages(), random_storages()};
  const PackLayout layouts[] = {pack_layout(parts_of(packs[0])), pack_layout(parts_of(packs[1]))};
  // Host blocks start at multiples of 64 bytes and those of a file may touch.
  const std::uint64_t gap = tier == Tier::kHost ? 64 - layouts[0].nbytes % 64 : 0;
  const std::uint64_t starts[] = {0, layouts[0].nbytes + gap};
  Bytes slab(starts[1] + layouts[1].nbytes);
  std::vector<Block> whole;
  for (int i : {0, 1}) {
    const Block block{place_of(tier, slab, starts[i]), layouts[i].nbytes};
    const Plan offload = plan_packed_offload(parts_of(packs[i]), layouts[i], block.place);
    ASSERT_EQ(crossing_copies(offload), block.nbytes > 0 ? 1u : 0u);
    run(random_() % 2 == 0 ? offload : unstaged(offload));
    for (std::size_t part = 0; part < packs[i].size(); ++part) {
      packs[i][part].spans = packed_spans(layouts[i].parts[part], block.place);
    }
    if (tier == Tier::kFile && block.nbytes > 0) whole.push_back(block);
  }

  std::vector<Storage> restored;
  std::vector<Bytes> expected;
  std::vector<LoadPart> loads;
  std::vector<bool> wanted(slab.size());
  for (const std::vector<Storage>& pack : packs) {
    for (const Storage& source : pack) {
      Storage& made = restored.emplace_back(storage('\x33'));
      Bytes& bytes = expected.emplace_back(made.bytes);
      LoadPart load{made.place, {}};
      for (const CopiedSpan& span : source.spans) {
        if (random_() % 3 == 0) continue;
        load.spans.push_back(span);
        std::memcpy(&bytes[made.place.byte_offset + span.range.begin],
                    &source.bytes[source.place.byte_offset + span.range.begin], span.range.nbytes());
        const auto first = span.place.position() - place_of(tier, slab, 0).position();
        std::fill_n(wanted.begin() + static_cast<std::ptrdiff_t>(first), span.range.nbytes(), true);
      }
      loads.push_back(load);
    }
  }
  std::shuffle(loads.begin(), loads.end(), random_);
  const Plan restore = plan_packed_restore(loads, whole);
  for (const Plan& plan : {restore, unstaged(restore)}) {
    for (Storage& made : restored) std::fill(made.bytes.begin(), made.bytes.end(), '\x33');
    run(plan);
    for (std::size_t i = 0; i < restored.size(); ++i) ASSERT_EQ(restored[i].bytes, expected[i]) << "storage " << i;
  }
  EXPECT_EQ(staging_bytes(unstaged(restore)), 0u);

  if (tier == Tier::kHost) {
    EXPECT_EQ(crossing_copies(restore), pieces_in(wanted));
    return;
  }
  std::vector<Block> read;
  for (const CopySpan& span : restore) {
    if (span.src.tier == Tier::kFile) read.push_back({span.src, span.nbytes});
  }
  std::erase_if(whole, [&](const Block& block) {
    const auto first =
        wanted.begin() + static_cast<std::ptrdiff_t>(starts[block.place == place_of(tier, slab, 0) ? 0 : 1]);
    return std::find(first, first + static_cast<std::ptrdiff_t>(block.nbytes), true) ==
           first + static_cast<std::ptrdiff_t>(block.nbytes);
  });
  EXPECT_EQ(read, whole) << "each block that is wanted is read once and whole";
}

INSTANTIATE_TEST_SUITE_P(Seeds, PlanPackRandom, testing::Range<std::uint64_t>(0, 200));

}  // namespace
}  // namespace ebbtide
