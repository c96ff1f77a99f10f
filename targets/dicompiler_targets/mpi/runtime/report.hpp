// What a rank measured, as JSON.
#pragma once

#include "exchange.hpp"

namespace dicompiler {

// The largest resident memory of this process in bytes; 0 where the system does not tell.
std::size_t memory_peak();

// One rank as a JSON object.
std::string report(int rank, const Device& device, int threads, const Measured& measured, const Times& times);

// Of each of so many frames the seconds from its beginning until some rank computed it, on rank `lead`; to be called by
// all.
std::vector<double> waits(int rank, const Measured& measured, const Times& times, std::size_t frames, int lead);

// All ranks' objects, printed by rank 0 as one; to be called by all. waited: see `waits`.
void print_reports(int rank, const std::string& own, const Measured& measured, const std::vector<double>& waited,
                   int lead);

}  // namespace dicompiler
