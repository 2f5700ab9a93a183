"""The dashboard's form; test_prometheus.py runs what it asks."""

import json
import unittest

from tools import DASHBOARD

ROWS = ["Service level", "State pool", "Batching and kernels", "Streams and backpressure",
        "GPU (DCGM exporter)"]


class DashboardTest(unittest.TestCase):
    def setUp(self):
        with open(DASHBOARD, encoding="utf-8") as file:
            self.dashboard = json.load(file)
        self.panels = self.dashboard["panels"]

    def test_rows(self):
        self.assertEqual([p["title"] for p in self.panels if p["type"] == "row"], ROWS)

    def test_panels_have_an_id_a_title_and_a_unit_of_their_own(self):
        ids = [panel["id"] for panel in self.panels]
        self.assertEqual(len(ids), len(set(ids)))
        titles = [panel["title"] for panel in self.panels]
        self.assertEqual(len(titles), len(set(titles)))
        for panel in self.panels:
            if panel["type"] != "row":
                self.assertTrue(panel["fieldConfig"]["defaults"]["unit"], panel["title"])
                self.assertEqual(panel["datasource"]["uid"], "${datasource}")
                letters = [target["refId"] for target in panel["targets"]]
                self.assertEqual(letters, sorted(set(letters)))
                self.assertTrue(all(target["legendFormat"] for target in panel["targets"]))

    def test_nothing_overlaps(self):
        taken = {}
        for panel in self.panels:
            grid = panel["gridPos"]
            self.assertLessEqual(grid["x"] + grid["w"], 24, panel["title"])
            for x in range(grid["x"], grid["x"] + grid["w"]):
                for y in range(grid["y"], grid["y"] + grid["h"]):
                    self.assertEqual(taken.setdefault((x, y), panel["id"]), panel["id"],
                                     panel["title"])

    def test_variables(self):
        names = [variable["name"] for variable in self.dashboard["templating"]["list"]]
        self.assertEqual(names, ["datasource", "job", "instance"])
