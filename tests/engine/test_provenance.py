"""The digest of a method's code: equal on hosts with the same code of the method, whatever else differs."""

import importlib
from pathlib import Path

import pytest

from coterie.engine import provenance
from coterie.engine.provenance import method_digest
from coterie.methods import find


def test_the_digest_covers_the_modules_that_a_method_imports_from_its_own_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "__init__.py": "",
        "method.py": "from coterie import Method\nfrom .votes import N\nclass M(Method):\n    n = N\n",
        "votes.py": "import digested.deep.counts\nN = 1\n",
        "deep/__init__.py": "",
        "deep/counts.py": "",
        "unused.py": "",
    }
    package = tmp_path / "digested"
    for name, code in files.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    method = importlib.import_module("digested.method").M
    before = method_digest(method)
    assert method_digest(method) == before != method_digest(find("fedavg"))
    changing = set()
    for name, code in files.items():
        (package / name).write_text(f"{code}CHANGED = 1\n")
        if method_digest(method) != before:
            changing.add(name)
        (package / name).write_text(code)
    assert changing == {"method.py", "votes.py", "deep/counts.py"}
    assert method_digest(method) == before


@pytest.mark.parametrize(
    ("changed", "methods"),
    [
        ("coterie.parts.prototypes", {"fedproto"}),
        ("coterie.methods.fedcpmd.settings", {"fedcpmd", "fedcpmd-auto"}),
        ("coterie.core.method", {"fedavg", "fedproto", "fedcpmd", "fedcpmd-auto"}),
        ("coterie.methods", set()),
        ("coterie.engine.loop", set()),
    ],
)
def test_the_digest_covers_the_modules_and_parts_of_a_method_and_no_others(
    monkeypatch: pytest.MonkeyPatch, changed: str, methods: set[str]
) -> None:
    before = {name: method_digest(find(name)) for name in ("fedavg", "fedproto", "fedcpmd", "fedcpmd-auto")}
    read = provenance._read_module

    def edited(name: str) -> tuple[str, str] | None:
        module = read(name)
        return (f"{module[0]}CHANGED = 1\n", module[1]) if module is not None and name == changed else module

    monkeypatch.setattr(provenance, "_read_module", edited)
    assert {name for name, digest in before.items() if method_digest(find(name)) != digest} == methods


def test_the_digest_of_a_class_without_a_module_file_is_that_of_its_code() -> None:
    def digest(code: str) -> str:
        names: dict[str, type] = {"Base": find("fedavg")}
        exec(f"class M(Base):\n    __module__ = 'nowhere'\n    def share(self):\n        return {code}\n", names)
        return method_digest(names["M"])

    assert digest("1") == digest("1") != digest("2")


def test_the_digest_does_not_depend_on_comments_docstrings_and_blank_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from coterie import Method\nclass Said(Method):\n    n = '# no comment'\n"
        "    def f(self):\n        return '''x'''\n"
    )
    prose = code.replace("class Said(Method):", "class Said(Method):\n    '''Two\n    lines.'''\n")
    prose = prose.replace("    def f(self):", "    # why\n    def f(self):  # what\n        '''One.'''\n")
    prose = f"'''Module.'''\n\n{prose}"
    file = tmp_path / "said.py"
    file.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    method = importlib.import_module("said").Said
    before = method_digest(method)
    file.write_text(prose)
    assert method_digest(method) == before
    file.write_text(code.replace("# no comment", "# a comment"))
    assert method_digest(method) != before
