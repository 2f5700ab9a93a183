"""A rolling restart as a stateful set does it: three servers, from the last to the first, under streams that clients
balance over them; and one that has clients which keep it from finishing."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time

from support import (PATIENCE_S, PROMPT, SOURCE, Client, Server, TestCase, collect, eventually,
                     generate_request, health_pb2, inference_pb2_grpc, sequence, step_request)

import grpc

DRAIN_TIMEOUT_S = 20
# The transport's second for last statuses, and a busy machine.
EXIT_MARGIN_S = 10

# docs/operations.md gives clients the same.
SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": ""},
    "methodConfig": [{"name": [{}], "retryPolicy": {
        "maxAttempts": 5, "initialBackoff": "0.05s", "maxBackoff": "1s", "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"]}}]}


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Streams:
    """Threads that stream one call after another through one balanced channel."""

    TOKENS = 300

    def __init__(self, ports, threads):
        target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        self.channel = grpc.insecure_channel(target, options=[
            ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
            ("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)])
        self._stub = inference_pb2_grpc.InferenceStub(self.channel)
        self._stop = threading.Event()
        self.errors = []
        self.ended = []  # When each stream began and ended.
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self):
        while not self._stop.is_set():
            begin = time.monotonic()
            try:
                tokens, last = collect(self._stub.Generate(
                    generate_request(PROMPT, max_new_tokens=self.TOKENS, ignore_eos=True),
                    timeout=PATIENCE_S))
                if len(tokens) != self.TOKENS or last.usage.output_tokens != self.TOKENS:
                    self.errors.append(f"{len(tokens)} tokens")
            except (grpc.RpcError, AssertionError) as error:
                self.errors.append(repr(error))
            self.ended.append((begin, time.monotonic()))

    def stop(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.channel.close()


class RollingRestartTest(TestCase):
    def start(self, port):
        server = Server(f"--drain-timeout-s={DRAIN_TIMEOUT_S}", "--cpu-threads=1",
                        "--log-requests=all", listen=f"127.0.0.1:{port}")
        self.addCleanup(server.stop)
        return server

    def stop_in_time(self, server, deadline_s):
        """SIGTERM; the exit code must be 0, and the end within the deadline."""
        begin = time.monotonic()
        server.terminate()
        self.assertEqual(server.wait(), 0, server.log())
        took = time.monotonic() - begin
        self.assertLess(took, deadline_s + EXIT_MARGIN_S, server.log())
        return begin, begin + took

    def test_no_stream_notices(self):
        ports = free_ports(3)
        servers = [self.start(port) for port in ports]
        streams = Streams(ports, threads=6)
        try:
            eventually(lambda: all("rpc=Generate code=OK" in server.log() for server in servers),
                       "the clients use every server")
            for ordinal in (2, 1, 0):
                running = servers[ordinal].log().count("rpc=Generate")
                begin, end = self.stop_in_time(servers[ordinal], DRAIN_TIMEOUT_S)
                # What ran there has ended there, and well.
                self.assertNotIn("ended", servers[ordinal].log())
                self.assertGreaterEqual(servers[ordinal].log().count("rpc=Generate"), running)
                # New streams began elsewhere before it was back.
                eventually(lambda: any(begin < first and last > end for first, last in
                                       streams.ended), "streams go on without it")
                servers[ordinal] = self.start(ports[ordinal])
                eventually(lambda: "rpc=Generate code=OK" in servers[ordinal].log(),
                           "the clients have found it again")
        finally:
            streams.stop()
        self.assertEqual(streams.errors, [])
        self.assertGreater(len(streams.ended), 12)


class DocumentationTest(TestCase):
    def test_it_gives_clients_the_service_config_of_this_test(self):
        with open(os.path.join(SOURCE, "docs/operations.md"), encoding="utf-8") as file:
            (text,) = re.findall(r"^service config: (.*?)^```", file.read(), re.M | re.S)
        self.assertEqual(json.loads(text), SERVICE_CONFIG)


class ObstinateClientsTest(TestCase):
    """The drain keeps its deadline, whatever a client does or leaves undone."""

    DRAIN_S = 3

    def test_drain_in_time(self):
        server = Server(f"--drain-timeout-s={self.DRAIN_S}", "--stream-buffer-tokens=16",
                        metrics=True)
        self.addCleanup(server.stop)
        client = server.client
        # It reads nothing: a small window, and more than all buffers hold.
        deaf = Client(server.address, [("grpc.http2.bdp_probe", 0),
                                       ("grpc.http2.lookahead_bytes", 1024)])
        self.addCleanup(deaf.close)
        unread = deaf.generate(PROMPT, max_new_tokens=100_000, ignore_eos=True, return_logits=True)
        eventually(lambda: server.metrics().value("gdn_blocked_streams") == 1, "it is blocked")
        # It stands still in the middle of its stream.
        script = ("import sys; from support import Client, PROMPT\n"
                  "for message in Client(sys.argv[1]).generate(PROMPT, max_new_tokens=1000000,\n"
                  "                                            ignore_eos=True):\n"
                  "    print('.', flush=True)\n")
        stuck = subprocess.Popen([sys.executable, "-B", "-c", script, server.address],
                                 stdout=subprocess.PIPE)
        self.addCleanup(stuck.stdout.close)
        self.addCleanup(stuck.wait)
        self.addCleanup(stuck.kill)
        self.assertEqual(stuck.stdout.readline(), b".\n")
        stuck.send_signal(signal.SIGSTOP)
        # It has a step stream open and sends nothing; and one says not a word of HTTP.
        requests = queue.SimpleQueue()
        self.addCleanup(requests.put, None)
        idle = client.inference.StepStream(iter(requests.get, None), timeout=PATIENCE_S)
        requests.put(step_request(sequence(client.create(), b"x")))
        next(idle)
        host, port = server.address.split(":")
        silent = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.addCleanup(silent.close)
        # And one is all right, with a stream that fits.
        watch = client.health.Watch(health_pb2.HealthCheckRequest(service="liveness"),
                                    timeout=PATIENCE_S)
        self.assertEqual(next(watch).status, health_pb2.HealthCheckResponse.SERVING)
        good = client.generate(PROMPT, max_new_tokens=200, ignore_eos=True)
        next(good)

        begin = time.monotonic()
        server.terminate()
        eventually(lambda: server.metrics().value("gdn_drain_seconds") > 0, "metrics tell of it")
        self.assertEqual(server.metrics().value("gdn_ready"), 0)
        alive = client.health.Check(health_pb2.HealthCheckRequest(service="liveness"),
                                    timeout=PATIENCE_S)
        self.assertEqual(alive.status, health_pb2.HealthCheckResponse.SERVING)
        self.assertEqual(collect(good)[1].usage.output_tokens, 200)
        self.assertEqual(server.wait(), 0, server.log())
        took = time.monotonic() - begin
        self.assertGreater(took, self.DRAIN_S - 0.5, "two clients never finish")
        self.assertLess(took, self.DRAIN_S + EXIT_MARGIN_S)
        self.assertIn("at the drain timeout", server.log())
        with self.refused(grpc.StatusCode.UNAVAILABLE):
            for _ in unread:
                pass
