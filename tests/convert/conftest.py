"""Makes hf_cases.py importable by the tests of this folder, and its Mixtral a fixture."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Mixtral in fp32, in one file."""
    pytest.importorskip("transformers", minversion="5.0")
    from hf_cases import make_mixtral

    return make_mixtral(tmp_path_factory.mktemp("hf") / "mixtral")
