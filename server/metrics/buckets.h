// Histogram buckets: short decimals, so that their text is the same in every scrape.
#ifndef SERVER_METRICS_BUCKETS_H_
#define SERVER_METRICS_BUCKETS_H_

#include <vector>

namespace gdn::metrics {

// Kernels: 1 us .. 50 ms. There are some forty of these histograms, so each bound counts.
inline const std::vector<double> kKernelSeconds = {0.000001, 0.000002, 0.000005, 0.00001,
                                                   0.00002,  0.00005,  0.0001,   0.0002,
                                                   0.0005,   0.001,    0.005,    0.05};

// Calls over the wire, streams among them: 500 us .. 100 s.
inline const std::vector<double> kRequestSeconds = {0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
                                                    0.1,    0.5,   1,     5,     20,   100};

// Steps, queues, calls in the engine: 5 us .. 50 s.
inline const std::vector<double> kDurationSeconds = {
    0.000005, 0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01,
    0.02,     0.05,    0.1,     0.2,     0.5,    1,      2,      5,     10,    20,    50};

// What a reader of a stream feels: six to a decade, 100 us .. 10 s.
inline const std::vector<double> kTokenSeconds = {
    0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005,
    0.0075, 0.01,    0.015,  0.02,   0.03,   0.05,    0.075, 0.1,    0.15,  0.2,   0.3,
    0.5,    0.75,    1,      1.5,    2,      3,       5,     7.5,    10};

inline const std::vector<double> kBatchSizes = {1,  2,  3,  4,  6,   8,   12,  16, 24,
                                                32, 48, 64, 96, 128, 192, 256, 512};

}  // namespace gdn::metrics

#endif  // SERVER_METRICS_BUCKETS_H_
