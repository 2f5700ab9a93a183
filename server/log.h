// The process's log: one line an event, to stderr.
#ifndef SERVER_LOG_H_
#define SERVER_LOG_H_

#include "server/options.h"

namespace gdn {

// Makes spdlog's default logger what the options say. Before any thread logs.
void InitLog(const LogOptions& options);

}  // namespace gdn

#endif  // SERVER_LOG_H_
