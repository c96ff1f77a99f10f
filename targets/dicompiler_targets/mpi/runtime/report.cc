#include "report.hpp"

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <numeric>

namespace dicompiler {
namespace {

std::string json(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", value);
    return text;
}

std::string json(const std::vector<double>& values) {
    std::string text;
    for (const auto value : values) text += (text.empty() ? "" : ", ") + json(value);
    return "[" + text + "]";
}

double between(Clock::time_point start, Clock::time_point end) {
    return std::chrono::duration<double>(end - start).count();
}

// What is the same for all processes whose clocks are one: they run since the same start of a kernel.
std::string clock_name() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string name;
    file >> name;
    return name;
}

// Entries [kind, index, frame, start, end], in seconds from `start`; so many at most that a report stays small.
std::string json(const std::vector<Span>& spans, Clock::time_point start) {
    constexpr std::size_t MOST = 10000;
    std::string text;
    for (std::size_t i = 0; i < std::min(spans.size(), MOST); ++i) {
        const auto& one = spans[i];
        text += std::string(text.empty() ? "" : ", ") + "[\"" + one.kind + "\", " + std::to_string(one.index) + ", " +
                std::to_string(one.frame) + ", " + json(between(start, one.start)) + ", " +
                json(between(start, one.end)) + "]";
    }
    return "[" + text + "]";
}

// Rank 0 is given the text of every rank, in order.
std::vector<std::string> gather(int rank, const std::string& own) {
    int count = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &count);
    const int length = static_cast<int>(own.size());
    std::vector<int> lengths(static_cast<std::size_t>(count)), starts(lengths.size());
    MPI_Gather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, 0, MPI_COMM_WORLD);
    std::vector<std::string> found;
    std::string all;
    if (rank == 0) {
        for (std::size_t i = 1; i < starts.size(); ++i) starts[i] = starts[i - 1] + lengths[i - 1];
        all.resize(static_cast<std::size_t>(starts.back() + lengths.back()));
    }
    MPI_Gatherv(own.data(), length, MPI_CHAR, &all[0], lengths.data(), starts.data(), MPI_CHAR, 0, MPI_COMM_WORLD);
    for (std::size_t i = 0; rank == 0 && i < starts.size(); ++i) {
        found.push_back(all.substr(static_cast<std::size_t>(starts[i]), static_cast<std::size_t>(lengths[i])));
    }
    return found;
}

}  // namespace

std::size_t memory_peak() {
    std::ifstream file("/proc/self/status");
    std::string word;
    std::size_t kilobytes = 0;
    while (file >> word) {
        if (word == "VmHWM:" && file >> kilobytes) return 1024 * kilobytes;
    }
    return 0;
}

Begun begun_at(int lead, const Measured& measured) {
    const auto& begun = measured.begun;
    auto name = clock_name();
    name.resize(36, ' ');
    const auto own = name;
    using std::chrono::nanoseconds;
    long long times[2] = {nanoseconds{measured.start.time_since_epoch()}.count(),
                          begun.empty() ? 0 : nanoseconds{begun.back() - measured.start}.count()};
    MPI_Bcast(&name[0], static_cast<int>(name.size()), MPI_CHAR, lead, MPI_COMM_WORLD);
    MPI_Bcast(times, 2, MPI_LONG_LONG, lead, MPI_COMM_WORLD);
    const auto first = name == own ? Clock::time_point{nanoseconds{times[0]}} : measured.start;
    return {first, first + nanoseconds{times[1]}};
}

std::string report(int rank, const Device& device, int threads, const Measured& measured, const Times& times,
                   Clock::time_point last) {
    std::string sent;
    for (const auto& entry : measured.sent) {
        sent += (sent.empty() ? "\"" : ", \"") + std::to_string(entry.first) + "\": " + std::to_string(entry.second);
    }
    auto spans = times.spans;
    spans.insert(spans.end(), measured.spans.begin(), measured.spans.end());
    const double compute = std::accumulate(times.segments.begin(), times.segments.end(), 0.0);
    return "{\"rank\": " + std::to_string(rank) + ", \"device\": \"" + device.name + "\", \"host\": \"" + device.host +
           "\", \"threads\": " + std::to_string(threads) + ", \"compute_s\": " + json(compute) +
           ", \"wait_s\": " + json(times.wait) + ", \"send_s\": " + json(measured.send) +
           ", \"memory_peak\": " + std::to_string(memory_peak()) + ", \"segments\": " + json(times.segments) +
           ", \"timeline\": " + json(spans, last) + ", \"sent\": {" + sent + "}}";
}

std::vector<double> waits(int rank, const Measured& measured, const Times& times, std::size_t frames, int lead,
                          Clock::time_point first) {
    std::vector<double> own(frames, std::numeric_limits<double>::infinity()), found(frames);
    for (std::size_t i = 0; i < times.begun.size(); ++i) {
        if (times.begun[i] != Clock::time_point{}) own[i] = between(first, times.begun[i]);
    }
    MPI_Reduce(own.data(), found.data(), static_cast<int>(frames), MPI_DOUBLE, MPI_MIN, lead, MPI_COMM_WORLD);
    for (std::size_t i = 0; rank == lead && i < frames; ++i) {
        const auto waited = found[i] - between(measured.start, measured.begun[i]);
        found[i] = std::max(0.0, std::min(waited, measured.frames[i]));
    }
    return found;
}

void print_reports(int rank, const std::string& own, const Measured& measured, const std::vector<double>& waited,
                   int lead) {
    const auto ranks = gather(rank, own);
    const auto times = "\"frames_s\": " + json(measured.frames) + ", \"waited_s\": " + json(waited) +
                       ", \"total_s\": " + json(measured.total);
    const auto frames = gather(rank, times);
    if (rank != 0) return;
    std::string text;
    for (const auto& one : ranks) text += (text.empty() ? "" : ",\n ") + one;
    std::printf("{\"ranks\": [\n %s],\n%s}\n", text.c_str(), frames[static_cast<std::size_t>(lead)].c_str());
    std::fflush(stdout);
}

}  // namespace dicompiler
