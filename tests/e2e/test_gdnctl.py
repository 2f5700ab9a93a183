"""gdnctl against the real server."""

import json
import os
import re
import signal
import socket
import subprocess
import tempfile

from support import EXACT, PATIENCE_S, PROMPT, Server, TestCase, eventually


class GdnctlTest(TestCase):
    FLAGS = (*EXACT, "--max-sessions=4")

    def tearDown(self):
        super().tearDown()
        for session in self.client.list().sessions:
            self.assert_idle(session.session_id)
            self.client.delete(session.session_id)

    def gdnctl(self, *arguments, exit_code=0, stdin=b"", server=None):
        done = subprocess.run(
            [os.environ["GDNCTL"], *arguments], input=stdin, capture_output=True,
            timeout=PATIENCE_S, check=False,
            env={**os.environ, "GDN_SERVER": server or self.server.address})
        self.assertEqual(done.returncode, exit_code, done.stderr)
        self.stderr = done.stderr.decode()
        return done.stdout

    def json(self, *arguments, **options):
        return [json.loads(line)
                for line in self.gdnctl("--json", *arguments, **options).splitlines()]

    def test_model(self):
        self.assertIn(b"demo-gdn-7m", self.gdnctl("model"))
        model = self.json("model")[0]
        self.assertEqual((model["vocab_size"], model["byte_vocabulary"]), (260, True))

    def test_health(self):
        self.assertEqual(self.gdnctl("health"), b"SERVING\n")
        self.assertEqual(self.json("health", "--service", "gdn.v1.Inference"),
                         [{"status": "SERVING"}])
        self.gdnctl("health", "--service", "no.such.Service", exit_code=3)
        self.gdnctl("health", "--timeout", "1", exit_code=2, server="127.0.0.1:1")

    def test_generate(self):
        for prompt, stdin in (((PROMPT,), b""), (("-",), PROMPT), (("--file", "-"), PROMPT),
                              (("--ids", ",".join(map(str, PROMPT))), b"")):
            text = self.gdnctl("generate", "--max-new-tokens", "96", *prompt, stdin=stdin)
            self.assertEqual(text, self.continuation)

    def test_generate_json(self):
        lines = self.json("generate", "--max-new-tokens", "96", "--top-logprobs", "2", "--stats",
                          PROMPT)
        self.assertEqual("".join(line["text"] for line in lines).encode(), self.continuation)
        tokens = [token for line in lines for token in line["tokens"]]
        self.assertEqual(bytes(token["id"] for token in tokens), self.continuation)
        for token in tokens:
            self.assertEqual(token["top_logprobs"][0]["id"], token["id"])
        self.assertEqual(lines[-1]["finish_reason"], "length")
        self.assertEqual(json.loads(self.stderr)["stats"]["tokens"], 96)

    def test_stats(self):
        self.gdnctl("generate", "--stats", "--max-new-tokens", "10", PROMPT)
        self.assertRegex(self.stderr, r"^10 tokens in \S+ s: first token after \S+ ms, "
                                      r"then \S+ tokens/s\n$")

    def test_seed(self):
        flags = ("generate", "--temperature", "1", "--max-new-tokens", "40", PROMPT)
        first = self.json(*flags)
        again = self.gdnctl(*flags, "--seed", first[0]["seed"])
        ids = bytes(token["id"] for line in first for token in line["tokens"] if token["id"] < 256)
        self.assertEqual(again, ids)

    def test_session_prefill_step_fork(self):
        session = self.gdnctl("session", "create").decode().strip()
        out = self.gdnctl("prefill", "--session", session, "--next-token", PROMPT).decode()
        self.assertRegex(out, r"position +25\n")
        self.assertRegex(out, r"next +71 'G'")
        fork = self.gdnctl("session", "fork", session).decode().strip()
        self.assertEqual({entry["session_id"] for entry in self.json("session", "list")},
                         {session, fork})
        step = self.json("step", "--session", fork, "--expected-position", "25", "--next-token",
                         "G")[0]
        self.assertEqual((step["position"], step["next_token"]["id"]), (26, self.continuation[1]))
        text = self.gdnctl("generate", "--session", session, "--max-new-tokens", "9", "G")
        self.assertEqual(text, self.continuation[1:10])
        self.assertEqual(self.json("session", "get", session)[0]["position"], 35)
        self.gdnctl("step", "--session", session, "--expected-position", "3", "x", exit_code=3)
        self.assertIn("--expected-position 35", self.stderr)
        self.gdnctl("session", "delete", session, fork)
        self.assertEqual(self.json("session", "list"), [])

    def test_hidden_states_through_files(self):
        with tempfile.TemporaryDirectory() as folder:
            rows = os.path.join(folder, "rows.f32")
            halves = [Server(*EXACT, f"--layers={layers}") for layers in ("0:3", "3:6")]
            for half in halves:
                self.addCleanup(half.stop)
            lower, upper = (half.address for half in halves)
            session = self.gdnctl("session", "create", server=lower).decode().strip()
            self.gdnctl("prefill", "--session", session, "--save-hidden", rows, PROMPT,
                        server=lower)
            self.assertEqual(os.path.getsize(rows), len(PROMPT) * 256 * 4)
            session = self.gdnctl("session", "create", server=upper).decode().strip()
            out = self.json("prefill", "--session", session, "--hidden", rows, "--next-token",
                            server=upper)
            self.assertEqual(out[0]["next_token"]["id"], self.continuation[0])

    def test_errors(self):
        self.gdnctl("session", "get", "no-such", exit_code=3)
        self.assertIn("no-such", self.stderr)
        self.gdnctl("generate", "--temperature", "-1", "x", exit_code=4)
        self.assertIn("sampling.temperature", self.stderr)
        self.gdnctl("generate", "--max-new-tokens", "0", "x", exit_code=4)
        self.gdnctl("generate", "--ids", "260", "x", exit_code=1)
        self.gdnctl("generate", "--ids", "260", exit_code=4)
        for _ in range(4):
            self.gdnctl("session", "create")
        self.gdnctl("session", "create", exit_code=5)
        self.assertRegex(self.stderr, r"Try again in \d+ ms")
        self.gdnctl("--server", "127.0.0.1:1", "--connect-timeout", "0.1", "model", exit_code=2)

    def test_a_server_that_comes_up_late(self):
        with socket.socket() as early:
            early.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            early.bind(("127.0.0.1", 0))
            early.listen()
            address = f"127.0.0.1:{early.getsockname()[1]}"
            child = subprocess.Popen(
                [os.environ["GDNCTL"], "--server", address, "--connect-timeout", str(PATIENCE_S),
                 "generate", "--max-new-tokens", "10", PROMPT],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self.addCleanup(child.kill)
            early.settimeout(PATIENCE_S)
            early.accept()[0].close()  # It has tried, and nobody answered.
        server = Server(*EXACT, listen=address)
        self.addCleanup(server.stop)
        out, errors = child.communicate(timeout=PATIENCE_S)
        self.assertEqual((child.returncode, out), (0, self.continuation[:10]), errors)

    def test_interrupt_cancels_the_stream(self):
        session = self.client.create()
        child = subprocess.Popen(
            [os.environ["GDNCTL"], "--server", self.server.address, "generate", "--session",
             session, "--max-new-tokens", "1000000", "--ignore-eos", PROMPT],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            self.assertEqual(child.stdout.read(10), self.continuation[:10])
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=PATIENCE_S)
        finally:
            child.kill()
        self.assertEqual(child.returncode, 130)
        self.assertTrue(re.search(b"interrupted", errors), errors)
        eventually(lambda: not self.client.get(session).in_use, "the slot is free")
