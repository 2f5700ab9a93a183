"""What an operator sees: health, reflection, metrics."""

import json
import math
import os
import re

from support import (DEVICE, PATIENCE_S, PROMPT, SOURCE, Server, TestCase, collect, eventually,
                     health_pb2, inference_pb2, reflection_pb2, sequence)

import grpc
from google.protobuf import descriptor_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
SERVICES = ("gdn.v1.Inference", "gdn.v1.Sessions")


class HealthTest(TestCase):
    FLAGS = ()

    def test_check(self):
        for service in ("", "liveness", *SERVICES):
            reply = self.client.health.Check(health_pb2.HealthCheckRequest(service=service),
                                             timeout=PATIENCE_S)
            self.assertEqual(reply.status, SERVING, service)

    def test_check_of_an_unknown_service(self):
        with self.assertRaises(grpc.RpcError) as caught:
            self.client.health.Check(health_pb2.HealthCheckRequest(service="no.such.Service"),
                                     timeout=PATIENCE_S)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)

    def test_watch(self):
        for service, status in (("gdn.v1.Inference", SERVING),
                                ("no.such.Service",
                                 health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)):
            call = self.client.health.Watch(health_pb2.HealthCheckRequest(service=service),
                                            timeout=PATIENCE_S)
            self.assertEqual(next(call).status, status, service)
            call.cancel()


class ReflectionTest(TestCase):
    FLAGS = ()

    def ask(self, **request):
        replies = list(self.client.reflection.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(**request)]), timeout=PATIENCE_S))
        self.assertEqual(len(replies), 1)
        return replies[0]

    def test_lists_the_services(self):
        names = {service.name
                 for service in self.ask(list_services="").list_services_response.service}
        self.assertLessEqual({*SERVICES, "grpc.health.v1.Health",
                              "grpc.reflection.v1alpha.ServerReflection"}, names)

    def test_describes_a_service(self):
        files = self.ask(file_containing_symbol="gdn.v1.Inference").file_descriptor_response
        methods = {}
        for data in files.file_descriptor_proto:
            for service in descriptor_pb2.FileDescriptorProto.FromString(data).service:
                methods[service.name] = [method.name for method in service.method]
        self.assertEqual(methods["Inference"],
                         ["GetModel", "Prefill", "Step", "StepStream", "Generate"])

    def test_unknown_symbol(self):
        self.assertEqual(self.ask(file_containing_symbol="gdn.v1.Nothing").error_response.error_code,
                         grpc.StatusCode.NOT_FOUND.value[0])


class MetricsTest(TestCase):
    FLAGS = ("--max-sessions=8",)
    METRICS = True

    def test_the_documentation_is_of_this_page(self):
        """Names, types and labels, both ways."""
        self.server.metrics()  # The endpoint's own families appear with the first scrape.
        metrics = self.server.metrics()
        self.assertLessEqual(len(metrics.samples), 1500)
        served = {name: [kind, set()] for name, kind in metrics.types.items()}
        for name, labels in metrics.samples:
            served[metrics.family(name)][1] |= {key for key, _ in labels} - {"le", "quantile"}
        documented = {}
        with open(os.path.join(SOURCE, "docs/metrics.md"), encoding="utf-8") as file:
            for name, labels, kind in re.findall(r"^\| `(\w+)(?:\{([\w,]+)\})?` \| (\w+) \|",
                                                 file.read(), re.M):
                documented[name] = [kind, set(filter(None, labels.split(",")))]
        self.assertEqual(documented, served)

    def test_the_documentation_lists_the_ops(self):
        served = {dict(labels)["op"] for name, labels in self.server.metrics().samples
                  if name == "gdn_kernel_duration_seconds_count"}
        with open(os.path.join(SOURCE, "docs/metrics.md"), encoding="utf-8") as file:
            rows = dict(re.findall(r"^\| (CPU|GPU) \| (.*) \|$", file.read(), re.M))
        self.assertEqual(set(re.findall(r"`(\w+)`", rows["GPU" if DEVICE else "CPU"])), served)

    def test_every_started_call_has_one_outcome(self):
        before = self.server.metrics()
        collect(self.client.generate(PROMPT, max_new_tokens=3))
        given_up = [self.client.generate(PROMPT, max_new_tokens=100_000, ignore_eos=True)
                    for _ in range(5)]
        for call in given_up:
            next(call)
            call.cancel()
        with self.refused(grpc.StatusCode.DEADLINE_EXCEEDED):
            collect(self.client.generate(PROMPT, max_new_tokens=100_000, ignore_eos=True,
                                         timeout=2))  # Long enough for a first token.
        with self.refused(grpc.StatusCode.INVALID_ARGUMENT):
            collect(self.client.generate(PROMPT, max_new_tokens=-1))
        with self.refused(grpc.StatusCode.NOT_FOUND):
            self.client.step(sequence("no-such", b"x"))

        def moved(name, **labels):
            after = self.server.metrics()
            return sum(value - before.samples[key] for key, value in after.samples.items()
                       if key[0] == name and set(labels.items()) <= key[1])
        eventually(lambda: moved("gdn_requests_total", rpc="Generate") == 8, "all calls are over")
        self.assertEqual(moved("gdn_requests_started_total", rpc="Generate"), 8)
        self.assertEqual(moved("gdn_requests_started_total", rpc="Step"), 1)
        self.assertEqual(moved("gdn_requests_total", rpc="Step"), 1)
        self.assertEqual(moved("gdn_streams_started_total"), 7)
        eventually(lambda: moved("gdn_streams_finished_total") == 7, "all streams are over")
        self.assertEqual(moved("gdn_streams_finished_total", reason="cancelled"), 6)
        self.assertEqual(moved("gdn_time_to_first_token_seconds_count"), 7)

    def test_replies_say_what_the_histograms_hold(self):
        def sums():
            metrics = self.server.metrics()
            return [metrics.value(f"gdn_{name}_duration_seconds_{part}")
                    for part in ("sum", "count") for name in ("queue", "compute", "call")]
        session = self.client.create()
        for call in (lambda: self.client.prefill(sequence(session, PROMPT)).timings,
                     lambda: self.client.step(sequence(session, b"x")).timings,
                     lambda: collect(self.client.generate(PROMPT, max_new_tokens=9))[1].timings):
            before = sums()
            timings = call()
            told = [timings.queue_ns * 1e-9, timings.compute_ns * 1e-9, timings.total_ns * 1e-9]
            eventually(lambda: sums()[5] == before[5] + 1, "the call is over")
            for value, then, now in zip(told, before, sums()):
                self.assertGreater(value, 0)
                self.assertAlmostEqual(now - then, value, delta=1e-9 + 1e-6 * value)
            self.assertEqual([now - then for then, now in zip(before[3:], sums()[3:])], [1, 1, 1])
        self.client.delete(session)

    def test_a_scrape_is_well_formed(self):
        metrics = self.server.metrics()
        for (name, _), value in metrics.samples.items():
            family = metrics.family(name)
            self.assertIn(family, metrics.types, name)
            if name.startswith("gdn_"):
                self.assertTrue(math.isfinite(value), name)
            self.assertIn(family, metrics.help, name)
        for name, kind in metrics.types.items():
            if name.startswith("gdn_"):
                self.assertEqual(name.endswith("_total"), kind == "counter", name)

    def test_histograms_are_cumulative(self):
        self.client.generate_tokens(PROMPT, max_new_tokens=8)
        metrics = self.server.metrics()
        series = {}
        for (name, labels), value in metrics.samples.items():
            if name.endswith("_bucket"):
                rest = frozenset(pair for pair in labels if pair[0] != "le")
                series.setdefault((name[:-7], rest), []).append((float(dict(labels)["le"]), value))
        self.assertGreater(len(series), 10)
        for (name, labels), buckets in series.items():
            counts = [value for _, value in sorted(buckets)]
            self.assertEqual(counts, sorted(counts), name)
            self.assertEqual(counts[-1], metrics.samples[name + "_count", labels], name)

    def test_counters_move_with_what_they_count(self):
        before = self.server.metrics()
        collect(self.client.generate(PROMPT, max_new_tokens=11, ignore_eos=True))
        session = self.client.create()
        self.client.prefill(sequence(session, b"x" * 70))
        self.client.step(sequence(session, b"x"))
        with self.refused(grpc.StatusCode.NOT_FOUND):
            self.client.get("no-such")
        after = self.server.metrics()

        def moved(name, **labels):
            return after.value(name, **labels) - before.value(name, **labels)

        self.assertEqual(moved("gdn_requests_total", rpc="Generate", code="OK"), 1)
        self.assertEqual(moved("gdn_requests_total", rpc="Prefill", code="OK"), 1)
        self.assertEqual(moved("gdn_requests_total", rpc="Step", code="OK"), 1)
        self.assertEqual(moved("gdn_requests_total", rpc="GetSession", code="NOT_FOUND"), 1)
        self.assertEqual(moved("gdn_streams_finished_total", reason="length"), 1)
        self.assertEqual(moved("gdn_time_to_first_token_seconds_count"), 1)
        self.assertEqual(moved("gdn_inter_token_latency_seconds_count"), 10)
        self.assertEqual(moved("gdn_tokens_total", phase="prefill")
                         + moved("gdn_tokens_total", phase="decode"),
                         len(PROMPT) + 10 + 70 + 1)
        self.assertEqual(after.value("gdn_sessions"), 1)
        self.assertGreater(after.total("gdn_kernel_duration_seconds_count"),
                           before.total("gdn_kernel_duration_seconds_count"))
        self.client.delete(session)
        self.assertEqual(self.server.metrics().value("gdn_sessions"), 0)

    def test_rejections(self):
        before = self.server.metrics().value("gdn_rejections_total", reason="no_slot")
        sessions = [self.client.create() for _ in range(8)]
        with self.refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
            self.client.create()
        self.assertEqual(self.server.metrics().value("gdn_rejections_total", reason="no_slot"),
                         before + 1)
        for session in sessions:
            self.client.delete(session)


class LogTest(TestCase):
    """The log of requests; what is in it is read from the process's standard error."""

    def server_with(self, *flags):
        server = Server(*flags)
        self.addCleanup(server.stop)
        return server

    def call(self, server, request_id):
        call = server.client.inference.GetModel.with_call(
            inference_pb2.GetModelRequest(), timeout=PATIENCE_S,
            metadata=(("x-request-id", request_id),))[1]
        return dict(call.trailing_metadata())["x-request-id"]

    def test_json_lines_of_all_requests(self):
        server = self.server_with("--log-format=json", "--log-level=debug", "--log-requests=all")
        self.assertEqual(self.call(server, "mine-1"), "mine-1")
        self.assertRegex(self.call(server, 'not "fit"'), "^[0-9a-f]{16}$")
        prompt = b"a secret of mine"
        _, last = collect(server.client.generate(prompt, max_new_tokens=4, ignore_eos=True))
        lines = []

        def over():
            lines[:] = [json.loads(line) for line in server.log().splitlines()]
            return any(line.get("rpc") == "Generate" and line["message"] == "request ends"
                       for line in lines)
        eventually(over, "the call's last line is there")
        of_requests = [line for line in lines if line["message"].startswith("request ")]
        self.assertTrue(all(line["request_id"] for line in of_requests))
        mine = [line for line in of_requests if line["request_id"] == "mine-1"]
        self.assertEqual([line["message"] for line in mine], ["request begins", "request ends"])
        end = next(line for line in of_requests
                   if line["rpc"] == "Generate" and line["message"] == "request ends")
        self.assertEqual((end["code"], end["input_tokens"], end["output_tokens"]),
                         ("OK", len(prompt), 4))
        self.assertEqual((end["queue_ns"], end["compute_ns"], end["total_ns"]),
                         (last.timings.queue_ns, last.timings.compute_ns, last.timings.total_ns))
        self.assertNotIn("secret", server.log())
        self.assertNotIn(" ".join(map(str, prompt)), server.log())

    def test_text_lines_with_prompts_where_asked_for(self):
        server = self.server_with("--log-requests=all", "--log-prompts")
        collect(server.client.generate(b"abc", max_new_tokens=2))
        eventually(lambda: 'input_ids="97 98 99"' in server.log(), "the prompt's ids are there")
        self.assertRegex(server.log(), r"info request ends request_id=[0-9a-f]{16} rpc=Generate code=OK ")

    def test_by_default_only_failures_of_the_server_are_logged(self):
        server = self.server_with()
        server.client.generate_tokens(PROMPT, max_new_tokens=2)
        with self.refused(grpc.StatusCode.NOT_FOUND):
            server.client.get("no-such")
        server.terminate()
        self.assertEqual(server.wait(), 0)
        self.assertNotIn("request ", server.log())
