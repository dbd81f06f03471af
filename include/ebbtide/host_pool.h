// HostPool: exact-size blocks of host memory carved out of large slabs, with a hard cap.
//
// Slabs come from a SlabSource, so that pageable memory here and a framework's pinned memory elsewhere share the same
// pool. Slabs stay reserved when their blocks come back: after the first step of a training run the pool asks the
// source for nothing. A request above a quarter of the slab size that no slab has room for gets a slab of its own,
// exactly as large: first fit of what remains wastes at most a fifth of the full slabs, whatever the sizes.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "ebbtide/block_space.h"
#include "ebbtide/extent_allocator.h"

namespace ebbtide {

class SlabSource {
 public:
  SlabSource() = default;
  SlabSource(const SlabSource&) = delete;
  SlabSource& operator=(const SlabSource&) = delete;
  virtual ~SlabSource() = default;

  // Address of `nbytes` of new memory aligned to 4096 bytes, or nullptr when there is none.
  [[nodiscard]] virtual void* allocate(std::uint64_t nbytes) = 0;
  virtual void release(void* address, std::uint64_t nbytes) = 0;
};

// Pageable memory straight from the kernel (mmap), so that a released slab leaves the process at once.
std::unique_ptr<SlabSource> make_pageable_slab_source();

// Thread safe. The pool outlives its blocks: whoever holds a block holds the pool.
class HostPool final : public BlockSpace {
 public:
  static constexpr std::uint64_t kDefaultSlabBytes = std::uint64_t{64} << 20;

  explicit HostPool(std::unique_ptr<SlabSource> source, std::uint64_t slab_bytes = kDefaultSlabBytes);
  // A pool of slabs that its owner adds, since only the owner can make them (a framework's page-locked memory).
  explicit HostPool(std::uint64_t slab_bytes = kDefaultSlabBytes);
  ~HostPool() override;

  [[nodiscard]] Tier tier() const override { return Tier::kHost; }
  // The cap holds for reserved bytes. Where a whole slab does not fit under it any more, empty slabs are given back
  // and a slab of just the block's size (at least a 64th of the slab size, where that fits) is tried; a source that
  // refuses counts as full. Blocks start at multiples of 64 bytes and are padded to that.
  [[nodiscard]] std::optional<Block> allocate(std::uint64_t nbytes, std::uint64_t limit) override;
  // Powers of two from the slab size on, which allocators of page-locked memory would round up to; less where a whole
  // slab does not fit under the cap, down to the padded `nbytes`. Slabs without blocks count as given back already
  // (see take_empty_slabs). 0 for a pool with a source.
  [[nodiscard]] std::uint64_t growth(std::uint64_t nbytes, std::uint64_t limit) const override;
  void free(const Block& block) override;
  [[nodiscard]] std::uint64_t used_bytes() const override;
  [[nodiscard]] std::uint64_t reserved_bytes() const override;

  // Takes over a slab of the owner's; address and `nbytes` are multiples of 64. It stays the owner's to free after
  // take_empty_slabs named it. Throws Error(kUsage) for a pool with a source, and for a slab that is there already.
  void add_slab(void* address, std::uint64_t nbytes);
  // Forgets slabs without blocks, oldest first, until at most `limit` bytes are reserved; returns their addresses. None
  // for a pool with a source.
  [[nodiscard]] std::vector<std::uint64_t> take_empty_slabs(std::uint64_t limit);
  // Gives slabs without blocks back to the source; returns the bytes given back. 0 for a pool without a source.
  std::uint64_t trim();
  // Calls of SlabSource::allocate that succeeded since the pool was made.
  [[nodiscard]] std::uint64_t slab_allocations() const;

 private:
  struct Release {
    SlabSource* source;  // null for a slab that is its owner's to free
    std::uint64_t nbytes;
    void operator()(void* address) const {
      if (source != nullptr) source->release(address, nbytes);
    }
  };
  struct Slab {
    std::unique_ptr<void, Release> memory;
    ExtentAllocator extents;
  };

  [[nodiscard]] std::optional<Block> carve(std::uint64_t nbytes);
  [[nodiscard]] bool make_room(std::uint64_t nbytes, std::uint64_t limit);
  [[nodiscard]] bool reserve_slab(std::uint64_t nbytes, std::uint64_t limit);
  void keep_slab(std::unique_ptr<void, Release> memory, std::uint64_t nbytes);
  [[nodiscard]] std::uint64_t empty_bytes() const;
  std::uint64_t trim_locked();

  const std::unique_ptr<SlabSource> source_;  // null for a pool whose owner adds the slabs
  const std::uint64_t slab_bytes_;
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, Slab> slabs_;  // by address
  std::vector<Slab*> by_age_;                      // oldest first
  std::uint64_t used_ = 0;
  std::uint64_t reserved_ = 0;
  std::uint64_t slab_allocations_ = 0;
};

}  // namespace ebbtide
