#include "worker.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <future>
#include <system_error>
#include <utility>

namespace aio {
namespace {

constexpr std::uint64_t kTogether = 1 << 20;  // bytes whose completions may wait for each other
constexpr useconds_t kPause = 5000;           // after EAGAIN, in microseconds

// Signals are for the interpreter's threads: Ctrl-C has to reach the one that waits.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        ::sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
};

}  // namespace

Worker::Worker(Lane& lane, const Shape& shape, std::function<std::unique_ptr<Backend>()> make,
               std::function<void(Segment)> reroute)
    : lane_(lane),
      shape_(shape),
      reroute_(std::move(reroute)),
      slots_(shape.queue_depth),
      pages_(shape.queue_depth),
      several_(static_cast<unsigned>(
          std::min<std::uint64_t>(shape.queue_depth / 4, kTogether / shape.block_bytes))) {
    for (Transfer& slot : slots_) free_.push_back(&slot);
    std::promise<void> made;
    auto outcome = made.get_future();
    const SignalsBlocked inherited_by_the_new_threads;
    thread_ = std::thread([this, make = std::move(make), &made] {
        try {
            backend_ = make();
            sleeper_.wake = [this] { backend_->wake(); };
        } catch (...) {
            made.set_exception(std::current_exception());
            return;
        }
        lane_.add(&sleeper_);
        made.set_value();
        run();
        lane_.remove(&sleeper_);
        backend_.reset();  // where it was made
    });
    try {
        outcome.get();
    } catch (...) {
        thread_.join();
        throw;
    }
}

Worker::~Worker() { thread_.join(); }

void Worker::run() {
    std::vector<Completion> completions(shape_.queue_depth);
    for (;;) {
        take_mail();
        fill();
        submit();
        if (in_flight_ == 0 && ready_.empty() && delayed_.empty() && lane_.closed()) return;
        if (!delayed_.empty()) {
            ::usleep(kPause);
            ready_.insert(ready_.end(), delayed_.begin(), delayed_.end());
            delayed_.clear();
        }
        // Sleep where nothing can be submitted before something completes or arrives.
        const bool full = free_.empty() || draining_;
        unsigned least = ready_.empty() ? several() : 0;
        const bool parked = least == 1 && !full;
        if (parked && !lane_.park(sleeper_)) least = 0;
        const unsigned count =
            backend_->reap(completions.data(), static_cast<unsigned>(completions.size()), least);
        if (parked) lane_.unpark(sleeper_);
        rare_ = count < 2 && (rare_ || least > 1);
        // First the counters: who sees a request ended finds its transfers counted.
        publish();
        for (unsigned i = 0; i < count; ++i) finish(completions[i]);
        if (in_flight_ == 0) draining_ = false;
    }
}

unsigned Worker::several() const {
    // One wake-up for several, as long as the drive has enough to do meanwhile. Nobody needs to
    // ring then: what arrives is looked at when they are there.
    return several_ > 1 && !rare_ && in_flight_ >= 2 * several_ ? several_ : 1;
}

void Worker::take_mail() {
    std::vector<std::uint64_t> files, regions;
    {
        const std::lock_guard lock(mail_mutex_);
        files.swap(dropped_files_);
        regions.swap(dropped_regions_);
    }
    for (const std::uint64_t serial : files) backend_->drop_file(serial);
    for (const std::uint64_t serial : regions) backend_->drop_region(serial);
}

void Worker::publish() {
    const std::lock_guard lock(mail_mutex_);
    published_ = backend_->counters();
}

void Worker::fill() {
    if (draining_) return;
    // With company, leave some of a request for the others.
    std::size_t most = shape_.workers > 1 ? std::max(1U, shape_.queue_depth / 4) : free_.size();
    while (!free_.empty() && most-- > 0) {
        Transfer* const transfer = free_.back();
        if (!lane_.take(*transfer)) return;
        free_.pop_back();
        try {
            if (transfer->path == Path::bounce) {
                give_page(*transfer, static_cast<std::size_t>(transfer - slots_.data()));
            }
        } catch (const std::system_error& error) {  // no memory: this request's failure only
            ++in_flight_;
            finish({transfer, -error.code().value()});
            continue;
        }
        ready_.push_back(transfer);
    }
}

void Worker::give_page(Transfer& transfer, std::size_t slot) {
    // Made at a slot's first ragged end; 64 KiB serve every grain that drives have.
    const std::uint64_t bytes = std::max<std::uint64_t>(transfer.grain(), 64 << 10);
    if (!pages_[slot]) pages_[slot] = Mapped(bytes);
    transfer.page = pages_[slot].at<char>();
}

void Worker::submit() {
    std::size_t from = 0;
    while (from < ready_.size()) {
        const auto count = static_cast<unsigned>(shape_.single_submit ? 1 : ready_.size() - from);
        const int taken = backend_->submit(ready_.data() + from, count);
        if (taken > 0) {
            from += static_cast<std::size_t>(taken);
            in_flight_ += static_cast<unsigned>(taken);
        } else if (taken == -EAGAIN && in_flight_ > 0) {
            break;  // completions make room
        } else {
            // This transfer's own failure; the ones behind it are none the worse.
            ++in_flight_;
            finish({ready_[from++], taken == 0 ? -EAGAIN : taken});
        }
    }
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(from));
    if (!shape_.overlap_events && in_flight_ > 0) draining_ = true;
}

void Worker::finish(const Completion& completion) {
    Transfer& transfer = *completion.transfer;
    --in_flight_;
    switch (settle(transfer, completion.result)) {
        case Next::again:
            ready_.push_back(&transfer);
            return;
        case Next::wait:
            delayed_.push_back(&transfer);
            return;
        case Next::buffered:
            reroute_({std::move(transfer.request), Path::buffered, transfer.at,
                      transfer.at + transfer.bytes});
            break;
        case Next::done:
            break;
    }
    transfer.request.reset();
    free_.push_back(&transfer);
}

void Worker::drop_file(std::uint64_t serial) {
    const std::lock_guard lock(mail_mutex_);
    dropped_files_.push_back(serial);
}

void Worker::drop_region(std::uint64_t serial) {
    const std::lock_guard lock(mail_mutex_);
    dropped_regions_.push_back(serial);
}

void Worker::abandon() { backend_->abandon(); }

Backend::Counters Worker::counters() const {
    const std::lock_guard lock(mail_mutex_);
    return published_;
}

}  // namespace aio
