// Runs the engine without Python, for the sanitizers: every backend, many threads, scripted
// faults, cancels and closes. Exits with 1 at the first wrong byte.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "../../offload/aio/csrc/engine.hpp"
#include "../../offload/aio/csrc/regions.hpp"
#include "../../offload/aio/csrc/stream.hpp"

namespace {

constexpr std::size_t kFileBytes = (3 << 20) + 777;
constexpr std::size_t kBufferBytes = 1 << 20;

std::vector<char> contents;
std::string folder;

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    std::exit(1);
}

struct AlignedDelete {
    void operator()(char* memory) const { std::free(memory); }
};

// Memory that is registered with the kernel as long as it lives.
class Buffer {
  public:
    explicit Buffer(std::uint64_t serial)
        : memory_(static_cast<char*>(std::aligned_alloc(4096, kBufferBytes))), serial_(serial) {
        std::memset(memory_.get(), 0, kBufferBytes);
        const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
        aio::Regions::table().add({serial_, address, kBufferBytes});
    }
    ~Buffer() { aio::Regions::table().remove(serial_); }
    char* data() { return memory_.get(); }
    std::uint64_t serial() const { return serial_; }

  private:
    std::unique_ptr<char, AlignedDelete> memory_;
    std::uint64_t serial_;
};

std::atomic<std::uint64_t> serials{1};

aio::File open_file(const std::string& path, int flags) {
    aio::File file;
    file.serial = serials++;
    file.buffered = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
    file.direct = ::open(path.c_str(), flags | O_DIRECT | O_CLOEXEC, 0600);
    file.mem_align = file.offset_align = 512;
    if (file.buffered < 0) fail("open " + path);
    return file;
}

void close_file(const aio::File& file) {
    ::close(file.buffered);
    if (file.direct >= 0) ::close(file.direct);
}

void wait(const aio::Request& request) {
    if (!request.wait_for(std::chrono::seconds(120))) fail("a request did not end");
}

// Reads of random ranges by one thread; some are cancelled. With `faulty`, errors may occur.
void read_randomly(aio::Engine& engine, unsigned seed, bool faulty, int rounds) {
    std::mt19937_64 random(seed);
    const aio::File file = open_file(folder + "/data", O_RDONLY);
    for (int round = 0; round < rounds; ++round) {
        Buffer buffer(serials++);
        std::uint64_t offset = random() % kFileBytes;
        if (round % 2 == 0) offset = offset / 4096 * 4096;
        const std::uint64_t skew = round % 3 == 0 ? random() % 4096 : offset % 4096;
        const std::uint64_t bytes =
            std::min<std::uint64_t>(random() % (kBufferBytes - 4096), kFileBytes - offset);
        auto request = engine.submit(serials++, false, file, buffer.data() + skew, offset, bytes);
        if (round % 7 == 0) request->cancel();
        wait(*request);
        const aio::Outcome outcome = request->outcome();
        if (outcome.kind == aio::Outcome::Kind::ok) {
            if (outcome.transferred != bytes) fail("success without all bytes");
            if (std::memcmp(buffer.data() + skew, contents.data() + offset, bytes) != 0) {
                fail("wrong bytes");
            }
        } else if (outcome.kind != aio::Outcome::Kind::cancelled && !faulty) {
            fail("an error without a fault: " + std::to_string(outcome.error));
        }
        engine.drop_region(buffer.serial());
        engine.collect_ended();
    }
    close_file(file);
    engine.drop_file(file.serial);
}

// Streams ranges through a small buffer; some are closed in the middle, by this thread or another.
void stream_randomly(aio::Engine& engine, unsigned seed, bool faulty, int rounds) {
    std::mt19937_64 random(seed);
    const aio::File file = open_file(folder + "/data", O_RDONLY);
    for (int round = 0; round < rounds; ++round) {
        Buffer buffer(serials++);
        aio::Course course;
        course.file = file;
        course.buffer = buffer.data();
        course.chunk = 4096 << random() % 5;
        course.slots = 1 + random() % 8;
        course.kept = 1 + random() % course.slots;
        std::uint64_t expected = 0;
        for (std::uint64_t i = random() % 4; i > 0; --i) {
            const std::uint64_t offset = random() % kFileBytes;
            course.ranges.emplace_back(offset, std::min(random() % 400'000, kFileBytes - offset));
            expected += course.ranges.back().second;
        }
        aio::Stream stream(engine, course);
        std::thread closer;
        if (round % 5 == 0) closer = std::thread([&] { stream.close(); });
        const std::uint64_t stop = round % 4 == 0 ? random() % 8 : ~0ULL;
        std::uint64_t total = 0, pieces = 0;
        bool whole = true;
        while (const auto request = stream.next()) {
            wait(*request);
            whole = request->outcome().kind == aio::Outcome::Kind::ok && pieces++ < stop;
            if (!whole) {
                if (request->outcome().kind == aio::Outcome::Kind::error && !faulty) {
                    fail("a stream's error without a fault");
                }
                stream.close();
                break;
            }
            if (round % 5 != 0 &&
                std::memcmp(buffer.data() + stream.place(*request),
                            contents.data() + request->offset, request->bytes) != 0) {
                fail("wrong bytes in a stream");
            }
            total += request->bytes;
            stream.take();
        }
        if (closer.joinable()) closer.join();
        if (whole && round % 5 != 0 && total != expected) fail("a stream ended early");
        stream.close();
        engine.drop_region(buffer.serial());
    }
    close_file(file);
    engine.drop_file(file.serial);
}

void write_and_read_back(aio::Engine& engine, unsigned seed) {
    const std::string path = folder + "/out" + std::to_string(seed);
    const aio::File file = open_file(path, O_RDWR | O_CREAT | O_TRUNC);
    std::vector<std::shared_ptr<aio::Request>> requests;
    // Neighbours meet inside pages: their ends must not overwrite each other.
    const std::uint64_t step = 10'007;
    Buffer buffer(serials++);
    std::memcpy(buffer.data(), contents.data(), kBufferBytes);
    for (std::uint64_t at = 0; at < kBufferBytes; at += step) {
        const std::uint64_t bytes = std::min(step, kBufferBytes - at);
        requests.push_back(engine.submit(serials++, true, file, buffer.data() + at, at, bytes));
    }
    for (const auto& request : requests) {
        wait(*request);
        if (request->outcome().kind != aio::Outcome::Kind::ok) fail("a write failed");
    }
    std::vector<char> back(kBufferBytes);
    if (::pread(file.buffered, back.data(), back.size(), 0) != static_cast<ssize_t>(back.size()) ||
        std::memcmp(back.data(), contents.data(), back.size()) != 0) {
        fail("wrong bytes were written");
    }
    close_file(file);
    ::unlink(path.c_str());
}

aio::Script faults(unsigned seed) {
    std::mt19937 random(seed);
    aio::Script script;
    script.shuffle = seed;
    script.batch = seed % 3;
    using Kind = aio::Fault::Kind;
    for (int i = 0; i < 2000; ++i) {
        switch (random() % 6) {
            case 0:
                script.faults.push_back({Kind::cut, static_cast<std::int64_t>(random() % 9000)});
                break;
            case 1:
                script.faults.push_back({Kind::error, EINTR});
                break;
            case 2:
                script.faults.push_back({random() % 4 != 0 ? Kind::none : Kind::error, EIO});
                break;
            case 3:
                script.faults.push_back({random() % 2 != 0 ? Kind::none : Kind::refuse, EBADF});
                break;
            default:
                script.faults.push_back({});
        }
    }
    return script;
}

void run(const std::string& name, unsigned workers, bool overlap, int rounds) {
    aio::Shape shape;
    shape.block_bytes = 32 << 10;
    shape.queue_depth = 4;
    shape.workers = workers;
    shape.overlap_events = overlap;
    const bool scripted = name == "scripted";
    try {
        aio::Engine engine(name, shape, !scripted, scripted ? faults(workers) : aio::Script{});
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < 3; ++i) {
            threads.emplace_back([&, i] { read_randomly(engine, i, scripted, rounds); });
        }
        threads.emplace_back([&] { stream_randomly(engine, workers, scripted, rounds); });
        if (!scripted) threads.emplace_back([&] { write_and_read_back(engine, 99); });
        threads.emplace_back([&] {
            for (int i = 0; i < 100; ++i) engine.counters();
        });
        for (std::thread& thread : threads) thread.join();
        // Closed with requests under way.
        const aio::File file = open_file(folder + "/data", O_RDONLY);
        std::vector<std::unique_ptr<Buffer>> buffers;
        std::vector<std::shared_ptr<aio::Request>> last;
        for (int i = 0; i < 20; ++i) {
            buffers.push_back(std::make_unique<Buffer>(serials++));
            last.push_back(
                engine.submit(serials++, false, file, buffers.back()->data(), 0, kBufferBytes));
            if (i % 2 == 0) last.back()->cancel();
        }
        engine.close();
        for (const auto& request : last) {
            if (!request->done()) fail("close did not wait");
        }
        close_file(file);
        std::printf("%-12s workers %u overlap %d: good\n", name.c_str(), workers, overlap);
    } catch (const std::system_error& error) {
        std::printf("%-12s not available: %s\n", name.c_str(), error.what());
    }
}

}  // namespace

int main(int count, char** arguments) {
    folder = count > 1 ? arguments[1] : ".";
    const int rounds = count > 2 ? std::atoi(arguments[2]) : 60;
    contents.resize(kFileBytes);
    std::mt19937 random(7);
    for (char& byte : contents) byte = static_cast<char>(random());
    const aio::File file = open_file(folder + "/data", O_RDWR | O_CREAT | O_TRUNC);
    if (::pwrite(file.buffered, contents.data(), kFileBytes, 0) != kFileBytes) fail("write");
    ::fsync(file.buffered);
    close_file(file);
    for (const char* name : {"uring-fixed", "uring", "libaio", "threads", "scripted"}) {
        for (const unsigned workers : {1U, 3U}) {
            for (const bool overlap : {true, false}) run(name, workers, overlap, rounds);
        }
    }
    ::unlink((folder + "/data").c_str());
    return 0;
}
