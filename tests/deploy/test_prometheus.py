"""A real Prometheus scrapes a real server under load; every expression of the dashboard, the rules, the
autoscaler's adapter and the docs must run, and have data."""

import http.server
import json
import math
import os
import re
import socket
import subprocess
import tempfile
import threading
import unittest
import urllib.parse
import urllib.request

import grpc
import yaml

from support import PROMPT, Client, Server, collect, eventually, sequence
from tools import DASHBOARD, DEPLOY, RULES, SOURCE, load_file, rule_groups, unpacked_program

# Ratios of what only a GPU has: the series are there, with nothing to divide by.
NO_DATA_ON_THE_CPU = ("gdn_graph_replays_total",)
PROFILED = ("GR_ENGINE_ACTIVE", "PIPE_TENSOR_ACTIVE", "DRAM_ACTIVE")
# In the format of NVIDIA's DCGM exporter, of what its dcp-metrics-included.csv switches on.
DCGM = "".join(f'{name}{{gpu="0",UUID="GPU-0",Hostname="host"}} {value}\n' for name, value in (
    *((f"DCGM_FI_PROF_{name}", 0.5) for name in PROFILED),
    ("DCGM_FI_DEV_XID_ERRORS", 0), ("DCGM_FI_DEV_FB_USED", 1024), ("DCGM_FI_DEV_POWER_USAGE", 90),
    ("DCGM_FI_DEV_SM_CLOCK", 1980), ("DCGM_FI_DEV_GPU_TEMP", 40)))
SELECTOR = re.compile(r'(?<![\w:."$=~])((?:gdn_|job:|instance:|DCGM_|process_|up\b)[\w:]*)(\{[^}]*\})?')


class Exporter(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(DCGM.encode())

    def log_message(self, *_):
        pass


class Load:
    """Calls of every kind until it is stopped, and one stream that never ends."""

    def __init__(self, address):
        self._address = address
        self._stop = threading.Event()
        self._client = Client(address)
        self._stream = self._client.generate(PROMPT, timeout=None, max_new_tokens=1_000_000,
                                             ignore_eos=True)
        next(self._stream)
        self._threads = [threading.Thread(target=self._read)]
        self._threads += [threading.Thread(target=self._run, args=(i,)) for i in range(6)]
        for thread in self._threads:
            thread.start()

    def _read(self):
        try:
            for _ in self._stream:
                pass
        except grpc.RpcError:  # Cancelled.
            pass

    def _run(self, number):
        client = Client(self._address)
        while not self._stop.is_set():
            try:
                collect(client.generate(PROMPT * (1 + number), max_new_tokens=40, ignore_eos=True))
                session = client.create()
                client.prefill(sequence(session, PROMPT * 20))
                client.step(sequence(session, b"x"))
                client.delete(session)
                given_up = client.generate(PROMPT, max_new_tokens=100_000, ignore_eos=True)
                next(given_up)
                given_up.cancel()
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
        client.close()

    def stop(self):
        self._stop.set()
        self._stream.cancel()
        for thread in self._threads:
            thread.join()
        self._client.close()


class PrometheusTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        prometheus = unpacked_program("prometheus", "prometheus")
        cls.server = Server("--max-sessions=8", "--max-queued-calls=5", metrics=True)
        cls.addClassCleanup(cls.server.stop)
        exporter = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
        threading.Thread(target=exporter.serve_forever, daemon=True).start()
        cls.addClassCleanup(exporter.shutdown)
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": RULES,
            "scrape_configs": [
                {"job_name": "gdn", "static_configs": [
                    {"targets": [f"127.0.0.1:{cls.server.metrics_port}"],
                     "labels": {"namespace": "gdn", "pod": "gdn-0"}}]},
                {"job_name": "dcgm", "static_configs": [
                    {"targets": [f"127.0.0.1:{exporter.server_port}"]}]}]}
        path = os.path.join(folder.name, "prometheus.yml")
        with open(path, "w", encoding="utf-8") as file:
            yaml.safe_dump(config, file)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            cls.address = f"127.0.0.1:{free.getsockname()[1]}"
        cls.log = open(os.path.join(folder.name, "log"), "w+b")
        cls.addClassCleanup(cls.log.close)
        process = subprocess.Popen(
            [prometheus, f"--config.file={path}", f"--web.listen-address={cls.address}",
             f"--storage.tsdb.path={folder.name}/data", "--log.level=warn"],
            stdout=cls.log, stderr=cls.log, stdin=subprocess.DEVNULL)

        def end():
            process.terminate()
            process.wait()
        cls.addClassCleanup(end)
        cls.addClassCleanup(Load(cls.server.address).stop)
        # Rates of recorded rates: several scrapes and evaluations.
        eventually(lambda: cls.ready() and cls.scrapes() >= 10, "Prometheus has ten scrapes")

    @classmethod
    def ask(cls, path, **parameters):
        url = f"http://{cls.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            return json.load(error)

    @classmethod
    def query(cls, expression):
        """[(labels, value)], or the error."""
        reply = cls.ask("query", query=expression)
        if reply["status"] != "success" or reply.get("warnings"):
            return reply.get("error") or str(reply["warnings"])
        result = reply["data"]["result"]
        if reply["data"]["resultType"] == "scalar":
            return [({}, float(result[1]))]
        return [(item["metric"], float(item["value"][1])) for item in result]

    @classmethod
    def ready(cls):
        try:
            return cls.ask("query", query="1")["status"] == "success"
        except (OSError, json.JSONDecodeError):  # Not listening, or "Service Unavailable".
            return False

    @classmethod
    def scrapes(cls):
        found = cls.query('count_over_time(up{job="gdn"}[10m])')
        return found[0][1] if found else 0

    def check_data(self, expression):
        """What is wrong with the expression, or nothing."""
        found = self.query(expression)
        if isinstance(found, str):
            return [f"{expression}: {found}"]
        if any(name in expression for name in NO_DATA_ON_THE_CPU):
            return []
        if not any(math.isfinite(value) for _, value in found):
            return [f"{expression}: no data"]
        return []

    def check_selectors(self, expression):
        """The same of every series it reads, for one that is to be empty as long as all is well."""
        problems = []
        if isinstance(error := self.query(expression), str):
            problems.append(f"{expression}: {error}")
        selectors = set(SELECTOR.findall(expression))
        self.assertTrue(selectors, expression)
        for name, labels in selectors:
            problems += self.check_data(f"count({name}{labels})")
        return problems

    def test_dashboard(self):
        with open(DASHBOARD, encoding="utf-8") as file:
            dashboard = json.load(file)
        targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
        self.assertGreater(len(targets), 50)
        problems = []
        for target in targets:
            expression = target["expr"]
            for variable in ("job", "instance"):
                expression = expression.replace(f"${variable}", ".*")
            self.assertNotIn("$", expression)
            found = self.check_data(expression)
            problems += found
            # A legend of labels that the result lacks would be blank.
            wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - {"le"}
            if not found:
                problems += [f"{expression}: no label {wanted - set(labels)}"
                             for labels, _ in self.query(expression) if wanted - set(labels)]
        for variable in dashboard["templating"]["list"][1:]:
            metric, label = re.fullmatch(r"label_values\((\w+).*, (\w+)\)",
                                         variable["query"]["query"]).groups()
            found = self.query(f"count by ({label}) ({metric})")
            self.assertTrue(found and all(labels.get(label) for labels, _ in found), variable)
        self.assertEqual(problems, [])

    def test_rules(self):
        problems = []
        for group in rule_groups():
            for rule in group["rules"]:
                if "record" in rule:
                    problems += self.check_data(rule["expr"]) + self.check_data(rule["record"])
                else:
                    problems += self.check_selectors(rule["expr"])
        self.assertEqual(problems, [])
        loaded = [rule for group in self.ask("rules")["data"]["groups"] for rule in group["rules"]]
        self.assertEqual(len(loaded), sum(len(group["rules"]) for group in rule_groups()))
        self.assertEqual([rule for rule in loaded if rule["health"] != "ok"], [])
        firing = [rule["name"] for rule in loaded if rule.get("state") == "firing"]
        self.assertEqual(set(firing) - {"GdnFirstTokenBurnFast", "GdnInterTokenBurnFast"}, set(),
                         "on a slow machine latency may alarm, and nothing else")

    def test_autoscaler(self):
        problems = []
        for rule in load_file(DEPLOY, "prometheus/adapter-values.yml")[0]["rules"]["custom"]:
            expression = rule["metricsQuery"].replace("<<.GroupBy>>", "pod")
            problems += self.check_data(expression.replace("<<.LabelMatchers>>", 'namespace="gdn"'))
            problems += self.check_data(rule["seriesQuery"])
        self.assertEqual(problems, [])

    def test_queries_of_the_docs(self):
        expressions = []
        for name in ("metrics.md", "operations.md"):
            with open(os.path.join(SOURCE, "docs", name), encoding="utf-8") as file:
                text = file.read()
            expressions += re.findall(r"`([^`\n]*\([^`\n]*gdn_[^`\n]*)`", text)
            for block in re.findall(r"```promql\n(.*?)```", text, re.S):
                expressions += block.strip().splitlines()
        self.assertGreater(len(expressions), 5)
        problems = []
        for expression in expressions:
            problems += self.check_selectors(expression)
        self.assertEqual(problems, [])
