// Memory that is populated and stays where it is: what may be registered with the kernel.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>

namespace aio {

struct Region {
    std::uint64_t serial = 0;  // never used twice, unlike an address
    std::uintptr_t address = 0;
    std::uint64_t bytes = 0;
};

// One table for the process: every engine looks its transfers up in it.
class Regions {
  public:
    static Regions& table();

    void add(const Region& region);
    void remove(std::uint64_t serial);
    // The region in which all of a range lies.
    std::optional<Region> find(const void* address, std::uint64_t bytes) const;

  private:
    Regions();
    mutable std::mutex mutex_;
    std::map<std::uintptr_t, Region> by_address_;
};

}  // namespace aio
