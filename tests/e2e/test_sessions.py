"""Sessions, prefill, step, fork, streams: the happy paths of the contract."""

import math
from queue import SimpleQueue

from support import (CLOSE, CONTINUATION, DEVICE, EXACT, GOLDEN, PROMPT, Golden, TestCase, collect,
                     floats, ids_of, inference_pb2, position_mismatch, relative_error, retry_info,
                     sequence, step_request, types_pb2)

import grpc


class SessionsTest(TestCase):
    FLAGS = (*EXACT, "--max-sessions=16")

    def tearDown(self):
        super().tearDown()
        for session in self.client.list(page_size=1000).sessions:
            self.client.delete(session.session_id)

    def test_model(self):
        model = self.client.model()
        self.assertEqual(model.name, "demo-gdn-7m")
        self.assertEqual(model.architecture, "Qwen3_5ForCausalLM")
        self.assertEqual((model.vocab_size, model.hidden_size, model.num_layers), (260, 256, 6))
        self.assertEqual((model.first_layer, model.last_layer), (0, 6))
        self.assertTrue(model.has_embedding and model.has_head and model.byte_vocabulary)
        self.assertEqual(model.precision, "bfloat16" if DEVICE else "float32")
        self.assertTrue(model.batch_invariant)
        self.assertEqual(list(model.eos_token_ids), [257])
        self.assertEqual(model.bos_token_id, 256)
        self.assertEqual(model.limits.max_sessions, 16)
        self.assertRegex(model.fingerprint, "^[0-9a-f]+$")
        # Six layers of [4, 128, 128] FP32 and a convolution tail.
        self.assertGreater(model.state_bytes_per_session, 6 * 4 * 128 * 128 * 4)

    def test_life_of_a_session(self):
        session = self.client.create(ttl_ms=0)
        info = self.client.get(session)
        self.assertEqual((info.session_id, info.position, info.ttl_ms), (session, 0, 0))
        self.assertFalse(info.in_use)
        self.client.prefill(sequence(session, PROMPT))
        info = self.client.get(session)
        self.assertEqual(info.position, len(PROMPT))
        self.assertGreaterEqual(info.last_use_time_ms, info.create_time_ms)
        self.assertEqual(self.client.delete(session).position, len(PROMPT))
        with self.refused(grpc.StatusCode.NOT_FOUND, "session_id", session):
            self.client.get(session)

    def test_list_is_paged_and_ordered(self):
        created = sorted(self.client.create() for _ in range(7))
        listed, token, pages = [], "", 0
        while True:
            page = self.client.list(page_size=3, page_token=token)
            self.assertEqual(page.total, 7)
            self.assertLessEqual(len(page.sessions), 3)
            listed += [session.session_id for session in page.sessions]
            token, pages = page.next_page_token, pages + 1
            if not token:
                break
        self.assertEqual((listed, pages), (created, 3))

    def test_slots_run_out_and_come_back(self):
        sessions = [self.client.create() for _ in range(16)]
        with self.refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "slot") as caught:
            self.client.create()
        self.assertGreater(retry_info(caught.exception).retry_delay.ToMilliseconds(), 0)
        self.client.delete(sessions[5])
        self.client.create()

    def test_equal_histories_have_equal_hashes(self):
        a, b, c = (self.client.create() for _ in range(3))
        self.client.prefill(sequence(a, PROMPT), sequence(b, PROMPT[:7]), sequence(c, PROMPT[::-1]))
        self.client.prefill(sequence(b, PROMPT[7:]))
        hashes = [self.client.get(session).token_hash for session in (a, b, c)]
        self.assertEqual(hashes[0], hashes[1])
        self.assertNotEqual(hashes[0], hashes[2])

    def test_greedy_text_and_logits_are_the_golden_ones(self):
        golden = Golden(GOLDEN)
        for i in range(3):
            tokens = self.client.generate_tokens(golden(f"{i}.prompt"), max_new_tokens=96,
                                                 ignore_eos=True, return_logits=True)
            if DEVICE:  # bfloat16 products may leave the golden path at a near-tie.
                first = golden(f"{i}.logits")[-260:]
                self.assertLess(relative_error(floats(tokens[0].logits.data), first), 3e-2, i)
                continue
            self.assertEqual(ids_of(tokens), list(golden(f"{i}.greedy")))
            logits = golden(f"{i}.greedy_logits")
            for k, token in enumerate(tokens):
                expected = (logits[260 * (k - 1):260 * k] if k else golden(f"{i}.logits")[-260:])
                self.assertLess(relative_error(floats(token.logits.data), expected), 1e-4, (i, k))
            if i == 1:
                self.assertEqual(bytes(ids_of(tokens)), CONTINUATION)

    def test_prefill_and_step_equal_generate(self):
        expected = self.client.generate_tokens(PROMPT, max_new_tokens=24, return_logits=True)
        session = self.client.create()
        output = {"next_token": True, "logits": types_pb2.POSITIONS_LAST}
        reply = self.client.prefill(sequence(session, PROMPT, **output)).sequences[0]
        for k, token in enumerate(expected):
            self.assertEqual(reply.position, len(PROMPT) + k)
            self.assertEqual(reply.next_token.id, token.id)
            self.assertEqual(reply.next_token.logprob, token.logprob)
            self.assertEqual(list(reply.logits.shape), [1, 260])
            self.assertEqual(reply.logits.data, token.logits.data)
            reply = self.client.step(
                sequence(session, [reply.next_token.id], **output)).sequences[0]

    def test_generate_continues_a_named_session(self):
        whole = ids_of(self.client.generate_tokens(PROMPT, max_new_tokens=40))
        session = self.client.create()
        first, last = collect(self.client.generate(PROMPT, session_id=session, max_new_tokens=15))
        self.assertEqual(last.position, len(PROMPT) + 15)
        self.assertEqual(last.finish_reason, inference_pb2.FINISH_REASON_LENGTH)
        self.assertEqual((last.usage.input_tokens, last.usage.output_tokens), (len(PROMPT), 15))
        self.assertEqual(self.client.get(session).position, len(PROMPT) + 15)
        # The session has consumed its own last token: it goes on after token 16 is fed.
        rest = self.client.generate_tokens([whole[15]], session_id=session, max_new_tokens=24)
        self.assertEqual(ids_of(first) + [whole[15]] + ids_of(rest), whole)

    def test_stop_tokens_and_length(self):
        greedy = ids_of(self.client.generate_tokens(PROMPT, max_new_tokens=30))
        stop = greedy[10]
        tokens, last = collect(
            self.client.generate(PROMPT, max_new_tokens=30, stop_token_ids=[stop]))
        self.assertEqual(ids_of(tokens), greedy[:greedy.index(stop) + 1])
        self.assertEqual(last.finish_reason, inference_pb2.FINISH_REASON_STOP)

    def test_seed_repeats_a_sample(self):
        sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "min_p": 0.01,
                    "repetition_penalty": 1.1}
        first = list(self.client.generate(PROMPT, max_new_tokens=32, sampling=sampling))
        seed = first[0].seed
        ids = [token.id for message in first for token in message.tokens]
        again = self.client.generate_tokens(PROMPT, max_new_tokens=32,
                                            sampling={**sampling, "seed": seed})
        self.assertEqual(ids_of(again), ids)
        other = self.client.generate_tokens(PROMPT, max_new_tokens=32,
                                            sampling={**sampling, "seed": seed ^ 1})
        self.assertNotEqual(ids_of(other), ids)

    def test_top_logprobs(self):
        session = self.client.create()
        token = self.client.prefill(sequence(session, PROMPT, next_token=True, top_logprobs=5,
                                             logits=types_pb2.POSITIONS_LAST)).sequences[0]
        top = token.next_token.top_logprobs
        self.assertEqual(len(top), 5)
        self.assertEqual((top[0].id, top[0].logprob),
                         (token.next_token.id, token.next_token.logprob))
        logits = floats(token.logits.data)
        order = sorted(range(260), key=lambda i: (-logits[i], i))[:5]
        self.assertEqual([entry.id for entry in top], order)
        log_sum = max(logits) + math.log(sum(math.exp(x - max(logits)) for x in logits))
        for entry in top:
            self.assertAlmostEqual(entry.logprob, logits[entry.id] - log_sum, places=4)

    def test_forks_go_their_own_ways(self):
        parent = self.client.create()
        self.client.prefill(sequence(parent, PROMPT))
        copies = self.client.fork(parent, count=2, expected_position=len(PROMPT))
        for copy in copies:
            info = self.client.get(copy)
            self.assertEqual((info.position, info.parent_session_id), (len(PROMPT), parent))
            self.assertEqual(info.token_hash, self.client.get(parent).token_hash)
        logits = {"logits": types_pb2.POSITIONS_LAST}
        reply = self.client.step(*(sequence(session, text, **logits) for session, text in
                                   ((copies[0], b"Go"), (copies[1], b"Am"), (parent, b"Go"))))
        got = [item.logits.data for item in reply.sequences]
        self.assertEqual(got[0], got[2], "a fork fed as its parent answers as its parent")
        self.assertNotEqual(got[0], got[1])
        fresh = self.client.create()
        alone = self.client.prefill(sequence(fresh, PROMPT + b"Am", **logits)).sequences[0]
        self.assertLess(relative_error(floats(got[1]), floats(alone.logits.data)), CLOSE)
        self.client.delete(parent)
        self.client.step(sequence(copies[0], b"!"))

    def test_expected_position(self):
        session = self.client.create()
        other = self.client.create()
        self.client.prefill(sequence(session, b"abc", expected_position=0))
        with self.refused(grpc.StatusCode.FAILED_PRECONDITION, session, "3", "5") as caught:
            self.client.step(sequence(other, b"x"), sequence(session, b"d", expected_position=5))
        mismatch = position_mismatch(caught.exception)
        self.assertEqual((mismatch.session_id, mismatch.expected_position,
                          mismatch.actual_position), (session, 5, 3))
        self.assertEqual(self.client.get(other).position, 0, "nothing of the batch has run")
        for call in (lambda: self.client.fork(session, expected_position=2),
                     lambda: collect(self.client.generate(b"x", session_id=session,
                                                          expected_position=2))):
            with self.refused(grpc.StatusCode.FAILED_PRECONDITION) as caught:
                call()
            self.assertEqual(position_mismatch(caught.exception).actual_position, 3)
        self.client.step(sequence(session, b"d", expected_position=3))

    def test_step_stream(self):
        expected = ids_of(self.client.generate_tokens(PROMPT, max_new_tokens=20))
        session = self.client.create()
        reply = self.client.prefill(sequence(session, PROMPT, next_token=True))
        # Each request is made of the answer before it.
        requests = SimpleQueue()
        replies = self.client.inference.StepStream(iter(requests.get, None), timeout=60)
        ids = [reply.sequences[0].next_token.id]
        for k in range(19):
            requests.put(step_request(sequence(session, ids[-1:], next_token=True,
                                               expected_position=len(PROMPT) + k)))
            ids.append(next(replies).sequences[0].next_token.id)
        self.assertEqual(ids, expected)
        requests.put(None)
        with self.assertRaises(StopIteration):
            next(replies)
        self.assertEqual(replies.code(), grpc.StatusCode.OK)

    def test_step_stream_answers_pipelined_requests_in_order(self):
        a, b = self.client.create(), self.client.create()
        requests = [step_request(sequence(session, [65 + k]))
                    for k in range(20) for session in (a, b)]
        replies = list(self.client.inference.StepStream(iter(requests), timeout=60))
        self.assertEqual([(r.sequences[0].session_id, r.sequences[0].position) for r in replies],
                         [(session, k + 1) for k in range(20) for session in (a, b)])

    def test_timings_add_up(self):
        session = self.client.create()
        timings = self.client.prefill(sequence(session, PROMPT * 20)).timings
        self.assertGreater(timings.compute_ns, 0)
        self.assertLessEqual(timings.queue_ns + timings.compute_ns, timings.total_ns)
