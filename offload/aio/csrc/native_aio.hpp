// Linux native AIO (io_submit) by raw system calls: for kernels and containers without io_uring.
#pragma once

#include <linux/aio_abi.h>

#include <unordered_map>
#include <vector>

#include "backend.hpp"
#include "wakeup.hpp"

namespace aio {

class NativeAioBackend final : public Backend {
  public:
    explicit NativeAioBackend(unsigned depth);
    ~NativeAioBackend() override;

    int submit(Transfer* const* transfers, unsigned count) override;
    unsigned reap(Completion* out, unsigned capacity, unsigned least) override;
    void wake() override { wakeup_.signal(); }
    void abandon() override { wakeup_.abandon(); }
    Counters counters() const override { return counters_; }

  private:
    void watch_wakeup();

    Wakeup wakeup_;
    aio_context_t context_ = 0;
    std::vector<iocb> blocks_;
    std::vector<unsigned> free_;
    std::vector<Transfer*> owners_;
    std::vector<io_event> events_;
    bool watching_ = false;
    Counters counters_;
};

}  // namespace aio
