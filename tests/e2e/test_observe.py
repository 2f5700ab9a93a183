"""What an operator sees: health, reflection, metrics."""

from support import (PATIENCE_S, PROMPT, TestCase, collect, health_pb2, reflection_pb2, sequence)

import grpc
from google.protobuf import descriptor_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
SERVICES = ("gdn.v1.Inference", "gdn.v1.Sessions")


class HealthTest(TestCase):
    FLAGS = ()

    def test_check(self):
        for service in ("", *SERVICES):
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

    def test_a_scrape_is_well_formed(self):
        metrics = self.server.metrics()
        for name, _ in metrics.samples:
            family = metrics.family(name)
            self.assertIn(family, metrics.types, name)
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
