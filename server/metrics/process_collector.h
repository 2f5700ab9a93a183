// The standard process_* families, read from /proc at each scrape.
#ifndef SERVER_METRICS_PROCESS_COLLECTOR_H_
#define SERVER_METRICS_PROCESS_COLLECTOR_H_

#include <prometheus/metric_family.h>

#include <vector>

namespace gdn::metrics {

std::vector<prometheus::MetricFamily> CollectProcess();

}  // namespace gdn::metrics

#endif  // SERVER_METRICS_PROCESS_COLLECTOR_H_
