"""The Prometheus rules: their syntax and unit tests by promtool, their runbooks, and the copy that
Kubernetes gets. `GDN_WRITE=1` writes that copy anew."""

import os
import re
import subprocess
import unittest

import yaml

from tools import DEPLOY, RULES, SOURCE, load_file, rule_groups, unpacked_program

PROMETHEUS_RULE = os.path.join(DEPLOY, "kubernetes/overlays/monitoring/prometheus-rule.yaml")


class PromtoolTest(unittest.TestCase):
    def promtool(self, *arguments):
        done = subprocess.run([unpacked_program("promtool", "prometheus"), *arguments], text=True,
                              capture_output=True, timeout=120, check=False, cwd=SOURCE)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_rules_are_well_formed(self):
        self.promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES)

    def test_configuration_is_well_formed(self):
        self.promtool("check", "config", "--syntax-only",
                      os.path.join(DEPLOY, "prometheus/prometheus.yml"))

    def test_unit_tests(self):
        self.promtool("test", "rules", os.path.join(SOURCE, "tests/deploy/rules_test.yml"))


class RunbookTest(unittest.TestCase):
    def test_every_alert_has_a_unit_test_and_a_section_in_the_runbook(self):
        with open(os.path.join(SOURCE, "docs/operations.md"), encoding="utf-8") as file:
            anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
                       for heading in re.findall(r"^#+ (.*)$", file.read(), re.M)}
        with open(os.path.join(SOURCE, "tests/deploy/rules_test.yml"), encoding="utf-8") as file:
            unit_tests = file.read()
        alerts = [rule for group in rule_groups() for rule in group["rules"] if "alert" in rule]
        self.assertGreater(len(alerts), 10)
        for alert in alerts:
            page, anchor = alert["annotations"]["runbook"].split("#")
            self.assertEqual(page, "docs/operations.md")
            self.assertIn(anchor, anchors, alert["alert"])
            self.assertIn(alert["labels"]["severity"], ("critical", "warning"))
            # What its texts name it has when it fires, or they would have holes.
            firing = re.findall(rf"labels: '\{{alertname=\"{alert['alert']}\", ([^}}]*)\}}'",
                                unit_tests)
            self.assertTrue(firing, f"no unit test in which {alert['alert']} fires")
            self.assertLessEqual(set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"]))),
                                 set(re.findall(r"(\w+)=", firing[0])), alert["alert"])

    def test_every_recording_rule_has_a_unit_test(self):
        with open(os.path.join(SOURCE, "tests/deploy/rules_test.yml"), encoding="utf-8") as file:
            asked = re.findall(r"expr: '?([^,]*)", file.read())
        names = [rule["record"] for group in rule_groups() for rule in group["rules"]
                 if "record" in rule]
        self.assertGreater(len(names), 10)
        # The burn rates of the other windows are asked through their alerts.
        missing = [name for name in names if not any(name in expression for expression in asked)]
        self.assertEqual([name for name in missing if "_slow:ratio" not in name], [])


class CopyTest(unittest.TestCase):
    def test_kubernetes_has_the_same_rules(self):
        if os.environ.get("GDN_WRITE") == "1":
            document = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
                        "metadata": {"name": "gdn"}, "spec": {"groups": rule_groups()}}
            with open(PROMETHEUS_RULE, "w", encoding="utf-8") as file:
                file.write("# Made from deploy/prometheus/rules by GDN_WRITE=1 in "
                           "tests/deploy/test_rules.py.\n")
                yaml.safe_dump(document, file, sort_keys=False, width=100)
        self.assertEqual(load_file(PROMETHEUS_RULE)[0]["spec"]["groups"], rule_groups(),
                         "they differ: write the copy anew, see the top of this file")
