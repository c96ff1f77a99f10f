// What a rank measured, as JSON.
#pragma once

#include "exchange.hpp"

namespace dicompiler {

// The largest resident memory of this process in bytes; 0 where the system does not tell.
std::size_t memory_peak();

// When rank `lead` began, and its last frame, by the clock of this one; to be called by all. Ranks begin at once, as far as
// a barrier can tell; those of one kernel have one clock, which tells exactly.
struct Begun {
    Clock::time_point first, last;
};
Begun begun_at(int lead, const Measured& measured);

// One rank as a JSON object; its timeline begins with the last frame.
std::string report(int rank, const Device& device, int threads, const Measured& measured, const Times& times,
                   Clock::time_point last);

// Of each of so many frames the seconds from its beginning until some rank computed it, on rank `lead`, which began at
// `first` by the clock of this one; to be called by all.
std::vector<double> waits(int rank, const Measured& measured, const Times& times, std::size_t frames, int lead,
                          Clock::time_point first);

// All ranks' objects, printed by rank 0 as one; to be called by all. waited: see `waits`.
void print_reports(int rank, const std::string& own, const Measured& measured, const std::vector<double>& waited,
                   int lead);

}  // namespace dicompiler
