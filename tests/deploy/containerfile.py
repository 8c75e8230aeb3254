"""Carries out a Containerfile without a daemon: each stage is a folder, and `RUN` is chroot.

It knows the instructions that ours has, in the form that ours has them, and refuses all others.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

FROM: Final = re.compile(r"\$\{(\w+)\}(?: AS (\w+))?")
CP: Final = ("cp", "-a")
APART: Final = ("unshare", "--mount", "sh", "-c")
NAME: Final = re.compile(r"\$\{(\w+)\}|\$(\w+)")


class Unknown(Exception):
    """An instruction that is not carried out here."""


@dataclass
class Stage:
    """`user` and `command`: as the last image has them."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    command: Sequence[str] = ()

    def path(self, inside: str) -> Path:
        return self.root / (Path(self.folder) / inside).relative_to("/")

    def run(
        self, command: Sequence[str], *, user: str = "0:0", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """In a namespace of mounts of its own, so that nothing stays mounted. As an image is run: no
        capabilities where it is not root."""
        inside = ["env", "-i", f"--chdir={self.folder}"]
        known = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", **self.environment, **variables}
        inside += [f"{name}={value}" for name, value in known.items()]
        uid, gid = user.split(":")
        rights = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
        rights += [] if uid == "0" else ["--bounding-set=-all", "--no-new-privs"]
        mounts = 'mount --make-rprivate / && mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'
        return subprocess.run(
            [*APART, mounts, self.root, *rights, *inside, *command],
            capture_output=True,
            text=True,
            check=False,
        )


def instructions(text: str) -> Iterator[tuple[str, str]]:
    whole = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    for line in whole.splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word, rest.strip()


def ignored(path: Path, patterns: Sequence[str]) -> bool:
    """By the part of .containerignore that ours uses: names at the top, and `**/` before a name."""
    parts = path.parts
    return any(
        fnmatch.fnmatch(name, one.removeprefix("**/"))
        for one in patterns
        for name in (parts if one.startswith("**/") else parts[:1])
    )


@dataclass
class Builder:
    """`bases`: folders with root file systems, by the argument that names them. `variables`: also in the
    environment of each RUN, such as where packages come from."""

    context: Path
    bases: Mapping[str, Path]
    folder: Path
    variables: Mapping[str, str]
    files: Sequence[str]  # of the context, in a checkout those that git knows
    stages: dict[str, Stage] = field(default_factory=dict)

    def build(self, containerfile: Path) -> Stage:
        stage: Stage | None = None
        arguments: dict[str, str] = {}
        for word, rest in instructions(containerfile.read_text()):
            if word == "ARG":
                name, _, value = rest.partition("=")
                arguments.setdefault(name, value)
                continue
            if word == "FROM":
                stage = self._begin(rest)
                continue
            assert stage, f"{word} before FROM"
            known = {**arguments, **stage.environment}
            if word == "RUN":
                self._run(stage, rest, known)
            elif word == "COPY":
                self._copy(stage, shlex.split(rest))
            elif word == "ENV":
                for pair in shlex.split(rest):
                    name, _, value = pair.partition("=")
                    stage.environment[name] = _filled(value, known)
            elif word == "WORKDIR":
                stage.folder = rest
                stage.path(".").mkdir(parents=True, exist_ok=True)
            elif word == "USER":
                stage.user = rest
            elif word == "CMD":
                stage.command = json.loads(rest)
            else:
                raise Unknown(word)
        assert stage
        return stage

    def _begin(self, rest: str) -> Stage:
        named = FROM.fullmatch(rest)
        if named is None:
            raise Unknown(f"FROM {rest}")
        base, name = named.groups()
        stage = self.stages[name or ""] = Stage(self.folder / (name or "last"))
        subprocess.run([*CP, self.bases[base], stage.root], check=True)
        return stage

    def _run(self, stage: Stage, command: str, known: Mapping[str, str]) -> None:
        done = stage.run(["sh", "-c", command], **{**self.variables, **known})
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"

    def _copy(self, stage: Stage, words: list[str]) -> None:
        if words[0].startswith("--from="):
            origin = self.stages[words[0].removeprefix("--from=")]
            source, target = words[1:]
            to = stage.path(target)
            to.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([*CP, origin.path(source), to], check=True)
            return
        *sources, target = words
        patterns = (self.context / ".containerignore").read_text().split("\n")
        patterns = [one for one in patterns if one and not one.startswith("#")]
        to = stage.path(target)
        for name in self.files:
            path = Path(name)
            if ignored(path, patterns) or not (self.context / path).is_file():
                continue
            if sources == ["."]:
                place = to / path
            elif name in sources:
                place = to / path.name
            else:
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.context / path, place)


def _filled(text: str, known: Mapping[str, str]) -> str:
    return NAME.sub(lambda found: known[found[1] or found[2]], text)


def git_files(folder: Path) -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "-z"],  # noqa: S607 - of whoever has the checkout
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return [one for one in done.stdout.split("\0") if one]


def listing(root: Path) -> dict[str, str]:
    """What is in it: names, rights, times, and links or sizes. Contents have their own check."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            about = path.lstat()
            what = str(path.readlink()) if path.is_symlink() else ""
            size = about.st_size if path.is_file() and not what else 0
            found[str(path.relative_to(root))] = f"{about.st_mode:o} {about.st_mtime:.0f} {size} {what}"
    return found
