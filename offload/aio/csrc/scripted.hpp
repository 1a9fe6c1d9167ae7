// A backend for tests: real transfers, with the faults and the order that a script asks for.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>
#include <vector>

#include "backend.hpp"

namespace aio {

// What happens to the n-th transfer; those beyond the script's end go well.
struct Fault {
    enum class Kind : std::uint8_t { none, error, cut, refuse } kind = Kind::none;
    std::int64_t value =
        0;  // errno of an error or of a refusal by submit(); bytes of a short result
};

struct Script {
    std::vector<Fault> faults;
    std::uint64_t shuffle = 0;  // seed of the order of completions; 0: as submitted
    unsigned batch = 0;         // the most that one submit() takes; 0: all
};

class ScriptedBackend final : public Backend {
  public:
    explicit ScriptedBackend(Script script)
        : script_(std::move(script)), random_(script_.shuffle) {}

    int submit(Transfer* const* transfers, unsigned count) override;
    unsigned reap(Completion* out, unsigned capacity, unsigned least) override;
    void wake() override;
    // `system_calls`: how often something was submitted beside transfers in flight.
    Counters counters() const override { return counters_; }

  private:
    struct Held {
        Transfer* transfer;
        Fault fault;
    };
    Fault next_fault();

    const Script script_;
    std::mt19937_64 random_;
    std::size_t step_ = 0;
    Counters counters_;
    std::vector<Held> held_;
    std::mutex mutex_;
    std::condition_variable woken_changed_;
    bool woken_ = false;
};

}  // namespace aio
