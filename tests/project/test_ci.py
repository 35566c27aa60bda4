"""Continuous integration: the action, the workflows in docs/ci.md and the hook of pre-commit, run as GitHub runs them.

Each script runs in a scratch repository as actions/checkout leaves it for a pull request. Where the scan itself does
not matter, a program that notes its arguments takes the place of Python.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from conftest import ROOT, Call, Done
from packaging.requirements import Requirement

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
CI = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
BLOCKS = [
    block.replace("OWNER/", "owner/").replace("COMMIT", "0" * 40) for block in re.findall(r"(?s)```yaml\n(.*?)```", CI)
]
WORKFLOWS = [block for block in BLOCKS if "\njobs:" in block]
SCAN, COVERAGE = map(yaml.safe_load, WORKFLOWS)
[HOOKS] = [yaml.safe_load(block) for block in BLOCKS if block not in WORKFLOWS]
SCRIPTS = Path(sysconfig.get_path("scripts"))

HEALTHY = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return self.body(x)


torch.manual_seed(0)
model, inputs = Net(), torch.eye(4)
"""
NO_KERNEL = HEALTHY.replace("self.body(x)\n", "torch.linalg.inv(self.body(x) + 4 * x)\n")
ARGUMENTS = "--device cpu --precision half,autocast-fp16 --times off --no-plan"
OF_PULL_REQUEST = {"pull_request": {"base": {"ref": "main"}}, "repository": {"default_branch": "main"}}


class Project(NamedTuple):
    """A repository as actions/checkout leaves it: the merged pull request, and the branches of the remote."""

    folder: Path
    temporary: Path

    def git(self, *arguments: str) -> None:
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=self.folder, check=True, capture_output=True)

    def commit(self, **files: str | None) -> None:
        """Write files, with ``__`` for a dot, or remove them; commit."""
        for key, text in files.items():
            path = self.folder / key.replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink() if text is None else path.write_text(text, encoding="utf-8")
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "a change")

    def run(
        self, step: Mapping[str, Any], inputs: Mapping[str, str], event: Mapping[str, Any], **variables: str
    ) -> Done:
        """Run the script of a step as a runner does for a fork: there is no token in its environment."""
        default = {name: given.get("default", "") for name, given in ACTION["inputs"].items()}
        contexts = {"inputs": default | inputs, "github": {"event": event}}
        environment = {name: str(evaluated(str(value), contexts)) for name, value in step.get("env", {}).items()}
        environment |= {
            "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.temporary),
            "RUNNER_TEMP": str(self.temporary),
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_REPOSITORY": "owner/project",
            "GITHUB_STEP_SUMMARY": str(self.temporary / "summary.md"),
            "GITHUB_WORKSPACE": str(self.folder),
            **variables,
        }
        bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail"] if step.get("shell") == "bash" else ["bash", "-e"]
        script = self.temporary / "script.sh"
        script.write_text(step["run"], encoding="utf-8")
        done = subprocess.run(
            [*bash, script], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def scan(self, event: Mapping[str, Any] = OF_PULL_REQUEST, **inputs: str) -> Done:
        """The step of the action that scans."""
        inputs = {name.replace("_", "-"): value for name, value in inputs.items()}
        given = {"target": "model.py", "args": ARGUMENTS, "python": sys.executable} | inputs
        return self.run(step_of(ACTION["runs"], "Scan"), given, event)


def step_of(job: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    [step] = [step for step in job["steps"] if step.get("name") == name]
    return dict(step)


def evaluated(value: str, contexts: Mapping[str, Any]) -> object:
    """``${{ a.b || c.d }}`` in these contexts; the value itself if it is no expression."""
    found = re.fullmatch(r"\$\{\{ ([\w.\-| ]+) \}\}", value)
    if found is None:
        return value
    for path in found[1].split(" || "):
        here: Any = contexts
        for key in path.split("."):
            here = here.get(key, {}) if isinstance(here, Mapping) else {}
        if here:
            return here
    return ""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project whose base branch has a healthy model and no baseline."""
    made = Project(tmp_path / "project", tmp_path / "temporary")
    made.folder.mkdir()
    made.temporary.mkdir()
    made.git("init", "-q", "-b", "main")
    made.git("remote", "add", "origin", "https://github.com/owner/project")
    made.commit(model__py=HEALTHY)
    on_base(made)
    return made


def on_base(project: Project, **files: str | None) -> None:
    """What the base branch has; the pull request starts there."""
    project.commit(**files)
    project.git("update-ref", "refs/remotes/origin/main", "HEAD")
    project.git("checkout", "-q", "--detach")


# -- What a pull request can change


@pytest.fixture
def accept(call: Call) -> Callable[[Project, str], str]:
    """The baseline that accepts all findings of a model."""

    def accepting(project: Project, model: str) -> str:
        folder = project.temporary / "accepting"
        folder.mkdir()
        (folder / "model.py").write_text(model, encoding="utf-8")
        command = f"--no-settings scan model.py --quiet {ARGUMENTS} --baseline known.json --update-baseline"
        call(*command.split(), folder=folder)
        return (folder / "known.json").read_text(encoding="utf-8")

    return accepting


@pytest.mark.slow
@pytest.mark.parametrize("change", ["a deleted baseline", "settings and an edited baseline"])
def test_a_pull_request_with_a_new_finding_fails_whatever_it_accepts(
    project: Project, accept: Callable[[Project, str], str], change: str
) -> None:
    name, accepted = "lowprec-baseline__json", accept(project, NO_KERNEL)
    on_base(project, **{name: json.dumps(json.loads(accepted) | {"findings": []})})
    settings = '[tool.lowprec-check]\nfail-on = "never"\nignore = ["LP"]\nbaseline = "lowprec-baseline.json"\n'
    more = {
        "a deleted baseline": {name: None},
        "settings and an edited baseline": {"pyproject__toml": settings, name: accepted},
    }
    project.commit(model__py=NO_KERNEL, **more[change])
    done = project.scan()
    assert done.returncode == 1, done
    [line] = [line for line in done.stdout.splitlines() if line.startswith("::error") and "LP101" in line]
    assert line.startswith("::error file=model.py,line=11,title=LP101")
    assert "LP101" in (project.temporary / "summary.md").read_text(encoding="utf-8")
    reports = {path.name for path in (project.temporary / "lowprec-check").iterdir()}
    assert reports >= {"scan.json", "scan.sarif", "scan.html", "scan.md"}


@pytest.mark.slow
def test_a_pull_request_without_a_new_finding_passes(project: Project, accept: Callable[[Project, str], str]) -> None:
    on_base(project, model__py=NO_KERNEL, **{"lowprec-baseline__json": accept(project, NO_KERNEL)})
    project.commit(model__py="# moved by a line\n" + NO_KERNEL, **{"lowprec-baseline__json": None})
    done = project.scan()
    assert done.returncode == 0, done
    assert "::error" not in done.stdout
    assert (project.temporary / "summary.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_scan_that_cannot_run_fails(project: Project) -> None:
    project.commit(model__py="import missing_package\n")
    done = project.scan()
    assert done.returncode == 2
    assert "missing_package" in done.stderr


# -- What the action makes of the checkout and of its inputs

NOTING = f"""\
#!{sys.executable}
import json, os, sys
from pathlib import Path

here = Path(__file__).parent
if "scan" in sys.argv:
    (here / "arguments.json").write_text(json.dumps(sys.argv[1:]))
    if "--json" in sys.argv and (here / "writes").exists():
        result = Path(sys.argv[sys.argv.index("--json") + 1])
        result.write_text("{{}}")
        result.with_name("scan.md").write_text("a summary")
    sys.exit(int((here / "code").read_text()))
"""


class Noting(NamedTuple):
    """The program that takes the place of Python."""

    path: Path

    @property
    def arguments(self) -> list[str] | None:
        """Of the scan; ``None`` if it was not started."""
        noted = self.path.with_name("arguments.json")
        return list(json.loads(noted.read_text())) if noted.exists() else None

    def accepted(self) -> str | None:
        """The content of the baseline that the scan was given."""
        words = self.arguments or []
        return Path(words[words.index("--baseline") + 1]).read_text() if "--baseline" in words else None


@pytest.fixture
def noting(tmp_path: Path) -> Noting:
    made = Noting(tmp_path / "programs" / "noting")
    made.path.parent.mkdir()
    made.path.write_text(NOTING)
    made.path.chmod(0o755)
    made.path.with_name("writes").touch()
    made.path.with_name("code").write_text("0")
    return made


BASELINE = "lowprec-baseline__json"


@pytest.mark.parametrize("of_pull_request", ["of the pull request", None])
@pytest.mark.parametrize("of_base", ["of the base branch", None])
def test_the_baseline_is_that_of_the_base_branch(
    project: Project, noting: Noting, of_base: str | None, of_pull_request: str | None
) -> None:
    if of_base:
        on_base(project, **{BASELINE: of_base})
    if of_base or of_pull_request:
        project.commit(**{BASELINE: of_pull_request})
    project.git("tag", "origin/main")  # of a name that git prefers to the branch
    done = project.scan(python=str(noting.path))
    assert done.returncode == 0, done
    assert noting.accepted() == of_base
    assert noting.arguments is not None
    assert noting.arguments[2:4] == ["lowprec_check", "--no-settings"]
    assert ("every finding counts" in done.stdout) is (of_base is None)


@pytest.mark.parametrize(
    ("event", "inputs", "branch"),
    [
        ({"pull_request": {"base": {"ref": "release"}}, "repository": {"default_branch": "main"}}, {}, "release"),
        ({"merge_group": {"base_ref": "refs/heads/release"}, "repository": {"default_branch": "main"}}, {}, "release"),
        ({"repository": {"default_branch": "main"}}, {}, "main"),
        (OF_PULL_REQUEST, {"base": "release"}, "release"),
    ],
    ids=["pull request", "merge group", "push", "input"],
)
def test_the_base_branch_is_that_of_the_event(
    project: Project, noting: Noting, event: dict[str, Any], inputs: dict[str, str], branch: str
) -> None:
    on_base(project, **{BASELINE: "main"})
    project.commit(**{BASELINE: "release"})
    project.git("update-ref", "refs/remotes/origin/release", "HEAD")
    project.commit(**{BASELINE: "of the pull request"})
    project.scan(event, python=str(noting.path), **inputs)
    assert noting.accepted() == branch


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("update-ref", "-d", "refs/remotes/origin/main"), "fetch-depth: 0"),
        (("remote", "set-url", "origin", "https://github.com/fork/project"), "of another repository"),
    ],
)
def test_a_checkout_without_the_base_branch_fails(
    project: Project, noting: Noting, command: tuple[str, ...], shown: str
) -> None:
    project.git(*command)
    done = project.scan(python=str(noting.path))
    assert (done.returncode, noting.arguments) == (2, None)
    assert shown in done.stdout


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("code", [0, 1, 2, 3, 130, 137])
def test_the_action_fails_if_the_scan_does_or_has_no_result(
    project: Project, noting: Noting, code: int, writes: bool
) -> None:
    noting.path.with_name("code").write_text(str(code))
    if not writes:
        noting.path.with_name("writes").unlink()
    done = project.scan(python=str(noting.path))
    assert done.returncode == (code if code or writes else 2)
    assert (project.temporary / "summary.md").exists() is writes


def test_results_of_something_else_are_not_taken_for_those_of_the_scan(project: Project, noting: Noting) -> None:
    (project.temporary / "lowprec-check").mkdir()
    done = project.scan(python=str(noting.path))
    assert done.returncode != 0
    assert noting.arguments is None
    assert project.scan(python=str(noting.path), reports=str(project.temporary / "second")).returncode == 0


HOSTILE = [
    "x; touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "' touch pwned '",
    '"; touch pwned; "',
    "--version",
    "*",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("name", ["target", "baseline", "base", "fail_on", "args", "reports", "python"])
def test_inputs_are_data(project: Project, noting: Noting, name: str, text: str) -> None:
    done = project.scan(**{"python": str(noting.path)} | {name: text})
    for folder in (project.folder, project.temporary, project.temporary.parent):
        assert not (folder / "pwned").exists()
    words = noting.arguments
    if name in ("target", "fail_on"):
        assert words is not None
        assert words[-1 if name == "target" else words.index("--fail-on") + 1] == text
        assert words[-2] == "--"
    elif name == "args":
        assert words is not None
        assert words[words.index("8") + 1 :][: len(text.split())] == text.split()
    elif name in ("base", "python"):
        assert (done.returncode != 0, words) == (True, None)


@pytest.mark.parametrize(
    "text", ["--baseline mine.json", "-p half --baseline=mine.json", "--update-baseline", "--fail-on never"]
)
def test_further_options_cannot_accept_findings(project: Project, noting: Noting, text: str) -> None:
    done = project.scan(python=str(noting.path), args=text)
    assert (done.returncode, noting.arguments) == (2, None)
    assert "cannot be in args" in done.stdout


def test_the_action_installs_itself(project: Project, tmp_path: Path) -> None:
    words = tmp_path / "words"
    program = tmp_path / "my python"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(words))}\n')
    program.chmod(0o755)
    done = project.run(step_of(ACTION["runs"], "Install lowprec-check"), {"python": str(program)}, {})
    assert (done.returncode, words.read_text().splitlines()[2:]) == (0, ["pip", "install", str(ROOT)])


def test_modules_of_the_pull_request_take_the_place_of_none(project: Project) -> None:
    """``python -m`` would run those in the checkout."""
    tells = "import pathlib, sys\npathlib.Path('pwned').touch()\nsys.exit(0)\n"
    names = ("pip", "lowprec_check", "runpy", "click", "token")
    project.commit(**{f"{name}__py": tells for name in names})
    inputs = {"python": sys.executable, "target": "missing.py"}
    installed = project.run(
        step_of(ACTION["runs"], "Install lowprec-check"), inputs, {}, GITHUB_ACTION_PATH="/missing-folder"
    )
    assert "'/missing-folder'" in installed.stderr
    scanned = project.scan(**inputs)
    assert (installed.returncode, scanned.returncode) == (1, 2)
    assert "missing.py" in scanned.stderr
    assert not (project.folder / "pwned").exists()


# -- The documents


def jobs() -> list[Mapping[str, Any]]:
    return [job for workflow in (SCAN, COVERAGE) for job in workflow["jobs"].values()]


def test_workflows_and_the_action_are_valid_and_safe(tmp_path: Path) -> None:
    """By the schemas of GitHub, and by zizmor, which knows how workflows are attacked."""
    workflows = tmp_path / ".github" / "workflows"
    workflows.mkdir(parents=True)
    for number, text in enumerate(WORKFLOWS):
        (workflows / f"{number}.yml").write_text(text, encoding="utf-8")
    files = sorted(map(str, workflows.iterdir()))
    commands = [
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", *files],
        ["check-jsonschema", "--builtin-schema", "vendor.github-actions", str(ROOT / "action.yml")],
        ["zizmor", "--offline", "--no-progress", *files, str(ROOT / "action.yml")],
    ]
    for program, *arguments in commands:
        if not (SCRIPTS / program).exists():
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{program} is not installed (extra test)")
        done = subprocess.run(
            [SCRIPTS / program, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_scripts_have_no_expressions_and_actions_are_pinned() -> None:
    steps = [step for job in jobs() for step in job["steps"]]
    assert len(steps) > 8
    for step in [*steps, *ACTION["runs"]["steps"]]:
        assert "${{" not in step.get("run", "")
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
    pinned = re.findall(r"uses: (\S+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)\n", CI)
    assert len(pinned) == CI.count(" uses: actions/") + CI.count(" uses: github/") > 5
    assert len(set(pinned)) == len({name for name, *_ in pinned}), "one version of each action"


def test_jobs_that_run_code_of_a_pull_request_can_only_read() -> None:
    for workflow in (SCAN, COVERAGE):
        assert workflow["permissions"] == {}
        assert {*workflow[True]} == {"pull_request", "push"}, "`on`, which YAML 1.1 reads as true"
        assert workflow[True]["pull_request"] == {"branches": ["main"]}
    for job in jobs():
        runs_code = any("run" in step or "lowprec-check" in step.get("uses", "") for step in job["steps"])
        assert runs_code is (job["permissions"] == {"contents": "read"})
    upload = SCAN["jobs"]["code-scanning"]
    assert upload["permissions"] == {"contents": "read", "security-events": "write"}
    assert "github.event.pull_request.head.repo.full_name == github.repository" in upload["if"]


def test_the_documents_name_the_inputs_and_files_of_the_action() -> None:
    [used] = [
        step for step in SCAN["jobs"]["scan"]["steps"] if "lowprec-check@" in step["uses" if "uses" in step else "name"]
    ]
    assert {*used["with"]} <= {*ACTION["inputs"]}
    assert re.findall(r"^\| `([\w-]+)` \| ", CI, re.MULTILINE) == [*ACTION["inputs"]]
    upload = SCAN["jobs"]["code-scanning"]["steps"][-1]
    assert upload["with"]["sarif_file"].endswith("/lowprec-check/scan.sarif")


def test_the_package_is_installed_from_a_repository_in_a_form_that_pip_reads() -> None:
    found = re.findall(r'"(lowprec-check @ [^"]+)"', CI)
    assert len(found) == 2
    assert {Requirement(text).url for text in found} == {"git+https://github.com/OWNER/lowprec-check@COMMIT"}
    assert "pip install lowprec-check" not in CI, "it is in no index"


def test_the_commands_in_the_document_have_existing_options(call: Call) -> None:
    commands = re.findall(r"^    (lowprec-check .*)$", CI, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        name, *words = [word for word in command.split()[1:] if word != "--no-settings"]
        shown = call(name, "--help").stdout + call(name, "--help-all").stdout
        assert all(word in shown for word in words if word.startswith("--")), command


@pytest.mark.parametrize("of_base", ["of the target branch", None])
def test_other_systems_take_the_baseline_of_the_target_branch(
    project: Project, noting: Noting, of_base: str | None
) -> None:
    """GitLab stops a job at the first command that fails."""
    [commands] = re.findall(r"(?:^    .*\n)*^    git show .*\n(?:^    .*\n)*", CI, re.MULTILINE)
    on_base(project, **{BASELINE: of_base} if of_base else {})
    project.commit(**{BASELINE: "of the merge request"})
    project.git("branch", "-f", "main", "refs/remotes/origin/main")
    project.git("remote", "set-url", "origin", str(project.folder))
    noting.path.rename(noting.path.with_name("lowprec-check"))
    step = {"run": re.sub(r"^    ", "", commands, flags=re.MULTILINE), "shell": "bash"}
    variables = {"CI_MERGE_REQUEST_TARGET_BRANCH_NAME": "main", "PATH": f"{noting.path.parent}:{os.environ['PATH']}"}
    done = project.run(step, {}, {}, **variables)
    words = noting.arguments
    assert (words is None) is (of_base is None), done
    if words is not None:
        assert words[:2] == ["--no-settings", "scan"]
        assert (project.folder / words[words.index("--baseline") + 1]).read_text() == of_base


# -- The gaps of a test suite

USES = "import torch\n\n\ndef test_it():\n    torch.eye(2).{}()\n"


def coverage(project: Project) -> Done:
    return project.run(step_of(COVERAGE["jobs"]["tests"], "Tests"), {}, OF_PULL_REQUEST)


def gaps(project: Project) -> str:
    """The saved coverage of the tests that the project has now."""
    report = project.temporary / "saved.json"
    words = f"--lowprec-coverage half,bfloat16 --lowprec-report {report}".split()
    subprocess.run([SCRIPTS / "pytest", *words], cwd=project.folder, check=True, capture_output=True)
    return report.read_text(encoding="utf-8")


@pytest.mark.slow
def test_new_gaps_of_a_test_suite_fail_whatever_the_pull_request_accepts(project: Project) -> None:
    name, test = "lowprec-coverage__json", "tests/test_net__py"
    project.commit(**{test: USES.format("inverse")})
    on_base(project, **{name: gaps(project)})
    project.commit(**{name: None})
    assert coverage(project).returncode == 0, "the gaps of the base branch"
    project.commit(**{test: USES.format("det")})
    settings = 'addopts = "--collect-only"\nlowprec_fail_on = "never"\nlowprec_baseline = "lowprec-coverage.json"\n'
    project.commit(**{name: gaps(project), "pyproject__toml": f"[tool.pytest.ini_options]\n{settings}"})
    done = coverage(project)
    assert done.returncode == 1, done
    assert "1 new gap" in done.stdout
    project.git("update-ref", "-d", "refs/remotes/origin/main")
    assert coverage(project).returncode == 1, "without a baseline every gap counts"


@pytest.mark.slow
def test_failures_that_only_the_pull_request_knows_fail(project: Project) -> None:
    known = '[[known]]\ntest = "tests/test_net.py::test_it"\nexception = "AttributeError"\n'
    settings = 'addopts = "--lowprec-update-manifest"\nlowprec_manifest = "known_gaps.toml"\n'
    project.commit(known_gaps__toml=known, pyproject__toml=f"[tool.pytest.ini_options]\n{settings}")
    project.commit(**{"tests/test_net__py": USES.format("no_such_method")})
    assert coverage(project).returncode == 1
    on_base(project)
    assert coverage(project).returncode == 0


# -- pre-commit


@pytest.mark.slow
def test_the_hook_of_pre_commit_fails_on_findings(project: Project, tmp_path: Path) -> None:
    if not (SCRIPTS / "pre-commit").exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("pre-commit is not installed (extra test)")
    hooks = Project(tmp_path / "hooks", tmp_path)
    hooks.folder.mkdir()
    hooks.git("init", "-q")
    hooks.commit(**{".pre-commit-hooks.yaml": (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")})
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=hooks.folder, capture_output=True, text=True, check=True)
    [repository] = HOOKS["repos"]
    [hook] = repository["hooks"]
    options = hook["args"]
    hook["args"] = options[: options.index("--baseline")]
    config = {"repos": [repository | {"repo": str(hooks.folder), "rev": head.stdout.strip()}]}
    environment = os.environ | {
        "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        "PRE_COMMIT_HOME": str(tmp_path / "kept"),
    }

    def commit(**files: str) -> Done:
        project.commit(**files)
        command = [
            SCRIPTS / "pre-commit",
            "run",
            "--hook-stage",
            hook["stages"][0],
            "--from-ref",
            "HEAD~1",
            "--to-ref",
            "HEAD",
        ]
        done = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True, check=False)
        return Done(done.returncode, done.stdout, done.stderr)

    assert "Skipped" in commit(**{".pre-commit-config.yaml": yaml.safe_dump(config)}).stdout, "no file of the model"
    assert commit(model__py=HEALTHY + "\n").returncode == 0
    failed = commit(model__py=NO_KERNEL)
    assert failed.returncode == 1
    assert "LP101 missing-kernel" in failed.stdout
