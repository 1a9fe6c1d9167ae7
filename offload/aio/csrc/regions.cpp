#include "regions.hpp"

#include <pthread.h>

namespace aio {

// Not destroyed at exit: I/O threads of forgotten engines may still look things up.
Regions& Regions::table() {
    static Regions* const regions = new Regions;
    return *regions;
}

Regions::Regions() {
    // An I/O thread may hold the lock while another thread forks; the child would wait for ever.
    ::pthread_atfork([] { table().mutex_.lock(); }, [] { table().mutex_.unlock(); },
                     [] { table().mutex_.unlock(); });
}

void Regions::add(const Region& region) {
    const std::lock_guard lock(mutex_);
    by_address_[region.address] = region;
}

void Regions::remove(std::uint64_t serial) {
    const std::lock_guard lock(mutex_);
    for (auto entry = by_address_.begin(); entry != by_address_.end(); ++entry) {
        if (entry->second.serial == serial) {
            by_address_.erase(entry);
            return;
        }
    }
}

std::optional<Region> Regions::find(const void* address, std::uint64_t bytes) const {
    const auto start = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(mutex_);
    auto next = by_address_.upper_bound(start);
    if (next == by_address_.begin()) return std::nullopt;
    const Region& region = std::prev(next)->second;
    if (start + bytes > region.address + region.bytes) return std::nullopt;
    return region;
}

}  // namespace aio
