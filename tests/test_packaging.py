"""What a package index shows: a README whose links lead into the repository, and one line for skipped tests."""

import importlib.util
import re
import tomllib
from collections import Counter
from pathlib import Path

from conftest import skipped_line

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def setup_script():
    spec = importlib.util.spec_from_file_location("pagedcli_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_and_picture_leads_to_a_file_of_the_repository():
    text = setup_script().with_absolute_links(README, "https://host/owner/name/", "1.2.3")
    targets = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", text)
    assert len(targets) == len(re.findall(r"\]\(", README))
    own = "https://host/owner/name/{}/v1.2.3/"
    num_pictures = 0
    for is_picture, target in targets:
        view = own.format("raw" if is_picture else "blob")
        assert target.startswith(view), target
        assert (ROOT / target.removeprefix(view).partition("#")[0]).exists(), target
        num_pictures += bool(is_picture)
    assert num_pictures == README.count("![") > 0


def test_links_that_are_absolute_or_within_the_page_stay():
    text = "[a](https://x.org) [b](#part) [c](mailto:x@y.z)"
    assert setup_script().with_absolute_links(text, "https://host/o/n", "1") == text


def test_without_an_address_the_readme_is_as_it_stands():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shown = setup_script().long_description()
    assert (shown == README) == ("Repository" not in project.get("urls", {}))


def test_skipped_tests_take_one_line():
    assert skipped_line(Counter()) is None
    reasons = Counter({"needs a GPU": 30, "no compiler": 2, "a": 1, "b": 1, "c": 1})
    assert skipped_line(reasons) == (
        "35 skipped: 30 needs a GPU; 2 no compiler; 1 a; 2 for other reasons (pytest -rs lists them)"
    )


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "pagedcli.__version__"}


def test_links_of_a_release_lead_to_its_tag(monkeypatch, tmp_path):
    script = setup_script()
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("[a](docs/a.md)")
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://host/o/n"\n')
    package = tmp_path / "src" / "pagedcli"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""Text."""\n\n__version__ = "1.2.3"\n')
    assert script.long_description() == "[a](https://host/o/n/blob/v1.2.3/docs/a.md)"
