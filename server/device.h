// File: device.h
//
// Which device a server runs on, and the pipeline there.
#ifndef SERVER_DEVICE_H_
#define SERVER_DEVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "server/model/weights.h"
#include "server/options.h"
#include "server/pipeline/pipeline.h"

namespace gdn {

// kCpu or kCuda. FAILED_PRECONDITION: a GPU was asked for, and there is none that this build can
// use. With kAuto falls back to the CPU and logs why.
absl::StatusOr<Device> ChooseDevice(const DeviceOptions& options);

// Packs or uploads the model and reserves the state pool. `device` is what ChooseDevice gave.
absl::StatusOr<std::unique_ptr<pipeline::Pipeline>> CreatePipeline(model::Model model,
                                                                   const ServerOptions& options,
                                                                   Device device);

}  // namespace gdn

#endif  // SERVER_DEVICE_H_
