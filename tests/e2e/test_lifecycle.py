"""The server as a process: how it starts, refuses to start, and stops."""

import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile

from support import (MODEL, PATIENCE_S, PROMPT, Client, Server, TestCase, collect, health_pb2,
                     ids_of, sequence, step_request)

import grpc


class StartTest(TestCase):
    def run_server(self, *flags):
        """Runs it to its end: exit status and standard error."""
        done = subprocess.run([os.environ["GDN_SERVER"], *flags], stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=PATIENCE_S, check=False,
                              env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"})  # No GPU.
        return done.returncode, done.stderr.decode()

    def assert_refuses(self, flags, *parts):
        code, text = self.run_server(*flags)
        self.assertGreater(code, 0, text)  # Not a signal.
        for part in parts:
            self.assertIn(part, text)
        self.assertNotIn("terminate called", text)

    def with_model(self, *flags, model=MODEL):
        return ["--model", model, "--listen", "127.0.0.1:0", "--metrics-listen", "off", *flags]

    def test_bad_flags(self):
        self.assert_refuses(["--no-such-flag"], "--no-such-flag")
        self.assert_refuses([], "--model")
        for flag, value in (("--layers", "3:1"), ("--layers", "x"), ("--precision", "int8"),
                            ("--max-sessions", "-1"), ("--max-sessions", "many"),
                            ("--device", "cuda"), ("--device", "tpu"), ("--listen", "nowhere"),
                            ("--listen", "127.0.0.1:99999"), ("--random-weights", "-1"),
                            ("--drain-timeout-s", "-1")):
            self.assert_refuses(self.with_model(f"{flag}={value}"), flag)

    def test_cuda_without_a_gpu_says_so_in_one_line(self):
        code, text = self.run_server(*self.with_model("--device=cuda"))
        self.assertEqual(code, 1, text)
        refusals = [line for line in text.splitlines() if "configuration:" not in line]
        self.assertEqual(len(refusals), 1, text)
        self.assertRegex(refusals[0],
                         r"cannot start: --device=cuda: .*CUDA.*; use --device=cpu or --device=auto$")

    def test_auto_without_a_gpu_runs_on_the_cpu_and_says_so(self):
        server = Server("--device=auto", hide_gpus=True)
        self.addCleanup(server.stop)
        self.assertEqual(len(server.client.generate_tokens(PROMPT, max_new_tokens=5)), 5)
        self.assertRegex(server.log(), r"--device=auto: running on the CPU: \S.*CUDA")

    def test_conflicting_flags_are_both_named(self):
        self.assert_refuses(self.with_model("--prefill-token-budget=64",
                                            "--prefill-chunk-tokens=128"),
                            "--prefill-token-budget", "--prefill-chunk-tokens")
        self.assert_refuses(["--model", MODEL, "--listen=127.0.0.1:50123",
                             "--metrics-listen=127.0.0.1:50123"], "--listen", "--metrics-listen")

    def test_layers_that_the_model_does_not_have(self):
        self.assert_refuses(self.with_model("--layers=3:7"), "--layers=3:7", "<= 6")

    def test_missing_model(self):
        self.assert_refuses(self.with_model(model="/no/such/model"), "--model=/no/such/model",
                            "config.json")

    def test_broken_model_files(self):
        with tempfile.TemporaryDirectory() as folder:
            model = os.path.join(folder, "model")
            shutil.copytree(MODEL, model)
            weights = os.path.join(model, "model.safetensors")
            config = os.path.join(model, "config.json")
            os.truncate(weights, os.path.getsize(weights) - 1000)
            self.assert_refuses(self.with_model(model=model), "model.safetensors")
            os.truncate(weights, 5)
            self.assert_refuses(self.with_model(model=model), "model.safetensors")
            with open(weights, "wb") as file:
                file.write(b"\xff" * 8 + b"{}")  # A header of 2^64 - 1 bytes.
            self.assert_refuses(self.with_model(model=model), "model.safetensors")
            os.remove(weights)
            self.assert_refuses(self.with_model(model=model), "safetensors")
            with open(config, "w", encoding="ascii") as file:
                file.write('{"architectures": [')
            self.assert_refuses(self.with_model(model=model), "config.json")
            os.remove(config)
            self.assert_refuses(self.with_model(model=model), "config.json")

    def test_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            self.assert_refuses(["--model", MODEL, "--listen", address, "--metrics-listen=off"],
                                address, "--listen")
            self.assert_refuses(["--model", MODEL, "--listen=127.0.0.1:0", "--metrics-listen",
                                 address], address, "--metrics-listen")

    def test_port_file_that_cannot_be_written(self):
        self.assert_refuses(self.with_model("--port-file=/no/such/folder/port"), "--port-file")

    def test_the_log_says_where_metrics_are(self):
        for metrics, words in ((False, "metrics off"), (True, "metrics port ")):
            server = Server(metrics=metrics)
            self.addCleanup(server.stop)
            self.assertIn(words, server.log())

    def test_help_and_version(self):
        for flag, word in (("--help", "--model"), ("--version", "gdn_server")):
            done = subprocess.run([os.environ["GDN_SERVER"], flag], capture_output=True,
                                  timeout=PATIENCE_S, check=False)
            self.assertEqual(done.returncode, 0)
            self.assertIn(word, done.stdout.decode())

    def test_random_weights_need_no_weight_file(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(os.path.join(MODEL, "config.json"), folder)
            server = Server("--random-weights=7", model=folder)
            self.addCleanup(server.stop)
            self.assertEqual(len(server.client.generate_tokens(PROMPT, max_new_tokens=5)), 5)


class StopTest(TestCase):
    def test_drain(self):
        server = Server("--drain-timeout-s=60")
        self.addCleanup(server.stop)
        client = server.client
        count = 2_000
        expected = ids_of(client.generate_tokens(PROMPT, max_new_tokens=40, ignore_eos=True))
        session = client.create()
        watch = client.health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        self.assertEqual(next(watch).status, health_pb2.HealthCheckResponse.SERVING)
        running = client.generate(PROMPT, max_new_tokens=count, ignore_eos=True)
        ids = ids_of(next(running).tokens)

        server.terminate()
        # The watch tells when the drain has begun.
        self.assertEqual(next(watch).status, health_pb2.HealthCheckResponse.NOT_SERVING)
        for call in (lambda: collect(client.generate(PROMPT)),
                     lambda: client.step(sequence(session, b"x")),
                     lambda: client.prefill(sequence(session, b"x")),
                     lambda: client.create(),
                     lambda: list(client.inference.StepStream(
                         iter([step_request(sequence(session, b"x"))]), timeout=PATIENCE_S))):
            with self.refused(grpc.StatusCode.UNAVAILABLE):
                call()
        watch.cancel()
        tokens, last = collect(running)
        ids += ids_of(tokens)
        self.assertEqual(len(ids), count, "the running stream ends as if nothing had happened")
        self.assertEqual(ids[:40], expected)
        self.assertEqual(last.usage.output_tokens, count)
        self.assertEqual(server.wait(), 0, server.log())

    def test_drain_timeout_ends_what_still_runs(self):
        server = Server("--drain-timeout-s=0")
        self.addCleanup(server.stop)
        running = server.client.generate(PROMPT, max_new_tokens=1_000_000, ignore_eos=True)
        next(running)
        server.terminate()
        with self.refused(grpc.StatusCode.UNAVAILABLE):
            for _ in running:
                pass
        self.assertEqual(server.wait(), 0, server.log())

    def test_idle_stop_and_sigint(self):
        server = Server()
        self.addCleanup(server.stop)
        idle = Client(server.address)
        self.addCleanup(idle.close)
        idle.model()
        # A stream with nothing to do does not hold the server up.
        requests = queue.SimpleQueue()
        self.addCleanup(requests.put, None)
        session = idle.create()
        stream = idle.inference.StepStream(iter(requests.get, None), timeout=PATIENCE_S)
        requests.put(step_request(sequence(session, b"x")))
        next(stream)
        server.process.send_signal(signal.SIGINT)
        with self.refused(grpc.StatusCode.UNAVAILABLE):
            next(stream)
        self.assertEqual(server.wait(), 0, server.log())
