"""The server when something runs out: file descriptors, threads of the HTTP endpoint, memory."""

import os
import socket
import subprocess

from support import MODEL, PATIENCE_S, PROMPT, Client, Server, TestCase, collect, eventually


class FilesTest(TestCase):
    def test_running_out_of_files_is_survived(self):
        server = Server("--max-sessions=4", max_files=128)
        self.addCleanup(server.stop)
        host, port = server.address.split(":")
        running = server.client.generate(PROMPT, max_new_tokens=2_000, ignore_eos=True)
        next(running)
        silent = [socket.create_connection((host, int(port)), timeout=PATIENCE_S)
                  for _ in range(200)]
        eventually(lambda: "cannot accept connections" in server.log(), "the log says so")
        late = Client(server.address)
        self.addCleanup(late.close)
        answer = late.model_later()
        # What is connected goes on, and the one that is not waits.
        self.assertEqual(collect(running)[1].usage.output_tokens, 2_000)
        self.assertFalse(answer.done())
        for connection in silent:
            connection.close()
        self.assertEqual(answer.result(timeout=PATIENCE_S).vocab_size, 260)
        eventually(lambda: "accepting connections again" in server.log(), "the log says so")
        server.terminate()
        self.assertEqual(server.wait(), 0, server.log())


class MemoryTest(TestCase):
    def test_more_sessions_than_memory_can_hold(self):
        with open("/proc/meminfo", encoding="ascii") as file:
            total_bytes = int(file.readline().split()[1]) * 1024
        state_bytes = 1_646_592
        sessions = total_bytes // state_bytes + 1
        self.assertLess(sessions, 1 << 20, "the flag's limit; take a larger model on this machine")
        done = subprocess.run(
            [os.environ["GDN_SERVER"], "--device=cpu", "--model", MODEL,
             "--listen=127.0.0.1:0", "--metrics-listen=off", f"--max-sessions={sessions}"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=False)
        self.assertEqual(done.returncode, 1, done.stderr)
        for part in (f"--max-sessions={sessions}", str(sessions + 1), str(state_bytes), "GiB"):
            self.assertIn(part, done.stderr.decode())
