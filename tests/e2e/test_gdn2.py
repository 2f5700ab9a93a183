"""A stack of gdn2 and linear_attention layers, behind the same contract as any other model."""

import os

from support import (CLOSE, EXACT, PROMPT, SOURCE, Server, TestCase, floats, ids_of, relative_error,
                     sequence, types_pb2)

MODEL = os.path.join(SOURCE, "tests/data/models/gdn2-mixed")
LAST = {"logits": types_pb2.POSITIONS_LAST}


class Gdn2Test(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(*EXACT, "--max-sessions=8", "--random-weights=3", model=MODEL)
        cls.addClassCleanup(cls.server.stop)
        cls.client = cls.server.client

    def tearDown(self):
        self.assertIsNone(self.server.process.poll(), "the server has died")
        for session in self.client.list(page_size=1000).sessions:
            self.client.delete(session.session_id)

    def test_model(self):
        model = self.client.model()
        self.assertEqual((model.name, model.architecture), ("gdn2-mixed", "Gdn2ForCausalLM"))
        self.assertEqual((model.num_layers, model.key_heads, model.value_heads), (3, 2, 2))
        # Three layers of [2, 64, 64] FP32 and a convolution tail.
        self.assertGreater(model.state_bytes_per_session, 3 * 2 * 64 * 64 * 4)

    def test_prefill_and_step_equal_generate(self):
        expected = self.client.generate_tokens(PROMPT, max_new_tokens=16)
        self.assertGreater(len(set(ids_of(expected))), 1)
        session = self.client.create()
        reply = self.client.prefill(sequence(session, PROMPT, next_token=True)).sequences[0]
        got = [reply.next_token.id]
        while len(got) < len(expected):
            reply = self.client.step(sequence(session, got[-1:], next_token=True)).sequences[0]
            got.append(reply.next_token.id)
        self.assertEqual(got, ids_of(expected))
        self.assertEqual(self.client.get(session).position, len(PROMPT) + len(expected) - 1)

    def test_forks_and_pieces(self):
        parent = self.client.create()
        self.client.prefill(sequence(parent, PROMPT[:11]))
        self.client.prefill(sequence(parent, PROMPT[11:]))
        copies = self.client.fork(parent, count=2, expected_position=len(PROMPT))
        reply = self.client.step(*(sequence(session, text, **LAST) for session, text in
                                   ((copies[0], b"Go"), (copies[1], b"Am"), (parent, b"Go"))))
        got = [item.logits.data for item in reply.sequences]
        self.assertEqual(got[0], got[2], "a fork fed as its parent answers as its parent")
        self.assertNotEqual(got[0], got[1])
        for logits, text in zip(got, (b"Go", b"Am")):
            fresh = self.client.create()
            alone = self.client.prefill(sequence(fresh, PROMPT + text, **LAST)).sequences[0]
            self.assertLess(relative_error(floats(logits), floats(alone.logits.data)), CLOSE)
