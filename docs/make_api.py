"""Writes docs/api.md from the docstrings of the public functions: python docs/make_api.py"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).with_name("api.md")
INTRO = """# API reference

Written by `python docs/make_api.py` from the docstrings. Letters of shapes are those of [naming.md](naming.md), the
mathematics is in [math.md](math.md).
"""
# By title: where the functions are imported from, and the module that defines them and whose docstring says what they are.
SECTIONS = {
    "The gated delta rule": ("flash_qla_tl", "flash_qla_tl.gated_delta_rule"),
    "Kimi Delta Attention": ("flash_qla_tl", "flash_qla_tl.kda"),
    "Over several GPUs": ("flash_qla_tl", "flash_qla_tl.context_parallel"),
    "Helpers": ("flash_qla_tl.utils", None),
    "Building blocks": ("flash_qla_tl.ops.utils", "flash_qla_tl.ops.utils"),
    "In flash-linear-attention": ("flash_qla_tl", "flash_qla_tl.integrations.fla"),
    "In transformers": ("flash_qla_tl.integrations.transformers", "flash_qla_tl.integrations.transformers"),
    "As FlashQLA": ("flash_qla_tl.compat.flash_qla", "flash_qla_tl.compat.flash_qla"),
    "As FlashQLA's helpers": ("flash_qla_tl.compat.flash_qla.utils", "flash_qla_tl.compat.flash_qla.utils"),
    "As FlashKDA": ("flash_qla_tl.compat.flash_kda", "flash_qla_tl.compat.flash_kda"),
    "References": ("flash_qla_tl.reference", "flash_qla_tl.reference"),
    "For tests and benchmarks": ("flash_qla_tl.testing", "flash_qla_tl.testing"),
}
LINE = 110


def functions(module: str, defined_in: str | None) -> list[str]:
    """Names of the module's public functions that were defined there, in the order of their definition."""
    module = importlib.import_module(module)
    found = {name: x for name, x in vars(module).items() if inspect.isfunction(x) and not name.startswith("_")}
    found = {name: x for name, x in found.items() if name in getattr(module, "__all__", found)}
    found = {name: x for name, x in found.items() if defined_in in (None, x.__module__)}
    return sorted(found, key=lambda name: (found[name].__module__, found[name].__code__.co_firstlineno))


def signature(name: str, function: Callable) -> str:
    def annotated(text: str, annotation: object) -> str:
        if annotation is inspect.Signature.empty:
            return text
        if not isinstance(annotation, str):
            annotation = re.sub(r"(torch\.(?=Tensor)|collections\.abc\.)", "", inspect.formatannotation(annotation))
        return f"{text}: {annotation}" if text else annotation

    found = inspect.signature(function)
    parts, bare_star = [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            bare_star = True
        if parameter.kind is parameter.KEYWORD_ONLY and not bare_star:
            parts.append("*")
            bare_star = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = annotated(stars + parameter.name, parameter.annotation)
        parts.append(text if parameter.default is parameter.empty else f"{text} = {parameter.default!r}")
    result = annotated("", found.return_annotation)
    end = f") -> {result}" if result else ")"
    line = f"{name}({', '.join(parts)}{end}"
    if len(line) <= LINE:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), end])


def markdown(docstring: str) -> str:
    """The docstring with its sections as lists, and its markup as that of Markdown."""
    text = re.sub(r":\w+:`(.*?)`", r"`\1`", inspect.cleandoc(docstring)).replace("``", "`").replace("::\n", ":\n")
    body, *sections = re.split(r"^(Args|Returns|Raises):\n", text, flags=re.MULTILINE)
    parts = [body.strip()]
    for heading, content in zip(sections[::2], sections[1::2], strict=True):
        # What follows a section without its indentation is text again.
        indented, rest = re.match(r"((?:    [^\n]*\n?|\n)*)(.*)", content, re.DOTALL).groups()
        items = re.sub(r"^([\w*]+(?:, [\w*]+)*): ", r"- `\1`: ", textwrap.dedent(indented).strip(), flags=re.MULTILINE)
        items = re.sub(r"^    (?=\S)", "  ", items, flags=re.MULTILINE)
        parts += [f"**{heading.replace('Args', 'Arguments')}**", items, rest.strip()]
    return "\n\n".join(part for part in parts if part)


def page() -> str:
    parts = [INTRO]
    for title, (module, defined_in) in SECTIONS.items():
        source = importlib.import_module(defined_in or module)
        parts.append(f"## {title}\n\nImported from `{module}`. {markdown(source.__doc__)}\n")
        for name in functions(module, defined_in):
            function = getattr(importlib.import_module(module), name)
            call = signature(name, function)
            parts.append(f"### {name}\n\n```text\n{call}\n```\n\n{markdown(function.__doc__)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
