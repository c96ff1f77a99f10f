// Reports each rank's measurements as JSON. The functions with MPI in their comment must be called by all ranks.
#pragma once

#include "exchange.hpp"

namespace dicompiler {

// Returns the peak resident memory of this process in bytes; 0 if the system does not report it.
std::size_t get_peak_memory();

// When rank `lead` began, and when its last frame began, by this rank's clock.
struct LeadTimes {
    Clock::time_point start, last_frame;
};
// Broadcasts these times with MPI. Ranks on one kernel share a clock, so the times are exact for them. Other ranks use
// their own start, because all ranks leave the same barrier.
LeadTimes share_lead_times(int lead, const ExchangeTimes& exchange_times);

// Returns a rank's measurements as a JSON object. The times of its timeline count from `last_frame`.
std::string make_report(int rank, const Device& device, int threads, const ExchangeTimes& exchange_times,
                        const ExecutionTimes& execution_times, Clock::time_point last_frame);

// Reduces with MPI, to rank `lead`: for each frame the seconds from its start until a rank began to compute it.
// `start`: when rank `lead` began, by this rank's clock.
std::vector<double> reduce_queue_waits(int rank, const ExchangeTimes& exchange_times,
                                       const ExecutionTimes& execution_times, std::size_t frames, int lead,
                                       Clock::time_point start);

// Gathers the reports with MPI. Rank 0 prints them as one JSON object.
void print_reports(int rank, const std::string& report, const ExchangeTimes& exchange_times,
                   const std::vector<double>& queue_waits, int lead);

}  // namespace dicompiler
