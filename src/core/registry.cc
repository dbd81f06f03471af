#include "ebbtide/registry.h"

namespace ebbtide {

ByteRanges Entry::missing() const { return wanted.minus(valid); }

std::vector<StoredRange> Entry::to_load() const {
  std::vector<StoredRange> ranges;
  for (const StoredRange& part : stored) {
    if (restored_valid.contains(part.range)) ranges.push_back(part);
  }
  return ranges;
}

Entry& Registry::create(const StorageRef& source, std::uint64_t version, EpochId epoch) {
  const StorageId id{++last_storage_};
  Entry& entry = entries_[id];
  entry.id = id;
  entry.source = source;
  entry.version = version;
  entry.epoch = epoch;
  saved_[{source.identity, epoch}] = id;
  entry.need = ++last_need_;
  by_need_[entry.need] = &entry;
  return entry;
}

void Registry::erase(StorageId storage) {
  Entry* entry = find(storage);
  if (entry == nullptr) return;
  hide(*entry);
  by_need_.erase(entry->need);
  entries_.erase(storage);
}

void Registry::hide(Entry& entry) {
  entry.closed = true;
  const auto saved = saved_.find({entry.source.identity, entry.epoch});
  if (saved != saved_.end() && saved->second == entry.id) saved_.erase(saved);
  unbind_restored(entry);
}

Entry* Registry::find(StorageId storage) {
  const auto found = entries_.find(storage);
  return found == entries_.end() ? nullptr : &found->second;
}

const Entry* Registry::find(StorageId storage) const {
  const auto found = entries_.find(storage);
  return found == entries_.end() ? nullptr : &found->second;
}

Entry* Registry::find_saved(std::uint64_t identity, EpochId epoch) {
  const auto found = saved_.find({identity, epoch});
  return found == saved_.end() ? nullptr : find(found->second);
}

Entry* Registry::find_restored(std::uint64_t identity) {
  const auto found = restored_.find(identity);
  return found == restored_.end() ? nullptr : find(found->second);
}

void Registry::bind_restored(Entry& entry, const StorageRef& restored) {
  entry.restored_ref = restored;
  restored_[restored.identity] = entry.id;
}

void Registry::unbind_restored(Entry& entry) {
  const auto found = restored_.find(entry.restored_ref.identity);
  if (found != restored_.end() && found->second == entry.id) restored_.erase(found);
}

void Registry::close_epoch(EpochId epoch) {
  std::erase_if(saved_, [epoch](const auto& item) { return item.first.epoch == epoch; });
}

TicketId Registry::issue(Entry& entry, std::uint32_t view) {
  const TicketId ticket{++last_ticket_};
  tickets_[value(ticket)] = {entry.id, view, PassId{}};
  ++entry.live_tickets;
  return ticket;
}

TicketRecord* Registry::ticket(TicketId ticket) {
  const auto found = tickets_.find(value(ticket));
  return found == tickets_.end() ? nullptr : &found->second;
}

void Registry::revoke(TicketId ticket) {
  const auto found = tickets_.find(value(ticket));
  if (found == tickets_.end()) return;
  if (Entry* entry = find(found->second.storage)) --entry->live_tickets;
  tickets_.erase(found);
}

void Registry::renew(Entry& entry, GroupId group) {
  entry.group = group;
  if (entry.need == last_need_) return;
  by_need_.erase(entry.need);
  entry.need = ++last_need_;
  by_need_[entry.need] = &entry;
}

void Registry::walk_back(std::uint64_t need, const std::function<bool(Entry&)>& visit) {
  for (auto it = by_need_.lower_bound(need); it != by_need_.begin();) {
    if (!visit(*(--it)->second)) return;
  }
}

void Registry::for_each(const std::function<void(Entry&)>& visit) {
  for (auto& [id, entry] : entries_) visit(entry);
}

}  // namespace ebbtide
