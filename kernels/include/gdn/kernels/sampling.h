/*! \file sampling.h
 *  \brief One token per row from logits, reproducible from (seed, position) alone.
 *
 *  In this order, on FP32 logits l (the input is not modified):
 *    1. repetition penalty r: for each id in `history`, l > 0 ? l / r : l * r
 *    2. temperature t = 0: greedy, the largest l, lowest id on ties; steps 3-6 are skipped
 *       else l <- l / t
 *    3. top-k: keep the k largest (ties: lower id first); 0 keeps all
 *    4. top-p: of those, with p = softmax over the kept, keep the shortest prefix in descending
 *       order (ties: lower id first) whose sum reaches top_p; at least one; 1 keeps all
 *    5. min-p: keep p >= min_p * max(p); 0 keeps all
 *    6. choose argmax over the kept ids of l + G(id), G = -log(-log(u)), u in (0, 1) from
 *       Philox4x32-10 keyed by seed, counter (position, id): the Gumbel form of sampling from
 *       softmax(l). No running sum is involved, so the choice is independent of reduction order,
 *       of the batch, and of the device up to the rounding of log.
 *
 *  Log-probabilities are those of the model: log softmax of the input logits, before steps 1-5.
 *  Rows whose logits hold NaN or +inf, or only -inf, give token -1, log-probabilities NaN and
 *  alternatives -1.
 *
 *  A row whose position is negative is padding: its token is -1, and nothing else of it is written;
 *  nothing of its inputs but the position matters (host back ends check its history).
 *
 *  On CUDA all arrays are in device memory, so their values are checked on the device: a row with a
 *  parameter outside its range, history offsets that are negative or decrease, or an id in its
 *  history outside [0, vocab) gives what a row of NaN gives. Reading only history_offsets[row] and
 *  [row + 1], it trusts them to stay within `history`. Captured in a graph, the call serves
 * whatever the arrays hold when the graph is replayed.
 *
 *  u = 1 - (word + 0.5) / 2^32, word = the first word of Philox4x32-10 with counter
 *  (id, 0, position low, position high) and key (seed low, seed high).
 */
#ifndef GDN_KERNELS_SAMPLING_H_
#define GDN_KERNELS_SAMPLING_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_sampling_params {
  float temperature;        /*!< >= 0; 0 is greedy. */
  int32_t top_k;            /*!< >= 0; 0 is off. */
  float top_p;              /*!< (0, 1]; 1 is off. */
  float min_p;              /*!< [0, 1); 0 is off. */
  float repetition_penalty; /*!< > 0; 1 is off. */
  uint64_t seed;
} gdn_sampling_params;

typedef struct gdn_sampling_args {
  int64_t rows;        /*!< B >= 0. */
  int64_t vocab;       /*!< >= 1. */
  const float* logits; /*!< [in] [B, vocab], last dimension dense. */
  int64_t logits_row_stride;
  const gdn_sampling_params* params; /*!< [in] [B]. */
  const int64_t* position; /*!< [in] [B] of the sampled token in its sequence; < 0: padding. */
  const int32_t* history;  /*!< [in] distinct ids seen by the rows, packed; NULL: none. */
  const int64_t* history_offsets; /*!< [in] [B+1] into history; NULL iff history is. */
  int32_t top_logprobs;           /*!< K >= 0 alternatives to report per row, <= vocab. */
  int32_t* token;                 /*!< [out] [B]. */
  float* logprob;                 /*!< [out] [B] of the chosen token, or NULL. */
  int32_t* top_ids;  /*!< [out] [B, K] descending, ties: lower id first; NULL iff K = 0. */
  float* top_values; /*!< [out] [B, K]; NULL iff K = 0. */
} gdn_sampling_args;

gdn_status gdn_sample(const gdn_exec* exec, const gdn_sampling_args* args);
gdn_status gdn_sample_workspace(const gdn_exec* exec, const gdn_sampling_args* args, size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status Sample(const gdn_exec&, const gdn_sampling_args&);
size_t SampleWorkspace(const gdn_exec&, const gdn_sampling_args&);
}  // namespace gdn::ref
namespace gdn::cpu {
gdn_status Sample(const gdn_exec&, const gdn_sampling_args&);
size_t SampleWorkspace(const gdn_exec&, const gdn_sampling_args&);
}  // namespace gdn::cpu
namespace gdn::cuda {
gdn_status Sample(const gdn_exec&, const gdn_sampling_args&);
size_t SampleWorkspace(const gdn_exec&, const gdn_sampling_args&);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_SAMPLING_H_ */
