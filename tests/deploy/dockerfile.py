"""As much of the Dockerfile syntax as ours use."""

import json
import os
import re

from tools import DEPLOY


class Dockerfile:
    """A file's stages, each a list of (instruction, rest of the line), with ARGs of their defaults."""

    def __init__(self, name):
        with open(os.path.join(DEPLOY, "docker", name), encoding="utf-8") as file:
            text = re.sub(r"^\s*#.*\n", "", file.read(), flags=re.M)
        self.args = {}
        self.stages = []
        for line in re.sub(r"\\\n", " ", text).splitlines():
            if not line.strip():
                continue
            word, rest = line.split(None, 1)
            if word == "ARG":
                key, _, value = rest.partition("=")
                self.args.setdefault(key, value.strip('"'))
            if word == "FROM":
                self.stages.append([])
            if self.stages:
                self.stages[-1].append((word, " ".join(rest.split())))

    @property
    def runtime(self):
        return self.stages[-1]

    def all(self, word, stage=-1):
        return [rest for instruction, rest in self.stages[stage] if instruction == word]

    def exec_form(self, word):
        """The words of ENTRYPOINT, CMD or HEALTHCHECK's CMD; an error if a shell were needed."""
        (rest,) = self.all(word)
        return json.loads(rest[rest.index("["):])
