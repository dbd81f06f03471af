// HostPool: exact-size blocks of host memory carved out of large slabs, with a hard cap.
//
// Slabs come from a SlabSource, so that pageable memory here and a framework's pinned memory elsewhere share the same
// pool. Slabs stay reserved when their blocks come back: after the first step of a training run the pool asks the
// source for nothing. A request above the slab size gets a slab of its own, exactly as large.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
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
  ~HostPool() override;

  [[nodiscard]] Tier tier() const override { return Tier::kHost; }
  // The cap holds for reserved bytes. Where a whole slab does not fit under it any more, empty slabs are given back
  // and a slab of just the block's size is tried; a source that refuses counts as full.
  [[nodiscard]] std::optional<Block> allocate(std::uint64_t nbytes, std::uint64_t limit) override;
  void free(const Block& block) override;
  [[nodiscard]] std::uint64_t used_bytes() const override;
  [[nodiscard]] std::uint64_t reserved_bytes() const override;

  // Gives slabs without blocks back to the source; returns the bytes given back.
  std::uint64_t trim();
  // Calls of SlabSource::allocate that succeeded since the pool was made.
  [[nodiscard]] std::uint64_t slab_allocations() const;

 private:
  struct Slab {
    void* address = nullptr;
    std::uint64_t nbytes = 0;
    ExtentAllocator extents;
  };

  [[nodiscard]] std::optional<Block> carve(std::uint64_t nbytes);
  [[nodiscard]] bool add_slab(std::uint64_t nbytes, std::uint64_t limit);
  std::uint64_t trim_locked();

  std::unique_ptr<SlabSource> source_;
  const std::uint64_t slab_bytes_;
  mutable std::mutex mutex_;
  std::vector<Slab> slabs_;  // sorted by address
  std::uint64_t used_ = 0;
  std::uint64_t reserved_ = 0;
  std::uint64_t slab_allocations_ = 0;
};

}  // namespace ebbtide
