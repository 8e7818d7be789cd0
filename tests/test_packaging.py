"""What is installed: the wheel's contents and needs, imports from anywhere, and the pinned versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import openlm_moe

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = {"openlm_moe": ROOT / "openlm_moe", "openlm_moe_kernels": ROOT / "kernels" / "openlm_moe_kernels"}
IMPORTS = "import transformers, openlm_moe, openlm_moe_kernels; print(openlm_moe.__file__, openlm_moe_kernels.__file__)"


def source_files() -> list[str]:
    """Code and data of both packages, as paths inside a wheel."""
    return [
        f"{package}/{file.relative_to(folder)}"
        for package, folder in SOURCES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "openlm_moe", source / "openlm_moe", ignore=ignore)
    shutil.copytree(ROOT / "kernels", source / "kernels", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
    ]
    done = subprocess.run([*build, source], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and sees this one's other packages, but not this checkout."""
    venv = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    python = venv / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    return python


def run_python(python: Path | str, code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([python, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packed = [name for name in names if ".dist-info/" not in name]
    assert sorted(packed) == sorted(source_files())
    assert wheel.name == f"openlm_moe-{openlm_moe.__version__}-py3-none-any.whl"  # pure Python: no compiler
    assert any(name.endswith("/LICENSE") for name in names)


def test_plain_install_needs_four_packages_at_most(wheel: Path) -> None:
    file = zipfile.ZipFile(wheel)
    name = next(n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(file.read(name).decode())
    needed = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    assert {r.name for r in needed if "extra ==" not in str(r.marker)} == {"torch", "numpy", "tqdm", "fsspec"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_wheel_imports_beside_transformers(place: str, installed: Path, tmp_path: Path) -> None:
    done = run_python(installed, IMPORTS, ROOT if place == "root" else tmp_path)
    assert done.returncode == 0, done.stderr
    if place == "elsewhere":
        assert done.stdout.count(str(installed.parents[1])) == 2


def test_wheel_is_not_shadowed_by_the_kernels_folder(installed: Path) -> None:
    code = "import transformers.utils.import_utils as u; print(u.is_kernels_available())"
    done = run_python(installed, code, ROOT)
    assert done.stdout.strip() == "False", done.stderr


def test_wheel_reads_its_data_files(installed: Path, tmp_path: Path) -> None:
    code = (
        "from openlm_moe.hosts.builtin.params import load_model_params as load\n"
        "print(load('open_lm_41m').dim, load('embedded').vocab_size)"
    )
    done = run_python(installed, code, tmp_path)
    assert done.stdout.split() == ["288", "4096"], done.stderr


def test_this_environment_imports_from_root_and_elsewhere(tmp_path: Path) -> None:
    for place in (ROOT, tmp_path):
        done = run_python(sys.executable, IMPORTS, place)
        assert done.returncode == 0, f"{done.stderr}\ninstall this checkout first: pip install -e ."


def importable_by_extras() -> list[str]:
    """Top-level modules of every package that some extra, and none of the four needs, brings."""
    return [
        "accelerate", "lm_eval", "matplotlib", "openwandb", "pyarrow", "rich", "safetensors", "tensorboard",
        "tokenizers", "transformers", "triton", "wandb", "wandb_workspaces", "webdataset", "yaml", "zstandard",
    ]  # fmt: skip


BLOCK = """
import sys
class Hiding:  # what a finder finds, but for some packages: they look as if they were not installed
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {blocked!r} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Hiding, sys.meta_path)
"""


def test_importing_needs_torch_alone(run: Callable, tmp_path: Path) -> None:
    block = BLOCK.format(blocked=[*importable_by_extras(), "numpy", "tqdm", "fsspec"])
    code = f"{block}\nimport torch\nbefore = set(sys.modules)\nimport openlm_moe, openlm_moe_kernels\n"
    code += "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
    code += "print(*sorted(new - set(sys.stdlib_module_names)))"
    done = run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    torch_and_its_needs = {"torch", "sympy", "mpmath", "networkx", "jinja2", "filelock", "typing_extensions"}
    assert set(done.stdout.split()) <= {"openlm_moe", "openlm_moe_kernels"} | torch_and_its_needs


def test_trainer_trains_without_any_extra(run: Callable, tmp_path: Path) -> None:
    """The four packages are enough for a run on shards, which need no reader of their own."""
    make_shards(tmp_path / "shards")
    model = '{"hidden_dim": 16, "n_layers": 2, "n_heads": 2, "seq_len": 16, "vocab_size": 64, "weight_tying": false}'
    (tmp_path / "tiny.json").write_text(model.replace("}", ', "post_embed_norm": false}'))
    flags = "--model tiny.json --experts 4 --dataset-manifest shards/manifest.jsonl --global-batch-size 4 --name a"
    code = f"{BLOCK.format(blocked=importable_by_extras())}\nfrom openlm_moe.main import main\n"
    code += f"sys.exit(main({(flags + ' --train-num-samples 256 --epochs 1 --workers 0').split()!r}))"
    done = run([sys.executable, "-c", code], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "logs" / "a" / "metrics.jsonl").exists()


def make_shards(folder: Path) -> None:
    """One shard of 16 samples of 17 tokens, as open_lm writes them, with its manifest."""
    import io
    import json
    import tarfile

    folder.mkdir()
    with tarfile.open(folder / "0.tar", "w") as tar:
        for number in range(16):
            content = json.dumps([(number * 5 + i) % 64 for i in range(17)]).encode()
            info = tarfile.TarInfo(f"{number:04d}.json")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    (folder / "manifest.jsonl").write_text('{"shard": "0", "num_sequences": 16}\n')


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_constraints_pin_what_every_extra_asks_for() -> None:
    pins = {canonicalize_name(name): version for name, version in pinned().items()}
    assert pins["torch"] == "2.13.0"
    assert pins["triton"] == "3.7.1"
    asked = [Requirement(text) for extra in PROJECT["optional-dependencies"].values() for text in extra]
    asked += [Requirement(text) for text in PROJECT["dependencies"]]
    for requirement in asked:
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_all_takes_every_extra_of_a_user() -> None:
    extras = PROJECT["optional-dependencies"]
    taken = set().union(*(Requirement(text).extras for text in extras["all"]))
    assert taken == set(extras) - {"all", "train", "test", "test-full"}


def test_versions_agree() -> None:
    assert PROJECT["version"] == openlm_moe.__version__
    assert re.search(rf"^## {re.escape(openlm_moe.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_no_folder_or_file_shadows_another_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))
    stems = {Path(name).stem for name in source_files() if name.endswith(".py")} - {"__init__", "__main__"}
    assert not stems & sys.stdlib_module_names
    folders = {Path(name).parent for name in source_files() if name.endswith(".py")}
    names = set(source_files())
    assert [str(f) for f in folders if f"{f}/__init__.py" not in names] == []  # a wheel would leave it out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_installs_into_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120)
    python = venv / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    done = subprocess.run(install, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    code = "import openlm_moe, openlm_moe.main as m; m.main(['--help'])"
    done = run_python(python, code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--moe-every" in done.stdout
