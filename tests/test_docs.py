"""The docs name what exists: every hook flag is documented, and every flag that a document shows is real."""

import dataclasses
import re
from pathlib import Path

import pytest

from slime.config.args import Args
from slime.config.parse import build_parser

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PROGRAMS = {
    "--help", "--head", "--address", "--to", "--input", "--output", "--sample", "--kills", "--verify", "--dry-run",
    "--processes", "--families", "--arch", "--against", "--tokens", "--tolerance", "--gradient-tolerance",
}  # fmt: skip


def test_every_hook_is_documented():
    text = (ROOT / "docs" / "hooks.md").read_text()
    for field in dataclasses.fields(Args):
        if field.metadata.get("hook"):
            assert "--" + field.name.replace("_", "-") in text


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_flags_and_links_of_documents_exist(path):
    text = path.read_text()
    known = {s for action in build_parser()._actions for s in action.option_strings} | OTHER_PROGRAMS
    passed_on = ("--sglang-", "--router-")
    shown = {f for f in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text) if not f.startswith(passed_on)}
    assert not shown - known
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (path.parent / link).exists(), link
