// File: gdn/client/streams.h
//
// The two streaming calls, read and written synchronously. A stream outlives neither its Client nor
// its owner's patience: destroying it cancels the call.
//
// Thread-safety: Cancel() may be called from any thread at any time; StepStream allows one thread
// that sends beside one that receives; everything else belongs to one thread.
#ifndef GDN_CLIENT_STREAMS_H_
#define GDN_CLIENT_STREAMS_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gdn/v1/inference.pb.h"

namespace gdn::client {

// Sampled tokens of one Generate call:
//
//   std::unique_ptr<GenerateStream> stream = client->Generate(request);
//   v1::GenerateResponse response;
//   while (stream->Next(&response)) Use(response.tokens());
//   absl::Status status = stream->Finish();
class GenerateStream {
 public:
  ~GenerateStream();
  GenerateStream(const GenerateStream&) = delete;
  GenerateStream& operator=(const GenerateStream&) = delete;

  // Waits for the next message; false at the end of the stream, whatever its reason.
  bool Next(v1::GenerateResponse* response);
  // Why the stream ended. OK only after a message with a finish_reason. Called before Next() has
  // returned false, it cancels the call first. The same again when repeated.
  absl::Status Finish();
  void Cancel();

 private:
  friend class Client;
  struct Impl;
  explicit GenerateStream(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Steps over one stream: one response per request, in order. Several requests may be under way.
class StepStream {
 public:
  ~StepStream();
  StepStream(const StepStream&) = delete;
  StepStream& operator=(const StepStream&) = delete;

  // Sends one request and waits for its response. Not while responses to Send() are outstanding.
  absl::StatusOr<v1::StepResponse> Step(const v1::StepRequest& request);

  // False once the stream has ended; Finish() says why.
  bool Send(const v1::StepRequest& request);
  bool Receive(v1::StepResponse* response);
  // No more requests follow. Responses still arrive.
  void CloseSend();
  // Closes the sending side, discards outstanding responses and returns the call's status. The same
  // again when repeated.
  absl::Status Finish();
  void Cancel();

 private:
  friend class Client;
  struct Impl;
  explicit StepStream(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace gdn::client

#endif  // GDN_CLIENT_STREAMS_H_
