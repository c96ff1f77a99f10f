#include "report.hpp"

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <numeric>

namespace dicompiler {
namespace {

std::string to_json(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", value);
    return text;
}

std::string to_json(const std::vector<double>& values) {
    std::string text;
    for (const auto value : values) text += (text.empty() ? "" : ", ") + to_json(value);
    return "[" + text + "]";
}

double seconds_between(Clock::time_point start, Clock::time_point end) {
    return std::chrono::duration<double>(end - start).count();
}

// Returns an identifier of the running kernel. Processes of the same kernel share a clock.
std::string get_boot_id() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string name;
    file >> name;
    return name;
}

// Formats entries as [kind, index, frame, start, end], with start and end in seconds since `origin`. The number of
// entries is limited to keep the report small.
std::string to_json(const std::vector<TimelineEntry>& timeline, Clock::time_point origin) {
    constexpr std::size_t MAX_ENTRIES = 10000;
    std::string text;
    for (std::size_t i = 0; i < std::min(timeline.size(), MAX_ENTRIES); ++i) {
        const auto& entry = timeline[i];
        text += std::string(text.empty() ? "" : ", ") + "[\"" + entry.kind + "\", " + std::to_string(entry.index) +
                ", " + std::to_string(entry.frame) + ", " + to_json(seconds_between(origin, entry.start)) + ", " +
                to_json(seconds_between(origin, entry.end)) + "]";
    }
    return "[" + text + "]";
}

// Returns on rank 0 the texts of all ranks, in the order of ranks, and no texts on other ranks.
std::vector<std::string> gather(int rank, const std::string& own) {
    int count = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &count);
    const int length = static_cast<int>(own.size());
    std::vector<int> lengths(static_cast<std::size_t>(count)), starts(lengths.size());
    MPI_Gather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, 0, MPI_COMM_WORLD);
    std::vector<std::string> texts;
    std::string all;
    if (rank == 0) {
        for (std::size_t i = 1; i < starts.size(); ++i) starts[i] = starts[i - 1] + lengths[i - 1];
        all.resize(static_cast<std::size_t>(starts.back() + lengths.back()));
    }
    MPI_Gatherv(own.data(), length, MPI_CHAR, &all[0], lengths.data(), starts.data(), MPI_CHAR, 0, MPI_COMM_WORLD);
    for (std::size_t i = 0; rank == 0 && i < starts.size(); ++i) {
        texts.push_back(all.substr(static_cast<std::size_t>(starts[i]), static_cast<std::size_t>(lengths[i])));
    }
    return texts;
}

}  // namespace

std::size_t get_peak_memory() {
    std::ifstream file("/proc/self/status");
    std::string word;
    std::size_t kilobytes = 0;
    while (file >> word) {
        if (word == "VmHWM:" && file >> kilobytes) return 1024 * kilobytes;
    }
    return 0;
}

LeadTimes share_lead_times(int lead, const ExchangeTimes& exchange_times) {
    const auto& frame_starts = exchange_times.frame_starts;
    auto boot_id = get_boot_id();
    boot_id.resize(36, ' ');
    const auto own_boot_id = boot_id;
    using std::chrono::nanoseconds;
    long long times[2] = {nanoseconds{exchange_times.start.time_since_epoch()}.count(),
                          frame_starts.empty() ? 0 : nanoseconds{frame_starts.back() - exchange_times.start}.count()};
    MPI_Bcast(&boot_id[0], static_cast<int>(boot_id.size()), MPI_CHAR, lead, MPI_COMM_WORLD);
    MPI_Bcast(times, 2, MPI_LONG_LONG, lead, MPI_COMM_WORLD);
    const auto start = boot_id == own_boot_id ? Clock::time_point{nanoseconds{times[0]}} : exchange_times.start;
    return {start, start + nanoseconds{times[1]}};
}

std::string make_report(int rank, const Device& device, int threads, const ExchangeTimes& exchange_times,
                        const ExecutionTimes& execution_times, Clock::time_point last_frame) {
    std::string sent;
    for (const auto& entry : exchange_times.sent_bytes) {
        sent += (sent.empty() ? "\"" : ", \"") + std::to_string(entry.first) + "\": " + std::to_string(entry.second);
    }
    auto timeline = execution_times.timeline;
    timeline.insert(timeline.end(), exchange_times.timeline.begin(), exchange_times.timeline.end());
    const auto& segments = execution_times.segments;
    const double compute = std::accumulate(segments.begin(), segments.end(), 0.0);
    return "{\"rank\": " + std::to_string(rank) + ", \"device\": \"" + device.name + "\", \"host\": \"" + device.host +
           "\", \"threads\": " + std::to_string(threads) + ", \"compute_s\": " + to_json(compute) +
           ", \"wait_s\": " + to_json(execution_times.wait) + ", \"send_s\": " + to_json(exchange_times.send) +
           ", \"peak_memory_bytes\": " + std::to_string(get_peak_memory()) + ", \"segments_s\": " + to_json(segments) +
           ", \"timeline\": " + to_json(timeline, last_frame) + ", \"sent_bytes\": {" + sent + "}}";
}

std::vector<double> reduce_queue_waits(int rank, const ExchangeTimes& exchange_times,
                                       const ExecutionTimes& execution_times, std::size_t frames, int lead,
                                       Clock::time_point start) {
    const auto& compute_starts = execution_times.compute_starts;
    std::vector<double> own(frames, std::numeric_limits<double>::infinity()), waits(frames);
    for (std::size_t i = 0; i < compute_starts.size(); ++i) {
        if (compute_starts[i] != Clock::time_point{}) own[i] = seconds_between(start, compute_starts[i]);
    }
    MPI_Reduce(own.data(), waits.data(), static_cast<int>(frames), MPI_DOUBLE, MPI_MIN, lead, MPI_COMM_WORLD);
    for (std::size_t i = 0; rank == lead && i < frames; ++i) {
        const auto wait = waits[i] - seconds_between(exchange_times.start, exchange_times.frame_starts[i]);
        waits[i] = std::max(0.0, std::min(wait, exchange_times.frames[i]));
    }
    return waits;
}

void print_reports(int rank, const std::string& report, const ExchangeTimes& exchange_times,
                   const std::vector<double>& queue_waits, int lead) {
    const auto reports = gather(rank, report);
    const auto times = "\"frames_s\": " + to_json(exchange_times.frames) +
                       ", \"queue_wait_s\": " + to_json(queue_waits) +
                       ", \"total_s\": " + to_json(exchange_times.total);
    const auto all_times = gather(rank, times);
    if (rank != 0) return;
    std::string text;
    for (const auto& entry : reports) text += (text.empty() ? "" : ",\n ") + entry;
    std::printf("{\"ranks\": [\n %s],\n%s}\n", text.c_str(), all_times[static_cast<std::size_t>(lead)].c_str());
    std::fflush(stdout);
}

}  // namespace dicompiler
