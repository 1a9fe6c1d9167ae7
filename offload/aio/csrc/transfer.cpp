#include "transfer.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace aio {
namespace {

constexpr int kMaxAgain = 200;  // pauses of 5 ms: a second
constexpr int kMaxStalls = 2;

// What a bounced page holds of the bytes that are wanted; copies them.
std::int64_t take_from_page(const Transfer& transfer, std::int64_t result) {
    const auto skip = static_cast<std::int64_t>(transfer.offset() - transfer.io_offset());
    const auto wanted = static_cast<std::int64_t>(transfer.bytes);
    const std::int64_t kept = std::clamp<std::int64_t>(result - skip, 0, wanted);
    std::memcpy(transfer.request->address + transfer.at, transfer.page + skip,
                static_cast<std::size_t>(kept));
    return kept;
}

Next after_error(Transfer& transfer, int error) {
    Request& request = *transfer.request;
    if (!request.failed()) {
        if (error == EINTR) return Next::again;
        if (error == EAGAIN && transfer.again++ < kMaxAgain) return Next::wait;
        if (error == EINVAL && transfer.path != Path::buffered && !request.file.strict) {
            // The file system took O_DIRECT at the trial read and refuses it here.
            transfer.path = Path::buffered;
            return Next::buffered;
        }
        request.fail(Outcome::Kind::error, error, transfer.offset());
    }
    drop(transfer);
    return Next::done;
}

}  // namespace

void drop(Transfer& transfer, std::uint64_t moved) {
    // Taken out first: the last settle may end the request, and nobody else may hold it then.
    const auto request = std::move(transfer.request);
    if (moved > 0) request->settle(moved, true);
    if (moved < transfer.bytes) request->settle(transfer.bytes - moved, false);
}

Next settle(Transfer& transfer, std::int64_t result) {
    if (result < 0) return after_error(transfer, static_cast<int>(-result));
    if (transfer.path == Path::bounce) result = take_from_page(transfer, result);

    Request& request = *transfer.request;
    const auto moved = static_cast<std::uint64_t>(result);
    if (moved == transfer.bytes || request.failed()) {
        drop(transfer, moved);
        return Next::done;
    }
    // Short. What is left is tried again, at an aligned place, until the end of the file shows.
    const std::uint64_t grain = transfer.grain();
    const std::uint64_t kept = transfer.path == Path::buffered ? moved : moved / grain * grain;
    if (kept > 0) {
        request.settle(kept, true);
        transfer.at += kept;
        transfer.bytes -= kept;
        transfer.again = transfer.stalls = 0;
        return Next::again;
    }
    const bool end_of_file = moved == 0 && !request.write;
    if (!end_of_file && ++transfer.stalls <= kMaxStalls) return Next::again;
    if (request.write) {
        request.fail(Outcome::Kind::error, EIO, transfer.offset() + moved);
    } else {
        request.fail(Outcome::Kind::ended_short, ENODATA, transfer.offset() + moved);
    }
    drop(transfer, moved);
    return Next::done;
}

}  // namespace aio
