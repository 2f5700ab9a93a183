"""Streams that end early: half-closed, cancelled at every phase, out of time, unread, killed."""

import queue
import signal
import subprocess
import sys
import threading

from support import (CLOSE, PATIENCE_S, PROMPT, Client, TestCase, collect, eventually, floats,
                     generate_request, ids_of, inference_pb2, relative_error, sequence,
                     step_request, types_pb2)

import grpc

# About two seconds of work, cut into many steps: a place to be interrupted.
LONG = bytes(range(32, 96)) * 400


class StreamsTest(TestCase):
    FLAGS = ("--precision=float32", "--max-sessions=48", "--stream-buffer-tokens=16",
             "--prefill-token-budget=128", "--prefill-chunk-tokens=64")
    METRICS = True

    def tearDown(self):
        super().tearDown()
        self.assert_quiet()
        for session in self.client.list(page_size=1000).sessions:
            self.client.delete(session.session_id)

    def assert_quiet(self, deadline_s=PATIENCE_S):
        """Nothing runs, waits or holds a slot that no session owns."""
        def quiet():
            metrics = self.server.metrics()
            return not any((metrics.value("gdn_running_streams"),
                            metrics.value("gdn_blocked_streams"),
                            metrics.value("gdn_queue_depth"), metrics.value("gdn_queue_tokens"),
                            metrics.value("gdn_state_slots", state="in_flight")))
        eventually(quiet, "all gauges back at 0", deadline_s)

    def start_prefill(self):
        """A Prefill call that is at work."""
        session = self.client.create()
        call = self.client.inference.Prefill.future(
            inference_pb2.PrefillRequest(sequences=[sequence(session, LONG)]), timeout=PATIENCE_S)
        eventually(lambda: self.client.get(session).in_use, "the prefill runs")
        return session, call

    def assert_applied_exactly_once(self, session):
        """What the session has consumed is a prefix of LONG, and goes on as if whole."""
        self.assert_idle(session)
        position = self.client.get(session).position
        self.assertLess(position, len(LONG))
        end = position + 50
        logits = {"logits": types_pb2.POSITIONS_LAST}
        rest = self.client.prefill(sequence(session, LONG[position:end], **logits))
        fresh = self.client.create()
        whole = self.client.prefill(sequence(fresh, LONG[:end], **logits))
        self.assertEqual(self.client.get(session).token_hash, self.client.get(fresh).token_hash)
        self.assertLess(relative_error(floats(rest.sequences[0].logits.data),
                                       floats(whole.sequences[0].logits.data)), CLOSE)
        return position

    def test_cancelled_prefill(self):
        session, call = self.start_prefill()
        call.cancel()
        self.assert_applied_exactly_once(session)

    def test_deadline_during_prefill(self):
        session = self.client.create()
        with self.refused(grpc.StatusCode.DEADLINE_EXCEEDED):
            self.client.inference.Prefill(
                inference_pb2.PrefillRequest(sequences=[sequence(session, LONG)]), timeout=0.1)
        self.assert_applied_exactly_once(session)

    def test_deadline_in_queue(self):
        before = self.server.metrics().total("gdn_cancellations_total")
        others = [self.start_prefill() for _ in range(4)]
        # Behind four prompts of equal rank and longer than its deadline allows.
        session = self.client.create()
        with self.refused(grpc.StatusCode.DEADLINE_EXCEEDED):
            self.client.inference.Prefill(
                inference_pb2.PrefillRequest(sequences=[sequence(session, LONG)]), timeout=0.05)
        self.assert_idle(session)
        eventually(lambda: self.server.metrics().total("gdn_cancellations_total") == before + 1,
                   "the deadline is counted")
        for _, call in others:
            call.cancel()
        eventually(lambda: self.server.metrics().total("gdn_cancellations_total") == before + 5,
                   "the cancellations are counted")
        # It was still waiting, or a chunk of it was in the step that ran as the time was up.
        self.assert_applied_exactly_once(session)

    def test_generate_cancelled_before_its_first_token(self):
        session = self.client.create()
        call = self.client.generate(LONG, session_id=session)
        eventually(lambda: self.client.get(session).in_use, "the stream runs")
        call.cancel()
        with self.assertRaises(grpc.RpcError) as caught:
            next(call)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.CANCELLED)
        self.assert_applied_exactly_once(session)

    def test_generate_cancelled_at_once(self):
        for _ in range(20):
            self.client.generate(PROMPT).cancel()

    def test_generate_cancelled_between_tokens(self):
        session = self.client.create()
        call = self.client.generate(PROMPT, session_id=session, max_new_tokens=100_000,
                                    ignore_eos=True)
        got = [token.id for _ in range(3) for token in next(call).tokens]
        call.cancel()
        self.assert_idle(session)
        # The tokens that were on their way are consumed too, each once; of those that arrived the
        # newest may not have been, where the call ended before the next step.
        position = self.client.get(session).position
        self.assertGreaterEqual(position, len(PROMPT) + len(got) - 1)
        greedy = ids_of(self.client.generate_tokens(
            PROMPT, max_new_tokens=position - len(PROMPT) + 1, ignore_eos=True))
        self.assertEqual(got, greedy[:len(got)])
        fresh = self.client.create()
        history = PROMPT + bytes(greedy[:position - len(PROMPT)])
        self.client.prefill(sequence(fresh, history))
        self.assertEqual(self.client.get(fresh).token_hash, self.client.get(session).token_hash)

    def test_generate_cancelled_after_its_end(self):
        call = self.client.generate(PROMPT, max_new_tokens=3)
        tokens, _ = collect(call)
        call.cancel()
        self.assertEqual(len(tokens), 3)
        self.assertEqual(call.code(), grpc.StatusCode.OK)

    def test_generate_deadline_while_streaming(self):
        session = self.client.create()
        call = self.client.generate(PROMPT, session_id=session, max_new_tokens=1_000_000,
                                    ignore_eos=True, timeout=0.5)
        with self.refused(grpc.StatusCode.DEADLINE_EXCEEDED):
            for _ in call:
                pass
        self.assert_idle(session)

    def test_step_stream_half_closed_without_a_request(self):
        call = self.client.inference.StepStream(iter(()), timeout=PATIENCE_S)
        self.assertEqual(list(call), [])
        self.assertEqual(call.code(), grpc.StatusCode.OK)

    def test_step_stream_half_closed_with_answers_outstanding(self):
        session = self.client.create()
        requests = [step_request(sequence(session, [k])) for k in range(30)]
        call = self.client.inference.StepStream(iter(requests), timeout=PATIENCE_S)
        self.assertEqual([r.sequences[0].position for r in call], list(range(1, 31)))
        self.assertEqual(call.code(), grpc.StatusCode.OK)

    def test_step_stream_cancelled_while_idle(self):
        session = self.client.create()
        for answered in (0, 1):
            requests = queue.SimpleQueue()
            call = self.client.inference.StepStream(iter(requests.get, None), timeout=PATIENCE_S)
            for _ in range(answered):
                requests.put(step_request(sequence(session, b"x")))
                next(call)
            call.cancel()
            requests.put(None)
            with self.assertRaises(grpc.RpcError) as caught:
                next(call)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.CANCELLED)
        self.assert_idle(session)
        self.assertEqual(self.client.get(session).position, 1)

    def test_step_stream_cancelled_at_work(self):
        sessions = [self.client.create() for _ in range(32)]
        batch = step_request(*(sequence(session, b"12345678") for session in sessions))
        requests = queue.SimpleQueue()
        call = self.client.inference.StepStream(iter(requests.get, None), timeout=PATIENCE_S)
        for _ in range(8):
            requests.put(batch)
        next(call)
        call.cancel()
        requests.put(None)
        positions = set()
        for session in sessions:
            self.assert_idle(session)
            positions.add(self.client.get(session).position)
        for position in positions:
            self.assertGreaterEqual(position, 8)
            self.assertLessEqual(position, 64)

    def test_step_stream_refusal_ends_it_and_nothing_else(self):
        session = self.client.create()
        requests = [step_request(sequence(session, b"a")), step_request(sequence(session, [-1])),
                    step_request(sequence(session, b"b"))]
        call = self.client.inference.StepStream(iter(requests), timeout=PATIENCE_S)
        self.assertEqual(next(call).sequences[0].position, 1)
        with self.refused(grpc.StatusCode.INVALID_ARGUMENT, "sequences[0].input.token_ids[0]"):
            next(call)
        self.assertEqual(self.client.get(session).position, 1)

    def test_gauges_return_to_zero_after_a_mass_cancel(self):
        sessions = [self.client.create() for _ in range(16)]
        calls = [self.client.generate(PROMPT, session_id=session, max_new_tokens=1_000_000,
                                      ignore_eos=True) for session in sessions]
        calls += [self.client.generate(PROMPT, max_new_tokens=1_000_000, ignore_eos=True)
                  for _ in range(16)]
        for call in calls:
            next(call)
        metrics = self.server.metrics()
        self.assertEqual(metrics.value("gdn_running_streams"), 32)
        self.assertEqual(metrics.value("gdn_sessions"), 16)
        for call in calls:
            call.cancel()
        self.assert_quiet(deadline_s=5)  # As often as Prometheus looks.
        metrics = self.server.metrics()
        self.assertEqual(metrics.value("gdn_state_slots", state="live"), 16)
        self.assertEqual(metrics.value("gdn_state_slots", state="free"), 32)

    def test_a_slow_reader_disturbs_nobody(self):
        # A small window, so that little is on its way before the server feels the reader.
        slow = Client(self.server.address, [("grpc.http2.bdp_probe", 0),
                                            ("grpc.http2.lookahead_bytes", 1024)])
        self.addCleanup(slow.close)
        count = 8_000  # Of 1 KiB each, with their logits: more than every buffer in between.
        call = slow.generate(PROMPT, max_new_tokens=count, ignore_eos=True, return_logits=True)
        ids = ids_of(next(call).tokens)
        eventually(lambda: self.server.metrics().value("gdn_blocked_streams") == 1,
                   "the stream pauses for its reader")
        expected = ids_of(self.client.generate_tokens(PROMPT, max_new_tokens=200, ignore_eos=True))
        self.assertEqual(len(expected), 200)
        self.assertEqual(self.server.metrics().value("gdn_running_streams"), 1)
        metrics = self.server.metrics()
        self.assertEqual(metrics.value("gdn_blocked_streams"), 1)
        blocked_s = metrics.value("gdn_stream_blocked_seconds_total")
        # It goes on where it stopped.
        while len(ids) < 2_000:
            ids += ids_of(next(call).tokens)
        self.assertEqual(ids[:200], expected)
        # Its pauses are counted as it goes on.
        self.assertGreater(self.server.metrics().value("gdn_stream_blocked_seconds_total"), blocked_s)
        call.cancel()

    def test_a_killed_client_frees_its_slot(self):
        session = self.client.create()
        script = (
            "import sys; from support import Client, PROMPT\n"
            "call = Client(sys.argv[1]).generate(PROMPT, session_id=sys.argv[2],\n"
            "                                    max_new_tokens=1000000, ignore_eos=True)\n"
            "for message in call: print('.', flush=True)\n")
        child = subprocess.Popen([sys.executable, "-B", "-c", script, self.server.address, session],
                                 stdout=subprocess.PIPE)
        late = threading.Timer(PATIENCE_S, child.kill)
        self.addCleanup(late.cancel)  # The process would wait for it.
        late.start()
        try:
            self.assertEqual(child.stdout.readline(), b".\n")
            self.assertTrue(self.client.get(session).in_use)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(PATIENCE_S)
            child.stdout.close()
        self.assert_idle(session)
        self.client.step(sequence(session, b"x"))


class FullQueueTest(TestCase):
    FLAGS = ("--max-queued-calls=2", "--max-sessions=8")

    def test_full_queue_and_no_slot(self):
        calls = [self.client.generate(PROMPT, max_new_tokens=100_000, ignore_eos=True)
                 for _ in range(2)]
        for call in calls:
            next(call)
        with self.refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue"):
            collect(self.client.generate(PROMPT))
        calls[0].cancel()
        eventually(lambda: self._accepted(), "a place in the queue is free again")
        calls[1].cancel()

    def _accepted(self):
        try:
            collect(self.client.generate(PROMPT, max_new_tokens=1))
        except grpc.RpcError as error:
            self.assertEqual(error.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
            return False
        return True
