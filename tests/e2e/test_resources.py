"""The server when something runs out: file descriptors, threads of the HTTP endpoint, memory."""

import socket

from support import PATIENCE_S, PROMPT, Client, Server, TestCase, collect, eventually


class FilesTest(TestCase):
    def test_running_out_of_files_is_survived(self):
        server = Server("--max-sessions=4", max_files=64)
        self.addCleanup(server.stop)
        host, port = server.address.split(":")
        running = server.client.generate(PROMPT, max_new_tokens=2_000, ignore_eos=True)
        next(running)
        silent = [socket.create_connection((host, int(port)), timeout=PATIENCE_S)
                  for _ in range(100)]
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
