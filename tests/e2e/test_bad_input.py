"""Bad input: each is refused with the right status and a message that names field and index, while
a stream that runs on the same connection, and another session, notice nothing."""

import struct
import threading

from support import (EXACT, PATIENCE_S, PROMPT, TestCase, collect, hidden_input, ids_of,
                     inference_pb2, sequence, sessions_pb2, step_request, tokens_input, types_pb2)

import grpc

INVALID = grpc.StatusCode.INVALID_ARGUMENT
RANGE = grpc.StatusCode.OUT_OF_RANGE
MISSING = grpc.StatusCode.NOT_FOUND
HIDDEN = 256


def rows(count, fill=0.5, **changes):
    """Hidden states [count, 256] with single values changed: rows(2, _300=nan)."""
    values = [fill] * (count * HIDDEN)
    for index, value in changes.items():
        values[int(index[1:])] = value
    return struct.pack(f"<{len(values)}f", *values)


class Bystander:
    """A long greedy stream on a connection, read all the time."""

    def __init__(self, client, session):
        self._call = client.generate(PROMPT, session_id=session, max_new_tokens=1 << 20,
                                     ignore_eos=True)
        self.ids = []
        self._progress = threading.Condition()
        self.error = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        try:
            for message in self._call:
                with self._progress:
                    self.ids += ids_of(message.tokens)
                    self._progress.notify_all()
        except grpc.RpcError as error:
            with self._progress:
                self.error = error
                self._progress.notify_all()

    def advance(self, count=1):
        """Waits for `count` more tokens; False if they do not come."""
        with self._progress:
            goal = len(self.ids) + count
            return self._progress.wait_for(lambda: len(self.ids) >= goal or self.error,
                                           PATIENCE_S) and not self.error

    def stop(self):
        self._call.cancel()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


class BadInputTest(TestCase):
    FLAGS = (*EXACT, "--max-sessions=8", "--max-new-tokens=2000000")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.quiet = cls.client.create(ttl_ms=0)
        cls.client.prefill(sequence(cls.quiet, PROMPT))
        twin = cls.client.fork(cls.quiet)[0]
        logits = {"logits": types_pb2.POSITIONS_LAST}
        cls.expected = cls.client.step(sequence(twin, b"G", **logits)).sequences[0].logits.data
        cls.client.delete(twin)
        cls.busy = cls.client.create(ttl_ms=0)
        # One connection for everything: a change of its state would show here.
        cls.states = []
        cls.client.channel.subscribe(cls.states.append)
        cls.bystander = Bystander(cls.client, cls.busy)
        cls.addClassCleanup(cls.bystander.stop)
        assert cls.bystander.advance()

    def setUp(self):
        self.before = self.client.get(self.quiet)

    def tearDown(self):
        super().tearDown()
        self.assertTrue(self.bystander.advance(), self.bystander.error)
        after = self.client.get(self.quiet)
        self.assertEqual((after.position, after.token_hash, after.in_use),
                         (self.before.position, self.before.token_hash, False))

    @classmethod
    def tearDownClass(cls):
        """The stream was right to its last token, and the quiet session still is."""
        cls.bystander.stop()
        error = cls.bystander.error
        assert error is not None and error.code() == grpc.StatusCode.CANCELLED, error
        ids = cls.bystander.ids
        alone = cls.client.generate_tokens(PROMPT, max_new_tokens=len(ids), ignore_eos=True)
        assert ids_of(alone) == ids, "the running stream was disturbed"
        logits = cls.client.step(sequence(cls.quiet, b"G", logits=types_pb2.POSITIONS_LAST))
        assert logits.sequences[0].logits.data == cls.expected, "the quiet session was disturbed"
        ready = cls.states.index(grpc.ChannelConnectivity.READY)
        assert cls.states[ready + 1:] == [], f"the connection was disturbed: {cls.states}"

    def refuse_batch(self, code, parts, *sequences, step_code=None, step_parts=None):
        """Prefill, Step and StepStream refuse these sequences alike."""
        with self.refused(code, *parts):
            self.client.prefill(*sequences)
        code, parts = step_code or code, step_parts or parts
        with self.refused(code, *parts):
            self.client.step(*sequences)
        with self.refused(code, *parts):
            list(self.client.inference.StepStream(iter([step_request(*sequences)]),
                                                  timeout=PATIENCE_S))

    def refuse_generate(self, code, parts, prompt=PROMPT, **fields):
        with self.refused(code, *parts):
            collect(self.client.generate(prompt, **fields))

    def test_unknown_session(self):
        good = sequence(self.quiet, b"x")
        self.refuse_batch(MISSING, ["sequences[1].session_id", "no-such"], good,
                          sequence("no-such", b"x"))
        self.refuse_batch(MISSING, ["sequences[1].session_id"], good, sequence("", b"x"))
        self.refuse_generate(MISSING, ["session_id", "no-such"], session_id="no-such")
        for call in (self.client.get, self.client.delete, self.client.fork):
            with self.refused(MISSING, "session_id", "no-such"):
                call("no-such")
        with self.refused(MISSING, "session_id"):
            self.client.get("x" * 100_000)

    def test_session_in_use(self):
        for call in (lambda: self.client.step(sequence(self.busy, b"x")),
                     lambda: self.client.delete(self.busy), lambda: self.client.fork(self.busy),
                     lambda: collect(self.client.generate(b"x", session_id=self.busy))):
            with self.refused(grpc.StatusCode.ABORTED, "session_id", self.busy):
                call()

    def test_token_id_out_of_range(self):
        for bad in (-1, 260, 2**31 - 1, -2**31):
            self.refuse_batch(INVALID, ["sequences[1].input.token_ids", "[2]", str(bad), "260"],
                              sequence(self.quiet, b"x"), sequence(self.busy, [1, 2, bad]))
            self.refuse_generate(INVALID, ["input.token_ids", "[1]", str(bad)], [0, bad])

    def test_stop_token_out_of_range(self):
        self.refuse_generate(INVALID, ["stop_token_ids", "[1]", "260"], stop_token_ids=[5, 260])

    def test_empty_batch(self):
        self.refuse_batch(INVALID, ["sequences"])

    def test_batch_too_large(self):
        self.refuse_batch(RANGE, ["sequences", "257", "256"],
                          *(sequence(f"s{i}", b"x") for i in range(257)))

    def test_duplicate_session(self):
        self.refuse_batch(INVALID, ["sequences[2].session_id", "sequences[0]"],
                          sequence(self.quiet, b"x"), sequence(self.busy, b"x"),
                          sequence(self.quiet, b"x"))

    def test_empty_and_absent_input(self):
        self.refuse_generate(INVALID, ["input"], b"")
        with self.refused(INVALID, "sequences[0].input"):
            self.client.step(sequence(self.quiet, b""))
        self.refuse_batch(INVALID, ["sequences[0].input"],
                          types_pb2.SequenceRequest(session_id=self.quiet))
        with self.refused(INVALID, "sequences[0]", "next_token"):
            self.client.prefill(sequence(self.quiet, b"", next_token=True))
        with self.refused(INVALID, "input"):
            list(self.client.inference.Generate(inference_pb2.GenerateRequest(),
                                                timeout=PATIENCE_S))

    def test_step_too_long(self):
        limit = self.client.model().limits.max_step_tokens
        with self.refused(RANGE, "sequences[0].input.token_ids", str(limit + 1), str(limit)):
            self.client.step(sequence(self.quiet, b"x" * (limit + 1)))

    def test_input_too_long(self):
        limit = self.client.model().limits.max_input_tokens
        with self.refused(RANGE, "sequences[0].input.token_ids", str(limit)):
            self.client.prefill(sequence(self.quiet, tokens_input([1] * (limit + 1))))

    def test_wrong_tensor(self):
        where = "sequences[1].input.hidden_states"
        for part, bad in (
                (".data", hidden_input(rows(1)[:-1], [1, HIDDEN])),
                (".data", hidden_input(rows(1), [2, HIDDEN])),
                (".data", hidden_input(b"", [1, HIDDEN])),
                (".data", hidden_input(rows(1), [2**62, HIDDEN])),
                (".data", hidden_input(rows(1), [1, HIDDEN], types_pb2.ELEMENT_TYPE_BFLOAT16)),
                (".shape", hidden_input(rows(1), [HIDDEN])),
                (".shape", hidden_input(rows(1), [1, 1, HIDDEN])),
                (".shape", hidden_input(rows(1), [])),
                (".shape", hidden_input(rows(1), [HIDDEN, 1])),
                (".shape", hidden_input(rows(1), [-1, HIDDEN])),
                (".shape", hidden_input(rows(1), [1, 255])),
                (".element_type", hidden_input(rows(1), [1, HIDDEN], 0)),
                (".element_type", hidden_input(rows(1), [1, HIDDEN], 77))):
            self.refuse_batch(INVALID, [where + part], sequence(self.quiet, b"x"),
                              sequence(self.busy, bad))
            self.refuse_generate(INVALID, ["input.hidden_states" + part], bad)

    def test_non_finite_hidden_input(self):
        for bad in (float("nan"), float("inf"), float("-inf")):
            data = rows(2, **{f"_{HIDDEN + 7}": bad})
            self.refuse_batch(INVALID, ["sequences[0].input.hidden_states", "[1, 7]"],
                              sequence(self.quiet, hidden_input(data, [2, HIDDEN])))
        # The same in half precision: NaN as bfloat16 and float16.
        for element_type, bits in ((types_pb2.ELEMENT_TYPE_BFLOAT16, 0x7FC0),
                                   (types_pb2.ELEMENT_TYPE_FLOAT16, 0x7E00)):
            data = struct.pack(f"<{HIDDEN}H", *([0] * 9 + [bits] + [0] * (HIDDEN - 10)))
            self.refuse_batch(INVALID, ["sequences[0].input.hidden_states", "[0, 9]"],
                              sequence(self.quiet, hidden_input(data, [1, HIDDEN], element_type)))

    def test_message_of_65_mib(self):
        huge = hidden_input(b"\0" * (65 << 20), [65 << 10, HIDDEN])
        for call in (lambda: self.client.prefill(sequence(self.quiet, huge)),
                     lambda: self.client.step(sequence(self.quiet, huge)),
                     lambda: collect(self.client.generate(huge)),
                     lambda: list(self.client.inference.StepStream(
                         iter([step_request(sequence(self.quiet, huge))]), timeout=PATIENCE_S))):
            with self.refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "message"):
                call()

    def test_max_new_tokens(self):
        limit = self.client.model().limits.max_new_tokens
        for bad in (0, -1, -2**63):
            self.refuse_generate(INVALID, ["max_new_tokens", str(bad)], max_new_tokens=bad)
        for bad in (limit + 1, 2**63 - 1):
            self.refuse_generate(RANGE, ["max_new_tokens", str(bad), str(limit)],
                                 max_new_tokens=bad)

    def test_sampling(self):
        nan = float("nan")
        for field, values in (("temperature", (-1.0, -1e-30, nan, float("inf"))),
                              ("top_k", (-1, -2**31)), ("top_p", (0.0, -0.5, 1.5, nan)),
                              ("min_p", (-0.1, 1.0, nan)),
                              ("repetition_penalty", (0.0, -1.0, nan))):
            for value in values:
                sampling = {field: value}
                self.refuse_generate(INVALID, [f"sampling.{field}"], sampling=sampling)
                self.refuse_batch(INVALID, [f"sequences[1].output.sampling.{field}"],
                                  sequence(self.quiet, b"x"),
                                  sequence(self.busy, b"x", next_token=True,
                                           sampling=types_pb2.Sampling(**sampling)))

    def test_top_logprobs(self):
        limit = self.client.model().limits.top_logprobs
        self.refuse_generate(INVALID, ["top_logprobs", "-1"], top_logprobs=-1)
        self.refuse_generate(RANGE, ["top_logprobs", str(limit)], top_logprobs=limit + 1)
        self.refuse_batch(RANGE, ["sequences[0].output.top_logprobs", str(limit)],
                          sequence(self.quiet, b"x", next_token=True, top_logprobs=limit + 1))

    def test_unknown_positions(self):
        for field in ("logits", "hidden_states"):
            self.refuse_batch(INVALID, [f"sequences[0].output.{field}", "7"],
                              sequence(self.quiet, b"x", **{field: 7}))

    def test_too_much_output(self):
        limit = self.client.model().limits.max_output_bytes
        tokens = limit // (260 * 4) + 1
        with self.refused(RANGE, "max_output_bytes", str(limit)):
            self.client.prefill(sequence(self.quiet, tokens_input([1] * tokens),
                                         logits=types_pb2.POSITIONS_ALL))

    def test_sessions_service(self):
        for call in (lambda: self.client.create(ttl_ms=-1),
                     lambda: self.client.fork(self.quiet, ttl_ms=-1)):
            with self.refused(INVALID, "ttl_ms", "-1"):
                call()
        for count in (0, -1):
            with self.refused(INVALID, "count", str(count)):
                self.client.fork(self.quiet, count=count)
        with self.refused(RANGE, "count", "9", "8"):
            self.client.fork(self.quiet, count=9)
        with self.refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "slot"):
            self.client.fork(self.quiet, count=8)
        self.assertEqual(self.client.list().total, 2, "all or none")
        with self.refused(INVALID, "page_size", "-1"):
            self.client.list(page_size=-1)
        self.assertEqual(list(self.client.list(page_token="~").sessions), [])

    def test_garbage_and_unknown_methods(self):
        call = self.client.channel.unary_unary("/gdn.v1.Inference/Prefill")
        with self.assertRaises(grpc.RpcError) as caught:
            call(b"\xff\xff\xff\xff", timeout=PATIENCE_S)
        self.assertIn(caught.exception.code(), (INVALID, grpc.StatusCode.INTERNAL))
        for method in ("/gdn.v1.Inference/Nothing", "/no.such.Service/Nothing"):
            with self.assertRaises(grpc.RpcError) as caught:
                self.client.channel.unary_unary(method)(b"", timeout=PATIENCE_S)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
        # Unknown fields are ignored, as protobuf has it.
        raw = self.client.channel.unary_unary("/gdn.v1.Sessions/ListSessions")
        reply = sessions_pb2.ListSessionsResponse.FromString(
            raw(b"\xfa\x3f\x03abc", timeout=PATIENCE_S))
        self.assertEqual(reply.total, 2)
