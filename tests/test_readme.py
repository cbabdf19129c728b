"""What the README says is what the code does."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_snippets_run():
    snippets = blocks("python")
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})


def test_commands_are_those_that_ci_runs():
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    ran = (ROOT / ".ci/run").read_text().splitlines()
    assert len(commands) == 2
    assert all(command in ran for command in commands)
    assert all(shlex.split(command)[0] == "python3" for command in commands)


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert all((ROOT / link).exists() for link in links if "://" not in link)


def test_environment_variables_are_all_listed():
    listed = set(re.findall(r"^\| `(FLASH_QLA_TL_\w+)` \|", README, re.MULTILINE))
    sources = [p for d in ("flash_qla_tl", "kernels", "tests") for p in (ROOT / d).rglob("*.py")]
    used = {n for p in sources for n in re.findall(r"[\"'](FLASH_QLA_TL_\w+)[\"']", p.read_text())}
    assert listed == used
