// What one system call moves, and what its result means for the request.
#pragma once

#include <cstdint>
#include <memory>

#include "request.hpp"

namespace aio {

struct Transfer {
    std::shared_ptr<Request> request;
    Path path = Path::direct;
    std::uint64_t at = 0;     // from the request's first byte
    std::uint64_t bytes = 0;  // of the request's
    char* page = nullptr;     // bounce only: `grain` bytes, aligned
    int again = 0;            // EAGAINs in a row
    int stalls = 0;           // short results in a row that brought no aligned progress

    std::uint64_t offset() const { return request->offset + at; }
    bool write() const { return request->write; }
    int fd() const {
        return path == Path::buffered ? request->file.buffered : request->file.direct;
    }

    // The system call's own range: of a bounce, the whole page around the bytes wanted.
    std::uint64_t io_offset() const {
        return path == Path::bounce ? offset() / grain() * grain() : offset();
    }
    char* io_address() const { return path == Path::bounce ? page : request->address + at; }
    std::uint64_t io_bytes() const { return path == Path::bounce ? grain() : bytes; }

    std::uint64_t grain() const { return request->file.grain(); }
};

enum class Next : std::uint8_t {
    done,      // every byte of the transfer is settled
    again,     // submit it once more: it has been moved on to what is left
    wait,      // the same, after a pause: the kernel was short of something
    buffered,  // submit it once more, through the page cache
};

// Account for a result: bytes, or -errno.
Next settle(Transfer& transfer, std::int64_t result);

// Settle a transfer that will not be submitted (again).
void drop(Transfer& transfer, std::uint64_t moved = 0);

}  // namespace aio
