// Submit and Generate: everything that can be refused is refused here, on the caller's thread.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/call_handles.h"
#include "server/engine/engine_impl.h"
#include "server/engine/random.h"
#include "server/engine/status_payload.h"
#include "server/engine/validate.h"

namespace gdn::engine {
namespace {

pipeline::SampleSpec ToSpec(const Sampling& sampling, int32_t top_logprobs) {
  pipeline::SampleSpec spec;
  spec.temperature = sampling.temperature;
  spec.top_k = sampling.top_k;
  spec.top_p = sampling.top_p;
  spec.min_p = sampling.min_p;
  spec.repetition_penalty = sampling.repetition_penalty;
  spec.seed = sampling.seed.has_value() ? *sampling.seed : RandomUint64();
  spec.top_logprobs = top_logprobs;
  return spec;
}

// Moves the input and the selection into the call.
void Fill(Input input, const OutputSelection& output, const pipeline::PipelineInfo& info,
          CallSequence* sequence) {
  sequence->input = std::move(input);
  sequence->length = InputLength(sequence->input, info);
  sequence->output = output;
  if (!output.next_token) return;
  sequence->sample = ToSpec(output.sampling, output.top_logprobs);
  if (output.sampling.repetition_penalty == 1.0f) return;
  sequence->history.Enable(info.vocab_size);
  for (const int32_t token : sequence->input.tokens) sequence->history.Add(token);
}

}  // namespace

absl::StatusOr<std::unique_ptr<BatchCall>> EngineImpl::Submit(BatchRequest request,
                                                              CallOptions options) {
  const pipeline::PipelineInfo& info = pipeline_->info();
  if (absl::Status status = ValidateBatch(request, options_, info); !status.ok()) return status;
  auto call = std::make_shared<Call>();
  call->type = request.kind == CallKind::kStep ? CallType::kStep : CallType::kPrefill;
  call->options = std::move(options);
  call->sequences = std::vector<CallSequence>(request.sequences.size());
  for (size_t i = 0; i < request.sequences.size(); ++i) {
    SequenceRequest& from = request.sequences[i];
    Fill(std::move(from.input), from.output, info, &call->sequences[i]);
  }
  Outbox outbox;
  absl::Status status;
  {
    const Lock lock(mu_);
    status = AdmitBatch(call, request, &outbox);
  }
  Publish(&outbox);
  if (!status.ok()) return status;
  return std::unique_ptr<BatchCall>(std::make_unique<BatchHandle>(this, std::move(call)));
}

absl::StatusOr<std::unique_ptr<GenerateCall>> EngineImpl::Generate(GenerateRequest request,
                                                                   CallOptions options) {
  const pipeline::PipelineInfo& info = pipeline_->info();
  if (absl::Status status = ValidateGenerate(request, options_, info); !status.ok()) return status;
  auto call = std::make_shared<Call>();
  call->type = CallType::kGenerate;
  call->options = std::move(options);
  call->sequences = std::vector<CallSequence>(1);
  OutputSelection output;
  output.next_token = true;
  output.sampling = request.sampling;
  output.top_logprobs = request.top_logprobs;
  Fill(std::move(request.input), output, info, &call->sequences[0]);
  call->stream = std::make_unique<Stream>();
  Stream& stream = *call->stream;
  stream.seed = call->sequences[0].sample.seed;
  stream.total_tokens = request.max_new_tokens;
  stream.return_logits = request.return_logits;
  stream.buffer_limit = StreamBufferLimit(request, options_, info);
  stream.stop_ids = request.stop_token_ids;
  if (!request.ignore_eos) {
    stream.stop_ids.insert(stream.stop_ids.end(), info.eos_token_ids.begin(),
                           info.eos_token_ids.end());
  }
  std::sort(stream.stop_ids.begin(), stream.stop_ids.end());
  Outbox outbox;
  absl::Status status;
  {
    const Lock lock(mu_);
    status = AdmitGenerate(call, request, &outbox);
  }
  Publish(&outbox);
  if (!status.ok()) return status;
  return std::unique_ptr<GenerateCall>(std::make_unique<GenerateHandle>(this, std::move(call)));
}

absl::Status EngineImpl::CheckAccepting(Outbox* outbox) {
  if (!draining_ && !stopping_) return absl::OkStatus();
  outbox->AddEnum(Outbox::Event::kRejected, RejectionReason::kDraining);
  return absl::UnavailableError(
      "the server is shutting down and takes no new calls; retry on another server");
}

absl::Status EngineImpl::CheckDeadline(const CallOptions& options) const {
  if (!options.deadline_ns.has_value() || *options.deadline_ns > clock_->NowNs()) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError("the deadline had passed before the call's turn came");
}

absl::Status EngineImpl::CheckRoomAndDeadline(const CallOptions& options, Outbox* outbox) {
  if (absl::Status status = CheckDeadline(options); !status.ok()) return status;
  if (static_cast<int64_t>(active_.size()) >= options_.max_queued_calls) {
    outbox->AddEnum(Outbox::Event::kRejected, RejectionReason::kQueueFull);
    return ExhaustedError(absl::StrCat("the queue is full with ", active_.size(),
                                       " calls; retry later, or on another server"),
                          options_.retry_delay_ms);
  }
  return absl::OkStatus();
}

absl::Status EngineImpl::UnknownSession(const std::string& field, std::string_view id) {
  return absl::NotFoundError(absl::StrCat(field, " \"", std::string(id.substr(0, 64)),
                                          "\" is unknown, deleted or expired; create a session "
                                          "and send its history again"));
}

absl::StatusOr<Session*> EngineImpl::FindIdle(std::string_view id,
                                              std::optional<int64_t> expected_position,
                                              const std::string& field) {
  Session* session = sessions_.Find(id);
  if (session == nullptr) return UnknownSession(field, id);
  if (session->in_use) {
    return absl::AbortedError(absl::StrCat(field, " ", session->id,
                                           " is in use by another call; retry after it has ended"));
  }
  if (expected_position.has_value() && *expected_position != session->position) {
    return PositionMismatchError({session->id, *expected_position, session->position});
  }
  return session;
}

absl::Status EngineImpl::AdmitBatch(const std::shared_ptr<Call>& call, const BatchRequest& request,
                                    Outbox* outbox) {
  if (absl::Status status = CheckAccepting(outbox); !status.ok()) return status;
  EvictExpired(outbox);  // Once: none of those found below may go while the rest is looked up.
  for (size_t i = 0; i < request.sequences.size(); ++i) {
    const SequenceRequest& from = request.sequences[i];
    absl::StatusOr<Session*> session = FindIdle(from.session_id, from.expected_position,
                                                absl::StrCat("sequences[", i, "].session_id"));
    if (!session.ok()) return session.status();
    call->sequences[i].session = *session;
  }
  if (absl::Status status = CheckRoomAndDeadline(call->options, outbox); !status.ok()) {
    return status;
  }
  for (CallSequence& sequence : call->sequences) {
    UseSession(sequence.session);
    sequence.result.session_id = sequence.session->id;
    sequence.result.position = sequence.session->position;
  }
  Activate(call);
  return absl::OkStatus();
}

absl::Status EngineImpl::AdmitGenerate(const std::shared_ptr<Call>& call,
                                       const GenerateRequest& request, Outbox* outbox) {
  if (absl::Status status = CheckAccepting(outbox); !status.ok()) return status;
  EvictExpired(outbox);
  CallSequence& sequence = call->sequences[0];
  const bool named = !request.session_id.empty();
  if (named) {
    absl::StatusOr<Session*> session =
        FindIdle(request.session_id, request.expected_position, "session_id");
    if (!session.ok()) return session.status();
    sequence.session = *session;
  } else if (request.expected_position.value_or(0) != 0) {
    return PositionMismatchError({"", *request.expected_position, 0});
  }
  if (absl::Status status = CheckRoomAndDeadline(call->options, outbox); !status.ok()) {
    return status;
  }
  if (named) {
    UseSession(sequence.session);
  } else {
    const std::optional<SlotHandle> slot = pool_.Acquire(SlotOwner::kInFlight);
    if (!slot.has_value()) return NoSlotError(1, outbox);
    call->stream->throw_away = std::make_unique<Session>();
    call->stream->throw_away->slot = *slot;
    sequence.session = call->stream->throw_away.get();
  }
  call->stream->position = sequence.session->position;
  Activate(call);
  outbox->Add(Outbox::Event::kStreamStarted);
  return absl::OkStatus();
}

absl::Status EngineImpl::NoSlotError(int64_t needed, Outbox* outbox) {
  outbox->AddEnum(Outbox::Event::kRejected, RejectionReason::kNoSlot);
  return ExhaustedError(absl::StrCat("no state slot is free: ", needed, " needed, ",
                                     pool_.count(SlotOwner::kFree), " of ", pool_.num_usable(),
                                     " free; delete sessions that are done, or retry later"),
                        options_.retry_delay_ms);
}

void EngineImpl::Activate(const std::shared_ptr<Call>& call) {
  call->admitted_ns = clock_->NowNs();
  call->work.owner = call.get();
  call->work.work_class = call->type == CallType::kStep ? WorkClass::kStep : WorkClass::kPrefill;
  call->work.pending.reserve(call->sequences.size());
  for (size_t i = 0; i < call->sequences.size(); ++i) {
    CallSequence& sequence = call->sequences[i];
    sequence.done = sequence.length == 0;  // Nothing to run, and the state stays as it is.
    if (sequence.done) continue;
    ++call->unfinished;
    call->waiting_tokens += sequence.length;
    call->work.pending.push_back({static_cast<int64_t>(i), sequence.length});
  }
  active_.emplace(call.get(), call);
  if (call->options.deadline_ns.has_value()) {
    deadlines_.emplace(*call->options.deadline_ns, call.get());
  }
  ++queued_calls_;
  queued_tokens_ += call->waiting_tokens;
  if (call->stream != nullptr) ++running_streams_;
  if (call->unfinished == 0) {
    nothing_to_run_.push_back(call.get());
  } else {
    scheduler_.Add(&call->work);
  }
  Wake();
}

}  // namespace gdn::engine
