"""The Kubernetes overlays: rendered by kubectl, held against the Kubernetes schemas of the current minor version
and the two before it, and against what a stateful, draining server needs of them."""

import copy
import functools
import json
import os
import re
import subprocess
import unittest

import jsonschema

from tools import DEPLOY, load_all, pypi_tools, rule_groups

VERSIONS = ("1.37", "1.36", "1.35")
OVERLAYS = ("cpu", "gpu", "monitoring")
# Of the Prometheus operator, not of Kubernetes.
CUSTOM = {"PodMonitor": {"jobLabel", "selector", "podMetricsEndpoints"}, "PrometheusRule": {"groups"}}


@functools.lru_cache(None)
def render(overlay):
    done = subprocess.run(
        [os.path.join(pypi_tools(), "bin/kubectl"), "kustomize",
         os.path.join(DEPLOY, "kubernetes/overlays", overlay)],
        capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0 or done.stderr:
        raise AssertionError(f"{overlay}: {done.stderr}")
    return load_all(done.stdout)


@functools.lru_cache(None)
def definitions(version):
    """Every type of a version, by name; the strict ones refuse fields they do not know."""
    with open(os.path.join(pypi_tools(), "kubernetes_validate/kubernetes-json-schema",
                           f"v{version}.0-local-strict", "_definitions.json"),
              encoding="utf-8") as file:
        return json.load(file)["$defs"]


def validate(document, version):
    group, _, api = document["apiVersion"].rpartition("/")
    kind = {"group": group, "version": api, "kind": document["kind"]}
    names = [name for name, schema in definitions(version).items()
             if kind in schema.get("x-kubernetes-group-version-kind", ())]
    if len(names) != 1:
        return [f"{kind} is not of Kubernetes {version}"]
    schema = {"$ref": f"#/$defs/{names[0]}", "$defs": definitions(version)}
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:300]}"
            for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]


def one(overlay, kind):
    found = [document for document in render(overlay) if document["kind"] == kind]
    assert len(found) == 1, (overlay, kind, len(found))
    return found[0]


class SchemaTest(unittest.TestCase):
    def test_every_object_of_every_overlay_is_valid(self):
        checked = 0
        for overlay in OVERLAYS:
            for document in render(overlay):
                if document["kind"] in CUSTOM:
                    self.assertEqual(set(document["spec"]), CUSTOM[document["kind"]])
                    continue
                for version in VERSIONS:
                    self.assertEqual(validate(document, version), [],
                                     f"{overlay}: {document['kind']} in Kubernetes {version}")
                    checked += 1
        self.assertGreater(checked, 3 * 16)

    def test_the_pod_that_fills_the_models_volume(self):
        with open(os.path.join(DEPLOY, "kubernetes/fill-model.yaml"), encoding="utf-8") as file:
            pod, = load_all(file.read())
        for version in VERSIONS:
            self.assertEqual(validate(pod, version), [], f"in Kubernetes {version}")
        server = one("gpu", "StatefulSet")["spec"]["template"]["spec"]
        claim = one("gpu", "PersistentVolumeClaim")
        self.assertEqual(pod["metadata"]["namespace"], claim["metadata"]["namespace"])
        spec = pod["spec"]
        volume = spec["volumes"][0]["persistentVolumeClaim"]
        self.assertEqual(volume["claimName"], claim["metadata"]["name"])
        self.assertFalse(volume.get("readOnly", False))
        self.assertNotIn("ReadOnlyMany", claim["spec"]["accessModes"])
        # Files it writes are the server's to read, and the namespace admits it.
        self.assertEqual(spec["securityContext"]["runAsUser"],
                         server["securityContext"]["runAsUser"])
        self.assertEqual(spec["containers"][0]["securityContext"],
                         server["containers"][0]["securityContext"])
        self.assertEqual(spec["containers"][0]["volumeMounts"][0]["mountPath"],
                         server["containers"][0]["volumeMounts"][0]["mountPath"])

    def test_a_wrong_field_is_found(self):
        wrong = copy.deepcopy(one("cpu", "StatefulSet"))
        wrong["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFileSystem"] = True
        for version in VERSIONS:
            self.assertNotEqual(validate(wrong, version), [])

    def test_names_are_unique_over_what_is_applied_together(self):
        for overlay in ("cpu", "gpu"):
            names = [(document["kind"], document["metadata"]["name"])
                     for document in (*render(overlay), *render("monitoring"))]
            self.assertEqual(len(names), len(set(names)))
            for document in (*render(overlay), *render("monitoring")):
                if document["kind"] != "Namespace":
                    self.assertEqual(document["metadata"]["namespace"], "gdn")


class WorkloadTest(unittest.TestCase):
    def each(self):
        for overlay in ("cpu", "gpu"):
            spec = one(overlay, "StatefulSet")["spec"]
            pod = spec["template"]["spec"]
            yield overlay, spec, pod, pod["containers"][0]

    def flags(self, overlay, container):
        """The arguments as the kubelet makes them."""
        name = container["envFrom"][0]["configMapRef"]["name"]
        config_map = one(overlay, "ConfigMap")
        self.assertEqual(config_map["metadata"]["name"], name)
        return [re.sub(r"\$\((\w+)\)", lambda match: config_map["data"][match.group(1)], argument)
                for argument in container["args"]]

    def test_rolling_restarts_need_no_spare_device_and_lose_no_call(self):
        for overlay, spec, pod, container in self.each():
            self.assertNotIn("replicas", spec, "applying must not scale")
            self.assertEqual(spec["podManagementPolicy"], "Parallel")
            self.assertEqual(spec["updateStrategy"],
                             {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}})
            pre_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            drain = next(int(flag.split("=")[1]) for flag in self.flags(overlay, container)
                         if flag.startswith("--drain-timeout-s="))
            self.assertGreater(pod["terminationGracePeriodSeconds"], pre_stop + drain + 5)
            self.assertGreater(pre_stop, container["readinessProbe"]["periodSeconds"])
            self.assertEqual(one(overlay, "PodDisruptionBudget")["spec"]["maxUnavailable"], 1)

    def test_probes_are_over_grpc_and_liveness_outlives_readiness(self):
        for _, _, _, container in self.each():
            ports = {port["containerPort"] for port in container["ports"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                self.assertIn(container[probe]["grpc"]["port"], ports)
            self.assertEqual(container["livenessProbe"]["grpc"].get("service"), "liveness")
            self.assertNotIn("service", container["readinessProbe"]["grpc"])

    def test_pods_spread_over_nodes_and_may_load_for_minutes(self):
        for _, spec, pod, container in self.each():
            (spread,) = pod["topologySpreadConstraints"]
            self.assertEqual((spread["topologyKey"], spread["maxSkew"]),
                             ("kubernetes.io/hostname", 1))
            self.assertLessEqual(spread["labelSelector"]["matchLabels"].items(),
                                 spec["template"]["metadata"]["labels"].items())
            startup = container["startupProbe"]
            self.assertGreaterEqual(startup["periodSeconds"] * startup["failureThreshold"], 300)

    def test_security(self):
        for overlay, _, pod, container in self.each():
            self.assertFalse(pod["automountServiceAccountToken"])
            self.assertFalse(one(overlay, "ServiceAccount")["automountServiceAccountToken"])
            self.assertTrue(pod["securityContext"]["runAsNonRoot"])
            self.assertEqual(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault")
            self.assertGreater(pod["securityContext"]["runAsUser"], 0)
            self.assertEqual(one(overlay, "Namespace")["metadata"]["labels"][
                "pod-security.kubernetes.io/enforce"], "restricted")
            self.assertEqual(container["securityContext"], {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]}})
            policy = one(overlay, "NetworkPolicy")["spec"]
            self.assertEqual(policy["policyTypes"], ["Ingress", "Egress"])
            self.assertNotIn("egress", policy)
            # Who reaches what; docs/operations.md says the same.
            self.assertEqual({port["port"]: rule["from"] for rule in policy["ingress"]
                              for port in rule["ports"]}, {
                "grpc": [{"namespaceSelector": {},
                          "podSelector": {"matchLabels": {"gdn-client": "true"}}}],
                "metrics": [{"namespaceSelector": {"matchLabels": {
                    "kubernetes.io/metadata.name": "monitoring"}}}]})

    def test_a_gpu_is_a_limit_and_is_tolerated(self):
        _, _, pod, container = list(self.each())[1]
        self.assertEqual(container["resources"]["limits"]["nvidia.com/gpu"], 1)
        self.assertIn("nvidia.com/gpu", [t["key"] for t in pod["tolerations"]])
        self.assertIn("--device=cuda", self.flags("gpu", container))
        self.assertTrue(container["volumeMounts"][0]["readOnly"])
        self.assertIn("--model=" + container["volumeMounts"][0]["mountPath"] + "/current",
                      self.flags("gpu", container))

    def test_selectors_select(self):
        for overlay, spec, _, container in self.each():
            labels = spec["template"]["metadata"]["labels"].items()
            service = one(overlay, "Service")["spec"]
            selectors = [spec["selector"]["matchLabels"], service["selector"],
                         one(overlay, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
                         one(overlay, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
                         one("monitoring", "PodMonitor")["spec"]["selector"]["matchLabels"]]
            for selector in selectors:
                self.assertLessEqual(selector.items(), labels)
            self.assertEqual(service["clusterIP"], "None")
            self.assertEqual(spec["serviceName"], one(overlay, "Service")["metadata"]["name"])
            ports = {port["name"] for port in container["ports"]}
            self.assertEqual({port["targetPort"] for port in service["ports"]}, ports)
            self.assertIn(one("monitoring", "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"],
                          ports)

    def test_the_server_takes_the_flags(self):
        for overlay, _, _, container in self.each():
            flags = [flag for flag in self.flags(overlay, container) if "--model=" not in flag]
            # The model is looked at after the flags, and there is none.
            done = subprocess.run([os.environ["GDN_SERVER"], *flags, "--model=/no/such/model",
                                   "--metrics-listen=off", "--listen=127.0.0.1:0"],
                                  capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(done.returncode, 1, done.stderr)


class MonitoringTest(unittest.TestCase):
    def test_the_rules_are_those_of_prometheus(self):
        self.assertEqual(one("monitoring", "PrometheusRule")["spec"]["groups"], rule_groups())

    def test_the_autoscaler_scales_what_is_there_slowly_down(self):
        spec = one("monitoring", "HorizontalPodAutoscaler")["spec"]
        workload = one("cpu", "StatefulSet")
        self.assertEqual(spec["scaleTargetRef"], {"apiVersion": workload["apiVersion"],
                                                  "kind": workload["kind"],
                                                  "name": workload["metadata"]["name"]})
        down = spec["behavior"]["scaleDown"]
        self.assertGreaterEqual(down["stabilizationWindowSeconds"], 300)
        self.assertEqual([policy["value"] for policy in down["policies"]], [1])
        names = {metric["pods"]["metric"]["name"] for metric in spec["metrics"]}
        self.assertEqual(names, {"gdn_queue_depth", "gdn_state_slots_used_ratio"})
        with open(os.path.join(DEPLOY, "prometheus/adapter-values.yml"), encoding="utf-8") as file:
            rules = load_all(file.read())[0]["rules"]["custom"]
        self.assertEqual({rule["name"]["as"] for rule in rules}, names)

    def test_the_dashboard_is_the_one_of_grafana(self):
        config_map = one("monitoring", "ConfigMap")
        with open(os.path.join(DEPLOY, "grafana/dashboards/gdn.json"), encoding="utf-8") as file:
            self.assertEqual(config_map["data"]["gdn.json"], file.read())
        self.assertEqual(config_map["metadata"]["labels"]["grafana_dashboard"], "1")
