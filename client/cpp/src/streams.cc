#include "gdn/client/streams.h"

#include <utility>

#include "client/cpp/src/rpc_status.h"
#include "client/cpp/src/streams_impl.h"

namespace gdn::client {

GenerateStream::GenerateStream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

GenerateStream::~GenerateStream() { Finish().IgnoreError(); }

bool GenerateStream::Next(v1::GenerateResponse* response) {
  if (impl_->at_end) return false;
  if (!impl_->reader->Read(response)) {
    impl_->at_end = true;
    return false;
  }
  if (response->finish_reason() != v1::FINISH_REASON_UNSPECIFIED) impl_->finish_reason_seen = true;
  return true;
}

absl::Status GenerateStream::Finish() {
  if (impl_->status.has_value()) return *impl_->status;
  if (!impl_->at_end) {
    // Unread messages would hold the status back for ever.
    impl_->context.TryCancel();
    v1::GenerateResponse ignored;
    while (Next(&ignored)) {
    }
  }
  absl::Status status = FromGrpc(impl_->reader->Finish());
  if (status.ok() && !impl_->finish_reason_seen) {
    status = absl::InternalError(
        "the server ended the stream without a finish_reason: the output may be incomplete");
  }
  impl_->status = status;
  return status;
}

void GenerateStream::Cancel() { impl_->context.TryCancel(); }

StepStream::StepStream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

StepStream::~StepStream() {
  if (impl_->status.has_value()) return;
  Cancel();
  Finish().IgnoreError();
}

absl::StatusOr<v1::StepResponse> StepStream::Step(const v1::StepRequest& request) {
  v1::StepResponse response;
  if (Send(request) && Receive(&response)) return response;
  const absl::Status status = Finish();
  if (status.ok()) return absl::OutOfRangeError("the server ended the stream");
  return status;
}

bool StepStream::Send(const v1::StepRequest& request) {
  return !impl_->send_closed && impl_->stream->Write(request);
}

bool StepStream::Receive(v1::StepResponse* response) {
  return !impl_->status.has_value() && impl_->stream->Read(response);
}

void StepStream::CloseSend() {
  if (std::exchange(impl_->send_closed, true)) return;
  impl_->stream->WritesDone();
}

absl::Status StepStream::Finish() {
  if (impl_->status.has_value()) return *impl_->status;
  CloseSend();
  v1::StepResponse ignored;
  while (impl_->stream->Read(&ignored)) {
  }
  impl_->status = FromGrpc(impl_->stream->Finish());
  return *impl_->status;
}

void StepStream::Cancel() { impl_->context.TryCancel(); }

}  // namespace gdn::client
