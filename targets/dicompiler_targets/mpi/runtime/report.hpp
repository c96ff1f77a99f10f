// What a rank measured, as JSON.
#pragma once

#include "exchange.hpp"

namespace dicompiler {

// The largest resident memory of this process in bytes; 0 where the system does not tell.
std::size_t memory_peak();

// One rank as a JSON object.
std::string report(int rank, const Device& device, int threads, const Measured& measured, const Times& times);

// All ranks' objects, printed by rank 0 as one; to be called by all.
void print_reports(int rank, const std::string& own, const Measured& measured, int lead);

}  // namespace dicompiler
