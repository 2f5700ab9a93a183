"""The layer stack cut over two servers: hidden states out of one are the input of the other."""

from support import (EXACT, PATIENCE_S, PROMPT, Server, TestCase, collect, floats, hidden_input,
                     ids_of, relative_error, sequence, types_pb2)

import grpc

ALL = types_pb2.POSITIONS_ALL
LAST = types_pb2.POSITIONS_LAST


class HiddenPipelineTest(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.servers = []
        for flags in ((), ("--layers=0:3",), ("--layers=3:6",)):
            cls.servers.append(Server(*EXACT, "--max-sessions=8", *flags))
            cls.addClassCleanup(cls.servers[-1].stop)
        cls.whole, cls.lower, cls.upper = (server.client for server in cls.servers)

    def tearDown(self):
        for server in self.servers:
            self.assertIsNone(server.process.poll(), "a server has died")
            for session in server.client.list().sessions:
                server.client.delete(session.session_id)

    def test_model(self):
        models = [client.model() for client in (self.whole, self.lower, self.upper)]
        self.assertEqual([(m.first_layer, m.last_layer, m.has_embedding, m.has_head)
                          for m in models],
                         [(0, 6, True, True), (0, 3, True, False), (3, 6, False, True)])
        self.assertEqual(len({m.fingerprint for m in models}), 3)
        self.assertEqual(models[0].state_bytes_per_session,
                         models[1].state_bytes_per_session + models[2].state_bytes_per_session)

    def chain(self, call, sessions, ids, positions=ALL):
        """Feeds ids to the lower half and its hidden states to the upper one."""
        below = call(self.lower)(sequence(sessions[0], ids, hidden_states=ALL)).sequences[0]
        hidden = below.hidden_states
        self.assertEqual(list(hidden.shape), [len(ids), 256])
        above = call(self.upper)(
            sequence(sessions[1], hidden_input(hidden.data, hidden.shape), logits=positions,
                     hidden_states=positions, next_token=True)).sequences[0]
        self.assertEqual(below.position, above.position)
        return above

    def assert_same(self, item, expected):
        self.assertEqual(item.position, expected.position)
        for got, want in ((item.logits, expected.logits),
                          (item.hidden_states, expected.hidden_states)):
            self.assertEqual(list(got.shape), list(want.shape))
            self.assertEqual(got.data, want.data)
        self.assertEqual(item.next_token, expected.next_token)

    def test_two_halves_equal_the_whole(self):
        session = self.whole.create()
        sessions = (self.lower.create(), self.upper.create())
        output = {"logits": ALL, "hidden_states": ALL, "next_token": True}
        # Prompts of several chunks, then steps of one and of a few tokens.
        for ids in (PROMPT * 8, b"Go in", PROMPT):
            expected = self.whole.prefill(sequence(session, ids, **output)).sequences[0]
            self.assert_same(self.chain(lambda c: c.prefill, sessions, ids), expected)
        token = expected.next_token.id
        for _ in range(16):
            expected = self.whole.step(sequence(session, [token], **output)).sequences[0]
            self.assert_same(self.chain(lambda c: c.step, sessions, [token]), expected)
            token = expected.next_token.id
        expected = self.whole.step(sequence(session, b"12345", **output)).sequences[0]
        self.assert_same(self.chain(lambda c: c.step, sessions, b"12345"), expected)

    def test_half_precision_input(self):
        """bfloat16 rows are the float32 rows they round to."""
        session = self.lower.create()
        hidden = self.lower.prefill(sequence(session, PROMPT, hidden_states=ALL))
        data = hidden.sequences[0].hidden_states.data
        upper_halves = b"".join(data[i + 2:i + 4] for i in range(0, len(data), 4))
        truncated = b"".join(b"\0\0" + data[i + 2:i + 4] for i in range(0, len(data), 4))
        shape = [len(PROMPT), 256]
        answers = []
        for values in (hidden_input(upper_halves, shape, types_pb2.ELEMENT_TYPE_BFLOAT16),
                       hidden_input(truncated, shape)):
            item = self.upper.prefill(sequence(self.upper.create(), values, logits=LAST))
            answers.append(item.sequences[0].logits.data)
        self.assertEqual(answers[0], answers[1])
        exact = self.upper.prefill(
            sequence(self.upper.create(), hidden_input(data, shape), logits=LAST))
        error = relative_error(floats(answers[0]), floats(exact.sequences[0].logits.data))
        self.assertGreater(error, 0)
        self.assertLess(error, 0.1)

    def test_what_a_half_does_not_hold(self):
        lower, upper = self.lower.create(), self.upper.create()
        precondition = grpc.StatusCode.FAILED_PRECONDITION
        with self.refused(precondition, "sequences[0].input.token_ids", "embedding"):
            self.upper.prefill(sequence(upper, PROMPT))
        with self.refused(precondition, "sequences[0].output.logits", "head"):
            self.lower.prefill(sequence(lower, PROMPT, logits=LAST))
        with self.refused(precondition, "sequences[0].output.next_token", "head"):
            self.lower.prefill(sequence(lower, PROMPT, next_token=True))
        for client in (self.lower, self.upper):
            with self.refused(precondition):
                collect(client.generate(PROMPT, timeout=PATIENCE_S))
        self.assertEqual((self.lower.get(lower).position, self.upper.get(upper).position), (0, 0))

    def test_hidden_input_in_place_of_the_embedding(self):
        """A whole server takes rows too; greedy choices go on as with tokens afterwards."""
        session = self.whole.create()
        rows = hidden_input(b"\0\0\0\x3f" * 256 * 3, [3, 256])
        item = self.whole.prefill(sequence(session, rows, next_token=True)).sequences[0]
        self.assertEqual(item.position, 3)
        tokens = self.whole.generate_tokens(rows, max_new_tokens=4)
        self.assertEqual(ids_of(tokens)[0], item.next_token.id)
