"""The documentation site: complete, spelled, linked, and its tutorials run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lapwing

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.py"))


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml; tags of Python objects are not followed."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def listed() -> list[str]:
    """The pages of the navigation."""

    def walk(part: object) -> list[str]:
        if isinstance(part, str):
            return [part]
        children = part.values() if isinstance(part, dict) else part
        return [page for child in children for page in walk(child)]  # type: ignore[attr-defined]

    return walk(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Settings)["nav"])


def test_every_page_is_in_the_navigation_and_exists() -> None:
    made = {"changelog.md"} | {f"tutorials/{path.stem}.md" for path in TUTORIALS}
    found = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent.name != "decisions"}
    hooked = {f"results/{path.stem}.md" for path in (DOCS / "results").glob("*.json")}  # added by docs/site/hooks.py
    assert hooked <= found
    assert (set(listed()) | hooked) - {"decisions/README.md"} == found | made


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    missing = [name for name in lapwing.__all__ if not re.search(rf"^::: lapwing\.{name}$", text, re.MULTILINE)]
    assert not missing


def test_links_between_files_of_the_repository_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" in target or target.endswith("changelog.md"):
                continue
            there = page.parent / target
            tutorial = there.parent.name == "tutorials" and there.with_suffix(".py").exists()
            assert there.exists() or tutorial, f"{page.relative_to(ROOT)} links to {target}"


def test_spelling() -> None:
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words-list", "burnin", "--skip", "*.png,*.json"]
    places = ["docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "src", "examples", "experiments"]
    found = subprocess.run([*command, *places], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def environment(tmp: Path) -> dict[str, str]:
    return os.environ | {"LAPWING_DOCS_CACHE": str(tmp), "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"}


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(DOCS / "site" / "tutorials.py"), str(path)]
    found = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "```text" in found.stdout or "![" in found.stdout


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors, references and the navigation; the tutorials have tests of their own and are not run here."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    found = subprocess.run(
        command, cwd=ROOT, env=environment(tmp_path) | {"LAPWING_DOCS_RUN": "0"}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert (tmp_path / "site" / "index.html").exists()
