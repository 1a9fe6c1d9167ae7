// The Python face of the engine: no logic of its own, and no wait that holds the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <system_error>

#include "engine.hpp"
#include "regions.hpp"
#include "stream.hpp"

namespace py = pybind11;

namespace {

using aio::Engine;
using aio::File;
using aio::Outcome;
using aio::Request;
using aio::Stream;

// Python runs its signal handlers between two of these, so Ctrl-C ends a wait.
constexpr std::chrono::milliseconds kSlice{50};

bool wait(const Request& request, std::optional<double> timeout) {
    using Clock = std::chrono::steady_clock;
    constexpr double kForever = 1e9;  // seconds: more would overflow the clock
    const auto start = Clock::now();
    const auto limit = std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(std::min(timeout.value_or(kForever), kForever)));
    for (;;) {
        const auto left = limit - (Clock::now() - start);
        bool ended;
        {
            const py::gil_scoped_release release;
            ended = request.wait_for(
                std::min<Clock::duration>(std::max(left, Clock::duration::zero()), kSlice));
        }
        if (ended) return true;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        if (left <= Clock::duration::zero()) return false;
    }
}

// The next piece as (place, offset, bytes), or None at the end; (outcome, bytes) where it failed.
py::object next_piece(Stream& stream) {
    const auto request = stream.next();
    if (!request) return py::none();
    if (!request->done()) wait(*request, std::nullopt);
    const Outcome outcome = request->outcome();
    if (outcome.kind != Outcome::Kind::ok) return py::make_tuple(outcome, request->bytes);
    stream.take();
    return py::make_tuple(stream.place(*request), request->offset, request->bytes);
}

const char* kind_name(Outcome::Kind kind) {
    switch (kind) {
        case Outcome::Kind::ok:
            return "ok";
        case Outcome::Kind::error:
            return "error";
        case Outcome::Kind::ended_short:
            return "short";
        case Outcome::Kind::cancelled:
            return "cancelled";
    }
    return "error";
}

aio::Script make_script(const std::vector<std::pair<std::string, std::int64_t>>& faults,
                        std::uint64_t shuffle, unsigned batch) {
    using Kind = aio::Fault::Kind;
    aio::Script script;
    script.shuffle = shuffle;
    script.batch = batch;
    for (const auto& [name, value] : faults) {
        const Kind kind = name == "error"    ? Kind::error
                          : name == "short"  ? Kind::cut
                          : name == "refuse" ? Kind::refuse
                                             : Kind::none;
        script.faults.push_back({kind, value});
    }
    return script;
}

// Lends a buffer's memory to memoryview and NumPy on Pythons before 3.12, where a class written
// in Python cannot: asks the object's own __buffer__ for a memoryview and exports that.
int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    PyObject* const lent = PyObject_CallMethod(self, "__buffer__", "i", flags);
    if (lent == nullptr) return -1;
    const int result = PyObject_GetBuffer(lent, view, flags);
    Py_DECREF(lent);  // the export keeps the memory
    return result;
}

struct BufferExporter {};

}  // namespace

PYBIND11_MODULE(_aio, m) {
    m.doc() = "The asynchronous I/O engine (io_uring, native AIO, threads).";

    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const std::system_error& error) {
            const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
            PyErr_SetObject(PyExc_OSError, arguments.ptr());
        }
    });

    py::class_<BufferExporter>(m, "BufferExporter",
                               py::custom_type_setup([](PyHeapTypeObject* type) {
                                   type->ht_type.tp_as_buffer = &type->as_buffer;
                                   type->as_buffer.bf_getbuffer = get_buffer;
                                   type->as_buffer.bf_releasebuffer = nullptr;
                               }))
        .def(py::init<>());

    py::class_<Outcome>(m, "Outcome")
        .def_property_readonly("kind", [](const Outcome& o) { return kind_name(o.kind); })
        .def_readonly("errno", &Outcome::error)
        .def_readonly("offset", &Outcome::offset)
        .def_readonly("transferred", &Outcome::transferred);

    py::class_<Request, std::shared_ptr<Request>>(m, "Request")
        .def("done", &Request::done)
        .def("cancel", &Request::cancel)
        .def("outcome", &Request::outcome)
        .def("wait", &wait, py::arg("timeout"));

    py::class_<Engine>(m, "Engine")
        .def(py::init([](const std::string& name, std::uint64_t block_bytes, unsigned queue_depth,
                         unsigned workers, bool single_submit, bool overlap_events,
                         bool cache_threads,
                         const std::vector<std::pair<std::string, std::int64_t>>& faults,
                         std::uint64_t shuffle, unsigned batch) {
                 const aio::Shape shape{block_bytes, queue_depth, workers, single_submit,
                                        overlap_events};
                 const py::gil_scoped_release release;
                 return std::make_unique<Engine>(name, shape, cache_threads,
                                                 make_script(faults, shuffle, batch));
             }),
             py::arg("name"), py::arg("block_bytes"), py::arg("queue_depth"), py::arg("workers"),
             py::arg("single_submit"), py::arg("overlap_events"), py::arg("cache_threads"),
             py::arg("faults") = std::vector<std::pair<std::string, std::int64_t>>{},
             py::arg("shuffle") = 0, py::arg("batch") = 0)
        .def("submit",
             [](Engine& engine, std::uint64_t token, bool write, std::uint64_t serial, int direct,
                int buffered, std::uint64_t mem_align, std::uint64_t offset_align, bool strict,
                std::uintptr_t address, std::uint64_t offset, std::uint64_t bytes) {
                 const File file{serial, direct, buffered, mem_align, offset_align, strict};
                 const py::gil_scoped_release release;
                 return engine.submit(token, write, file, reinterpret_cast<char*>(address), offset,
                                      bytes);
             })
        .def("collect_ended", &Engine::collect_ended)
        .def("drop_file", &Engine::drop_file)
        .def("drop_region", &Engine::drop_region)
        .def("counters",
             [](const Engine& engine) {
                 const auto counters = engine.counters();
                 py::dict found;
                 found["system_calls"] = counters.system_calls;
                 found["fixed_buffers"] = counters.fixed_buffers;
                 found["fixed_files"] = counters.fixed_files;
                 found["register_error"] = counters.register_error;
                 return found;
             })
        .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>())
        .def("abandon", &Engine::abandon);

    py::class_<Stream>(m, "Stream")
        .def(py::init([](Engine& engine, std::uint64_t serial, int direct, int buffered,
                         std::uint64_t mem_align, std::uint64_t offset_align, bool strict,
                         std::uintptr_t address, std::uint64_t chunk, unsigned slots, unsigned kept,
                         std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges) {
                 const File file{serial, direct, buffered, mem_align, offset_align, strict};
                 aio::Course course{
                     file, reinterpret_cast<char*>(address), chunk, slots, kept, std::move(ranges)};
                 const py::gil_scoped_release release;
                 return std::make_unique<Stream>(engine, std::move(course));
             }),
             py::keep_alive<1, 2>())
        .def("next", &next_piece)
        .def("close", &Stream::close, py::call_guard<py::gil_scoped_release>())
        .def("abandon", &Stream::abandon);

    m.def("add_region", [](std::uint64_t serial, std::uintptr_t address, std::uint64_t bytes) {
        aio::Regions::table().add({serial, address, bytes});
    });
    m.def("remove_region", [](std::uint64_t serial) { aio::Regions::table().remove(serial); });

    // For the tests, which compare it with the plan of the Python engines.
    m.def("plan", [](bool write, bool direct, std::uint64_t mem_align, std::uint64_t offset_align,
                     std::uintptr_t address, std::uint64_t offset, std::uint64_t bytes) {
        const File file{1, direct ? 0 : -1, 0, mem_align, offset_align, false};
        const auto request =
            std::make_shared<Request>(0, write, file, reinterpret_cast<char*>(address), offset,
                                      bytes, std::make_shared<aio::Ended>());
        std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t>> parts;
        for (const aio::Segment& segment : aio::plan(request)) {
            const char* const path = segment.path == aio::Path::direct     ? "direct"
                                     : segment.path == aio::Path::buffered ? "buffered"
                                                                           : "bounce";
            parts.emplace_back(path, segment.at, segment.stop);
        }
        return parts;
    });
}
