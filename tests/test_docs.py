"""What the README and docs/ say is what the code does.

Blocks of Python and shell run here, each by itself, unless their first line is a comment that says what they need:
``# needs a GPU``. Text, formulas and output are in blocks of other languages, or indented.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import flash_qla_tl

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    """(line, text) of the fenced blocks, those inside lists included."""
    text = page.read_text()
    found = re.finditer(rf"^( *)```{language}\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start()) + 2, textwrap.dedent(m[2])) for m in found]


def cases(language, pages):
    every = [(page, *block) for page in pages for block in blocks(page, language)]
    return [pytest.param(page, line, text, id=f"{page.name}:{line}") for page, line, text in every]


def needs(text):
    return text.startswith("# needs ")


@pytest.mark.parametrize(("page", "line", "text"), cases("python", PAGES))
def test_python(page, line, text):
    code = compile("\n" * (line - 1) + text, str(page), "exec")
    if needs(text):
        pytest.skip(text.splitlines()[0].removeprefix("# "))
    exec(code, {})


@pytest.mark.parametrize(("page", "line", "text"), cases("sh", [page for page in PAGES if page != README]))
def test_shell(page, line, text, tmp_path):
    """In a folder with copies of what commands read, with this Python, and without a GPU."""
    if needs(text):
        subprocess.run(["bash", "-n", "-c", text], check=True)
        pytest.skip(text.splitlines()[0].removeprefix("# "))
    for folder in ("benchmark", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    packages = [str(Path(flash_qla_tl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        **path,
        "PYTHONPATH": os.pathsep.join(packages),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    run = subprocess.run(["bash", "-euc", text], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_at_least_half_of_the_blocks_run():
    for language in ("python", "sh"):
        texts = [text for page in PAGES for _, text in blocks(page, language)]
        assert sum(map(needs, texts)) <= len(texts) / 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fences_say_their_language(page):
    """A block without one would run nowhere, and nobody would know."""
    fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
    assert set(fences[::2]) <= {"python", "sh", "text"} and set(fences[1::2]) <= {""}


def test_commands_of_the_readme_are_those_that_ci_runs():
    commands = [line for _, block in blocks(README, "sh") for line in block.splitlines()]
    ran = (ROOT / ".ci/run").read_text().splitlines()
    assert len(commands) == 2
    assert all(command in ran for command in commands)
    assert all(shlex.split(command)[0] == "python3" for command in commands)


def anchors(page):
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        if "://" not in link:
            target = page.parent / link if link else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/index.md").read_text()
    assert all(f"]({page.name})" in index for page in PAGES if page.name not in ("README.md", "index.md"))


def test_environment_variables_are_all_listed():
    listed = set(re.findall(r"^\| `(FLASH_QLA_TL_\w+)` \|", README.read_text(), re.MULTILINE))
    sources = [p for d in ("flash_qla_tl", "kernels", "tests") for p in (ROOT / d).rglob("*.py")]
    used = {n for p in sources for n in re.findall(r"[\"'](FLASH_QLA_TL_\w+)[\"']", p.read_text())}
    assert listed == used


@pytest.fixture(scope="module")
def make_api():
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs/make_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_api_page_is_up_to_date(make_api):
    assert make_api.page() == make_api.PAGE.read_text(), "run: python docs/make_api.py"


def test_api_page_has_every_public_name(make_api):
    from flash_qla_tl import utils

    headings = re.findall(r"^### (\w+)$", make_api.PAGE.read_text(), re.MULTILINE)
    for module in (flash_qla_tl, utils):
        assert {name for name in module.__all__ if not name.startswith("_")} <= set(headings)


@pytest.mark.parametrize("name", [x for x in flash_qla_tl.__all__ if x.startswith(("chunk_", "kda_"))])
def test_operators_document_their_contract(name):
    """Shapes, units, dtypes, results and errors; the source of the method in the module."""
    operator = getattr(flash_qla_tl, name)
    doc = operator.__doc__
    assert "Returns:\n" in doc and "Raises:\n" in doc and "[B, T, HV" in doc
    if name in ("chunk_gated_delta_rule", "chunk_kda"):
        assert "natural logarithm" in doc and "any float dtype" in doc and "bf16" in doc
    assert re.search(r"arXiv:\d{4}\.\d{5}", sys.modules[operator.__module__].__doc__)


def test_markdown_of_a_docstring(make_api):
    def function():
        """Of :func:`other` and ``x``::

            code

        Args:
            a, b: first
                and more.

        The others too.

        Raises:
            ValueError: why.
        """

    assert make_api.markdown(function.__doc__) == textwrap.dedent(
        """\
        Of `other` and `x`:

            code

        **Arguments**

        - `a, b`: first
          and more.

        The others too.

        **Raises**

        - `ValueError`: why."""
    )


def test_signatures(make_api):
    def f(x: int, *, y: "float | None" = 2.0, **others: object) -> "str":
        pass

    assert make_api.signature("f", f) == "f(x: int, *, y: float | None = 2.0, **others: object) -> str"
    assert make_api.signature("f" * 80, f).splitlines()[1:] == [
        "    x: int,",
        "    *,",
        "    y: float | None = 2.0,",
        "    **others: object,",
        ") -> str",
    ]
