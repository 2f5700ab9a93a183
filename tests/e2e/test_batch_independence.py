"""In float32 with --batch-invariant, nobody's bits depend on who else is served."""

from support import (EXACT, PATIENCE_S, PROMPT, TestCase, collect, ids_of, inference_pb2, sequence,
                     types_pb2)

STREAMS = 64
LENGTHS = (0, 1, 3, 64, 65, 500)
TEXT = (b"In the beginning was the Word, and the Word was with God. It is a truth universally "
        b"acknowledged, that a single man in possession of a good fortune, must be in want. ")


class BatchIndependenceTest(TestCase):
    FLAGS = (*EXACT, "--max-sessions=80")
    METRICS = True

    def start(self, i):
        """Stream i: its own prompt, length and sampling."""
        prompt = (TEXT * 3)[i:i + 1 + (37 * i) % 150]
        sampling = {} if i % 3 == 0 else {"temperature": 0.5 + i / 64, "seed": i}
        if i % 3 == 2:
            sampling.update(top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2)
        return self.client.generate(prompt, sampling=sampling, max_new_tokens=16 + i % 9,
                                    ignore_eos=True, return_logits=True, top_logprobs=3)

    @staticmethod
    def fingerprint(tokens):
        return [(token.id, token.logprob, token.logits.data,
                 [(top.id, top.logprob) for top in token.top_logprobs]) for token in tokens]

    def test_concurrent_streams(self):
        alone = [self.fingerprint(collect(self.start(i))[0]) for i in range(STREAMS)]
        self.assertEqual([len(tokens) for tokens in alone], [16 + i % 9 for i in range(STREAMS)])
        before = self.server.metrics()
        calls = [self.start(i) for i in range(STREAMS)]
        together = [self.fingerprint(collect(call)[0]) for call in calls]
        after = self.server.metrics()
        for i in range(STREAMS):
            self.assertEqual(together[i], alone[i], f"stream {i}")

        # They did share steps: otherwise the comparison above would show nothing.
        def moved(name):
            return (after.value(name, phase="decode") - before.value(name, phase="decode"))

        self.assertGreater(moved("gdn_batch_size_sum") / moved("gdn_batch_size_count"), 8)

    def prefill(self, lengths):
        """One batch of fresh sessions: the bytes of all their outputs, and what follows."""
        sessions = [self.client.create() for _ in lengths]
        every = {"logits": types_pb2.POSITIONS_ALL, "hidden_states": types_pb2.POSITIONS_ALL}
        reply = self.client.prefill(*(sequence(session, (TEXT * 8)[length:2 * length], **every)
                                      for session, length in zip(sessions, lengths)))
        outputs = []
        for item, length in zip(reply.sequences, lengths):
            self.assertEqual((item.position, list(item.logits.shape),
                              list(item.hidden_states.shape)),
                             (length, [length, 260], [length, 256]))
            # One step more shows the state that is left behind.
            step = self.client.step(sequence(item.session_id, b"x",
                                             logits=types_pb2.POSITIONS_LAST))
            outputs.append((item.logits.data, item.hidden_states.data,
                            step.sequences[0].logits.data))
            self.client.delete(item.session_id)
        return outputs

    def test_ragged_prefill(self):
        alone = [self.prefill([length])[0] for length in LENGTHS]
        self.assertEqual(self.prefill(LENGTHS), alone)
        self.assertEqual(self.prefill(LENGTHS[::-1]), alone[::-1])

    def test_ragged_prefill_beside_streams(self):
        alone = [self.prefill([length])[0] for length in LENGTHS]
        calls = [self.client.generate(PROMPT, max_new_tokens=100_000, ignore_eos=True)
                 for _ in range(8)]
        for call in calls:
            next(call)
        beside = self.prefill(LENGTHS)
        for call in calls:
            call.cancel()
        self.assertEqual(beside, alone)

    def test_ragged_prefill_calls_of_several_clients(self):
        alone = [self.prefill([length])[0] for length in LENGTHS]
        sessions = [self.client.create() for _ in LENGTHS]
        every = {"logits": types_pb2.POSITIONS_ALL, "hidden_states": types_pb2.POSITIONS_ALL}
        calls = [self.client.inference.Prefill.future(inference_pb2.PrefillRequest(sequences=[
            sequence(session, (TEXT * 8)[length:2 * length], **every)]), timeout=PATIENCE_S)
            for session, length in zip(sessions, LENGTHS)]
        for call, (logits, hidden, _), session in zip(calls, alone, sessions):
            item = call.result().sequences[0]
            self.assertEqual((item.logits.data, item.hidden_states.data), (logits, hidden))
            self.client.delete(session)

    def test_greedy_is_the_same_through_step_and_generate(self):
        expected = ids_of(self.client.generate_tokens(TEXT[:70], max_new_tokens=12))
        sessions = [self.client.create() for _ in range(20)]
        reply = self.client.prefill(*(sequence(session, TEXT[:70], next_token=True)
                                      for session in sessions))
        for token in expected:
            self.assertEqual({item.next_token.id for item in reply.sequences}, {token})
            reply = self.client.step(*(sequence(session, [token], next_token=True)
                                       for session in sessions))
        for session in sessions:
            self.client.delete(session)
