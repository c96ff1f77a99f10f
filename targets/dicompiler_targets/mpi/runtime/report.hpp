// Reports each rank's measurements as JSON. If the comment of a function mentions MPI, all ranks must call it.
// Argument `lead` is the first source, which is a rank that begins frames. It also measures the times of frames.
#pragma once

#include "exchange.hpp"

namespace dicompiler {

// Returns the peak resident memory of this process in bytes; 0 if the system does not report it.
std::size_t get_peak_memory();

// The times when rank `lead` and its last frame began, by this rank's clock.
struct LeadTimes {
    Clock::time_point start, last_frame;
};
// Broadcasts the times of rank `lead` with MPI. They are exact on the same host, where ranks share a clock. A rank on
// another host uses its own start instead, which is nearly equal.
LeadTimes share_lead_times(int lead, const ExchangeTimes& exchange_times);

// Returns a rank's measurements as a JSON object. Times in its timeline are seconds since `last_frame`.
std::string make_report(int rank, const Device& device, int threads, const ExchangeTimes& exchange_times,
                        const ExecutionTimes& execution_times, Clock::time_point last_frame);

// Computes with MPI on rank `lead` the seconds from the start of each frame until a rank began to compute it.
// `start` is the time when rank `lead` began, by this rank's clock.
std::vector<double> reduce_queue_waits(int rank, const ExchangeTimes& exchange_times,
                                       const ExecutionTimes& execution_times, std::size_t frames, int lead,
                                       Clock::time_point start);

// Gathers the reports of all ranks with MPI. Rank 0 prints them as one JSON object.
void print_reports(int rank, const std::string& report, const ExchangeTimes& exchange_times,
                   const std::vector<double>& queue_waits, int lead);

}  // namespace dicompiler
